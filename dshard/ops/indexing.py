"""Operators that read and write elements at given indices.

An indexed dim may be sharded: a read leaves a partial sum, a written element goes to the rank that holds it.
The dims of the indices may be sharded where elements are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.core.call import Call, Operator
from dshard.layout import Shape
from dshard.ops import lookup
from dshard.ops.concat import SAME_WHEN_EQUAL
from dshard.ops.views import PASS, kept
from dshard.rules.rule import ANY, LINEAR, PassThrough, Rule, Term


def _shared(dim: int, *shapes: Shape) -> Term:
    """The dims, other than `dim`, in which all shapes agree."""
    sizes = zip(*shapes, strict=True)
    return tuple((str(i),) if i != dim and len(set(found)) == 1 else () for i, found in enumerate(sizes))


def _whole(*shapes: Shape) -> tuple[Term, ...]:
    return tuple(((),) * len(shape) for shape in shapes)


def gather(call: Call) -> Rule:
    """Each output element reads its own row: dims of index and operand align, but for the one that is looked up."""
    src, index = call.shapes
    if len(src) != len(index) or not src:
        return Rule(_whole(src, index), _whole(*call.out_shapes), passes=PASS)
    dim = call.dim()
    term = _shared(dim, src, index)
    out = (*term[:dim], ("index",), *term[dim + 1 :])
    return Rule((_at(term, dim), out), (out,), passes=PASS)


def _at(term: Term, dim: int) -> Term:
    """The term of the operand that is read or written: its indexed dim may be sharded."""
    return (*term[:dim], ("v",), *term[dim + 1 :])


def scatter(call: Call) -> Rule:
    """Each element of the source is written to its own row."""
    pending = _scatter_pending(call)
    if len(set(map(len, call.shapes))) > 1 or not call.shapes[0]:
        return Rule(_whole(*call.shapes), _whole(*call.out_shapes), passes=pending)
    term = _shared(call.dim(), *call.shapes)
    held = _at(term, call.dim())
    return Rule((held, *(term,) * (len(call.specs) - 1)), (held,), passes=pending)


def _scatter_pending(call: Call) -> tuple[PassThrough, ...]:
    if call.argument("reduce") is not None:
        return ()
    if len(call.specs) == 3:
        adds = call.func._schema.name.removesuffix("_") == "aten::scatter_add"
        return (PassThrough(frozenset({0, 2}), LINEAR if adds else ANY),)
    return _overwritten(call)


def _overwritten(call: Call) -> tuple[PassThrough, ...]:
    """The pass-throughs of writing a number into a partial operand."""
    return (PassThrough(frozenset({0}), ANY if call.argument("value") == 0 else SAME_WHEN_EQUAL),)


def index_select(call: Call) -> Rule:
    """Rows at some indices."""
    src, index = call.shapes
    if not src or not index:
        return Rule(_whole(src, index), _whole(*call.out_shapes), passes=PASS)
    dim = call.dim()
    term = kept(len(src), (dim,))
    out = (*term[:dim], ("index",), *term[dim + 1 :])
    return Rule((_at(term, dim), (("index",),)), (out,), passes=PASS)


def index_write(call: Call) -> Rule:
    """Rows of the source are added, or written, at some indices."""
    src, index, rows = call.shapes
    adds = call.func._schema.name.removesuffix("_") == "aten::index_add"
    pending = (PassThrough(frozenset({0, 2}), LINEAR if adds else ANY),)
    term = kept(len(src), (call.dim(),))
    rows_term = term if len(rows) == len(src) else _whole(rows)[0]
    held = _at(term, call.dim()) if src else term
    return Rule((held, *_whole(index), rows_term), (held,), passes=pending)


def index_fill(call: Call) -> Rule:
    """One value is written at some indices."""
    term = kept(len(call.shapes[0]), (call.dim(),))
    pending = _overwritten(call) if len(call.specs) == 2 else ()
    held = _at(term, call.dim()) if term else term
    return Rule((held, *_whole(*call.shapes[1:])), (held,), passes=pending)


# -- x[i, :, j]


def index(call: Call) -> Rule:
    """The indices broadcast; what they give stands in place of the indexed dims, or leads where these are apart."""
    src, *shapes = call.shapes
    spread = torch.broadcast_shapes(*shapes)
    inner = tuple((f"i{k}",) for k in range(len(spread)))
    terms = tuple(_right(shape, spread, inner) for shape in shapes)
    where = _positions(call)
    return Rule((_held(src, where), *terms), (_result(len(src), where, inner),), passes=PASS)


def index_put(call: Call) -> Rule:
    """The same, written: the dims of the indices stay whole."""
    src, *shapes, values = call.shapes
    where = _positions(call)
    spread = torch.broadcast_shapes(*shapes)
    out = _result(len(src), where, ((),) * len(spread))
    sizes = _result(len(src), where, spread, src)
    pending = (PassThrough(frozenset({0, len(call.specs) - 1}), LINEAR if call.argument("accumulate") else ANY),)
    inputs = (_held(src, where), *_whole(*shapes), _right(values, sizes, out))
    return Rule(inputs, (inputs[0],), passes=pending)


def _held(src: Shape, where: list[int]) -> Term:
    """The term of the indexed operand: the indexed dims have factors that no other tensor has."""
    return tuple((f"v{i}",) if i in where else dim for i, dim in enumerate(kept(len(src))))


def _positions(call: Call) -> list[int]:
    return [i for i, index in enumerate(call.argument("indices")) if index is not None]


def _right(shape: Shape, spread: Sequence[Any], term: Term) -> Term:
    """The term of a tensor that is broadcast to shape `spread`, whose term is `term`."""
    shift = len(spread) - len(shape)
    return tuple(term[shift + i] if n == spread[shift + i] else () for i, n in enumerate(shape))


def _result(ndim: int, where: list[int], inner: Sequence[Any], outer: Sequence[Any] | None = None) -> tuple[Any, ...]:
    """The factors of each dim of the result: `inner` for those of the indices, `outer` for the remaining dims."""
    dims = kept(ndim) if outer is None else outer
    rest = [dim for i, dim in enumerate(dims) if i not in where]
    at = where[0] if where[-1] - where[0] == len(where) - 1 else 0
    return (*rest[:at], *inner, *rest[at:])


def has_mask(args: tuple[Any, ...]) -> bool:
    """Whether some index is a mask: the shape of the result depends on its values."""
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def by_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an indexed operator with masks converted to indices; one value written under one mask is a masked fill."""
    x, indices, *rest = args
    if func in _WRITES and len(indices) == 1 and rest[0].ndim == 0 and not any(rest[1:2]) and not kwargs:
        mask = indices[0].reshape(*indices[0].shape, *(1,) * (x.ndim - indices[0].ndim)).bool()
        fill = torch.ops.aten.masked_fill if func is _ATEN.index_put.default else torch.ops.aten.masked_fill_
        return fill.Tensor(x, mask, rest[0])
    converted: list[Tensor | None] = []
    for each in indices:
        is_mask = each is not None and each.dtype in (torch.bool, torch.uint8)
        converted.extend(each.nonzero().unbind(1) if is_mask else [each])
    return func(x, converted, *rest, **kwargs)


_ATEN = torch.ops.aten
_WRITES = (_ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)

MASKED: dict[Any, Callable[..., Any]] = dict.fromkeys((_ATEN.index.Tensor, *_WRITES), by_mask)
"""The functions that replace an operator when an index is a mask."""

RULES: dict[str, Operator] = {
    "aten::gather": Operator(gather, lookup.reading),
    "aten::scatter": Operator(scatter, lookup.writing),
    "aten::scatter_add": Operator(scatter, lookup.writing),
    "aten::scatter_reduce": Operator(scatter, lookup.writing),
    "aten::index_select": Operator(index_select, lookup.reading),
    "aten::index_add": Operator(index_write, lookup.writing),
    "aten::index_copy": Operator(index_write, lookup.writing),
    "aten::index_fill": Operator(index_fill, lookup.writing),
    "aten::index": Operator(index, lookup.indexing),
    "aten::index_put": Operator(index_put, lookup.putting),
    "aten::_index_put_impl": Operator(index_put, lookup.putting),
}
