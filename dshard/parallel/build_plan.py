"""Build a plan from the roles of parameters and a strategy."""

from __future__ import annotations

from collections.abc import Sequence

from dshard.core.torch_placements import torch_placements
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.factors import Use
from dshard.parallel.plan_values import Plan
from dshard.parallel.roles import Role, Roles
from dshard.parallel.strategies import Axis
from dshard.placements import Placement, Replicate, Shard
from dshard.rules.matmul_loops import Schedule


def lay_out(roles: Roles, name: str, axes: Sequence[Axis], mesh: Mesh) -> Plan:
    """The plan in which each mesh axis is used as its entry of `axes` says."""
    parameters = {name: _placed(dims, axes, mesh) for name, dims in roles.parameters.items()}
    outputs = {name: tuple(axis.keep(output) for axis in axes) for name, output in roles.outputs.items()}
    products = {
        module: schedule for module, use in roles.products.items() if (schedule := _schedule(roles, module, use, axes))
    }
    batch = tuple(axis.inputs if axis.batch or roles.of_inputs else Replicate() for axis in axes)
    gathered = tuple(own for own, axis in zip(mesh.names, axes, strict=True) if axis.weights == "first")
    attention = tuple(axis.attention for axis in axes) if any(axis.attention for axis in axes) else None
    return Plan(
        *(name, mesh, parameters, batch, outputs, products, roles.shared), gathered=gathered, attention=attention
    )


def _placed(dims: tuple[Role, ...], axes: Sequence[Axis], mesh: Mesh) -> tuple[Placement, ...]:
    """The placements of a parameter with these dims.

    An axis that gathers the parameter for use shards another dim than the other axes, if there is one, or else their
    shards of the same dim: so gathering runs along such axes alone.
    """
    gathers = [axis.weights == "first" for axis in axes]
    used = tuple(Replicate() if last else axis.place(dims) for last, axis in zip(gathers, axes, strict=True))
    split = {placement.dim for placement in used if isinstance(placement, Shard)}
    layout = Layout(mesh, used)
    for i, axis in enumerate(axes):
        if gathers[i]:
            layout = layout.replace(i, axis.place(dims, split))
    return torch_placements(layout) if layout.order else layout.placements


def _schedule(roles: Roles, module: str, use: Use, axes: Sequence[Axis]) -> Schedule | None:
    """The loops of a module's matmul if every axis has one; sums stay partial until the output's layout is applied."""
    loops = [axis.loop(roles.parameters[use.parameter], use) for axis in axes]
    rows = [row for row in loops if row is not None]
    if len(rows) < len(loops):
        return None
    pinned = module in roles.outputs
    return Schedule(
        tuple(loop for loop, _ in rows), tuple("P" if loop == "k" and pinned else stored for loop, stored in rows)
    )
