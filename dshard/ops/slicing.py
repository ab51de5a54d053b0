"""Operators that select elements along dims, their backward forms, and operators that write a selection.

A dim along which elements are selected is not sharded, as it has no factor, unless one index is selected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dshard.core.call import Call, Operator
from dshard.core.checks import check_dim
from dshard.ops.exchange import cut, cut_backward, cut_scatter, index_exchange
from dshard.ops.lookup import selecting
from dshard.ops.split_pieces import PIECES
from dshard.ops.views import with_local_size
from dshard.placements import ReduceOp
from dshard.rules.rule import ANY, LINEAR, MOVES, PassThrough, Rule, together


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
    """Any dim may be sharded except the one that is cut into pieces."""
    return call.rule("... [] ... -> *... [] ...", at="dim", passes=MOVES)


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
    "aten::split": Operator(split, alternatives=(PIECES,)),
    "aten::split_with_sizes": Operator(split, alternatives=(PIECES,)),
    "aten::unsafe_split": Operator(split),
    "aten::unsafe_split_with_sizes": Operator(split),
    "aten::unbind": Operator(unbind),
}
