"""`plan_model` and `parallelize`: one call lays out any module by a strategy of the papers, or by the cheapest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from dataclasses import replace
from typing import Any

from torch import nn

from dshard.comm import DeviceMesh
from dshard.errors import LayoutError
from dshard.layout import layout_of
from dshard.mesh import Mesh
from dshard.ops.matmul import Schedule
from dshard.parallel.factors import Use, trace_factors
from dshard.parallel.price import price
from dshard.parallel.roles import Roles, roles_of
from dshard.parallel.strategies import Axis, axes_of, check_units
from dshard.parallel.values import Plan
from dshard.parallel.wire import distribute_parameters, wire
from dshard.placements import Placement, Replicate, Shard
from dshard.tensor import as_mesh


AUTO = "auto"
Asked = str | Mapping[str, Sequence[Placement]] | Plan


def plan_model(
    model: nn.Module, mesh: DeviceMesh | Mesh, plan: Asked = AUTO, /, *args: Any, **kwargs: Any
) -> Plan:
    """What `parallelize` would do, and what a training step then sends and holds; nothing is done yet.

    `args` and `kwargs` are an example batch: only shapes and dtypes matter. Parameters may be without data. The mesh
    may be pure, so that no process is needed.

    Raises:
        StrategyError: no such strategy, a mesh that it cannot use, or more ranks than there are heads.
        LayoutError: a forward pass that depends on the values of tensors; a pattern that matches no parameter.
    """
    pure = as_mesh(mesh)
    args, kwargs = _example(model, args, kwargs)
    if isinstance(plan, Plan):
        found = replace(plan, mesh=pure)
    elif isinstance(plan, str):
        roles = roles_of(trace_factors(model, args, kwargs))
        axes = axes_of(plan, pure)
        check_units(roles, axes, pure)
        found = lay_out(roles, plan, axes, pure)
    else:
        found = by_name(model, pure, plan)
    return replace(found, cost=price(model, found, args, kwargs))


def parallelize(
    model: nn.Module, mesh: DeviceMesh | Mesh, plan: Asked = AUTO, /, *args: Any, **kwargs: Any
) -> nn.Module:
    """Lay out `model` in place and return it: its parameters become DTensors, and it takes plain tensors as before.

    `plan` is the name of a strategy ("megatron", "megatron-sp", "optimus", "tesseract", "atp", "fsdp", "data", joined by
    " x ", or "auto"), placements by a pattern of parameter names, or a `Plan`. `args` and `kwargs` are an example batch,
    by which the model is traced; a model with `dummy_inputs`, and placements by name, need none.

    Inputs are given whole, alike on all ranks, or as DTensors; outputs are DTensors. Plain tensors that the model makes
    on its way count as replicated. Every rank must have the same parameters; nothing is sent. Parameters without data
    get their local part alone.

    Raises:
        StrategyError: no such strategy, a mesh that it cannot use, or more ranks than there are heads.
        LayoutError: a forward pass that depends on the values of tensors; a pattern that matches no parameter.
    """
    pure = as_mesh(mesh)
    if isinstance(plan, Plan):
        found = plan
    elif isinstance(plan, str):
        args, kwargs = _example(model, args, kwargs)
        roles = roles_of(trace_factors(model, args, kwargs))
        axes = axes_of(plan, pure)
        check_units(roles, axes, pure)
        found = lay_out(roles, plan, axes, pure)
    else:
        found = by_name(model, pure, plan)
    distribute_parameters(model, replace(found, mesh=pure))
    wire(model, replace(found, mesh=pure))
    return model


def by_name(model: nn.Module, mesh: Mesh, patterns: Mapping[str, Sequence[Placement]]) -> Plan:
    """The plan that lays out parameters by the first pattern, as in `fnmatch`, that matches their name.

    Raises:
        LayoutError: a pattern that matches no parameter, or placements that a parameter cannot have.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise LayoutError(
                f"the pattern {pattern!r} matches no parameter of {type(model).__name__}: patterns are those of fnmatch, "
                f"names such as {', '.join(names[:3])}"
            )
    whole = (Replicate(),) * mesh.ndim
    parameters = {}
    for name, parameter in model.named_parameters():
        given = next((p for pattern, p in patterns.items() if fnmatchcase(name, pattern)), whole)
        parameters[name] = layout_of(mesh, given, parameter.dim()).placements
    return Plan("by name", mesh, parameters, whole)


def _example(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args or kwargs:
        return args, kwargs
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        raise LayoutError(
            f"{type(model).__name__} must be traced to be laid out: give an example batch after the plan, "
            "parallelize(model, mesh, plan, inputs)"
        )
    return (), dict(dummy)


def lay_out(roles: Roles, name: str, axes: Sequence[Axis], mesh: Mesh) -> Plan:
    """The plan in which each mesh axis does what `axes` say."""
    parameters = {
        name: tuple(axis.place(dims) for axis in axes) for name, dims in roles.parameters.items()
    }
    outputs = {name: tuple(axis.keep(output) for axis in axes) for name, output in roles.outputs.items()}
    products = {module: schedule for module, use in roles.products.items() if (schedule := _schedule(roles, module, use, axes))}
    batch = tuple(Shard(0) if axis.batch else Replicate() for axis in axes)
    return Plan(name, mesh, parameters, batch, outputs, products, roles.shared)


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
