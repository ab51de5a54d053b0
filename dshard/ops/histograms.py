"""Counts of values: each rank counts its own, and the counts are partial sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.comm import has_only_shape
from dshard.core.call import Call, Composed, Operator
from dshard.core.moves import reduced_together
from dshard.core.signature import Args, Function
from dshard.ops.composite import run_composite
from dshard.ops.custom import decomposed
from dshard.rules.rule import Rule
from dshard.rules.rule_notation import parse_rule
from dshard.torch_private import OpOverload

_ATEN = torch.ops.aten
_BINS = "i, i -> [k]"


def histogram(call: Call) -> Rule:
    """Any dim may be sharded, and leaves partial counts; without bounds the extremes of all values are found first."""
    return call.rule(" ".join(f"i{dim}" for dim in range(len(call.shapes[0]))) + " -> [k]")


def bin_counts(call: Call) -> Rule:
    """The values may be sharded, and leave partial counts; the largest of all, on the host, says how many there are."""
    return call.rule(_BINS if len(call.specs) > 1 else _BINS[3:])


def _has_no_bounds(args: Args) -> bool:
    low, high = (*args[2:], 0, 0)[:2]
    return bool(low == high)


def _extremes(x: Any) -> tuple[float, float]:
    """The least and the largest value, by one reduction, on the host."""
    negative, largest = reduced_together([(-x).max(), x.max()], "aten.aminmax.default")
    return -negative.item(), largest.item()


def histogram_of_all(x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """`torch.histc` from the least to the largest value; of equal ones, from one less to one more, as torch has it."""
    if x.numel() and not has_only_shape(x):
        low, high = _extremes(x)
    if low == high:
        low, high = low - 1, high + 1
    return torch.histc(x, bins, low, high)


def bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """`torch.bincount`, of as many bins as the largest value of all ranks asks for."""
    least, largest = _extremes(x.long()) if x.numel() else (0, -1)
    first = torch.full([min(x.numel(), 1)] * x.dim(), least, dtype=x.dtype)
    second = None if weights is None else torch.ones([1 + (weights.shape != x.shape)] * weights.dim())
    torch.bincount(first, second, min(minlength, 0))  # torch refuses what it refuses of all
    if not x.numel():
        return x.new_zeros(minlength, dtype=torch.int64)
    n = max(int(largest) + 1, minlength)
    tensors = (x,) if weights is None else (x, weights)
    text, shapes = _BINS if len(tensors) > 1 else _BINS[3:], [tuple(t.shape) for t in tensors]
    with torch.no_grad():
        return run_composite(  # type: ignore[no-any-return]
            lambda: parse_rule(text, shapes, [(n,)]), partial(_count, n), tensors, ("aten.bincount.default", n)
        )


def _count(n: int, x: Tensor, weights: Tensor | None = None) -> Tensor:
    is_single = weights is not None and weights.dtype is torch.float32
    dtype = torch.int64 if weights is None else torch.float32 if is_single else torch.float64
    return x.new_empty(n, dtype=dtype) if has_only_shape(x) else torch.bincount(x, weights, n).to(dtype)


RULES: dict[str, Operator] = {
    "aten::histc": Operator(
        histogram, composed={_ATEN.histc.default: Composed(decomposed(histogram_of_all), _has_no_bounds)}
    ),
    "aten::bincount": Operator(bin_counts, composed={_ATEN.bincount.default: Composed(decomposed(bincount))}),
}
META: dict[OpOverload, Function] = {
    _ATEN.bincount.default: lambda x, weights=None, minlength=0: _count(minlength, x, weights)
}
"""The meta form, of as many bins as are asked for: values may ask for more."""
