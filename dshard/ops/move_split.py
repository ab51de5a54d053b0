"""Operators that need all of a sharded dim: another dim is sharded in its place.

Gathering the dim replicates the tensor and the work; an all_to_all to another dim moves only the needed elements, and
leaves the result sharded.
"""

from __future__ import annotations

from dshard.core.call import Alternative, AlternativePlan, Call
from dshard.layout import Layout, Shape
from dshard.ops.small_reductions import split_axes
from dshard.placements import Shard
from dshard.rules.expand import order_of, sharded_anyway
from dshard.rules.rule import Rule
from dshard.rules.strategy import completed_layout


def _plan(call: Call, rule: Rule) -> AlternativePlan | None:
    """The plan of an operator along one dim, with other dims sharded in its place."""
    spec = call.specs[0]
    if call.argument("dim") is None or not spec.shape or 0 in spec.shape:
        return None
    layout = _other_dims_sharded(completed_layout(spec.layout), spec.shape, call.dim())
    if layout is None:
        return None
    _, outputs = sharded_anyway(rule, order_of(rule.inputs, [layout]), layout.mesh)
    return AlternativePlan((layout,), outputs, call.func)


def _other_dims_sharded(layout: Layout, shape: Shape, dim: int) -> Layout | None:
    """The layout with the longest other dims sharded in place of `dim`; None if it is unsharded or they are short."""
    axes = split_axes(layout, (dim,))
    for axis in axes:
        left = layout.replace(axis, Shard(dim)).local_shape(shape, (0,) * layout.mesh.ndim)
        other = max((d for d in range(len(shape)) if d != dim), key=lambda d: left[d], default=None)
        if other is None or left[other] < layout.mesh.shape[axis]:
            return None
        layout = layout.replace(axis, Shard(other))
    return layout if axes else None


MOVED_SPLIT = Alternative("split moved to another dim", _plan)
