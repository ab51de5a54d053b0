"""Chains of ranks along which a region is sent from mesh to mesh, and the forms of a unit task.

With one sender, receivers on A hosts of B ranks each, and t seconds for the slice over one network card (section 3.1 of
"On Optimizing the Communication of Model Parallelism", whose stages run one after the other; here every form is
pipelined, chunk by chunk):

| form              | pieces                                | busy seconds of the sender's card |
|-------------------|---------------------------------------|-----------------------------------|
| send              | the slice to each receiver            | A B t                             |
| local_all_gather  | on each host, 1 / B to each rank      | A t                               |
| global_all_gather | 1 / (A B) to each rank                | t, and t on each receiver's       |
| broadcast         | the slice along one chain of all      | t                                 |
| multi_rail        | 1 / k along each of k chains          | t / k, with k cards on each host  |
| reduce            | terms are added along the chain first | t                                 |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dshard.layout import Region
from dshard.placements import chunk_of
from dshard.redistribute import numel
from dshard.reshard.host_network import HostNetwork
from dshard.reshard.tasks import Task

Form: TypeAlias = Literal["send", "local_all_gather", "global_all_gather", "broadcast", "multi_rail", "reduce"]
"""Forms of sending a part to its receivers, by how it is split and in which order its pieces visit the receivers."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A piece of a region that is forwarded from rank to rank in `chunks`, as in a pipelined broadcast.

    The piece is the elements `span` of the flattened region. The first `terms` ranks each hold a term of its sum: each
    adds its own to the received sum. The last of them has the value, which all later ranks receive. In the model the
    chain begins `start` seconds after the first chain, and keeps its slowest link busy for `seconds`.

    >>> chain = Chain((range(2), range(4)), range(0, 8), (0, 4, 5), "broadcast", chunks=2)
    >>> chain.hops, list(chain.pieces())
    (((0, 4), (4, 5)), [range(0, 4), range(4, 8)])
    """

    region: Region
    span: range
    ranks: tuple[int, ...]
    form: Form
    terms: int = 1
    chunks: int = 1
    start: float = 0.0
    seconds: float = 0.0

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The (sender, receiver) pairs along the chain."""
        return tuple(zip(self.ranks, self.ranks[1:], strict=False))

    @property
    def region_text(self) -> str:
        """The region as text, as in "0:4,8:16"."""
        return ",".join(f"{part.start}:{part.stop}" for part in self.region)

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that receive the value."""
        return self.ranks[self.terms :]

    def piece(self, index: int) -> range:
        """The elements of a chunk, counted in the flattened region."""
        return chunk_of(self.span, self.chunks, index)

    def pieces(self) -> tuple[range, ...]:
        """The elements of each chunk that is not empty; empty chunks come last."""
        return tuple(piece for piece in map(self.piece, range(self.chunks)) if piece)

    def begins(self, index: int, hop: int) -> float:
        """Seconds at which a chunk is sent over a hop in the model: a chunk's time for each earlier chunk and hop."""
        return self.start + (index + hop) * self.seconds / self.chunks


def flat_range(region: Region) -> range:
    """The range of all elements of a region, flattened."""
    return range(numel(region))


FORMS: tuple[Form, ...] = ("send", "local_all_gather", "broadcast", "multi_rail", "global_all_gather")
"""The forms of a task without a reduction, the simplest first."""

MAX_HEADS = 8
"""The most candidates for the sender of one piece."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain without a chosen head: `heads` are the candidates for its first ranks, `to` the other ranks."""

    region: Region
    span: range
    heads: tuple[tuple[int, ...], ...]
    to: tuple[int, ...]
    form: Form

    def ranks(self, head: int) -> tuple[int, ...]:
        """The ranks of the chain that begins with this head."""
        begin = self.heads[head]
        return (*begin, *(rank for rank in self.to if rank != begin[-1]))


def drafts(task: Task, form: Form, network: HostNetwork, number: int) -> list[Draft]:
    """The drafts of a task's chains in one form; the `number` of the task spreads equal choices over ranks."""
    if len(task.holders) > 1:
        heads = tuple(_reductions(task, network))
        return [Draft(task.region, flat_range(task.region), heads, task.receivers, "reduce")]
    holders = dict(network.by_host(task.holders[0]))
    chains, far = [], []
    for host, ranks in network.by_host(task.receivers):
        if host in holders:
            local_heads = tuple((rank,) for rank in holders[host][:MAX_HEADS])
            near: Form = "send" if len(ranks) == 1 else "broadcast"
            chains.append(Draft(task.region, flat_range(task.region), local_heads, ranks, near))
        else:
            far.append(ranks)
    if far:
        chains += _far(task, form, network, far, _heads(task.holders[0], network, number))
    return [draft for draft in chains if draft.span]


def _far(
    task: Task, form: Form, network: HostNetwork, hosts: list[tuple[int, ...]], heads: tuple[tuple[int, ...], ...]
) -> Iterator[Draft]:
    region, span = task.region, flat_range(task.region)
    everyone = tuple(rank for ranks in hosts for rank in ranks)
    match form:
        case "send":
            for rank in everyone:
                yield Draft(region, span, heads, (rank,), form)
        case "local_all_gather":
            for ranks in hosts:
                for i in range(len(ranks)):
                    yield Draft(region, chunk_of(span, len(ranks), i), heads, _rotated(ranks, i), form)
        case "global_all_gather":
            for i in range(len(everyone)):
                yield Draft(region, chunk_of(span, len(everyone), i), heads, _rotated(everyone, i), form)
        case "multi_rail":
            k = min(network.cards, max(map(len, hosts)))
            for i in range(k):
                to = tuple(rank for ranks in hosts for rank in _rotated(ranks, i * len(ranks) // k))
                yield Draft(region, chunk_of(span, k, i), heads, to, form)
        case _:
            yield Draft(region, span, heads, everyone, form)


def forms_of(task: Task, network: HostNetwork) -> tuple[Form, ...]:
    """The forms that make a difference for a task."""
    if len(task.holders) > 1:
        return ("reduce",)
    holding = {network.host(rank) for rank in task.holders[0]}
    far = [ranks for host, ranks in network.by_host(task.receivers) if host not in holding]
    if sum(map(len, far)) <= 1:
        return ("send",)
    return FORMS if network.cards > 1 else tuple(form for form in FORMS if form != "multi_rail")


def _heads(holders: tuple[int, ...], network: HostNetwork, number: int) -> tuple[tuple[int, ...], ...]:
    """The possible first ranks: one holder behind each card, the next one for each `number`."""
    by_card: dict[int, list[int]] = {}
    for rank in holders:
        by_card.setdefault(network.card(rank), []).append(rank)
    return tuple((ranks[number % len(ranks)],) for ranks in list(by_card.values())[:MAX_HEADS])


def _reductions(task: Task, network: HostNetwork) -> Iterator[tuple[int, ...]]:
    """Orders of summation of the terms, host by host; each host is the last one once."""
    hosts = sorted({network.host(rank) for replicas in task.holders for rank in replicas})
    receivers = set(task.receivers)
    for last in hosts[:MAX_HEADS]:
        chosen = [min(replicas, key=lambda rank: (network.host(rank) != last, rank)) for replicas in task.holders]
        yield tuple(
            sorted(chosen, key=lambda rank: (network.host(rank) == last, rank in receivers, network.host(rank)))
        )


def _rotated(ranks: tuple[int, ...], i: int) -> tuple[int, ...]:
    return ranks[i:] + ranks[:i]
