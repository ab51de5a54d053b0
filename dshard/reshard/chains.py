"""Chains of ranks along which a region is sent from mesh to mesh, the forms of a unit task, and the network of hosts.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, TypeAlias

from dshard.caches import cached
from dshard.layout import Layout, Region, Shape, overlap
from dshard.placements import Partial, chunk_of
from dshard.redistribute.step import numel
from dshard.topology import Topology

Resource: TypeAlias = tuple[int, Literal["tx", "rx"]]
"""One direction of a network card, which two chains cannot use at one time; or of a rank's link within its host."""


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """Hosts of `per_host` ranks each, with `cards` network cards each; links are full duplex.

    `bandwidth` is in bytes per second of a card, `latency` in seconds of a message between hosts; `inside` and
    `inside_latency` are those of one rank within its host.

    >>> network = HostNetwork(4, 2, 1e9, 0.0, 1e12, 0.0)
    >>> [(network.host(rank), network.card(rank)) for rank in (0, 2, 5)]
    [(0, 0), (0, 1), (1, 2)]
    """

    per_host: int
    cards: int
    bandwidth: float
    latency: float
    inside: float
    inside_latency: float

    def host(self, rank: int) -> int:
        """The number of a rank's host."""
        return rank // self.per_host

    def card(self, rank: int) -> int:
        """The number of the card through which a rank sends to other hosts, counted over all hosts."""
        return self.host(rank) * self.cards + rank % self.per_host * self.cards // self.per_host

    def by_host(self, ranks: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
        """The ranks of each host, hosts in ascending order."""
        return [(host, tuple(own)) for host, own in groupby(sorted(ranks, key=self.host), key=self.host)]

    def crosses(self, sender: int, receiver: int) -> bool:
        """Whether a hop leaves a host."""
        return self.host(sender) != self.host(receiver)

    def link(self, sender: int, receiver: int) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second of a hop."""
        crosses = self.crosses(sender, receiver)
        return (self.latency, self.bandwidth) if crosses else (self.inside_latency, self.inside)


@cached("network", 256)
def host_network_of(topology: Topology) -> HostNetwork:
    """The hosts of a topology: its units of least bandwidth to their outside, the innermost of these.

    On a network of one layer each rank is a host of its own.
    """
    layers = topology.layers
    at = min(reversed(range(len(layers))), key=lambda i: layers[i].group_bandwidth)
    layer, below = layers[at], layers[at + 1 :]
    ranks = prod(inner.ranks or 1 for inner in below)
    cards = 1
    if layer.rank_bandwidth is not None:
        cards = min(ranks, max(1, round(layer.group_bandwidth / layer.rank_bandwidth)))
    inner = below[0] if below else layer
    bandwidth = layer.group_bandwidth / cards
    return HostNetwork(ranks, cards, bandwidth, layer.latency, inner.group_bandwidth, inner.latency)


Holders: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A region to send from ranks that hold it to ranks that need it and do not hold it.

    `holders` are the replicas of each term: of one, unless the source is partial.
    """

    region: Region
    holders: Holders
    receivers: tuple[int, ...]


def tasks(src: Layout, dst: Layout, shape: Sequence[int]) -> tuple[Task, ...]:
    """The unit tasks from `src` to `dst`, in the order of the source's regions, then of the destination's.

    >>> from dshard.mesh import Mesh
    >>> from dshard.placements import Replicate, Shard
    >>> src = Layout(Mesh((2,)), (Shard(0),))
    >>> dst = Layout(Mesh((3,), ranks=(2, 3, 4)), (Shard(0),))
    >>> [(task.region[0], task.holders[0], task.receivers) for task in tasks(src, dst, (5,))]
    [(range(0, 2), (0,), (2,)), (range(2, 3), (0,), (3,)), (range(3, 4), (1,), (3,)), (range(4, 5), (1,), (4,))]
    """
    unit_tasks = []
    needed = {region: tuple(rank for ranks in terms for rank in ranks) for region, terms in parts(dst, shape).items()}
    for held, holders in parts(src, shape).items():
        for region, ranks in needed.items():
            both = overlap(held, region)
            if both is not None:
                receivers = tuple(rank for rank in ranks if len(holders) > 1 or rank not in holders[0])
                if receivers:
                    unit_tasks.append(Task(both, holders, receivers))
    return tuple(unit_tasks)


def parts(layout: Layout, shape: Sequence[int]) -> dict[Region, Holders]:
    """The non-empty regions of a tensor, and the ranks that hold the replicas of each term of each."""
    mesh, reduced = layout.mesh, reduced_axes(layout)
    holders: dict[Region, dict[tuple[int, ...], list[int]]] = {}
    for at, rank in zip(mesh.coordinates(), mesh.ranks, strict=True):
        region = layout.region(shape, at)
        if all(region):
            holders.setdefault(region, {}).setdefault(tuple(at[i] for i in reduced), []).append(rank)
    return {region: tuple(map(tuple, terms.values())) for region, terms in holders.items()}


def reduced_axes(layout: Layout) -> tuple[int, ...]:
    """The mesh axes of more than one rank on which the layout is partial; a single term is the value itself."""
    return tuple(i for i, p in enumerate(layout.placements) if isinstance(p, Partial) and layout.mesh.shape[i] > 1)


def region_of(layout: Layout, shape: Shape, rank: int) -> Region | None:
    """The region of a rank; None if the rank is not in the mesh or its region is empty."""
    if rank not in layout.mesh:
        return None
    region = layout.region(shape, layout.mesh.coordinate(rank))
    return region if all(region) else None


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
