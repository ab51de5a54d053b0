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
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, Request, Session, flat_exchange, has_only_shape, numbers_of, request_alone
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.experts.local_experts import index_error
from dshard.routing import Held, Routing


class TokenPairs(NamedTuple):
    """Rows [n, d], and pairs of a row and an expert: the row, the expert's number among all, and the weight of each."""

    rows: Tensor
    row: Tensor
    expert: Tensor
    weight: Tensor


class TokenRoute(NamedTuple):
    """Which rows and pairs of this rank go where.

    `token` is the row of each that is sent, by rank, `slot` the pair of each pair that is sent. `rows` and `pairs` are
    the numbers sent to and received from each rank.
    """

    token: Tensor
    slot: Tensor
    rows: tuple[Shape, Shape]
    pairs: tuple[Shape, Shape]


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The exchange of so many `tokens` along mesh `axes`, to parameters laid out as `experts` say.

    Their dim `dim` are the experts, of which there are `total`; `routing` says how tokens are expected to be spread.
    A token goes to the ranks from which a later exchange along the axes `beyond` reaches its experts; rows have
    `arrived` by an exchange before, or are tokens.
    """

    experts: Layout
    axes: tuple[str, ...]
    dim: int
    total: int
    tokens: int
    routing: Routing
    beyond: tuple[str, ...] = ()
    arrived: bool = False

    @property
    def code(self) -> torch.dtype:
        """The dtype of the code of a pair: where its row and its expert are on the rank that has the expert."""
        return torch.int32 if self.tokens * max(1, self.total) < 2**31 else torch.int64

    @cached("exchanges", 4096)
    def held(self, at: Coordinate) -> Held:
        """The experts that each rank in the group of the rank at `at` has, or reaches later."""
        mesh = self.experts.mesh
        return tuple(
            [_joined([self.own(each) for each in mesh.peers(self.beyond, at)]) for at in mesh.peers(self.axes, at)]
        )

    def own(self, at: Coordinate) -> range:
        """The experts of the rank at `at`."""
        return self.experts.dim_range(self.dim, self.total, at)

    def dispatch(
        self, at: Coordinate, space: Session, given: TokenPairs, drops: bool = False
    ) -> Program[tuple[TokenRoute, TokenPairs]]:
        """Make the route of rows and pairs, and send them along it; what arrived is in the order of the ranks.

        If it `drops` pairs, these have the number behind all experts, and go nowhere.

        Raises:
            IndexError: on each rank of the group, where one of them has an index that is none of an expert.
        """
        held = self.held(at)
        if has_only_shape(given.rows):
            rows, pairs = self._expected(at, len(given.rows), len(given.row))
            yield from self._told(at, space, given.row.new_empty((len(held), 2)))
            token, slot, codes = (given.row.new_empty(sum(n)) for n in (rows[0], pairs[0], pairs[0]))
        else:
            wanted = _Wanted.of(given, held, self.total, drops)
            rows, pairs = yield from self._counts(at, space, wanted.counts)
            token, slot, codes = wanted.sent(sum(rows[0]), sum(pairs[0]), given, self.total)
        pieces = [given.rows[token], codes.to(self.code), given.weight[slot]]
        arrived, codes, weight = yield from self._swap(at, space, pieces, [rows, pairs, pairs])
        total = max(1, self.total)
        row = torch.div(codes, total, rounding_mode="floor").long() + _starts(rows[1], pairs[1], codes)
        return TokenRoute(token, slot, rows, pairs), TokenPairs(arrived, row, (codes % total).long(), weight)

    def from_others(self, at: Coordinate, route: TokenRoute) -> int:
        """The rows that come from other ranks along the route."""
        return sum(route.rows[1]) - route.rows[1][self.experts.mesh.peers(self.axes, at).index(at)]

    def combine(self, at: Coordinate, space: Session, route: TokenRoute, rows: Tensor, tokens: int) -> Program[Tensor]:
        """Return a row for each that arrived, and add those that come back to their tokens: [tokens, d]."""
        (back,) = yield from self._swap(at, space, [rows], [_back(route.rows)])
        return back.new_zeros(tokens, rows.shape[1]).index_add(0, route.token, back)

    def send(self, at: Coordinate, space: Session, route: TokenRoute, x: Tensor) -> Program[Tensor]:
        """Send rows of local tokens [t, d] along the route: a row for each that arrived in the forward pass."""
        (rows,) = yield from self._swap(at, space, [x[route.token]], [route.rows])
        return rows

    def combine_gradients(
        self,
        at: Coordinate,
        space: Session,
        route: TokenRoute,
        gradients: tuple[Tensor, Tensor],
        sizes: tuple[int, int],
    ) -> Program[tuple[Tensor, Tensor]]:
        """Return the gradients of rows and weights that arrived: those of so many local rows and weights."""
        swapped = [_back(route.rows), _back(route.pairs)]
        rows, weights = yield from self._swap(at, space, gradients, swapped)
        of_x = rows.new_zeros(sizes[0], *rows.shape[1:]).index_add(0, route.token, rows)
        return of_x, weights.new_zeros(sizes[1]).index_copy(0, route.slot, weights)

    def _counts(
        self, at: Coordinate, space: Session, counts: Tensor
    ) -> Program[tuple[tuple[Shape, Shape], tuple[Shape, Shape]]]:
        """The numbers of rows, and of pairs, that this rank sends to each and receives from each."""
        theirs = yield from self._told(at, space, counts)
        numbers = numbers_of(torch.stack([counts.reshape(-1), theirs]))
        (rows, pairs), (their_rows, their_pairs) = ((tuple(each[::2]), tuple(each[1::2])) for each in numbers)
        wrong = [i for n, i in zip((*rows, *their_rows), (*pairs, *their_pairs), strict=True) if n < 0]
        if wrong:
            raise index_error(wrong[0], self.total)
        return (rows, their_rows), (pairs, their_pairs)

    def _told(self, at: Coordinate, space: Session, counts: Tensor) -> Program[Tensor]:
        """Exchange two numbers with each rank."""
        two = (2,) * len(counts)
        step = flat_exchange(self.experts.mesh, self.axes, at, two, two)
        return (yield from request_alone(Request(step, counts.reshape(-1)), space))

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

    def _expected(self, at: Coordinate, tokens: int, pairs: int) -> tuple[tuple[Shape, Shape], tuple[Shape, Shape]]:
        """The numbers of rows and pairs that are expected, where there are no indices."""
        hits, shares = self.hits(at, -(-pairs // max(1, tokens)))
        if self.arrived:  # what has come needs one of these ranks
            reached = 1 - prod([1 - hit for hit in hits])
            hits, shares = (
                tuple([hit / (reached or 1.0) for hit in hits]),
                tuple([n / (sum(shares) or 1.0) for n in shares]),
            )
        own, n = self.experts.mesh.peers(self.axes, at).index(at), len(hits)
        rows, of_pairs = (tuple([round(each * n) for each in of]) for of, n in ((hits, tokens), (shares, pairs)))
        return (rows, (rows[own],) * n), (of_pairs, (of_pairs[own],) * n)

    def _swap(
        self, at: Coordinate, space: Session, tensors: Sequence[Tensor], sizes: Sequence[tuple[Shape, Shape]]
    ) -> Program[list[Tensor]]:
        """Send rows of several tensors to each rank in one message, `sizes` to and from each; receive others."""
        widths = [prod(x.shape[1:]) * x.itemsize for x in tensors]
        parts = [
            x.contiguous().reshape(-1).view(torch.uint8).split([n * width for n in send])
            for x, width, (send, _) in zip(tensors, widths, sizes, strict=True)
        ]
        flat = torch.cat([piece for to_one in zip(*parts, strict=True) for piece in to_one])
        received = [[n * w for n in recv] for w, (_, recv) in zip(widths, sizes, strict=True)]
        send = tuple([sum(map(len, to_one)) for to_one in zip(*parts, strict=True)])
        recv = tuple([sum(of_one) for of_one in zip(*received, strict=True)])
        step = flat_exchange(self.experts.mesh, self.axes, at, send, recv)
        arrived = yield from request_alone(Request(step, flat), space)
        pieces = arrived.split([n for of_one in zip(*received, strict=True) for n in of_one])
        k = len(tensors)
        return [torch.cat(pieces[i::k]).view(x.dtype).view(-1, *x.shape[1:]) for i, x in enumerate(tensors)]


class _Wanted(NamedTuple):
    """Which ranks each row goes to, [rows, ranks], and how many rows and pairs go to each, [ranks, 2].

    `owner` is the rank that has the expert of each pair, or reaches it, `ranks` for none.
    """

    needs: Tensor
    owner: Tensor
    counts: Tensor

    @classmethod
    def of(cls, given: TokenPairs, held: Held, total: int, drops: bool) -> _Wanted:
        ranks, device, expert = len(held), given.row.device, given.expert
        wrong = (expert < 0) | (expert >= total + drops)
        owner = _owners(held, total, device)[torch.where(wrong, total, expert)]
        needs = torch.zeros(len(given.rows), ranks + 1, dtype=torch.bool, device=device)
        needs = needs.index_put_((given.row, owner), torch.ones((), dtype=torch.bool, device=device))[:, :ranks]
        pairs = torch.zeros(ranks + 1, dtype=torch.long, device=device).index_add_(0, owner, torch.ones_like(owner))
        return cls(needs, owner, _counts_or_error(needs.sum(0), pairs[:ranks], expert, wrong))

    def sent(self, rows: int, pairs: int, given: TokenPairs, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """The row of each of so many rows, the slot of each of so many pairs, and the code of each, by rank.

        A code is the number of the row in its message times the number of experts, plus the expert's number.
        """
        by_rank = torch.argsort(self.needs.t().reshape(-1), descending=True, stable=True)[:rows]
        slot = torch.argsort(self.owner, stable=True)[:pairs]
        place = self.needs.cumsum(0) - 1
        code = place[given.row[slot], self.owner[slot]] * max(1, total) + given.expert[slot]
        return by_rank % max(1, len(given.rows)), slot, code


def _counts_or_error(rows: Tensor, pairs: Tensor, expert: Tensor, wrong: Tensor) -> Tensor:
    """The numbers of rows and pairs for each rank; for all -1 and a wrong index, where there is one."""
    counts = torch.stack([rows, pairs], 1)
    if not len(wrong):
        return counts
    at = wrong.to(torch.uint8).argmax(0, keepdim=True)  # an index without dims would be read by the host
    error = torch.stack([torch.full_like(rows, -1), expert[at].expand_as(rows)], 1)
    return torch.where(wrong[at], error, counts)


@cached("exchanges", 1024)
def _owners(held: Held, total: int, device: torch.device) -> Tensor:
    """The rank that has each expert, as its number in the group, behind all for none."""
    owners = torch.full((total + 1,), len(held))
    for i, each in enumerate(held):
        owners[each.start : each.stop] = i
    return owners.to(device)


def _joined(parts: Sequence[range]) -> range:
    """Ranges one after the other as one."""
    some = [part for part in parts if part]
    return range(min(part.start for part in some), max(part.stop for part in some)) if some else range(0)


def _back(sizes: tuple[Shape, Shape]) -> tuple[Shape, Shape]:
    return sizes[1], sizes[0]


def _starts(rows: Shape, pairs: Shape, like: Tensor) -> Tensor:
    """For each pair the first row of the message that it came in."""
    if has_only_shape(like):
        return like
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    firsts_of, counts = torch.tensor(firsts, device=like.device), torch.tensor(pairs, device=like.device)
    return torch.repeat_interleave(firsts_of, counts, output_size=len(like))
