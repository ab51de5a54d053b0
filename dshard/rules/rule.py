"""An operator as a rule: the factors in each dim of its tensors, and the partial operands that pass through it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dshard.caches import cached
from dshard.errors import ShapeError
from dshard.layout import Shape
from dshard.placements import ReduceOp
from dshard.routing import Routing

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
class Chosen:
    """Rows of the operand with the factor `each` work with so many of the `parts` of operands, as `routing` says."""

    each: str
    parts: str
    routing: Routing


@dataclass(frozen=True, slots=True)
class Rule:
    """An operator's rule: the factors in each dim of its operands and outputs.

    `unsharded` factors may not be sharded. A sharded factor that an output lacks leaves it partial: with `reduce[i]`
    for output `i`, or `reduce[0]` for all. `passes` are partial operands that leave the outputs partial. Only the
    layout of `unread` operands matters: they are not redistributed. `sizes` are the sizes of factors that are alone in
    no dim. With `reshards` a mesh axis that shards a dim may shard any factor of the operand in its place. With `loops`
    a mesh axis may shard any factor, even one that no operand has sharded. The local work of `loops` is one matmul over
    all factors, or several, each with one of the factors `apart`; of other rules see `joined_factors`. The two factors
    of a `triangle` count only pairs in which the index of the second is at most that of the first. If `held` is not 0,
    a tensor of all factors but those `apart`, with elements of so many bytes, is held between the matmuls, and a
    triangle is computed as a whole. With `chosen` each row works with some parts of operands alone. `blocks` are
    factors that are not sharded, and major in a dim: where another factor of the dim is sharded, it is so in blocks.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    unsharded: frozenset[str] = frozenset()
    reduce: tuple[ReduceOp, ...] = ("sum",)
    passes: tuple[PassThrough, ...] = ()
    unread: frozenset[int] = frozenset()
    sizes: tuple[tuple[str, int], ...] = ()
    reshards: bool = False
    loops: bool = False
    apart: tuple[str, ...] = ()
    triangle: tuple[str, str] | None = None
    held: int = 0
    chosen: Chosen | None = None
    blocks: frozenset[str] = frozenset()

    def reductions(self) -> tuple[ReduceOp, ...]:
        """For each output the reduction with which a sharded factor that it lacks leaves it partial."""
        return self.reduce if len(self.reduce) > 1 else self.reduce * len(self.outputs)

    def __str__(self) -> str:
        return f"{self._side(self.inputs)} -> {self._side(self.outputs)}"

    def _side(self, terms: tuple[Term, ...]) -> str:
        return ", ".join(" ".join(self._dim(dim) for dim in term) for term in terms)

    def _dim(self, dim: Dim) -> str:
        names = [f"[{name}]" if name in self.unsharded else name for name in dim]
        return names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "[]"


@cached("joined factors", 4096)
def joined_factors(rule: Rule) -> tuple[frozenset[str], ...]:
    """Sets of factors: the local work of a rule without loops multiplies over one of them, the largest on a rank.

    For each output its missing factors are summed one after the other, over all factors of the tensors that have it. A
    factor that one tensor alone has is left out: the tensor is summed over it first, or read or written at some of its
    indices, in one pass over the tensor.
    """
    inputs, outputs = ([{n for dim in term for n in dim} for term in terms] for terms in (rule.inputs, rule.outputs))
    counts = Counter([name for names in (*inputs, *outputs) for name in names])
    joined = set[frozenset[str]]()
    for kept in outputs:
        terms = [{name for name in names if counts[name] > 1} for names in inputs]
        for name in dict.fromkeys([name for names in terms for name in sorted(names - kept)]):
            together = set[str]().union(*[names for names in terms if name in names])
            terms = [*[names for names in terms if name not in names], together - {name}]
            joined.add(frozenset(together))
        joined.add(frozenset({name for name in kept if counts[name] > 1}))
    return tuple([names for names in joined if not any(names < others for others in joined)])


def linear(*operands: int) -> tuple[PassThrough, ...]:
    """The pass-throughs of an operator linear in each of these operands: a partial sum of one passes through."""
    return tuple([PassThrough(frozenset({operand})) for operand in operands])


def together(*operands: int, ops: tuple[ReduceOp, ...] = LINEAR) -> tuple[PassThrough, ...]:
    """The pass-through of a partial reduction, one of `ops`, that all these operands have; none without `ops`."""
    return (PassThrough(frozenset(operands), ops),) if ops else ()


MOVES = together(0, ops=ANY)
"""The pass-through of an operator that only moves the elements of one operand."""


def factor_sizes(terms: Sequence[Term], shapes: Sequence[Shape], rule: object) -> dict[str, int]:
    """The size of each factor that is alone in some dim; a larger size overrides a size of one."""
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
