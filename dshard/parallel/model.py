"""`plan_model` and `parallelize`: one call lays out any module by a strategy of the papers, or by the cheapest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from dshard import comm
from dshard.comm import DeviceMesh
from dshard.errors import LayoutError, StrategyError
from dshard.layout import layout_of
from dshard.mesh import Mesh
from dshard.ops.matmul import Schedule
from dshard.parallel.factors import Use, trace_factors
from dshard.parallel.roles import Roles, roles_of
from dshard.parallel.strategies import Axis, axes_of, check_units
from dshard.parallel.values import Placements, Plan
from dshard.parallel.wire import distribute_parameters, wire
from dshard.placements import Placement, Replicate, Shard
from dshard.tensor import as_mesh


def lay_out(roles: Roles, name: str, axes: Sequence[Axis], mesh: Mesh) -> Plan:
    """The plan in which each mesh axis does what `axes` say."""
    parameters = {
        name: tuple(axis.place(dims) for axis in axes) for name, dims in roles.parameters.items()
    }
    outputs = {name: tuple(axis.keep(output) for axis in axes) for name, output in roles.outputs.items()}
    products = {module: schedule for module, use in roles.products.items() if (schedule := _schedule(roles, module, use, axes))}
    batch = tuple(Shard(0) if axis.batch else Replicate() for axis in axes)
    return Plan(name, mesh, parameters, batch, outputs, products)


def _schedule(roles: Roles, module: str, use: Use, axes: Sequence[Axis]) -> Schedule | None:
    """The loops of the product of a module, where every axis has one; sums stay pending for where the output goes."""
    found = [axis.loop(roles.parameters[use.parameter], use) for axis in axes]
    rows = [row for row in found if row is not None]
    if len(rows) < len(found):
        return None
    pinned = module in roles.outputs
    return Schedule(
        tuple(loop for loop, _ in rows), tuple("P" if loop == "k" and pinned else stored for loop, stored in rows)
    )
