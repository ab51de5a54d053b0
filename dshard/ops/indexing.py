"""Operators that read and write elements at given indices.

An indexed dim may be sharded: a read leaves a partial sum, a written element goes to the rank that holds it.
The dims of the indices may be sharded where elements are read, or added: sums of ranks are a partial sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard.core import checks
from dshard.core.call import Call, Composed, Operator
from dshard.core.signature import Args, Function, Kwargs
from dshard.ops import lookup
from dshard.ops.concat import SAME_WHEN_EQUAL
from dshard.ops.ragged import selects
from dshard.rules.rule import ANY, LINEAR, MOVES, PassThrough, Rule, together


def gather(call: Call) -> Rule:
    """Dims of one size in operand and index may be sharded; the dim that is looked up leaves a partial sum."""
    src, index = call.shapes
    if len(src) != len(index):
        return call.rule("[...], [...] -> [...]", passes=MOVES)
    return call.rule("... v ..., ... i ... -> ... i ...", at="dim", same_size=True, passes=MOVES)


def scatter(call: Call) -> Rule:
    """Dims of one size in all operands may be sharded, and the dim that is written; sharded indices of a sum, too."""
    passes = _scatter_passes(call)
    if len(set(map(len, call.shapes))) > 1:
        return call.rule("*[...] -> [...]", passes=passes)
    written = "i" if _name(call) == "aten::scatter_add" else "[]"
    return call.rule(f"... v ..., *... {written} ... -> ... v ...", at="dim", same_size=True, passes=passes)


def _scatter_passes(call: Call) -> tuple[PassThrough, ...]:
    if call.argument("reduce") is not None:
        return ()
    if len(call.specs) == 3:
        return together(0, 2, ops=LINEAR if _name(call) == "aten::scatter_add" else ANY)
    return _overwritten(call)


def _name(call: Call) -> str:
    """The operator's name, in place or not."""
    return call.func._schema.name.removesuffix("_")


def _overwritten(call: Call) -> tuple[PassThrough, ...]:
    """The pass-through of writing a number into a partial operand."""
    return together(0, ops=ANY if call.argument("value") == 0 else SAME_WHEN_EQUAL)


def index_select(call: Call) -> Rule:
    """Any dim may be sharded; the dim that is looked up leaves a partial sum."""
    if not call.shapes[0] or not call.shapes[1]:
        return call.rule("[...], [...] -> [...]", passes=MOVES)
    return call.rule("... v ..., i -> ... i ...", at="dim", passes=MOVES)


def index_write(call: Call) -> Rule:
    """Any dim of the operand that is written may be sharded; sharded indices leave a partial sum of what is added."""
    src, indices, rows = call.shapes
    adds = _name(call) == "aten::index_add"
    passes = together(0, 2, ops=LINEAR if adds else ANY)
    if len(rows) != len(src):
        return call.rule("... v ..., [...], [...] -> ... v ...", at="dim", passes=passes)
    index = "i" if adds and src and indices else "[]"
    of_index = index if indices else ""
    return call.rule(f"... v ..., {of_index}, ... {index} ... -> ... v ...", at="dim", passes=passes)


def index_fill(call: Call) -> Rule:
    """Any dim of the operand that is written may be sharded; the indices may not."""
    passes = _overwritten(call) if len(call.specs) == 2 else ()
    return call.rule("... v ..., *[...] -> ... v ...", at="dim", passes=passes)


# -- x[i, :, j]


def index(call: Call) -> Rule:
    """Any dim may be sharded; the dims that are looked up leave a partial sum."""
    return call.rule(f"{_indexed(call)}, *... -> {' '.join(_result(call, '...'))}", passes=MOVES)


def index_put(call: Call) -> Rule:
    """Any dim of the operand that is written may be sharded; sharded indices leave a partial sum of what is added."""
    _, *indices, values = call.shapes
    n, adds = len(torch.broadcast_shapes(*indices)), call.argument("accumulate")
    dims = _result(call, *["[]"] * n)
    passes = together(0, len(call.specs) - 1, ops=LINEAR if adds else ANY)
    if adds and len(values) == len(dims):
        written = " ".join(_result(call, "..."))
        return call.rule(f"{_indexed(call)}, *..., {written} -> {_indexed(call)}", passes=passes)
    written = " ".join(dims[len(dims) - len(values) :])
    return call.rule(f"{_indexed(call)}, *[...], {written} -> {_indexed(call)}", passes=passes)


def _indexed(call: Call) -> str:
    """The term of the operand: indexed dims have factors that no other tensor has."""
    where = _positions(call)
    return " ".join(f"{'v' if i in where else 'd'}{i}" for i in range(len(call.shapes[0])))


def _positions(call: Call) -> list[int]:
    return [i for i, index in enumerate(call.argument("indices")) if index is not None]


def _result(call: Call, *inner: str) -> list[str]:
    """The term of the result: `inner` replaces the indexed dims, or leads if these are not adjacent."""
    where = _positions(call)
    rest = [f"d{i}" for i in range(len(call.shapes[0])) if i not in where]
    at = where[0] if where[-1] - where[0] == len(where) - 1 else 0
    return [*rest[:at], *inner, *rest[at:]]


def has_mask(args: Args) -> bool:
    """Whether some index is a mask: the shape of the result depends on its values."""
    return any(map(selects, args[1]))


def by_mask(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run an indexed operator with masks converted to indices; one value written under one mask is a masked fill."""
    x, indices, *rest = args
    if func in _WRITES and len(indices) == 1 and rest[0].numel() == 1 and not any(rest[1:2]) and not kwargs:
        mask = indices[0].to(x.device)  # which torch takes from the CPU as indices, and not to fill
        mask = mask.reshape((*mask.shape, *(1,) * (x.ndim - mask.ndim))).bool()
        fill = torch.ops.aten.masked_fill if func is _ATEN.index_put.default else torch.ops.aten.masked_fill_
        return fill.Tensor(x, mask, rest[0].reshape(()))
    converted: list[Tensor | None] = []
    for each in indices:
        converted.extend(each.nonzero().unbind(1) if selects(each) else [each])
    return func(x, converted, *rest, **kwargs)


_ATEN = torch.ops.aten
_WRITES = (_ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default)

_MASKED = dict.fromkeys((_ATEN.index.Tensor, *_WRITES), Composed(by_mask, has_mask))

RULES: dict[str, Operator] = {
    "aten::gather": Operator(gather, lookup.reading, refuses_empty=True),
    "aten::scatter": Operator(scatter, lookup.writing, check=checks.check_scatter, refuses_empty=True),
    "aten::scatter_add": Operator(scatter, lookup.writing, check=checks.check_scatter, refuses_empty=True),
    "aten::scatter_reduce": Operator(scatter, lookup.writing),
    "aten::index_select": Operator(index_select, lookup.reading, check=checks.check_index_select, refuses_empty=True),
    "aten::index_add": Operator(index_write, lookup.writing, check=checks.check_index_add, refuses_empty=True),
    "aten::index_copy": Operator(index_write, lookup.writing, refuses_empty=True),
    "aten::index_fill": Operator(index_fill, lookup.writing, refuses_empty=True),
    "aten::index": Operator(index, lookup.indexing, composed=_MASKED, refuses_empty=True),
    "aten::index_put": Operator(index_put, lookup.putting, composed=_MASKED, refuses_empty=True),
    "aten::_index_put_impl": Operator(index_put, lookup.putting, composed=_MASKED, refuses_empty=True),
}
