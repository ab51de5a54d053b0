"""Lower bounds on the communication of a distributed matmul, and of attention with sharded sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from dshard.layout import Shape
from dshard.placements import Shard
from dshard.rules.expand import Operand
from dshard.rules.rule import Rule


def matmul_lower_bound(m: int, k: int, n: int, ranks: int) -> float:
    """Elements that some rank must receive to multiply m x k by k x n on `ranks` ranks, each tensor stored once.

    The memory-independent bound of Al Daas, Ballard, Grigori, Kumar and Rouse (2022), whose constants are tight: what a
    rank must touch less what it holds. Which of three cases applies depends on how many ranks there are for the shape.

    >>> round(matmul_lower_bound(4096, 4096, 4096, 8) / 2**20, 6)
    6.0
    """
    small, middle, large = sorted((m, k, n))
    own = (m * k + k * n + m * n) / ranks
    if ranks * middle <= large:
        touched = middle * small + (large * small + large * middle) / ranks
    elif ranks * small**2 <= large * middle:
        touched = 2 * (large * middle * small**2 / ranks) ** 0.5 + large * middle / ranks
    else:
        touched = 3 * (m * n * k / ranks) ** (2 / 3)
    return max(0.0, touched - own)


LARGEST = 128
"""The most ranks along a sequence for which a bound with a causal mask is computed."""


def attention_lower_bound(rows: float, keys: float, groups: int, ranks: int, causal: bool) -> float:
    """Elements that the ranks receive together for the heads that share a key head, where each rank holds 1/`ranks`.

    `rows` are the elements of a head's queries and result, `keys` those of the keys and values that `groups` heads
    share; a rank holds a range of both. A pair of ranges counts if two ranks hold them: it is computed by a rank that
    lacks one of them. A rank that receives the queries of a ranks, and sends what it adds to their results, and the
    keys of b others computes at most a + b + a b such pairs of each head, less those c = max(0, a + b + 1 - ranks) that
    one rank holds. What is received is at least the pairs there are over the most of them for an element: the argument
    of Irony, Toledo and Tiskin (2004), by which Ballard et al. bound matmuls, with the layout of the operands given.
    Pairs are linear in each range of each rank, so parts of ranges do no better; a rank that holds none does worse.

    >>> attention_lower_bound(8.0, 8.0, 1, 8, False)  # one head of 8 brought to one rank, which holds an eighth
    14.0
    """
    if ranks == 1:
        return 0.0
    pairs = groups * ranks * (ranks - 1) / (2 if causal else 1)
    most = max(
        groups * count / (groups * a * rows / ranks + b * keys / ranks)
        for a, b, count in (_causal_pairs(ranks) if causal else _pairs(ranks))
        if groups * a * rows + b * keys
    )
    return pairs / most


def attention_bytes_bound(
    rule: Rule, operands: Sequence[Operand], outputs: Sequence[tuple[Shape, int]]
) -> float | None:
    """Bytes that some rank must receive in attention whose operands are stored once, all sharded in the same way.

    None for another operator, and for other layouts.
    """
    if rule.apart != ("d", "e"):
        return None
    q, k, v = operands[:3]
    mesh, first = q.layout.mesh, len(q.shape) - 2
    split = 1
    for axis, n in enumerate(mesh.shape):
        placements = {operand.layout.placements[axis] for operand in (q, k, v)}
        if n == 1:
            continue
        if len(placements) > 1 or not isinstance(placement := placements.pop(), Shard) or placement.dim > first:
            return None
        split *= n if placement.dim == first else 1
    causal = rule.triangle is not None
    if (causal and split > LARGEST) or not all(map(prod, (q.shape, k.shape, v.shape))):
        return None
    (result, itemsize), *_ = outputs
    heads, key_heads = prod(q.shape[:-2]), prod(k.shape[:-2])
    rows, keys = (prod(q.shape) + prod(result)) / heads, (prod(k.shape) + prod(v.shape)) / key_heads
    bound = attention_lower_bound(rows, keys, max(1, heads // key_heads), split, causal)
    return bound * key_heads / mesh.size * itemsize


def _pairs(ranks: int) -> Iterator[tuple[int, int, int]]:
    """The pairs of a and b; for each b those a at which the quotient may be largest, which is monotone in between."""
    for b in range(ranks):
        for a in {0, ranks - 1 - b, ranks - 1}:
            yield a, b, a + b + a * b - max(0, a + b + 1 - ranks)


def _causal_pairs(ranks: int) -> Iterator[tuple[int, int, int]]:
    """The most pairs of a query range and a key range, if queries see the keys before: the last see the first."""
    for b in range(ranks):
        count = 0
        for a in range(ranks):
            count += min(ranks - 1 - a, b + 1)
            yield a, b, count
