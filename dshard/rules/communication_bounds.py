"""Lower bounds on the communication of a distributed matmul, of attention with sharded sequences, and of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import comb, prod

from dshard.layout import Shape
from dshard.placements import Shard
from dshard.routing import Held, Routing
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


# -- what ranks receive for a layer of experts, whatever moves: tokens, experts, or some of each

MOST_RANKS = 64
"""The most ranks for which a bound is computed: its time grows with their square."""


def experts_lower_bound(
    routing: Routing, held: Held, choices: int, tokens: Sequence[float], row: float, weights: float
) -> float:
    """Elements that all ranks together receive, at least, in one pass over a layer of experts with expected loads.

    `held` are the experts of each rank, `tokens` the number of its tokens; `row` is the elements of a token's row, and
    of its result, `weights` those of an expert. A pass forward needs tokens and weights, and returns results; a pass
    backward needs gradients of results, and returns those of tokens and of weights: the bound holds for each of both.
    The proof is that of `pass_lower_bound`. Loads of a step vary about the expected ones: with so few tokens that some
    experts get none, single steps may receive less.

    >>> pairs = range(0, 2), range(2, 4), range(4, 6), range(6, 8)
    >>> round(experts_lower_bound(Routing.uniform(), pairs, 2, [256] * 4, 64, 1e9))  # 2 rows x 1.393
    182565
    """
    shares, total = routing.row_shares(held, choices), sum(tokens)
    at_expert = [shares[expert] * (total - own) for each, own in zip(held, tokens, strict=True) for expert in each]
    remote = routing.remote_shares(held, choices)
    at_token = [own * share for of_rank, own in zip(remote, tokens, strict=True) for share in of_rank]
    return pass_lower_bound(at_expert, at_token, row, weights)


def experts_bytes_bound(rule: Rule, operands: Sequence[Operand]) -> float | None:
    """Bytes that some rank must receive in a layer of experts, forward, whose tokens and experts are stored once.

    None for another operator, for tokens or experts that are not split over all ranks, and for many ranks.
    """
    if rule.chosen is None:
        return None
    mesh, token = operands[0].layout.mesh, operands[0]
    of_parts = [
        (o, term.index((rule.chosen.parts,)))
        for o, term in zip(operands, rule.inputs, strict=True)
        if (rule.chosen.parts,) in term
    ]
    first, dim = of_parts[0]
    axes = {axis for axis, n in enumerate(mesh.shape) if n > 1}
    are_split = all(axes == {*o.layout.axes_of(at)} for o, at in of_parts)
    placements = [token.layout.placements[axis] for axis in axes]
    rows = all(isinstance(p, Shard) and p.dim < len(token.shape) - 1 for p in placements)
    if not (axes and are_split and rows) or mesh.size > MOST_RANKS:
        return None
    places = sorted(map(mesh.coordinate, mesh.ranks), key=lambda at: [at[axis] for axis in first.layout.axes_of(dim)])
    held = tuple([first.layout.dim_range(dim, first.shape[dim], at) for at in places])
    tokens = [prod(token.layout.local_shape(token.shape, at)[:-1]) for at in places]
    total, choices = (
        first.shape[dim],
        next(o.shape[-1] for o, term in zip(operands, rule.inputs, strict=True) if (rule.chosen.each,) in term),
    )
    weights = sum([prod(o.shape) for o, _ in of_parts]) / max(1, total)
    choices, row = min(choices, total), token.shape[-1]
    bound = experts_lower_bound(rule.chosen.routing, held, choices, tokens, row, weights) / mesh.size
    if rule.chosen.routing == Routing.uniform() and max(map(len, held)) <= -(-total // mesh.size):
        bound = max(bound, busiest_lower_bound(total, mesh.size, choices, min(tokens), row, weights))
    return bound * token.itemsize


def pass_lower_bound(at_expert: Sequence[float], at_token: Sequence[float], row: float, weights: float) -> float:
    """The bound for loads of experts, `at_expert`, and of experts at the ranks of tokens that choose them, `at_token`.

    A schedule computes each pair of a token and a chosen expert on some rank s, or each inner feature of it. If s is
    not the token's rank, the token's row comes to s (`row` elements), once for all its pairs there, and what s adds to
    the result leaves s, once if s adds it up (`row` more: all sends together are all receipts). If s is not the
    expert's rank, its `weights` come to s, or their gradient leaves it, once for all tokens there. So with x(t, s) = 1
    where token t visits s, y(e, s) = 1 where expert e does, and z(t, e, s) the part of the pair that s computes,

        minimize  sum of 2 row x(t, s) + weights y(e, s)      over all s but the token's, or the expert's, own
        so that   sum over s of z(t, e, s) = 1,  z(t, e, s) <= x(t, s),  z(t, e, s) <= y(e, s)

    (at its own rank a token or an expert costs nothing) bounds from below what is received. By duality of linear
    programs so does the sum of any f(t, e) = min over s of a(t, e, s) + b(t, e, s) of the pairs on two ranks, if
    a(t, e, s) sum to at most 2 row over the experts of t, and b(t, e, s) to at most `weights` over the tokens of e, at
    each s; at the token's own rank a is 0, and at the expert's b is. Two choices of them:

    - a = f at the expert's rank, b = f at all others. Of k experts that t has on one other rank each takes f = c(e) / k
      with c(e) <= 2 row, and sum over all remote tokens of c(e) / k <= weights: in all min(2 row m, weights) for each
      expert, where m = `at_expert` sums 1 / k. These m sum to the rows sent: where no expert is worth less than its
      tokens' rows, moving tokens meets this bound.
    - b = f at the token's rank, a = f at all others. Of a token's k remote experts each takes f = c / k with
      c(e, s) <= 2 row, and sum over the tokens of rank s of c / k <= weights: in all min(2 row l, weights) for each
      expert and each other rank, where l = `at_token` sums 1 / k. Where tokens are many, moving all
      experts to all ranks that need them meets this bound.

    Between them the bound is up to the ranks that a token needs below either: all ranks together receive less yet if
    one rank gets a copy of every expert, and computes all pairs.
    """
    by_expert = sum([min(2 * row * load, weights) for load in at_expert])
    by_token = sum([min(2 * row * load, weights) for load in at_token])
    return max(by_expert, by_token)


def busiest_lower_bound(experts: int, ranks: int, choices: int, tokens: float, row: float, weights: float) -> float:
    """Elements that some rank receives in a pass forward, at least, if tokens choose every set of experts as often.

    Each rank has `tokens` tokens and its share of the experts, and copies of others in whole or in part; `row` and
    `weights` are as of `experts_lower_bound`. In a pass backward, which sends what came, some rank sends as much.

    Where all ranks receive at most B: a rank with c copies, of h experts then, and v tokens of other ranks receives
    c weights + v row of them, and the ranks together, as each token's result leaves the v, c weights + 2 v row on the
    mean. Of the pairs of its own tokens it can compute the part h / experts, and of others' those of v tokens: at most
    of the v that have most of their experts among the h, of which there are hypergeometric numbers. A rank is a point:
    what it receives and sends, and the pairs that it computes. The mean of all lies in the convex hull of the possible
    points, at B or below it, and must have all pairs of a rank's tokens. The bound is the least B at which it may; that
    c is rounded down where B bounds a rank, and points of whole experts span the others, for copies in part.

    >>> held = tuple([range(i, i + 4) for i in range(0, 256, 4)])
    >>> moved = 2 * 8192 * 63 / 64 * sum(Routing.uniform().hits(held, 8)) * 7168  # rows of tokens of DeepSeek-V3
    >>> round(moved / busiest_lower_bound(256, 64, 8, 8192, 7168, 3 * 7168 * 2048), 2)
    1.13
    """
    least, most = 0.0, float(experts * weights)
    for _ in range(40):
        middle = (least + most) / 2
        enough = _pairs_within(middle, experts, ranks, choices, tokens, row, weights) >= choices * tokens * (1 - 1e-12)
        least, most = (least, middle) if enough else (middle, most)
    return least


def _pairs_within(
    budget: float, experts: int, ranks: int, choices: int, tokens: float, row: float, weights: float
) -> float:
    """The most pairs that a rank computes on the mean if none receives more than `budget`."""
    home, sets, points = -(-experts // ranks), comb(experts, choices), list[tuple[float, float]]()
    for held in range(home, experts + 1):
        copies, visits, pairs = held - home, 0.0, tokens * choices * held / experts
        left = (budget - max(0, copies - 1) * weights) / row
        if left < 0:
            break
        points.append((copies * weights, pairs))
        for of_token in range(min(choices, held), 0, -1):  # first tokens with most of their experts here
            alike = comb(held, of_token) * comb(experts - held, choices - of_token) / sets * (ranks - 1) * tokens
            taken = min(alike, left - visits)
            visits, pairs = visits + taken, pairs + taken * of_token
            points.append((copies * weights + 2 * row * visits, pairs))
    return _hull_at(budget, points)


def _hull_at(x: float, points: list[tuple[float, float]]) -> float:
    """The height of the upper hull of the points at x or left of it, whichever is higher."""
    hull = list[tuple[float, float]]()
    for point in sorted(points):
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    highest = max([height for at, height in hull if at <= x])
    for (a, low), (b, high) in pairwise(hull):
        if a <= x < b:
            highest = max(highest, low + (high - low) * (x - a) / (b - a))
    return highest


def _is_below(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether b is not above the line from a to c, which are left and right of it."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])
