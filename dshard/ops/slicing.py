"""Operators that select elements along dims, their backward forms, and operators that write a selection.

A dim along which elements are selected is not sharded, as it has no factor, unless one index is selected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.core.call import AlternativePlan, Call, LocalOp, Operator, RankCall
from dshard.core.checks import check_dim
from dshard.core.moves import run_on_ranks
from dshard.core.spec import specs_of
from dshard.core.view_sync import part_of
from dshard.ops.exchange import (
    IndexExchange,
    IndexRun,
    Moves,
    cut,
    cut_backward,
    cut_scatter,
    exchange_locals,
    index_exchange,
    planned_exchanges,
)
from dshard.ops.lookup import selecting
from dshard.ops.small_reductions import split_axes
from dshard.ops.views import with_local_size
from dshard.placements import ReduceOp
from dshard.rules.rule import ANY, LINEAR, MOVES, PassThrough, Rule, together


def _pieces(call: Call) -> AlternativePlan | None:
    """`x.split(sizes, dim)`: views with memory of their own. One exchange for all where every piece shards evenly."""
    spec, dim = call.specs[0], call.dim()
    layout, mesh, n = spec.layout, spec.layout.mesh, spec.shape[dim]
    sizes = [out.shape[dim] for out in call.outs]
    ranks = prod(mesh.shape[axis] for axis in split_axes(layout, (dim,)))
    if ranks == 1 or len(sizes) < 2 or min(sizes) < 1:
        return None
    ends = list(accumulate(sizes, initial=0))
    even = not any(size % ranks for size in sizes)
    moves = (
        [_dealt(sizes, ends, ranks)]
        if even
        else [(IndexRun(0, range(*ends[i : i + 2]), 0),) for i in range(len(sizes))]
    )
    lengths = [n] if even else sizes
    exchanges = [
        IndexExchange(layout, (spec.shape,), dim, each, length) for each, length in zip(moves, lengths, strict=True)
    ]
    local_sizes = [size // ranks for size in sizes]
    specs = specs_of([layout] * len(call.outs), call.outs, spec.device)

    def cut(at: object) -> LocalOp:
        return lambda local: list(local.split(local_sizes, dim))

    def run(x: Any, *_: object, **__: object) -> list[Any]:
        locals_: Sequence[Tensor] = [exchange_locals(exchange, (x._local_tensor,)) for exchange in exchanges]
        if even:
            locals_ = run_on_ranks(mesh, cut, tuple(locals_), {})
        views = []
        for i, (local, piece) in enumerate(zip(locals_, specs, strict=True)):
            first = x.storage_offset() + call.outs[i].storage_offset()
            rest = (dim, *ends[i : i + 2], 1)
            views.append(part_of(x, local, piece, first, torch.ops.aten.slice.Tensor, rest))
        return views

    sent = planned_exchanges(exchanges, spec.itemsize)
    return AlternativePlan((layout,), (layout,) * len(sizes), run, exchanges=sent)


def _dealt(sizes: Sequence[int], starts: Sequence[int], ranks: int) -> Moves:
    """The moves that give each rank its chunk of each piece."""
    moves, at = [], 0
    for rank in range(ranks):
        for start, size in zip(starts, sizes, strict=False):
            n = size // ranks
            moves.append(IndexRun(0, range(start + rank * n, start + (rank + 1) * n), at))
            at += n
    return tuple(moves)


PIECES = index_exchange(_pieces)


@dataclass(frozen=True, slots=True)
class Selection:
    """The terms of a tensor and of a selection of it; `dims` are the arguments that name dims of the tensor."""

    tensor: str
    selected: str
    dims: tuple[str, ...] = ("dim",)

    def rule(self, call: Call, text: str, passes: tuple[PassThrough, ...]) -> Rule:
        """The rule `text`, with a gap at the selected dims."""
        dims = [call.argument(name) for name in self.dims]
        return call.rule(text, at=[dim for dim in dims if dim is not None], same_size=True, passes=passes)


SELECT = Selection("... [] ...", "... ...")
SLICE = Selection("...", "...")
DIAGONAL = Selection("... [] ...", "... ... []", ("dim1", "dim2"))
WINDOWS = Selection("... [] ...", "... [] ... []", ("dim", "dimension"))


def taken(of: Selection) -> Callable[[Call], Rule]:
    """The rule of an operator from a tensor to a selection of it."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded except those of which a part is taken."""
        return of.rule(call, f"{of.tensor} -> {of.selected}", MOVES)

    return rule


def one_index(call: Call) -> Rule:
    """Any dim may be sharded; where that of the index is, the rank that holds it has the slice, the others zeros."""
    return call.rule("... v ... -> ... ...", at="dim", passes=MOVES)


def put_back(of: Selection, ops: tuple[ReduceOp, ...] = ANY) -> Callable[[Call], Rule]:
    """The rule of an operator from a selection, or its gradient, to a tensor that is zero elsewhere."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded except those of which a part is put into zeros."""
        return of.rule(call, f"{of.selected} -> {of.tensor}", together(0, ops=ops))

    return rule


def replaced(of: Selection) -> Callable[[Call], Rule]:
    """The rule of an operator from a tensor and a selection's new values to the tensor with these values."""

    def rule(call: Call) -> Rule:
        """Any dim may be sharded except those of which a part is replaced."""
        return of.rule(call, f"{of.tensor}, {of.selected} -> {of.tensor}", together(0, 1, ops=ANY))

    return rule


def split(call: Call) -> Rule:
    """Any dim may be sharded except the one that is cut into pieces; that one in blocks, if each piece is one."""
    dim = call.dim()
    blocks = call.specs[0].layout.blocks.get(dim)
    if len(call.outs) != blocks or len({out.shape[dim] for out in call.outs}) > 1:
        return call.rule("... [] ... -> *... [] ...", at="dim", passes=MOVES)
    return call.rule(f"... ({blocks} m) ... -> *... m ...", at="dim", passes=MOVES)


def split_kernel(call: RankCall) -> LocalOp:
    """The operator, or a kernel that splits the blocks of the local tensor."""
    dim = call.dim()
    if dim not in call.strategy.inputs[0].blocks:
        return call.func
    sizes = [call.out_local_shape(i)[dim] for i in range(len(call.outs))]
    return lambda x, *_, **__: x.split_with_sizes(sizes, dim)


def unbind(call: Call) -> Rule:
    """Any dim may be sharded except the one whose indices become tensors."""
    return call.rule("... [] ... -> *... ...", at="dim", passes=MOVES)


_BACKWARD = with_local_size("input_sizes")

RULES: dict[str, Operator] = {
    "aten::select": Operator(one_index, selecting),
    "aten::slice": Operator(taken(SLICE), alternatives=(index_exchange(cut),)),
    "aten::diagonal": Operator(taken(DIAGONAL)),
    "aten::unfold": Operator(taken(WINDOWS)),
    "aten::select_backward": Operator(put_back(SELECT), _BACKWARD),
    "aten::slice_backward": Operator(put_back(SLICE), _BACKWARD, (index_exchange(cut_backward),)),
    "aten::diagonal_backward": Operator(put_back(DIAGONAL), _BACKWARD),
    "aten::unfold_backward": Operator(put_back(WINDOWS, LINEAR), _BACKWARD),
    "aten::diag_embed": Operator(put_back(DIAGONAL)),
    "aten::select_scatter": Operator(replaced(SELECT), check=check_dim),
    "aten::slice_scatter": Operator(replaced(SLICE), alternatives=(index_exchange(cut_scatter),), check=check_dim),
    "aten::diagonal_scatter": Operator(replaced(DIAGONAL)),
    "aten::split": Operator(split, split_kernel, alternatives=(PIECES,), blocks=True),
    "aten::split_with_sizes": Operator(split, split_kernel, alternatives=(PIECES,), blocks=True),
    "aten::unsafe_split": Operator(split, split_kernel, blocks=True),
    "aten::unsafe_split_with_sizes": Operator(split, split_kernel, blocks=True),
    "aten::unbind": Operator(unbind),
}
