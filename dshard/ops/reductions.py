"""Reductions, and operators that need all of one dim: a reduced dim that is sharded leaves the result partial."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.core.call import Call, LocalOp, Operator, names, out_local_shape
from dshard.mesh import Coordinate
from dshard.ops.pointwise import pointwise
from dshard.placements import ReduceOp
from dshard.rules.rule import LINEAR, PassThrough, Rule, Term
from dshard.rules.strategy import Strategy

HALF = frozenset({torch.float16, torch.bfloat16})


# -- reductions


def reduced(call: Call) -> tuple[int, ...]:
    """The dims that the call reduces; a scalar has none."""
    return tuple(dim for dim in call.dims() if 0 <= dim < len(call.shapes[0]))


def remaining(call: Call) -> Term:
    """The term of the result: reduced dims go, or stay as dims of size one."""
    dims, term = reduced(call), names(len(call.shapes[0]))
    if call.argument("keepdim"):
        return tuple(() if i in dims else dim for i, dim in enumerate(term))
    return tuple(dim for i, dim in enumerate(term) if i not in dims)


def reduction(call: Call, *reduce: ReduceOp, passes: tuple[ReduceOp, ...] = ()) -> Rule:
    """Operands reduced dim by dim: a split one leaves the outputs pending; what is pending with `passes` stays so."""
    pending = (PassThrough(frozenset({0}), passes),) if passes else ()
    out = remaining(call)
    return Rule((names(len(call.shapes[0])),), (out,) * len(call.outs), reduce=reduce, passes=pending)


def total(call: Call) -> Rule:
    """Sums: linear, where the dtype loses nothing before the terms are added."""
    return reduction(call, "sum", passes=_linear(call))


def counted(call: Call) -> Rule:
    """Sums of something that is not linear."""
    return reduction(call, "sum")


def product(call: Call) -> Rule:
    """Products, through which pending products pass."""
    return reduction(call, "product", passes=("product",) if _keeps_numbers(call) else ())


def _linear(call: Call) -> tuple[ReduceOp, ...]:
    src, out = call.specs[0].dtype, call.outs[0].dtype
    if not (src.is_floating_point or src.is_complex):
        return ("sum",) if _keeps_numbers(call) else ()
    return LINEAR if src == out or (out.is_floating_point and out.itemsize > src.itemsize) else ()


def _keeps_numbers(call: Call) -> bool:
    return call.specs[0].dtype == call.outs[0].dtype != torch.bool


def extreme(op: ReduceOp) -> Callable[[Call], Rule]:
    """max or min, through which pending ones pass. Of two tensors: each element; with positions: along one dim."""

    def rule(call: Call) -> Rule:
        """Largest or smallest: a split dim leaves it pending, and pending ones pass."""
        if call.argument("other") is not None:
            return pointwise(call)
        if 0 in call.shapes[0]:
            _ask(call)
        return reduction(call, op, passes=(op,)) if len(call.outs) == 1 else along(call)

    return rule


def _ask(call: Call) -> None:
    """Let torch refuse a reduction of no elements; meta tensors do not check it."""
    call.func(torch.empty(call.shapes[0], dtype=call.specs[0].dtype), *call.args[1:], **call.kwargs)


def truth(op: ReduceOp) -> Callable[[Call], Rule]:
    """any or all: the max or min of truth values. A list of no dims reduces none."""

    def rule(call: Call) -> Rule:
        """Whether any or all are true: a split dim leaves the max or min of truth values pending."""
        if call.argument("dim") == []:
            return pointwise(call)
        return reduction(call, op, passes=(op,) if call.specs[0].dtype == torch.bool else ())

    return rule


def both_extremes(call: Call) -> Rule:
    """aminmax."""
    if 0 in call.shapes[0]:
        _ask(call)
    return reduction(call, "min", "max")


def mean_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel of the mean: the sum of the local elements over the global count; half precision is summed in single."""
    dims, shape, out = reduced(call), call.shapes[0], call.outs[0].dtype
    if not set(dims) & set(strategy.inputs[0].sharded_dims()):
        return call.func
    count, keepdim = prod(shape[dim] for dim in dims), bool(call.argument("keepdim"))
    wide = torch.float32 if out in HALF else out

    def mean(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (x.sum(dims, keepdim, dtype=wide) / count).to(out)

    return mean


def filled(*ops: ReduceOp) -> Callable[[Call, Strategy, Coordinate], LocalOp]:
    """A kernel of max and min: a rank that holds no elements gives the identity of the reduction."""

    def kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
        local = strategy.inputs[0].local_shape(call.shapes[0], coordinate)
        if len(call.specs) > 1 or len(call.outs) != len(ops) or all(local[dim] for dim in reduced(call)):
            return call.func
        shapes = [out_local_shape(call, strategy, coordinate, i) for i in range(len(ops))]
        if len(ops) == 1:
            return lambda x, *args, **kwargs: x.new_full(shapes[0], identity(ops[0], x.dtype))
        return lambda x, *args, **kwargs: tuple(
            x.new_full(shape, identity(op, x.dtype)) for op, shape in zip(ops, shapes, strict=True)
        )

    return kernel


def identity(op: ReduceOp, dtype: torch.dtype) -> float | int | bool:
    """The value that changes no max or min.

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
    """An operator that must see all of one dim, or, where it names none, of every dim; other dims split freely."""
    ndim = len(call.shapes[0])
    term = names(ndim)
    if call.argument("dim") is None:
        outputs = tuple(names(len(shape), "out") for shape in call.out_shapes)
        return Rule((term,), outputs, frozenset(name for dim in (*term, *sum(outputs, ())) for name in dim))
    at = {call.dim()} if ndim else set()
    short = tuple(dim for i, dim in enumerate(term) if i not in at)
    resized = tuple(("out",) if i in at else dim for i, dim in enumerate(term))
    outputs = tuple(_like(shape, call.shapes[0], term, short, resized) for shape in call.out_shapes)
    pending = (PassThrough(frozenset({0}), passes),) if passes else ()
    return Rule((term,), outputs, frozenset({*map(str, at), "out"}), passes=pending)


def _like(shape: tuple[int, ...], src: tuple[int, ...], term: Term, short: Term, resized: Term) -> Term:
    if len(shape) < len(src):
        return short
    return term if shape == src else resized


def cumulative_sum(call: Call) -> Rule:
    """cumsum: linear."""
    return along(call, _linear(call))


_ALONG = Operator(along)

RULES: dict[str, Operator] = {
    "aten::sum": Operator(total),
    "aten::mean": Operator(total, mean_kernel),
    "aten::nansum": Operator(counted),
    "aten::count_nonzero": Operator(counted),
    "aten::prod": Operator(product),
    "aten::amax": Operator(extreme("max"), filled("max")),
    "aten::amin": Operator(extreme("min"), filled("min")),
    "aten::max": Operator(extreme("max"), filled("max")),
    "aten::min": Operator(extreme("min"), filled("min")),
    "aten::aminmax": Operator(both_extremes, filled("min", "max")),
    "aten::any": Operator(truth("max")),
    "aten::all": Operator(truth("min")),
    "aten::_is_any_true": Operator(truth("max")),
    "aten::_is_all_true": Operator(truth("min")),
    "aten::cumsum": Operator(cumulative_sum),
    **{
        f"aten::{name}": _ALONG
        for name in (
            "argmax",
            "argmin",
            "argsort",
            "cummax",
            "cummin",
            "cumprod",
            "kthvalue",
            "logcumsumexp",
            "median",
            "mode",
            "nanmedian",
            "sort",
            "topk",
        )
    },
}
