"""Operators that need all of a sharded dim: another dim is sharded in its place, where that costs less.

Gathering the dim gives every rank all of the tensor, and all of the work; exchanging it for another dim gives each rank
the elements that it needs, and leaves the result sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dshard.caches import cached
from dshard.core.context import planning_context
from dshard.core.moves import redistributed
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout
from dshard.ops.reduced_norms import gathered, split_axes
from dshard.placements import Shard
from dshard.redistribute import plan
from dshard.rules.strategy import completed_layout
from dshard.topology import Topology
from dshard.torch_private import OpOverload


@cached("split dims", 16384)
def split_dims_of(spec: Spec, dim: int, topology: Topology) -> Layout | None:
    """The layout with `dim` unsharded and the longest other dims sharded, if that costs less to reach; else None."""
    axes = split_axes(spec.layout, (dim,))
    candidate = completed_layout(spec.layout)
    for axis in axes:
        left = candidate.replace(axis, Shard(dim)).local_shape(spec.shape, (0,) * spec.layout.mesh.ndim)
        other = max((d for d in range(len(spec.shape)) if d != dim), key=lambda d: left[d], default=None)
        if other is None or left[other] < spec.layout.mesh.shape[axis]:
            return None
        candidate = candidate.replace(axis, Shard(other))
    if not axes:
        return None
    whole = gathered(completed_layout(spec.layout), axes)
    turning, gathering = (
        plan(spec.layout, layout, spec.shape, spec.itemsize, topology).seconds for layout in (candidate, whole)
    )
    return candidate if turning < gathering else None


def layout_for(args: tuple[Any, ...], position: int) -> Layout | None:
    """The cheaper layout of the first operand with the dim of argument `position` unsharded; None if there is none."""
    spec: Spec | None = args[0]._spec if isinstance(args[0], Wrapper) else None
    if spec is None or not spec.layout.sharded_dims() or 0 in spec.shape:
        return None
    ndim, dim = len(spec.shape), args[position] if len(args) > position else -1
    if not -ndim <= dim < ndim:
        return None
    return split_dims_of(spec, dim % ndim, planning_context().topology_of(spec.layout.mesh))


def pays(func: OpOverload) -> Callable[[tuple[Any, ...]], bool]:
    """A test whether a call of `func` costs less with another dim sharded."""
    position = MOVED_SPLITS[func]
    return lambda args: layout_for(args, position) is not None


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator with its dim unsharded and another one sharded."""
    layout = layout_for(args, MOVED_SPLITS[func])
    assert layout is not None
    return func(redistributed(args[0], layout, str(func)), *args[1:], **kwargs)


_ATEN = torch.ops.aten

MOVED_SPLITS: dict[OpOverload, int] = {
    _ATEN.sort.default: 1,
    _ATEN.median.dim: 1,
    _ATEN.nanmedian.dim: 1,
    _ATEN.mode.default: 1,
    _ATEN.kthvalue.default: 2,
    _ATEN.topk.default: 2,
}
"""Operators along one dim, and the position of the argument that names it."""
