"""Reductions, and operators that need all of one dim; reducing a sharded dim leaves the result partial."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from dshard.comm import sum_dtype
from dshard.core.call import Alternative, AlternativePlan, Call, Kernel, LocalOp, Operator, RankCall
from dshard.core.checks import check_aminmax, check_dim
from dshard.layout import Layout, Shape
from dshard.ops.pointwise import pointwise
from dshard.ops.scans import BEST_OF_BLOCKS, LARGEST, SMALLEST, add, latest, log_add, multiply, scan
from dshard.ops.small_reductions import split_axes
from dshard.placements import ReduceOp, Shard
from dshard.rules.expand import order_of, sharded_anyway
from dshard.rules.rule import LINEAR, Rule, together
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
        left = layout.replace(axis, Shard(dim)).largest_shape(shape)
        other = max((d for d in range(len(shape)) if d != dim), key=lambda d: left[d], default=None)
        if other is None or left[other] < layout.mesh.shape[axis]:
            return None
        layout = layout.replace(axis, Shard(other))
    return layout if axes else None


MOVED_SPLIT = Alternative("split moved to another dim", _plan)


# -- reductions


def reduced(call: Call) -> tuple[int, ...]:
    """The dims that the call reduces; a scalar has none."""
    return tuple(dim for dim in call.dims() if 0 <= dim < len(call.shapes[0]))


def reduction(call: Call, *reduce: ReduceOp, passes: tuple[ReduceOp, ...] = ()) -> Rule:
    """Any dim may be sharded; one that is reduced leaves the outputs partial, as operands partial by `passes` do."""
    one = "1" if call.argument("keepdim") else ""
    return call.rule(f"... r ... -> *... {one} ...", at=call.dims(), reduce=reduce, passes=together(0, ops=passes))


def total(call: Call) -> Rule:
    """Any dim may be sharded; one that is summed leaves a partial sum."""
    return reduction(call, "sum", passes=_linear(call))


def counted(call: Call) -> Rule:
    """Any dim may be sharded; one that is summed leaves a partial sum, but partial operands are reduced."""
    return reduction(call, "sum")


def product(call: Call) -> Rule:
    """Any dim may be sharded; one that is multiplied up leaves a partial product."""
    return reduction(call, "product", passes=("product",) if _keeps_numbers(call) else ())


def _linear(call: Call) -> tuple[ReduceOp, ...]:
    src, out = call.specs[0].dtype, call.outs[0].dtype
    if not (src.is_floating_point or src.is_complex):
        return ("sum",) if _keeps_numbers(call) else ()
    return LINEAR if src == out or (out.is_floating_point and out.itemsize > src.itemsize) else ()


def _keeps_numbers(call: Call) -> bool:
    return call.specs[0].dtype == call.outs[0].dtype != torch.bool


def extreme(op: ReduceOp) -> Callable[[Call], Rule]:
    """The rule of max or min. Of two tensors: each element; with positions: along one dim."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded; one that is reduced leaves a partial max or min. With positions it may not be."""
        if call.argument("other") is not None:
            return pointwise(call)
        return reduction(call, op, passes=(op,)) if len(call.outs) == 1 else along(call)

    return rule


def truth(op: ReduceOp) -> Callable[[Call], Rule]:
    """The rule of any or all: the max or min of truth values. A list of no dims reduces none."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded; one that is reduced leaves a partial max or min of truth values."""
        if call.argument("dim") == []:
            return pointwise(call)
        return reduction(call, op, passes=(op,) if call.specs[0].dtype == torch.bool else ())

    return rule


def both_extremes(call: Call) -> Rule:
    """Any dim may be sharded; one that is reduced leaves a partial min and a partial max."""
    return reduction(call, "min", "max")


def mean_kernel(call: RankCall) -> LocalOp:
    """A kernel of the mean: the sum of the local elements over the global count; half precision is summed in single."""
    dims, shape, out = reduced(call), call.shapes[0], call.outs[0].dtype
    if not set(dims) & set(call.strategy.inputs[0].sharded_dims()):
        return call.func
    count, keepdim = prod(shape[dim] for dim in dims), bool(call.argument("keepdim"))
    wide = sum_dtype(out)

    def mean(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return (x.sum(dims, keepdim, dtype=wide) / count).to(out)

    return mean


def filled(*ops: ReduceOp) -> Kernel:
    """A kernel of max and min: a rank that holds no elements gives the identity of the reduction."""

    def kernel(call: RankCall) -> LocalOp:
        local = call.local_shape()
        if len(call.specs) > 1 or len(call.outs) != len(ops) or all(local[dim] for dim in reduced(call)):
            return call.func
        shapes = [call.out_local_shape(i) for i in range(len(ops))]
        if len(ops) == 1:
            return lambda x, *args, **kwargs: x.new_full(shapes[0], identity(ops[0], x.dtype))
        return lambda x, *args, **kwargs: tuple(
            x.new_full(shape, identity(op, x.dtype)) for op, shape in zip(ops, shapes, strict=True)
        )

    return kernel


def identity(op: ReduceOp, dtype: torch.dtype) -> float | int | bool:
    """The identity of max or min for a dtype.

    >>> identity("max", torch.int8), identity("min", torch.bool)
    (-128, True)
    """
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if op == "max" else limits.max


# -- along one dim


def along(call: Call, passes: tuple[ReduceOp, ...] = ()) -> Rule:
    """Any dim may be sharded except the one along which it works, or none where it works along all."""
    if call.argument("dim") is None:
        return call.rule("[...] -> *[...]")
    src, out = call.shapes[0], call.out_shapes[0]
    left = "[d]" if out == src else "[k]" if len(out) == len(src) else ""
    return call.rule(f"... [d] ... -> *... {left} ...", at="dim", passes=together(0, ops=passes))


def cumulative_sum(call: Call) -> Rule:
    """Any dim may be sharded except the one along which it sums."""
    return along(call, _linear(call))


RULES: dict[str, Operator] = {
    "aten::sum": Operator(total),
    "aten::mean": Operator(total, mean_kernel, blocks=True),
    "aten::nansum": Operator(counted),
    "aten::count_nonzero": Operator(counted),
    "aten::prod": Operator(product),
    "aten::amax": Operator(extreme("max"), filled("max"), blocks=True, refuses_empty=True),
    "aten::amin": Operator(extreme("min"), filled("min"), blocks=True, refuses_empty=True),
    "aten::max": Operator(extreme("max"), filled("max"), (LARGEST,), refuses_empty=True, blocks=True),
    "aten::min": Operator(extreme("min"), filled("min"), (SMALLEST,), refuses_empty=True, blocks=True),
    "aten::aminmax": Operator(both_extremes, filled("min", "max"), check=check_aminmax, refuses_empty=True),
    "aten::any": Operator(truth("max")),
    "aten::all": Operator(truth("min")),
    "aten::_is_any_true": Operator(truth("max")),
    "aten::_is_all_true": Operator(truth("min")),
    "aten::argmax": Operator(along, alternatives=(LARGEST,), refuses_empty=True),
    "aten::argmin": Operator(along, alternatives=(SMALLEST,), refuses_empty=True),
    "aten::cumsum": Operator(cumulative_sum, alternatives=(scan(add),)),
    "aten::cumprod": Operator(along, alternatives=(scan(multiply),)),
    "aten::logcumsumexp": Operator(along, alternatives=(scan(log_add),)),
    "aten::cummax": Operator(along, alternatives=(scan(latest(torch.ge), positions=True),)),
    "aten::cummin": Operator(along, alternatives=(scan(latest(torch.le), positions=True),)),
    "aten::topk": Operator(along, alternatives=(BEST_OF_BLOCKS, MOVED_SPLIT)),
    **{
        f"aten::{name}": Operator(along, alternatives=(MOVED_SPLIT,), refuses_empty=True)
        for name in ("kthvalue", "median", "mode", "nanmedian")
    },
    "aten::sort": Operator(along, alternatives=(MOVED_SPLIT,), check=check_dim),
    "aten::argsort": Operator(along),
}
