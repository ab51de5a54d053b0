"""Operators that select some of a tensor's elements, their backward forms, and those that write a selection.

A dim along which elements are selected is not sharded, for its term has no factor there, unless by a single index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from dshard.core.call import Call, Operator, names, pending_all
from dshard.layout import Shape
from dshard.ops.lookup import selecting
from dshard.ops.views import kept, moved, with_local_size
from dshard.placements import ReduceOp
from dshard.rules.rule import ANY, LINEAR, Rule, Term

Part: TypeAlias = Callable[[Call, Shape, Shape], tuple[Term, Term]]
"""The terms of a tensor of the first shape and of its selection, of the second; for forward, backward and scatter."""


def select(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """The terms of one index of a dim, which goes."""
    dim = call.dim(ndim=len(src))
    term = kept(len(src), (dim,))
    return term, (*term[:dim], *term[dim + 1 :])


def slice_(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """The terms of some indices of a dim. If these are all, the dim may be sharded."""
    dim = call.dim(ndim=len(src))
    term = kept(len(src), () if src == part else (dim,))
    return term, term


def diagonal(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """The terms of a diagonal of two dims, which becomes the last dim."""
    dims = (call.dim("dim1", len(src)), call.dim("dim2", len(src)))
    term = kept(len(src), dims)
    return term, (*(dim for i, dim in enumerate(term) if i not in dims), ())


def windows(call: Call, src: Shape, part: Shape) -> tuple[Term, Term]:
    """The terms of windows of a dim, whose elements become the last dim."""
    name = "dimension" if call.argument("dimension") is not None else "dim"
    term = kept(len(src), (call.dim(name, len(src)),)) if src else ()
    return term, (*(term or ((),) * (len(part) - 1)), ())


def taken(part: Part) -> Callable[[Call], Rule]:
    """An operator from a tensor to a selection of it."""

    def rule(call: Call) -> Rule:
        """A part of a tensor; the dim of which it is taken stays whole."""
        src, out = part(call, call.shapes[0], call.out_shapes[0])
        return moved(src, out)

    return rule


def one_index(call: Call) -> Rule:
    """One index of a dim, which goes; where it is split, the rank that holds it has the slice, the others zeros."""
    dim, term = call.dim(), names(len(call.shapes[0]))
    return moved(term, (*term[:dim], *term[dim + 1 :]))


def put_back(part: Part, ops: tuple[ReduceOp, ...] = ANY) -> Callable[[Call], Rule]:
    """An operator from a selection, or its gradient, to a tensor, zero elsewhere; overlaps add up; only sums pass."""

    def rule(call: Call) -> Rule:
        """A part within zeros; the dim where it is put stays whole."""
        out, src = part(call, call.out_shapes[0], call.shapes[0])
        return Rule((src,), (out,), passes=pending_all(1, ops))

    return rule


def replaced(part: Part) -> Callable[[Call], Rule]:
    """An operator from a tensor and a selection's new values to the tensor with these values."""

    def rule(call: Call) -> Rule:
        """A tensor with a part replaced; the dim of which it is taken stays whole."""
        src, new = part(call, *call.shapes)
        return Rule((src, new), (src,), passes=pending_all(2, ANY))

    return rule


def split(call: Call) -> Rule:
    """Pieces of a dim."""
    term = kept(len(call.shapes[0]), (call.dim(),))
    return moved(term, *[term] * len(call.outs))


def unbind(call: Call) -> Rule:
    """A tensor for each index of a dim, which goes."""
    dim = call.dim()
    term = kept(len(call.shapes[0]), (dim,))
    return moved(term, *[(*term[:dim], *term[dim + 1 :])] * len(call.outs))


_BACKWARD = with_local_size("input_sizes")

RULES: dict[str, Operator] = {
    "aten::select": Operator(one_index, selecting),
    "aten::slice": Operator(taken(slice_)),
    "aten::diagonal": Operator(taken(diagonal)),
    "aten::unfold": Operator(taken(windows)),
    "aten::select_backward": Operator(put_back(select), _BACKWARD),
    "aten::slice_backward": Operator(put_back(slice_), _BACKWARD),
    "aten::diagonal_backward": Operator(put_back(diagonal), _BACKWARD),
    "aten::unfold_backward": Operator(put_back(windows, LINEAR), _BACKWARD),
    "aten::diag_embed": Operator(put_back(diagonal)),
    "aten::select_scatter": Operator(replaced(select)),
    "aten::slice_scatter": Operator(replaced(slice_)),
    "aten::diagonal_scatter": Operator(replaced(diagonal)),
    "aten::split": Operator(split),
    "aten::split_with_sizes": Operator(split),
    "aten::unsafe_split": Operator(split),
    "aten::unsafe_split_with_sizes": Operator(split),
    "aten::unbind": Operator(unbind),
}
