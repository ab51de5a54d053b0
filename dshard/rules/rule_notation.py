"""The rule notation: an operator by the factors of its tensors, einsum style.

    "m k, k n -> m n"          each mesh axis may shard m, n or k; k is missing from the output, so it leaves a Partial
    "b s h -> (b s) h"         a merged dim: b is major
    "... [h] -> ... [h]"       any leading dims; h may not be sharded
    "b 1 -> b h"               a dim of size one
    "(2 f) k -> ..."           a dim of two parts of f each, which is sharded in blocks
    "n c [...] -> n c [...]"   dims without a factor, which may not be sharded: `[]` is one, `[...]` are any number
    "*a b -> a b"              any number of operands, or of outputs, of these dims
    "a b -> a"  reduce="max"   a sharded b leaves the output Partial("max")

Operators also differ in which partial operands pass through: `passes` lists sets of operands which, partial together
while the others are replicated, leave the outputs partial with the same reduction.

Two `...` in a term leave a gap at the dims that a call names, wherever these are, as in the rules of dshard's own
operators with dims as arguments:

    "... [d] ... -> ... [d] ..."    softmax: any dim may be sharded, but for the one along which it works
    "... r ... -> ... ..."          a sum over some dims
    "... v ..., i -> ... i ..."     index_select
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from dshard.caches import cached
from dshard.errors import NotationError, ShapeError
from dshard.layout import Shape
from dshard.placements import REDUCE_OPS, ReduceOp
from dshard.rules.rule import Dim, PassThrough, Rule, Term, factor_sizes

_TOKEN = re.compile(r"\.\.\.|\[\.\.\.\]|\(|\)|\[\w*\]|\w+")
_SHARED: Dim = ("...",)
_UNSHARED: Dim = ("[...]",)


def parse_rule(
    text: str,
    shapes: Sequence[Shape],
    outputs: Sequence[Shape] | None = None,
    *,
    at: Sequence[int] | None = None,
    same_size: bool = False,
    reduce: ReduceOp | Sequence[ReduceOp] = "sum",
    passes: tuple[PassThrough, ...] = (),
    loops: bool = False,
) -> Rule:
    """Parse `text` as the rule for operands of these shapes, and outputs of those if they are known.

    `...` stands for dims that the operands share, aligned at the right. A dim of size one where the factor is larger
    elsewhere is broadcast, and is not sharded; with `same_size` nor is any dim of `...` that differs in size.

    >>> print(parse_rule("... k, k n -> ... n", [(2, 3, 4), (4, 5)]))
    _0 _1 k, k n -> _0 _1 n

    Two `...` leave a gap for the dims `at` of the first tensor in whose gap something stands; -1 is its last dim.

    >>> print(parse_rule("... v ..., i -> ... i ...", [(2, 3, 4), (6,)], at=[1]))
    _0 v _1, i -> _0 i _1
    >>> print(parse_rule("... r ... -> ... ...", [(2, 3, 4)], at=[0, -1]))
    r0 _0 r1 -> _0
    """
    ops = (reduce,) if isinstance(reduce, str) or reduce is None else tuple(reduce)
    if not all(isinstance(op, str) and op in REDUCE_OPS for op in ops):
        raise NotationError(f"the rule {text!r} reduces by {ops}: use {', '.join(REDUCE_OPS)}")
    known_outputs = None if outputs is None else tuple(outputs)
    rule = _parsed(text, tuple(shapes), known_outputs, None if at is None else tuple(at), same_size)
    return replace(rule, reduce=ops, passes=passes, loops=loops)


@cached("rules", 16384)
def _parsed(
    text: str, shapes: tuple[Shape, ...], outputs: tuple[Shape, ...] | None, at: tuple[int, ...] | None, same_size: bool
) -> Rule:
    """The terms and unsharded factors of a rule."""
    left, right = read_rule(text)
    in_terms = left.for_tensors(shapes, "operands", text)
    out_terms = right.terms if outputs is None else right.for_tensors(outputs, "outputs", text)
    terms, n_operands = [*in_terms, *out_terms], len(in_terms)
    known: list[Shape | None] = [*shapes, *([None] * len(out_terms) if outputs is None else outputs)]
    positions = _positions(terms, known, at, text)
    shared = [_shared(term, len(shape), positions) for term, shape in zip(in_terms, shapes, strict=True)]
    most = max(shared, default=0)
    names = [f"_{i}" for i in range(most)]
    terms = [
        _expand(term, names[most - n :], positions, None if shape is None else len(shape), text)
        for term, n, shape in zip(terms, [*shared, *[most] * len(out_terms)], known, strict=True)
    ]
    if same_size:
        terms = _of_one_size(terms, [*shapes, *(outputs or [])], names)
    unsharded = frozenset([name[1:-1] for term in terms for dim in term for name in dim if name[0] == "["])
    if unsharded:
        terms = [tuple([tuple([name.strip("[]") for name in dim]) for dim in term]) for term in terms]
    inputs = _broadcast(terms[:n_operands], shapes, text)
    rule = Rule(tuple(inputs), tuple(terms[n_operands:]), unsharded)
    blocks = [name for term in terms for dim in term if len(dim) > 1 for name in dim if name.isdecimal()]
    return _in_blocks(rule, blocks, [*shapes, *(outputs or [])], text) if blocks else rule


def _in_blocks(rule: Rule, blocks: Sequence[str], shapes: Sequence[Shape], text: str) -> Rule:
    """The rule with these numbers as blocks of the dims that they are in."""
    sizes = {name: int(name) for name in blocks}
    known = sizes | factor_sizes((*rule.inputs, *rule.outputs)[: len(shapes)], shapes, text)
    for term, shape in zip((*rule.inputs, *rule.outputs), shapes, strict=False):
        for dim, n in zip(term, shape, strict=True):
            if not sizes.keys().isdisjoint(dim) and len(dim) > 1:
                parts = prod([known.get(name, 1) for name in dim])
                if n != parts if known.keys() >= {*dim} else n % parts:
                    raise ShapeError(f"a dim of size {n} is not ({' '.join(dim)}) of the rule {text!r}")
                sizes |= {name: n // parts for name in dim if name not in known}
    names = frozenset(blocks)
    return replace(rule, unsharded=rule.unsharded | names, sizes=tuple(sizes.items()), blocks=names)


# -- the text alone


@dataclass(frozen=True, slots=True)
class Side:
    """The terms on one side of the arrow; term number `repeated` stands for any number of tensors."""

    terms: tuple[Term, ...]
    repeated: int | None = None

    def for_tensors(self, shapes: Sequence[Shape], kind: str, text: str) -> tuple[Term, ...]:
        """A term for each tensor."""
        terms, i = self.terms, self.repeated
        if i is not None:
            terms = (*terms[:i], *terms[i : i + 1] * (len(shapes) - len(terms) + 1), *terms[i + 1 :])
        if not shapes and terms == ((),):  # nothing beside the arrow: a scalar, or no tensor
            return ()
        if len(terms) != len(shapes):
            raise NotationError(f"the rule {text!r} has {len(terms)} {kind}, but {len(shapes)} were given")
        return terms

    def example(self) -> list[Shape]:
        """Shapes that fit the terms, of the fewest dims and tensors."""
        return [(2,) * sum([dim not in (_SHARED, _UNSHARED) for dim in term]) for term in self.terms]


@cached("rules", 4096)
def read_rule(text: str) -> tuple[Side, Side]:
    """The terms on both sides of a rule's arrow. Names in brackets keep their brackets."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError(f"the rule {text!r} has no '->': write it like 'm k, k n -> m n'")
    return _read_side(left, text), _read_side(right, text)


def _read_side(side: str, text: str) -> Side:
    parts = [*map(str.strip, side.split(","))]
    repeated = [i for i, part in enumerate(parts) if part.startswith("*")]
    if len(repeated) > 1:
        raise NotationError(f"the rule {text!r} has several '*' on one side: it is not clear how many tensors each is")
    return Side(tuple([_read_term(part.removeprefix("*"), text) for part in parts]), *repeated)


def _read_term(term: str, text: str) -> Term:
    dims: list[Dim] = []
    merged: list[str] | None = None
    if _TOKEN.sub("", term).strip():
        raise NotationError(f"cannot read {_TOKEN.sub('', term).strip()!r} in the rule {text!r}")
    for token in _TOKEN.findall(term):
        if token == "(":
            merged = []
        elif token == ")":
            if merged is None:
                raise NotationError(f"')' without '(' in the rule {text!r}")
            dims.append(tuple(merged))
            merged = None
        elif merged is not None:
            merged.append(token)
        else:
            dims.append(() if token in ("1", "[]") else (token,))
    if merged is not None:
        raise NotationError(f"'(' without ')' in the rule {text!r}")
    return tuple(dims)


# -- with the tensors


def _parts(term: Term) -> list[Term]:
    """The dims before, between and after the `...` of a term."""
    parts: list[Term] = [()]
    for dim in term:
        if dim == _SHARED:
            parts.append(())
        else:
            parts[-1] += (dim,)
    return parts


def _positions(terms: Sequence[Term], shapes: Sequence[Shape | None], at: Sequence[int] | None, text: str) -> list[int]:
    """The dims `at`, counted from 0, of a tensor that has all dims; none for a tensor without dims."""
    gaps = [(_parts(term), shape) for term, shape in zip(terms, shapes, strict=True) if term.count(_SHARED) > 1]
    if gaps and at is None:
        raise NotationError(f"the rule {text!r} has several '...' in one term: it is not clear how many dims each is")
    sizes = [
        len(shape) - len(before) - len(after) for (before, gap, *_, after), shape in gaps if gap and shape is not None
    ]
    ndim = sizes[0] if sizes else 0
    return sorted({dim % ndim for dim in at or ()}) if ndim else []


def _shared(term: Term, ndim: int, positions: list[int]) -> int:
    """The number of dims of `...` in the term of a tensor of `ndim` dims."""
    return max(ndim - len(_expand(term, [], positions, None, "")), 0) if _SHARED in term else 0


def _expand(term: Term, names: list[str], positions: list[int], ndim: int | None, text: str) -> Term:
    """The dims of a tensor of `ndim` dims, those of `...` being `names`."""
    before, *rest = _parts(term)
    dims: list[Dim] = [(name,) for name in names] if rest else []
    for i, position in enumerate(positions if len(rest) > 1 else ()):
        dims[position:position] = [_numbered(dim, i) for dim in rest[0]] if len(positions) > 1 else rest[0]
    dims = [*before, *dims, *(rest[-1] if rest else ())]
    if _UNSHARED in dims:
        i = dims.index(_UNSHARED)
        dims[i : i + 1] = [()] * (0 if ndim is None else ndim - len(dims) + 1)
    if ndim is not None and len(dims) != ndim:
        raise NotationError(f"the rule {text!r} gives a tensor {len(dims)} dims, but it has {ndim}")
    return tuple(dims)


def _numbered(dim: Dim, i: int) -> Dim:
    """The dim with a number in each name."""
    return tuple([f"[{name[1:-1]}{i}]" if name[0] == "[" else f"{name}{i}" for name in dim])


def _of_one_size(terms: Sequence[Term], shapes: Sequence[Shape], names: list[str]) -> list[Term]:
    """The terms without the names whose dims differ in size."""
    sizes: dict[Dim, set[int]] = {}
    for term, shape in zip(terms, shapes, strict=True):
        for dim, n in zip(term, shape, strict=True):
            sizes.setdefault(dim, set()).add(n)
    unequal = {(name,) for name in names if len(sizes[name,]) > 1}
    return [tuple([() if dim in unequal else dim for dim in term]) for term in terms]


def _broadcast(terms: Sequence[Term], shapes: Sequence[Shape], rule: str) -> list[Term]:
    sizes = factor_sizes(terms, shapes, rule)
    return [
        tuple(
            [
                () if n == 1 and len(dim) == 1 and sizes.get(dim[0], 1) != 1 else dim
                for dim, n in zip(term, shape, strict=True)
            ]
        )
        for term, shape in zip(terms, shapes, strict=True)
    ]
