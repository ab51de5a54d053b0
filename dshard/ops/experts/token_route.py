"""The ragged exchange of tokens and experts along mesh axes, as programs of one rank.

A token goes once to each other rank that has one of its experts, with its weights beside it; that rank returns one row,
the weighted sum. The route depends on the indices alone: it is made once, with the one question to the host, and serves
both directions of the forward and of the backward pass. Several exchanges in a row, each along other axes, are levels:
the first goes to hosts, say, and what arrives there goes on to ranks.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, Request, Transfer, flat_exchange, has_only_shape, numbers_of
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.experts.local_experts import index_error
from dshard.routing import Held, Routing

_WRONG = 2**40
"""What a rank takes from the numbers that it tells for each wrong index."""


Sizes: TypeAlias = tuple[Shape, Shape]
"""Numbers of what is sent to each rank of a group, and of what is received from each."""


class TokenPairs(NamedTuple):
    """Rows [n, d], and pairs of a row and an expert: the row, the expert's number among all, and the weight of each.

    The pairs of a row follow each other.
    """

    rows: Tensor
    row: Tensor
    expert: Tensor
    weight: Tensor


class TokenRoute(NamedTuple):
    """Which rows and pairs of this rank go where.

    `token` is the row of each that is sent, by rank, of so many `tokens`, `pair` the pair of each of `n_pairs` that is
    sent. `rows` and `pairs` are the numbers sent to and received from each rank.
    """

    token: Tensor
    pair: Tensor
    tokens: int
    n_pairs: int
    rows: Sizes
    pairs: Sizes


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The exchange of tokens along mesh `axes`, to parameters laid out as `experts` say.

    Their dim `dim` are the experts, of which there are `total`; `routing` says how tokens are expected to be spread.
    A token goes to the ranks from which a later exchange along the axes `beyond` reaches its experts; rows have
    `arrived` by an exchange before, or are tokens.
    """

    experts: Layout
    axes: tuple[str, ...]
    dim: int
    total: int
    routing: Routing
    beyond: tuple[str, ...] = ()
    arrived: bool = False

    @cached("exchanges", 4096)
    def of_rank(self, at: Coordinate) -> RankExchange:
        """The part of the rank at `at`."""
        return RankExchange(self, at)

    @cached("exchanges", 4096)
    def held(self, at: Coordinate) -> Held:
        """The experts that each rank in the group of the rank at `at` has, or reaches later."""
        mesh = self.experts.mesh
        own = [[self._own(each) for each in mesh.peers(self.beyond, at)] for at in mesh.peers(self.axes, at)]
        return tuple(map(_joined, own))

    def _own(self, at: Coordinate) -> range:
        """The experts of the rank at `at`."""
        return self.experts.dim_range(self.dim, self.total, at)

    def hits(self, at: Coordinate, k: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each rank of the group the probability that a token needs it, and its share of all pairs."""
        held, k = self.held(at), min(k, self.total)
        if not k:
            return (0.0,) * len(held), (0.0,) * len(held)
        rows, shares = self.routing.row_shares(self._every(), k), self.routing.shares(self.total, k)
        return tuple([sum(rows[e.start : e.stop]) for e in held]), tuple([sum(shares[e.start : e.stop]) for e in held])

    @cached("exchanges", 4096)
    def _every(self) -> Held:
        """The experts of each rank in order, or of the ranks that one reaches later: of this group, and of others."""
        mesh = self.experts.mesh
        along = [mesh.axis(name) for name in self.axes]
        firsts = [at for at in map(mesh.coordinate, mesh.ranks) if not any(at[axis] for axis in along)]  # of each group
        held = {(part.start, part.stop): part for at in firsts for part in self.held(at)}
        return tuple([held[ends] for ends in sorted(held)])


class RankExchange:
    """What one rank sends and receives in an exchange of tokens; its programs run on each rank of the group.

    `own` is the number of the rank at `at` in its group, `held` are the experts that each has, or reaches later.
    """

    def __init__(self, exchange: TokenExchange, at: Coordinate) -> None:
        self.exchange, self.at, self.held = exchange, at, exchange.held(at)
        self.own = exchange.experts.mesh.peers(exchange.axes, at).index(at)
        self.counts = self._step((2,) * len(self.held), (2,) * len(self.held))

    def dispatch(self, given: TokenPairs, drops: bool = False) -> Program[tuple[TokenRoute, TokenPairs]]:
        """Make the route of rows and pairs, and send them along it; what arrived is in the order of the ranks.

        If it `drops` pairs, these have the number behind all experts, and go nowhere.

        Raises:
            IndexError: on each rank of the group, where one of them has an index that is none of an expert.
        """
        if has_only_shape(given.rows):
            (yield Request(self.counts, given.row.new_empty(2 * len(self.held))))()
            route, codes = self._expected(given)
        else:
            route, codes = yield from self._route(given, drops)
        pieces = given.rows.index_select(0, route.token), codes, given.weight.index_select(0, route.pair)
        rows, codes, weight = yield from self._swap(pieces, (route.rows, route.pairs, route.pairs))
        return route, TokenPairs(rows, (codes & 1).cumsum(0) - 1, codes >> 1, weight)

    def from_others(self, route: TokenRoute) -> int:
        """The rows that come from other ranks along the route."""
        received = route.rows[1]
        return sum(received) - received[self.own]

    def send(self, route: TokenRoute, x: Tensor) -> Program[Tensor]:
        """Send rows of local tokens [t, d] along the route: a row for each that arrives."""
        (rows,) = yield from self._swap((x.index_select(0, route.token),), (route.rows,))
        return rows

    def combine(self, route: TokenRoute, rows: Tensor) -> Program[Tensor]:
        """Return a row for each that arrived, and add those that come back to their tokens: [tokens, d]."""
        (back,) = yield from self._swap((rows,), (route.rows[::-1],))
        return _added(back, route)

    def combine_gradients(self, route: TokenRoute, rows: Tensor, weights: Tensor) -> Program[tuple[Tensor, Tensor]]:
        """Return the gradients of rows and weights that arrived: those of the tokens, and of the weights of pairs."""
        rows, weights = yield from self._swap((rows, weights), (route.rows[::-1], route.pairs[::-1]))
        return _added(rows, route), weights.new_zeros(route.n_pairs).index_copy_(0, route.pair, weights)

    def _route(self, given: TokenPairs, drops: bool) -> Program[tuple[TokenRoute, Tensor]]:
        """The route of these pairs, and the code of each that is sent.

        A code is twice the number of the expert, and one more for the first pair of a row.
        """
        rows, n, total = len(given.rows), len(self.held), self.exchange.total
        owner = _owners(self.held, total, drops, given.row.device)[given.expert.clamp(-1, total + drops)]
        pairs = owner.new_zeros((n + 2) * rows).index_add_(0, owner * rows + given.row, torch.ones_like(owner))
        pairs = pairs.view(n + 2, rows)  # of each rank and row
        counts = torch.stack([pairs.count_nonzero(1), pairs.sum(1)], 1)
        told = torch.sub(counts[:n], counts[n + 1 :], alpha=_WRONG).view(-1)
        theirs = (yield Request(self.counts, told))()
        own, others = numbers_of(torch.stack([told, theirs]))
        if min(others) < 0:
            yield from self._refuse(given.expert[owner > n])
        sizes, of_pairs = ((tuple(own[i::2]), tuple(others[i::2])) for i in (0, 1))
        token = torch.nonzero_static(pairs[:n], size=sum(sizes[0]))[:, 1]
        owner, pair = owner.sort(stable=True)
        owner, pair = owner[: sum(of_pairs[0])], pair[: sum(of_pairs[0])]
        at = owner * rows + given.row.index_select(0, pair)
        codes = given.expert.index_select(0, pair) * 2
        codes[:1] += 1
        codes[1:] += at[1:] != at[:-1]
        return TokenRoute(token, pair, rows, len(given.row), sizes, of_pairs), codes.to(torch.int32)

    def _refuse(self, wrong: Tensor) -> Program[None]:
        """Raise the error for the first index of the group that is wrong, on each of its ranks."""
        first = wrong[:1].long() if len(wrong) else wrong.new_zeros(1, dtype=torch.long)
        told = torch.cat([torch.full_like(first, len(wrong)), first]).repeat(len(self.held))
        found = numbers_of((yield Request(self.counts, told))())
        raise index_error(next(i for n, i in zip(found[::2], found[1::2], strict=True) if n), self.exchange.total)

    def _expected(self, given: TokenPairs) -> tuple[TokenRoute, Tensor]:
        """The route that is expected of pairs without data, and their codes."""
        n, n_pairs = len(given.rows), len(given.row)
        hits, shares = self.exchange.hits(self.at, -(-n_pairs // max(1, n)))
        tokens, of_all = float(n), float(n_pairs)
        if self.exchange.arrived:  # what has come needs one of these ranks
            tokens /= (1 - prod([1 - hit for hit in hits])) or 1.0
            of_all /= sum(shares) or 1.0
        own, ranks = self.own, len(hits)
        rows, pairs = (tuple([round(each * n) for each in of]) for of, n in ((hits, tokens), (shares, of_all)))
        token, pair = given.row.new_empty(sum(rows)), given.row.new_empty(sum(pairs))
        sizes, of_pairs = (rows, (rows[own],) * ranks), (pairs, (pairs[own],) * ranks)
        return TokenRoute(token, pair, n, n_pairs, sizes, of_pairs), pair.to(torch.int32)

    def _swap(self, tensors: Sequence[Tensor], sizes: Sequence[Sizes]) -> Program[list[Tensor]]:
        """Send so many rows of several tensors to each rank, in one message, and receive so many from each."""
        if len(tensors) == 1:
            (x,), ((send, recv),) = tensors, sizes
            width = x.shape[1]
            step = self._step(tuple(map(width.__mul__, send)), tuple(map(width.__mul__, recv)))
            return [(yield Request(step, x.reshape(-1)))().view(sum(recv), width)]
        there, back, parts = list[Shape](), list[Shape](), list[Sequence[Tensor]]()
        for x, ways in zip(tensors, sizes, strict=True):
            width = prod(x.shape[1:]) * x.itemsize
            send, recv = (tuple(map(width.__mul__, each)) for each in ways)
            parts.append(x.contiguous().view(-1).view(torch.uint8).split_with_sizes(send))
            there.append(send)
            back.append(recv)
        step = self._step(tuple(map(sum, zip(*there, strict=True))), tuple(map(sum, zip(*back, strict=True))))
        arrived = (yield Request(step, torch.cat([*chain.from_iterable(zip(*parts, strict=True))])))()
        pieces, k = arrived.split_with_sizes([*chain.from_iterable(zip(*back, strict=True))]), len(tensors)
        return [torch.cat(pieces[i::k]).view(x.dtype).view(-1, *x.shape[1:]) for i, x in enumerate(tensors)]

    def _step(self, send: Shape, recv: Shape) -> Transfer:
        return flat_exchange(self.exchange.experts.mesh, self.exchange.axes, self.at, send, recv)


def _added(rows: Tensor, route: TokenRoute) -> Tensor:
    """The sum for each token of the rows that came back."""
    return rows.new_zeros(route.tokens, rows.shape[1]).index_add_(0, route.token, rows)


@cached("exchanges", 1024)
def _owners(held: Held, total: int, drops: bool, device: torch.device) -> Tensor:
    """The rank that has each expert, as its number in the group; behind them the number of none, and of wrong indices.

    The number of experts is that of dropped pairs, or wrong; the last entry is for what is wrong in any case.
    """
    owners = torch.full((total + 2,), len(held))
    for i, each in enumerate(held):
        owners[each.start : each.stop] = i
    owners[total + drops :] = len(held) + 1
    return owners.to(device)


def _joined(parts: Sequence[range]) -> range:
    """Ranges one after the other as one."""
    some = [part for part in parts if part]
    return range(min(part.start for part in some), max(part.stop for part in some)) if some else range(0)
