"""Grouped matmuls: one matmul for each group of rows, such as the tokens of an expert, or for each group of a sum.

`offs` are where the groups end, along the dim that the operands of two dims have in place of a batch dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard.comm import numbers_of, with_form
from dshard.core.call import Call, LocalOp, Operator, RankCall
from dshard.core.signature import Function
from dshard.errors import ShapeError
from dshard.rules.rule import Rule, linear

_GROUPED = torch.ops.aten._grouped_mm.default
_TERMS = {
    (2, 3): ("t k", "[e] k n", "t n"),
    (3, 2): ("[e] m k", "k t", "m t"),
    (2, 2): ("m t", "t n", "[e] m n"),
    (3, 3): ("b m k", "b k n", "b m n"),
}
"""The terms of both operands and the result, by the numbers of dims of the operands."""
_GROUPS = {(2, 3): (0, 0), (3, 2): (1, 1), (2, 2): (0, 1)}
"""The operand and its dim that the groups divide."""


def grouped(call: Call) -> Rule:
    """Any dim may be sharded but that of groups; a sharded contraction leaves a partial sum.

    Ranks that share what is grouped, such as tokens, have each the part of every group that is theirs.
    """
    a, b, out = _TERMS[len(call.shapes[0]), len(call.shapes[1])]
    offs = ", [...]" if len(call.shapes) > 2 else ""
    return call.rule(f"{a}, {b}{offs} -> {out}", passes=linear(0, 1))


def without_data(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The result for meta tensors of every dtype: torch's own form refuses those that its kernels of GPUs do."""
    dims = a.dim(), b.dim()
    if dims not in _TERMS or (offs is None) != (dims == (3, 3)):
        raise ShapeError(
            f"a grouped matmul of shapes {tuple(a.shape)} and {tuple(b.shape)} {'without' if offs is None else 'with'} "
            "offs: give operands of 2 or 3 dims, and offs, the ends of the groups, unless both have 3"
        )
    *operands, out = (term.split() for term in _TERMS[dims])
    sizes = {"[e]": 0 if offs is None else offs.shape[0]}
    for term, x in zip(operands, (a, b), strict=True):
        sizes |= zip(term, x.shape, strict=True)
    return a.new_empty([sizes[factor] for factor in out], dtype=out_dtype or a.dtype)


META: dict[Any, Function] = {_GROUPED: without_data}


def kernel(call: RankCall) -> LocalOp:
    """The operator, one matmul after the other where it refuses the strides of local tensors, or without data."""
    at = _GROUPS.get((len(call.shapes[0]), len(call.shapes[1])))
    held = None if at is None else call.held(at[1], at[0])

    def run(a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if offs is not None and held is not None and at is not None and len(held) < call.shapes[at[0]][at[1]]:
            offs = (offs - held.start).clamp(0, len(held))  # the ends of the groups' parts that this rank holds
        if a.numel() and b.numel() and is_aligned(a) and is_aligned(b):
            return call.func(a, b, offs, *args, **kwargs)  # type: ignore[no-any-return]
        return one_by_one(a, b, offs, *args, **kwargs)

    return with_form(run, without_data)


def one_by_one(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The grouped matmul as one matmul for each group: rows behind the last group are zero."""
    out = without_data(a, b, offs, bias, out_dtype).zero_()
    start = 0
    for i, end in enumerate([] if offs is None else numbers_of(offs)):
        match a.dim(), b.dim():
            case 2, 2:
                out[i] = a[:, start:end] @ b[start:end]
            case 2, _:
                out[start:end] = a[start:end] @ b[i]
            case _:
                out[:, start:end] = a[i] @ b[:, start:end]
        start = end
    return out if offs is not None else torch.bmm(a, b)


def is_aligned(x: Tensor) -> bool:
    """Whether the rows or the columns have the alignment of torch's kernels: dense, at multiples of 16 bytes."""
    row, column = x.stride()[-2:]
    rows, columns = x.shape[-2:]
    if column == 1 and row >= max(1, columns) and row * x.itemsize % 16 == 0:
        return True
    return row == 1 and column >= max(1, rows) and column * x.itemsize % 16 == 0


RULES: dict[str, Operator] = {"aten::_grouped_mm": Operator(grouped, kernel, blocks=True)}
