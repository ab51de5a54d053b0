"""Rules of reshapes: the factors that the dims before and after share."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd, prod

from dshard.layout import Shape
from dshard.rules.rule import Rule, Term


@dataclass(slots=True)
class _Side:
    """A reader of one of the two shapes, major to minor: the current dim, the size left of it, the factors so far."""

    shape: Shape
    dims: list[list[str]] = field(default_factory=list)
    at: int = 0
    left: int = 1

    def __post_init__(self) -> None:
        self.dims = [[] for _ in self.shape]
        self.left = self.shape[0] if self.shape else 1

    @property
    def done(self) -> bool:
        return self.at == len(self.shape)

    def advance(self) -> None:
        """Go to the next dim."""
        self.at += 1
        self.left = 1 if self.done else self.shape[self.at]

    def take(self, factor: str, size: int) -> None:
        """Add a factor to the current dim, and go to the next dim when no size is left."""
        self.dims[self.at].append(factor)
        self.left //= size
        if self.left == 1:
            self.advance()

    def term(self) -> Term:
        """The factors of all dims."""
        return tuple(map(tuple, self.dims))


def reshape_rule(src: Shape, dst: Shape) -> Rule:
    """The rule of a reshape from `src` to `dst`, whose dims are decomposed into the factors that both share.

    Factors that the two do not share may not be sharded. A dim of size one pairs with one of size one.

    >>> print(reshape_rule((8, 6, 10), (48, 2, 5)))
    _0 _1 (_2 _3) -> (_0 _1) _2 _3
    >>> print(reshape_rule((6, 4), (4, 6)))
    (_0 [rest0]) [] -> (_0 [rest1]) []
    """
    if prod(src) == 0:
        return _of_no_elements(src, dst)
    a, b = _Side(src), _Side(dst)
    sizes: dict[str, int] = {}
    while not a.done and not b.done:
        shared = gcd(a.left, b.left)
        if 1 in (a.left, b.left) and a.left != b.left:
            (a if a.left == 1 else b).advance()
        elif shared == 1 and a.left != 1:
            _skip(a, b, sizes)
        else:
            factor = f"_{len(sizes)}"
            sizes[factor] = shared
            a.take(factor, shared)
            b.take(factor, shared)
    unshared = frozenset(name for name in sizes if name.startswith("rest"))
    return Rule((a.term(),), (b.term(),), unshared, sizes=tuple(sizes.items()))


def _skip(a: _Side, b: _Side, sizes: dict[str, int]) -> None:
    """Skip dims, which share no factor, up to where both sides have equally many elements again."""
    passed = [1, 1]
    while passed[0] != passed[1] or passed[0] == 1:
        i = 0 if passed[0] <= passed[1] else 1
        side = (a, b)[i]
        passed[i] *= side.left
        if side.dims[side.at]:
            rest = f"rest{sum(name.startswith('rest') for name in sizes)}"
            sizes[rest] = side.left
            side.dims[side.at].append(rest)
        side.advance()


def _of_no_elements(src: Shape, dst: Shape) -> Rule:
    """The rule of a reshape of no elements: leading dims that agree are shared; the others may not be sharded."""
    agree = 0
    while agree < min(len(src), len(dst)) and src[agree] == dst[agree]:
        agree += 1
    lead = tuple((f"_{i}",) for i in range(agree))
    return Rule((lead + ((),) * (len(src) - agree),), (lead + ((),) * (len(dst) - agree),))
