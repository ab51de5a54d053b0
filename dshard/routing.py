"""How a layer of experts spreads tokens: expected pairs and rows by expert and by rank.

A token chooses `choices` of `experts` experts, none twice; token and chosen expert are a pair. A rank that has at least
one of a token's experts needs its row once. Shares, rows and pairs are expected ones: no tensor is looked at.

The model: a `Routing` says the share of pairs of each expert, and of all distributions of a token's choices with these
shares it is the one of greatest entropy. Without preferences every set of experts is as likely as another
(hypergeometric numbers); else a set is chosen in proportion to the product of its experts' odds, the conditional
Bernoulli model of Chen, Dempster and Liu, "Weighted finite population sampling to maximize entropy", Biometrika 81
(1994), 457-469. Tokens are alike on all ranks; a router that limits a token to some hosts' experts sends less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

from dshard.caches import cached
from dshard.errors import ShapeError
from dshard.validate import as_int, as_number, as_tuple

Held = tuple[range, ...]
"""The experts that each rank, or each host, has: consecutive ranges from expert 0 to the last."""

_TOLERANCE = 1e-11
_ROUNDS = 200
_CERTAIN = 1 - 1e-12
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Routing:
    """The share of tokens that each expert is expected to get, by which layers of experts are priced.

    Made by `Routing.uniform()`, `Routing.zipf(exponent)` or `Routing.of(counts)`.

    >>> Routing.uniform().shares(4, 2)
    (0.25, 0.25, 0.25, 0.25)
    >>> [round(share, 3) for share in Routing.of([3, 1, 2, 2]).shares(4, 2)]
    [0.375, 0.125, 0.25, 0.25]
    """

    exponent: float = 0.0
    counts: tuple[float, ...] | None = None

    @classmethod
    def uniform(cls) -> Routing:
        """Every expert gets as many tokens as another."""
        return cls()

    @classmethod
    def zipf(cls, exponent: float) -> Routing:
        """The expert that is the n-th busiest gets tokens in proportion to 1 / n**exponent, but each token once.

        Popularity has nothing to do with an expert's number: busy experts are spread over all numbers, in steps of the
        golden ratio. `exponent` 0 is `uniform`; trained routers without balance are between 0.5 and 1.
        """
        return cls(as_number(exponent, "Routing.zipf", zero=True))

    @classmethod
    def of(cls, counts: Iterable[float]) -> Routing:
        """Each expert gets tokens in proportion to `counts`, such as those of a step; a tensor's `.tolist()` will do.

        No expert gets a token twice: shares above 1 / choices are cut to that, and the others get what is left.
        """
        numbers = as_tuple(counts, "Routing.of", "give the number of tokens of each expert, such as [12, 9, 3, 8]")
        return cls(counts=tuple([as_number(number, "Routing.of", zero=True) for number in numbers]))

    def __str__(self) -> str:
        if self.counts is not None:
            return f"counts of {len(self.counts)} experts"
        return f"zipf({self.exponent:g})" if self.exponent else "uniform"

    def shares(self, experts: int, choices: int) -> tuple[float, ...]:
        """The share of all pairs at each expert; they sum to 1. A `ShapeError` if the counts are of other experts."""
        return tuple([chance / max(1, choices) for chance in _chances(self, experts, choices)])

    @cached("routings", 256)
    def row_shares(self, held: Held, choices: int) -> tuple[float, ...]:
        """For each expert the rows that its rank needs for it, for each token: a row for several experts is shared.

        Those of a rank's experts sum to the probability that a token needs the rank.
        """
        return _shared(_draws(self, held[-1].stop, choices), [len(each) for each in held], choices)

    @cached("routings", 256)
    def remote_shares(self, held: Held, choices: int) -> tuple[tuple[float, ...], ...]:
        """For each rank and each expert elsewhere, 1 / (experts elsewhere) of each token of the rank that chooses it.

        Those of a rank sum to the probability that a token of it needs another one. Takes seconds for 512 ranks.
        """
        draws, shares = _draws(self, held[-1].stop, choices), list[tuple[float, ...]]()
        for own in held:
            others = draws[: own.start] + draws[own.stop :]
            remote = _shared(others + draws[own.start : own.stop], [len(others), len(own)], choices)
            shares.append((*remote[: own.start], *[0.0] * len(own), *remote[own.start : len(others)]))
        return tuple(shares)

    def hits(self, held: Held, choices: int) -> tuple[float, ...]:
        """The probability that a token needs each rank: that one of its experts is there.

        >>> pairs = range(0, 2), range(2, 4), range(4, 6), range(6, 8)
        >>> [round(hit, 4) for hit in Routing.uniform().hits(pairs, 2)]  # 1 - C(6, 2) / C(8, 2)
        [0.4643, 0.4643, 0.4643, 0.4643]
        """
        shares = self.row_shares(held, choices)
        return tuple([sum([shares[expert] for expert in each]) for each in held])


# -- the chances of experts


@cached("routings", 256)
def _chances(routing: Routing, experts: int, choices: int) -> tuple[float, ...]:
    """The probability that a token chooses each expert: in proportion to its popularity, but at most 1."""
    as_int(choices, "choices of a token", least=0)
    popularity = _popularity(routing, experts)
    able = sum([each > 0 for each in popularity])
    if choices > able:
        raise ShapeError(
            f"{routing}: a token chooses {choices} experts, and {able} of {experts} get tokens: "
            "choose fewer, or give counts of more experts"
        )
    certain: set[int] = set()
    while True:
        total = sum([each for expert, each in enumerate(popularity) if expert not in certain])
        scale = (choices - len(certain)) / total if total else 0.0
        more = {expert for expert, each in enumerate(popularity) if each * scale > _CERTAIN and expert not in certain}
        if not more:
            break
        certain |= more
    return tuple([1.0 if expert in certain else each * scale for expert, each in enumerate(popularity)])


def _popularity(routing: Routing, experts: int) -> tuple[float, ...]:
    if routing.counts is None:
        step = next(n for n in range(max(1, round(experts * _GOLDEN)), experts + 2) if gcd(n, experts) == 1)
        return tuple([(1 + expert * step % experts) ** -routing.exponent for expert in range(experts)])
    if len(routing.counts) != experts:
        raise ShapeError(
            f"a Routing of {len(routing.counts)} counts for a layer of {experts} experts: "
            f"give {experts} counts, or Routing.uniform()"
        )
    return routing.counts


# -- the distribution of a token's choices: independent draws with probabilities p, given that `choices` are drawn


@cached("routings", 256)
def _draws(routing: Routing, experts: int, choices: int) -> tuple[float, ...]:
    """The probabilities of independent draws that, given that `choices` experts are drawn, give each its chance.

    The odds are corrected until they do. A step is shorter where few experts compete: then an expert's chance follows
    twice its odds.
    """
    chances = _chances(routing, experts, choices)
    draws, free = list(chances), [expert for expert, chance in enumerate(chances) if 0 < chance < 1]
    spread = sum([chances[expert] * (1 - chances[expert]) for expert in free])
    step = 2 * spread / (1 + 2 * spread)
    for _ in range(_ROUNDS):
        drawn = _given(draws, choices)
        if all(abs(drawn[expert] - chances[expert]) <= _TOLERANCE * chances[expert] for expert in free):
            break
        for expert in free:
            odds = _odds(draws[expert]) * (_odds(chances[expert]) / _odds(drawn[expert])) ** step
            draws[expert] = odds / (1 + odds)
    return tuple(draws)


def _odds(chance: float) -> float:
    return chance / (1 - chance)


def _given(draws: Sequence[float], choices: int) -> list[float]:
    """The probability of each draw, given that there are `choices`."""
    sides = _sides([[1 - draw, draw] for draw in draws], choices)
    drawn = [draw * _sum_at(*each, choices - 1) for draw, each in zip(draws, sides, strict=True)]
    total = sum(drawn) / max(1, choices)
    return [each / total for each in drawn] if choices else drawn


def _shared(draws: tuple[float, ...], sizes: Sequence[int], choices: int) -> tuple[float, ...]:
    """For each draw the mean of 1 / (draws of its group), 0 where it is not drawn; groups have these sizes."""
    ends = [*accumulate(sizes)]
    groups = [draws[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    total = _drawn(draws, choices)[choices]
    shares = list[float]()
    sides = _sides([_drawn(group, choices) for group in groups], choices)
    for group, (before, after) in zip(groups, sides, strict=True):
        # beside a draw and n others of its group are choices - 1 - n elsewhere
        weights = [chance / (choices - i) for i, chance in enumerate(_added(before, after, choices)[:choices])]
        for draw, beside in zip(group, _sides([[1 - d, d] for d in group], choices), strict=True):
            shares.append(draw * _sum_at(weights, _added(*beside, choices), choices - 1) / total)
    return tuple(shares)


# -- distributions of numbers of draws, up to `most` of them


def _drawn(draws: Iterable[float], most: int) -> list[float]:
    """The probabilities of 0, 1, 2, ... of these draws."""
    number = [1.0]
    for draw in draws:
        number = _added(number, [1 - draw, draw], most)
    return number


def _added(a: list[float], b: list[float], most: int) -> list[float]:
    """The distribution of the sum of two numbers."""
    total = [0.0] * min(len(a) + len(b) - 1, most + 1)
    for j, right in enumerate(b):
        for i, left in enumerate(a[: len(total) - j]):
            total[i + j] += left * right
    return total


def _sum_at(a: list[float], b: list[float], total: int) -> float:
    """The probability that two numbers sum to `total`."""
    return sum([left * b[total - i] for i, left in enumerate(a) if 0 <= total - i < len(b)])


def _sides(numbers: list[list[float]], most: int) -> list[tuple[list[float], list[float]]]:
    """For each number the sum of those before it, and of those after: nothing is divided, so nothing cancels."""
    if not numbers:
        return []
    before = accumulate(numbers[:-1], lambda a, b: _added(a, b, most), initial=[1.0])
    after = [*accumulate(reversed(numbers[1:]), lambda a, b: _added(a, b, most), initial=[1.0])]
    return [*zip(before, reversed(after), strict=True)]
