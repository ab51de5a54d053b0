"""The rule notation: an operator by the factors of its tensors, einsum style.

    "m k, k n -> m n"          each mesh axis may shard m, n or k; k is missing from the output, so it leaves a Partial
    "b s h -> (b s) h"         a merged dim: b is major
    "... [h] -> ... [h]"       any leading dims; h is not to be sharded on any mesh axis
    "b 1 -> b h"               1 is a dim of size one
    "a b -> a"  reduce="max"   a sharded b leaves the output Partial("max")

Operators also differ in which partial operands pass through: `pending` lists sets of operands which, partial
together while the others are replicated, leave the outputs partial with the same reduction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dshard.errors import NotationError, ShapeError
from dshard.layout import Shape
from dshard.placements import REDUCE_OPS, ReduceOp

Dim = tuple[str, ...]
Term = tuple[Dim, ...]
ANY: tuple[ReduceOp, ...] = ("sum", "avg", "product", "max", "min")
LINEAR: tuple[ReduceOp, ...] = ("sum", "avg")


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Operands that, all partial with one of `ops` while others are replicated, leave the outputs partial with it."""

    operands: frozenset[int]
    ops: tuple[ReduceOp, ...] = LINEAR


@dataclass(frozen=True, slots=True)
class Rule:
    """An operator's rule: the factors in each dim of its operands and outputs.

    `whole` factors may not be sharded. A sharded factor that an output lacks leaves it partial: with `reduce[i]` for
    output `i`, or `reduce[0]` where all are alike. Of `unread` operands only the layout matters: they are not
    redistributed. `sizes` are those of factors that stand alone in no dim. With `loops` a mesh axis may shard any
    factor, even one that no operand has sharded.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    whole: frozenset[str] = frozenset()
    reduce: tuple[ReduceOp, ...] = ("sum",)
    pending: tuple[PassThrough, ...] = ()
    unread: frozenset[int] = frozenset()
    sizes: tuple[tuple[str, int], ...] = ()
    loops: bool = False

    def reduce_of(self, output: int) -> ReduceOp:
        """The reduction with which a sharded factor that output `i` lacks leaves it partial."""
        return self.reduce[output] if len(self.reduce) > 1 else self.reduce[0]

    def __str__(self) -> str:
        return f"{self._side(self.inputs)} -> {self._side(self.outputs)}"

    def _side(self, terms: tuple[Term, ...]) -> str:
        return ", ".join(" ".join(self._dim(dim) for dim in term) for term in terms)

    def _dim(self, dim: Dim) -> str:
        names = [f"[{name}]" if name in self.whole else name for name in dim]
        return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1"


def linear(*operands: int) -> tuple[PassThrough, ...]:
    """The pass-throughs of an operator linear in each of these operands: a partial sum of one passes through."""
    return tuple(PassThrough(frozenset({operand})) for operand in operands)


_TOKEN = re.compile(r"\.\.\.|\(|\)|\[\w+\]|\w+")


def parse_rule(
    text: str,
    shapes: Sequence[Shape],
    *,
    reduce: ReduceOp | Sequence[ReduceOp] = "sum",
    pending: tuple[PassThrough, ...] = (),
    loops: bool = False,
) -> Rule:
    """Parse `text` as the rule for operands of these shapes; `...` stands for leading dims, aligned at the right.

    A dim of size one where the factor is larger elsewhere is broadcast, and is not sharded.

    >>> print(parse_rule("... k, k n -> ... n", [(2, 3, 4), (4, 5)]))
    _0 _1 k, k n -> _0 _1 n

    Raises:
        NotationError: the text is no rule, or an operand has another number of dims.
        ShapeError: a factor has two sizes.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError(f"the rule {text!r} has no '->': write it like 'm k, k n -> m n'")
    whole: set[str] = set()
    inputs = [_parse_term(part, whole, text) for part in left.split(",")] if left.strip() else []
    outputs = [_parse_term(part, whole, text) for part in right.split(",")]
    if len(inputs) != len(shapes):
        raise NotationError(f"the rule {text!r} has {len(inputs)} operands, but {len(shapes)} were given")
    leading = max(
        (len(shape) - len(term) + 1 for term, shape in zip(inputs, shapes, strict=True) if ("...",) in term), default=0
    )
    spread_in = [_expand(term, leading, len(shape), text) for term, shape in zip(inputs, shapes, strict=True)]
    spread_out = [_expand(term, leading, None, text) for term in outputs]
    ops = (reduce,) if isinstance(reduce, str) or reduce is None else tuple(reduce)
    if not all(isinstance(op, str) and op in REDUCE_OPS for op in ops):
        raise NotationError(f"the rule {text!r} reduces by {ops}: use {', '.join(REDUCE_OPS)}")
    return Rule(
        tuple(_broadcast(spread_in, shapes, text)), tuple(spread_out), frozenset(whole), ops, pending, loops=loops
    )


def _parse_term(text: str, whole: set[str], rule: str) -> Term:
    dims: list[Dim] = []
    merged: list[str] | None = None
    if _TOKEN.sub("", text).strip():
        raise NotationError(f"cannot read {_TOKEN.sub('', text).strip()!r} in the rule {rule!r}")
    for token in _TOKEN.findall(text):
        if token == "(":
            merged = []
        elif token == ")":
            if merged is None:
                raise NotationError(f"')' without '(' in the rule {rule!r}")
            dims.append(tuple(merged))
            merged = None
        else:
            name = token.strip("[]")
            if token.startswith("["):
                whole.add(name)
            if merged is not None:
                merged.append(name)
            else:
                dims.append(() if name == "1" else (name,))
    if merged is not None:
        raise NotationError(f"'(' without ')' in the rule {rule!r}")
    return tuple(dims)


def _expand(term: Term, leading: int, ndim: int | None, rule: str) -> Term:
    if ("...",) in term:
        at = term.index(("...",))
        here = leading if ndim is None else ndim - len(term) + 1
        term = (*term[:at], *((f"_{leading - here + i}",) for i in range(here)), *term[at + 1 :])
    if ndim is not None and len(term) != ndim:
        raise NotationError(f"the rule {rule!r} gives an operand {len(term)} dims, but it has {ndim}")
    return term


def _broadcast(terms: Sequence[Term], shapes: Sequence[Shape], rule: str) -> list[Term]:
    sizes = factor_sizes(terms, shapes, rule)
    broadcast = []
    for term, shape in zip(terms, shapes, strict=True):
        broadcast.append(
            tuple(
                () if n == 1 and len(dim) == 1 and sizes.get(dim[0], 1) != 1 else dim
                for dim, n in zip(term, shape, strict=True)
            )
        )
    return broadcast


def factor_sizes(terms: Sequence[Term], shapes: Sequence[Shape], rule: object) -> dict[str, int]:
    """The size of each factor that stands alone in some dim; a size of one gives way to a larger one.

    Raises:
        ShapeError: a factor has two sizes.
    """
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for dim, n in zip(term, shape, strict=True):
            if len(dim) != 1:
                continue
            known = sizes.setdefault(dim[0], n)
            if known != n and 1 not in (known, n):
                raise ShapeError(
                    f"the factor {dim[0]!r} of the rule '{rule}' is {known} in one operand and {n} in another"
                )
            if known == 1:
                sizes[dim[0]] = n
    return sizes
