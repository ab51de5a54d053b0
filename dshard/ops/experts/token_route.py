"""The ragged exchange of tokens and experts along mesh axes, as programs of one rank.

A token goes once to each other rank that has one of its experts, with all of its indices and weights beside it; that
rank returns one row, the weighted sum. The route depends on the indices alone: it is made once, with the one question
to the host, and serves both directions of the forward and of the backward pass. Several exchanges in a row, each along
other axes, are levels: the first goes to hosts, say, and what arrives there goes on to ranks.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, Request, Transfer, flat_exchange, has_only_shape, numbers_of
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.experts.local_experts import index_error
from dshard.routing import Held, Routing

CODE = torch.int32
"""The dtype in which the number of an expert is sent."""
_WRONG = 2**40
"""What a rank takes from the numbers that it tells for each wrong index."""


class RoutedRows(NamedTuple):
    """Rows [n, d], the experts of each [n, k], by their number among all, and its weights for them [n, k]."""

    rows: Tensor
    experts: Tensor
    weight: Tensor


class TokenRoute(NamedTuple):
    """Which rows of this rank go where.

    `token` is the row of each that is sent, by rank, among so many `tokens`. `sent` and `received` are the numbers of
    rows sent to and received from each rank, `pairs` that of pairs of a row received and an expert that it came for.
    """

    token: Tensor
    tokens: int
    sent: Shape
    received: Shape
    pairs: int


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

    def dispatch(self, given: RoutedRows, drops: bool = False) -> Program[tuple[TokenRoute, RoutedRows]]:
        """Make the route of rows, and send them along it; what arrived is in the order of the ranks.

        If it `drops` pairs, these have the number behind all experts, and go nowhere.

        Raises:
            IndexError: on each rank of the group, where one of them has an index that is none of an expert.
        """
        rows, index, weight = given
        if has_only_shape(rows):
            (yield Request(self.counts, index.new_empty(2 * len(self.held))))()
            route = self._expected(index)
        else:
            route = yield from self._route(index, drops)
        tensors = rows, weight, index.to(CODE)
        arrived = yield from self.send(route, _in_one(tensors))
        rows, weight, index = _apart(arrived, tensors)
        return route, RoutedRows(rows, index, weight)

    def from_others(self, route: TokenRoute) -> int:
        """The rows that come from other ranks along the route."""
        return sum(route.received) - route.received[self.own]

    def send(self, route: TokenRoute, x: Tensor) -> Program[Tensor]:
        """Send rows of local tokens [t, d] along the route: a row for each that arrives."""
        return self._swap(x.index_select(0, route.token), route.sent, route.received)

    def combine(self, route: TokenRoute, tensors: Sequence[Tensor]) -> Program[list[Tensor]]:
        """Return rows for those that arrived, and add what comes back to their tokens: [tokens, d] of each."""
        back = yield from self._swap(_in_one(tensors), route.received, route.sent)
        if back.dtype == tensors[0].dtype:
            return [x.contiguous() for x in _apart(_added(back, route), tensors)]
        return [_added(x.contiguous(), route) for x in _apart(back, tensors)]

    def _route(self, index: Tensor, drops: bool) -> Program[TokenRoute]:
        """The route of rows with these experts."""
        n, total = len(self.held), self.exchange.total
        owner = _owners(self.held, total, drops, index.device)[index.clamp(-1, total + drops)]
        pairs = owner.new_zeros(n + 2, len(owner)).scatter_(0, owner.t(), 1, reduce="add")  # of each rank and row
        counts = torch.stack([pairs.count_nonzero(1), pairs.sum(1)], 1)
        told = torch.sub(counts[:n], counts[n + 1 :], alpha=_WRONG).view(-1)
        theirs = (yield Request(self.counts, told))()
        own, others = numbers_of(torch.stack([told, theirs]))
        if min(others) < 0:
            yield from self._refuse(index[owner > n])
        token = torch.nonzero_static(pairs[:n], size=sum(own[::2]))[:, 1]
        return TokenRoute(token, len(owner), tuple(own[::2]), tuple(others[::2]), sum(others[1::2]))

    def _refuse(self, wrong: Tensor) -> Program[None]:
        """Raise the error for the first index of the group that is wrong, on each of its ranks."""
        first = wrong[:1].long() if len(wrong) else wrong.new_zeros(1, dtype=torch.long)
        told = torch.cat([torch.full_like(first, len(wrong)), first]).repeat(len(self.held))
        found = numbers_of((yield Request(self.counts, told))())
        raise index_error(next(i for n, i in zip(found[::2], found[1::2], strict=True) if n), self.exchange.total)

    def _expected(self, index: Tensor) -> TokenRoute:
        """The route that is expected of indices without data."""
        n, k = index.shape
        hits, shares = self.exchange.hits(self.at, k)
        tokens = float(n)
        if self.exchange.arrived:  # what has come needs one of these ranks
            tokens /= (1 - prod([1 - hit for hit in hits])) or 1.0
        sent = tuple([round(hit * tokens) for hit in hits])
        received, pairs = (sent[self.own],) * len(hits), round(shares[self.own] * k * tokens) * len(hits)
        return TokenRoute(index.new_empty(sum(sent)), n, sent, received, pairs)

    def _swap(self, rows: Tensor, send: Shape, recv: Shape) -> Program[Tensor]:
        """Send so many rows to each rank, and receive so many from each."""
        width = rows.shape[1]
        step = self._step(tuple(map(width.__mul__, send)), tuple(map(width.__mul__, recv)))
        return (yield Request(step, rows.reshape(-1)))().view(sum(recv), width)

    def _step(self, send: Shape, recv: Shape) -> Transfer:
        return flat_exchange(self.exchange.experts.mesh, self.exchange.axes, self.at, send, recv)


def _in_one(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors [n, m] beside each other: of several dtypes as bytes."""
    if len(tensors) == 1:
        return tensors[0]
    if len({x.dtype for x in tensors}) == 1:
        return torch.cat(list(tensors), 1)
    return torch.cat([x.contiguous().view(torch.uint8) for x in tensors], 1)


def _apart(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The rows of each of several tensors that are packed in one."""
    if len(like) == 1:
        return [packed]
    size = packed.itemsize
    parts = packed.split_with_sizes([x.shape[1] * x.itemsize // size for x in like], 1)
    return [part if part.dtype == x.dtype else _viewed(part, x) for part, x in zip(parts, like, strict=True)]


def _added(rows: Tensor, route: TokenRoute) -> Tensor:
    """The sum for each token of the rows that came back."""
    return rows.new_zeros(route.tokens, rows.shape[1]).index_add_(0, route.token, rows)


def _viewed(part: Tensor, like: Tensor) -> Tensor:
    """Columns of bytes in the dtype of others: a view where they begin at multiples of its size."""
    if not part.numel():
        return like.new_empty((len(part), like.shape[1]))
    if (part.storage_offset() | part.stride(0)) % like.itemsize:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(like.dtype)


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
