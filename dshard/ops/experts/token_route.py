"""The ragged exchange of tokens and experts along mesh axes, as programs of one rank.

A token goes once to each other rank that has one of its experts, with its weights beside it; that rank returns one row,
the weighted sum. The route depends on the indices alone: it is made once, with the one question to the host, and serves
both directions of the forward and of the backward pass.

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
from dshard.rules.expert_loops import expected_rows


class TokenRoute(NamedTuple):
    """Which tokens of this rank go where, and which of the rows that arrive are for which local expert.

    `token` is the token of each row that is sent, by rank, `slot` the pair of each weight. `rows` and `pairs` are the
    numbers sent to and received from each rank. `order` sorts the received pairs by expert; of each then `row` is its
    row, and `ends` are where the pairs of each local expert end.
    """

    token: Tensor
    slot: Tensor
    rows: tuple[Shape, Shape]
    pairs: tuple[Shape, Shape]
    row: Tensor
    order: Tensor
    ends: Tensor


@dataclass(frozen=True, slots=True)
class TokenExchange:
    """The exchange of so many `tokens` along mesh `axes`, to parameters laid out as `experts` say.

    Their dim `dim` are the experts, of which there are `total`.
    """

    experts: Layout
    axes: tuple[str, ...]
    dim: int
    total: int
    tokens: int

    @property
    def code(self) -> torch.dtype:
        """The dtype of the code of a pair: where its row and its expert are on the rank that has the expert."""
        return torch.int32 if self.tokens * max(1, self.total) < 2**31 else torch.int64

    @cached("token exchanges", 4096)
    def held(self, at: Coordinate) -> tuple[range, ...]:
        """The experts of each rank in the group of the rank at `at`."""
        peers = self.experts.mesh.peers(self.axes, at)
        return tuple([self.experts.dim_range(self.dim, self.total, peer) for peer in peers])

    def own(self, at: Coordinate) -> range:
        """The experts of the rank at `at`."""
        return self.experts.dim_range(self.dim, self.total, at)

    def dispatch(
        self, at: Coordinate, space: Session, x: Tensor, index: Tensor, weight: Tensor
    ) -> Program[tuple[TokenRoute, Tensor, Tensor]]:
        """Make the route of local tokens [t, d], indices and weights [t, k], and send them along it.

        Returns the route, the rows that arrived, and of each pair, sorted by expert, its weight.

        Raises:
            IndexError: on each rank of the group, where one of them has an index that is none of an expert.
        """
        held = self.held(at)
        if has_only_shape(index):
            rows, pairs = _expected(index, held, held.index(self.own(at)), self.total)
            token, slot, codes = (index.new_empty(sum(n), dtype=torch.long) for n in (rows[0], pairs[0], pairs[0]))
        else:
            wanted = _Wanted.of(index, held, self.total)
            rows, pairs = yield from self._counts(at, space, wanted.counts)
            token, slot, codes = wanted.sent(sum(rows[0]), sum(pairs[0]), index, held, self.total)
        pieces = [x[token], codes.to(self.code), weight.reshape(-1)[slot]]
        arrived, codes, weights = yield from self._swap(at, space, pieces, [rows, pairs, pairs])
        base = _base(held)
        expert, order = torch.sort(codes % base, stable=True)
        row = torch.div(codes, base, rounding_mode="floor").long() + _starts(rows[1], pairs[1], codes)
        steps = torch.arange(len(self.own(at)), device=index.device, dtype=expert.dtype)
        ends = torch.searchsorted(expert, steps, right=True, out_int32=True)
        return TokenRoute(token, slot, rows, pairs, row[order], order, ends), arrived, weights[order]

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
        like: tuple[Tensor, Tensor],
    ) -> Program[tuple[Tensor, Tensor]]:
        """Return the gradients of rows and sorted weights: those of the local tokens and weights, which are `like`."""
        of_rows, of_weights = gradients
        x, weight = like
        unsorted = torch.empty_like(of_weights).index_copy(0, route.order, of_weights)
        sizes = [_back(route.rows), _back(route.pairs)]
        rows, weights = yield from self._swap(at, space, [of_rows, unsorted], sizes)
        of_x = rows.new_zeros(x.shape).index_add(0, route.token, rows)
        flat = weights.new_zeros(weight.numel()).index_copy(0, route.slot, weights)
        return of_x, flat.view(weight.shape)

    def _counts(
        self, at: Coordinate, space: Session, counts: Tensor
    ) -> Program[tuple[tuple[Shape, Shape], tuple[Shape, Shape]]]:
        """The numbers of rows, and of pairs, that this rank sends to each and receives from each."""
        two = (2,) * len(counts)
        step = flat_exchange(self.experts.mesh, self.axes, at, two, two)
        theirs = yield from request_alone(Request(step, counts.reshape(-1)), space)
        numbers = numbers_of(torch.stack([counts.reshape(-1), theirs]))
        (rows, pairs), (their_rows, their_pairs) = ((tuple(each[::2]), tuple(each[1::2])) for each in numbers)
        wrong = [i for n, i in zip((*rows, *their_rows), (*pairs, *their_pairs), strict=True) if n < 0]
        if wrong:
            raise index_error(wrong[0], self.total)
        return (rows, their_rows), (pairs, their_pairs)

    def _swap(
        self, at: Coordinate, space: Session, tensors: Sequence[Tensor], sizes: Sequence[tuple[Shape, Shape]]
    ) -> Program[list[Tensor]]:
        """Send rows of several tensors to each rank in one message, `sizes` to and from each; receive others."""
        widths = [_width(x) for x in tensors]
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


def _width(x: Tensor) -> int:
    """The bytes of one row."""
    return prod(x.shape[1:]) * x.itemsize


class _Wanted(NamedTuple):
    """Which ranks each token goes to, [tokens, ranks], and how many rows and pairs go to each, [ranks, 2].

    `owner` is the rank that has the expert of each pair, `ranks` for none.
    """

    needs: Tensor
    owner: Tensor
    counts: Tensor

    @classmethod
    def of(cls, index: Tensor, held: tuple[range, ...], total: int) -> _Wanted:
        (tokens, k), ranks, device = index.shape, len(held), index.device
        owners, _ = _owners(held, total, device)
        flat = index.reshape(-1).long()
        wrong = (flat < 0) | (flat >= total)
        owner = owners[torch.where(wrong, total, flat)]
        needs = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=device)
        needs = needs.scatter_(1, owner.view(tokens, k), True)[:, :ranks]
        pairs = torch.zeros(ranks + 1, dtype=torch.long, device=device).index_add_(0, owner, torch.ones_like(owner))
        return cls(needs, owner, _counts_or_error(needs.sum(0), pairs[:ranks], flat, wrong))

    def sent(self, rows: int, pairs: int, index: Tensor, held: tuple[range, ...], total: int) -> tuple[Tensor, ...]:
        """The token of each of so many rows, the slot of each of so many pairs, and the code of each, by rank.

        A code is the number of the row in its message times the most experts of a rank, plus the expert's number there.
        """
        (tokens, k), (_, firsts) = index.shape, _owners(held, total, index.device)
        by_rank = torch.argsort(self.needs.t().reshape(-1), descending=True, stable=True)[:rows]
        token = by_rank % max(1, tokens)
        slot = torch.argsort(self.owner, stable=True)[:pairs]
        rank = self.owner[slot]
        place = self.needs.cumsum(0) - 1
        code = place[slot // max(1, k), rank] * _base(held) + index.reshape(-1)[slot] - firsts[rank]
        return token, slot, code


def _base(held: Sequence[range]) -> int:
    return max(1, *map(len, held))


def _counts_or_error(rows: Tensor, pairs: Tensor, flat: Tensor, wrong: Tensor) -> Tensor:
    """The numbers of rows and pairs for each rank; for all -1 and a wrong index, where there is one."""
    at = wrong.to(torch.uint8).argmax() if len(wrong) else None
    counts = torch.stack([rows, pairs], 1)
    if at is None:
        return counts
    error = torch.stack([torch.full_like(rows, -1), flat[at].expand_as(rows)], 1)
    return torch.where(wrong[at], error, counts)


@cached("token exchanges", 1024)
def _owners(held: tuple[range, ...], total: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rank that has each expert, as its number in the group, behind all for none; and the first expert of each."""
    owners = torch.full((total + 1,), len(held))
    for i, each in enumerate(held):
        owners[each.start : each.stop] = i
    return owners.to(device), torch.tensor([each.start for each in held]).to(device)


def _expected(
    index: Tensor, held: Sequence[range], own: int, total: int
) -> tuple[tuple[Shape, Shape], tuple[Shape, Shape]]:
    """The numbers of rows and pairs that are expected, where there are no indices."""
    tokens, k = index.shape
    send = tuple([round(expected_rows(tokens, k, len(each), total)) for each in held])
    pairs = tuple([round(tokens * k * len(each) / max(1, total)) for each in held])
    n = len(held)
    return (send, (send[own],) * n), (pairs, (pairs[own],) * n)


def _back(sizes: tuple[Shape, Shape]) -> tuple[Shape, Shape]:
    return sizes[1], sizes[0]


def _starts(rows: Shape, pairs: Shape, like: Tensor) -> Tensor:
    """For each pair the first row of the message that it came in."""
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    if has_only_shape(like):
        return like
    firsts_of, counts = torch.tensor(firsts, device=like.device), torch.tensor(pairs, device=like.device)
    return torch.repeat_interleave(firsts_of, counts, output_size=len(like))
