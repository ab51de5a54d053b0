"""Operators along a sharded dim by small reductions instead of gathering it: softmax, norms.

These are torch's own decompositions, whose reductions leave small partial results. They run where completing
those is cheaper on the topology in use than gathering the dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from dshard.caches import cached
from dshard.core.context import planning_context
from dshard.core.moves import with_partials_reduced
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout
from dshard.ops.custom import decomposed
from dshard.placements import Partial, ReduceOp, Replicate
from dshard.redistribute import plan
from dshard.rules.strategy import completed_layout
from dshard.topology import Topology
from dshard.torch_private import OpOverload, decomposition_table

Dims: TypeAlias = Callable[[tuple[Any, ...], int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PartialStatistics:
    """An operator along some dims of operand number `operand` that `reductions` small reductions can compute."""

    dims: Dims
    reductions: tuple[ReduceOp, ...]
    operand: int
    run: Callable[..., Any]

    def pays(self, args: tuple[Any, ...]) -> bool:
        """Whether a dim is sharded, and the small reductions cost less than gathering it."""
        spec: Spec | None = args[self.operand]._spec if isinstance(args[self.operand], Wrapper) else None
        if spec is None or not spec.layout.sharded_dims():
            return False
        return pays(
            spec, self.dims(args, len(spec.shape)), self.reductions, planning_context().topology_of(spec.layout.mesh)
        )


@cached("spread", 16384)
def pays(spec: Spec, dims: tuple[int, ...], reductions: tuple[ReduceOp, ...], topology: Topology) -> bool:
    """Whether `reductions` over `dims`, completed on all ranks, cost less than gathering these dims."""
    axes = split_axes(spec.layout, dims)
    if not axes:
        return False
    small = tuple(1 if dim in dims else n for dim, n in enumerate(spec.shape))
    gathering = plan(spec.layout, gathered(spec.layout, axes), spec.shape, spec.itemsize, topology)
    settled = completed_layout(spec.layout)
    reducing = sum(
        plan(pending(settled, axes, op), gathered(settled, axes), small, spec.itemsize, topology).seconds
        for op in reductions
    )
    return reducing < gathering.seconds


def split_axes(layout: Layout, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard these dims."""
    return tuple(axis for dim in dims for axis in layout.axes_of(dim) if layout.mesh.shape[axis] > 1)


def gathered(layout: Layout, axes: tuple[int, ...]) -> Layout:
    """The layout with `axes` replicated."""
    for axis in axes:
        layout = layout.replace(axis, Replicate())
    return layout


def pending(layout: Layout, axes: tuple[int, ...], op: ReduceOp) -> Layout:
    """The layout with `axes` partial."""
    for axis in axes:
        layout = layout.replace(axis, Partial(op))
    return layout


def at(position: int) -> Dims:
    """A function that reads the dim from argument number `position`."""

    def dims(args: tuple[Any, ...], ndim: int) -> tuple[int, ...]:
        return (args[position] % ndim,) if ndim else ()

    return dims


def trailing(position: int) -> Dims:
    """A function that gives the last dims, as many as argument number `position` is long."""
    return lambda args, ndim: tuple(range(ndim - len(args[position]), ndim))


def decomposition(func: OpOverload, *operands: int) -> Callable[..., Any]:
    """torch's decomposition of `func`, run with the partial placements of these operands reduced."""
    function = decomposition_table[func]

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(
            *(with_partials_reduced(arg, str(func)) if i in operands else arg for i, arg in enumerate(args)), **kwargs
        )

    return run


_ATEN = torch.ops.aten
_SHIFTED: tuple[ReduceOp, ...] = ("max", "sum")
_MOMENTS: tuple[ReduceOp, ...] = ("sum", "sum")


def _row(
    func: OpOverload, dims: Dims, reductions: tuple[ReduceOp, ...], operand: int, *operands: int
) -> PartialStatistics:
    return PartialStatistics(dims, reductions, operand, decomposed(decomposition(func, *operands)))


PARTIAL_STATISTICS: dict[OpOverload, PartialStatistics] = {
    _ATEN._softmax.default: _row(_ATEN._softmax.default, at(1), _SHIFTED, 0, 0),
    _ATEN._log_softmax.default: _row(_ATEN._log_softmax.default, at(1), _SHIFTED, 0, 0),
    _ATEN._softmax_backward_data.default: _row(_ATEN._softmax_backward_data.default, at(2), ("sum",), 1, 0, 1),
    _ATEN._log_softmax_backward_data.default: _row(_ATEN._log_softmax_backward_data.default, at(2), ("sum",), 1, 0, 1),
    _ATEN.native_layer_norm.default: _row(_ATEN.native_layer_norm.default, trailing(1), _MOMENTS, 0, 0),
    _ATEN.native_layer_norm_backward.default: _row(
        _ATEN.native_layer_norm_backward.default, trailing(2), _MOMENTS, 1, 0, 1
    ),
}
"""Operators that need not gather the dims along which they work."""
