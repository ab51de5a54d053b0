"""Seconds of one collective, and of local work: the terms of every price.

A collective takes its messages one after the other, each a latency, and the bytes that its busiest rank receives over
the bandwidth of its link (Hockney's model). Bytes are those received, so a formula has no (n - 1) / n of its own. Which
algorithm runs what:

| collective     | gloo                          | nccl                     | xla (a torus) |
|----------------|-------------------------------|--------------------------|---------------|
| all_gather     | a broadcast of each part      | ring                     | ring          |
| reduce_scatter | all_to_all, then a local sum  | ring                     | ring          |
| all_reduce     | ring                          | the better of ring, tree | ring          |
| all_to_all     | pairwise                      | pairwise                 | pairwise      |
| broadcast      | binomial tree                 | pipelined ring           | pipelined ring |
| permute        | one message to the next rank  | the same                 | the same      |

On a topology that has NCCL's algorithms, as presets of GPUs do, the cheapest of these runs the first three and
broadcasts, by NCCL's own prices (`algorithm_price`), and messages take the steps of its rings. NCCL gathers and
scatters pieces of one size alone: those of different sizes are exchanged pairwise (`sends_pieces_in_messages`). A
collective along several mesh axes takes its messages along each of them, one after the other. A two-level all_reduce is
no algorithm here but a plan: reduce_scatter inside, all_reduce across, all_gather inside. Prices grow with the bytes,
and are never below the bytes that must pass a cut of the network over its bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import NamedTuple

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.mesh import Mesh
from dshard.topology import COLLECTIVES, Collective, Link, Topology
from dshard.topology.algorithms import COLLECTIVES_OF, Algorithm
from dshard.topology.links import Hardware
from dshard.topology.sharing import DIRECT

LARGE_PIECE = 2**22
"""Bytes of a piece above which a broadcast of each piece takes less time than messages from each rank to each.

That is between hosts, whose link a broadcast crosses once, and by the prices of NCCL's algorithms on presets of GPUs;
within a host each broadcast takes a ring's steps, and messages take less time at all sizes.
"""
BESIDE = 1e-3
"""Latencies that a message takes which is in flight beside those along each axis, in a collective along several.

So one collective begins about as soon as one after the other along each axis, and where all else is equal these, of
fewer messages, are chosen.
"""
SLOWDOWN = 0.189
"""By how much longer a GPU computes beside communication: the mean that Lee et al. (arXiv 2507.03114) found on four."""


def collective_seconds(
    collective: Collective,
    nbytes: float,
    mesh: Mesh,
    axes: Iterable[str],
    topology: Topology,
    *,
    peers: int | None = None,
    along: Sequence[float] = (),
    even: bool = True,
) -> float:
    """Seconds of a collective along `axes`, all groups active, in which the busiest rank receives `nbytes`.

    `peers` is the number of ranks from which a rank receives, where that is not all of its group; `along` the bytes of
    an exchange that come from elsewhere on each axis, where that is known. The pieces of an all_gather or
    reduce_scatter that is not `even` differ in size.
    """
    axes = tuple(axes)
    terms = terms_of(collective, mesh, axes, topology)
    n, link, algorithms, latency = terms.ranks, terms.link, terms.algorithms, terms.latency
    if n == 1:
        return 0.0
    if terms.messages:
        crossing = tuple(zip(_terms_along(mesh, axes, topology), along, strict=True)) if along else ()
        return terms.message_seconds(nbytes, 1 if collective == "permute" else peers, crossing)
    if not even and topology.backend == "nccl":
        nodes, _ = topology.nodes(mesh, axes) or (1, None)
        if sends_pieces_in_messages(collective, nbytes / (n - 1), nodes > 1):  # at least the bound of a search
            of_one_size = collective_seconds(collective, nbytes, mesh, axes, topology)
            return max(of_one_size, _exchanged_seconds(collective, nbytes, n, mesh, axes, topology))
    if algorithms:
        return min([begin + nbytes / rate for begin, rate in algorithms])
    match collective:
        case "reduce_scatter" if topology.backend == "gloo" and not link.measured:
            return _exchanged_seconds(collective, nbytes, n, mesh, axes, topology)
        case "all_gather" | "reduce_scatter":
            return latency + link.seconds(nbytes)
        case "all_reduce":
            ring = 2 * latency + link.seconds(nbytes)
            tree = topology.backend == "nccl" and not link.measured
            return min(ring, tree_all_reduce_seconds(nbytes, n, link)) if tree else ring
        case "broadcast" if topology.backend == "gloo":  # a binomial tree, whose root sends all bytes log n times
            return _log2(n) * messages_seconds(nbytes, 1, link)
        case "broadcast":
            return messages_seconds(nbytes, n - 1, link)
        case _:
            raise AssertionError(f"{collective} is of messages")


def sends_pieces_in_messages(collective: str, piece: float, spans_hosts: bool) -> bool:
    """Whether NCCL exchanges pieces of different sizes in messages, the largest of `piece` bytes.

    Its all_gather and reduce_scatter take pieces of one size. Between hosts, large pieces are gathered by broadcasts.
    """
    return collective == "reduce_scatter" or (collective == "all_gather" and not (spans_hosts and piece > LARGE_PIECE))


def _exchanged_seconds(
    collective: Collective, nbytes: float, n: int, mesh: Mesh, axes: tuple[str, ...], topology: Topology
) -> float:
    """Seconds of an all_gather or reduce_scatter of `n` ranks by an all_to_all, and the local sum of the latter."""
    seconds = collective_seconds("all_to_all", nbytes, mesh, axes, topology)
    if collective == "reduce_scatter":  # n terms are read, and their sum is written
        seconds += work_seconds(0.0, nbytes * (n + 1) / (n - 1), topology)
    return seconds


def messages_seconds(nbytes: float, messages: int, link: Link) -> float:
    """Seconds of so many messages, one after the other, in which the busiest rank receives `nbytes` in all."""
    return messages * link.latency + link.seconds(nbytes)


def tree_all_reduce_seconds(nbytes: float, n: int, link: Link) -> float:
    """Seconds of an all_reduce up and down a double binary tree, for what in a ring would be `nbytes` received.

    A rank receives the tensor twice, not 2 (n - 1) / n times, in a number of messages that grows with log n alone.
    """
    return messages_seconds(nbytes * n / (n - 1), 2 * _log2(n), link)


SENT: frozenset[Collective] = DIRECT | {"permute"}
"""Collectives of messages, of which each rank has its own for each other."""


class AlgorithmPrice(NamedTuple):
    """Seconds of a collective by one algorithm: those to begin, and the bytes that a ring would receive over `rate`."""

    begin: float
    rate: float


class MessagePrice(NamedTuple):
    """Seconds of messages by one protocol: to begin them, of `one`, of those from all others of a group.

    Bytes take `slowed` times as long as over the bare link.
    """

    begin: float
    one: float
    all: float
    slowed: float


class Terms(NamedTuple):
    """The price of a collective along mesh axes: the ranks of a group, their link, and the topology's algorithms.

    A collective in which each rank has messages of its own for others has `messages`, by each protocol. There are no
    algorithms where none runs the collective, or its link was measured. Else `latency` are the seconds of one message
    after the other to all ranks of a group, but for one; an all_reduce takes twice as long.
    """

    ranks: int
    link: Link
    algorithms: tuple[AlgorithmPrice, ...]
    latency: float
    messages: tuple[MessagePrice, ...] = ()

    def message_seconds(
        self, nbytes: float, peers: int | None = None, crossing: Sequence[tuple[Terms, float]] = ()
    ) -> float:
        """Seconds of messages from so many peers, or all.

        Where it is known what comes from elsewhere on each axis, by its terms alone, bytes take as long as along it.
        """
        found = []
        for i, (begin, one, most, slowed) in enumerate(self.messages):
            over = _crossing_seconds(nbytes, crossing, i) if crossing else slowed * self.link.seconds(nbytes)
            found.append(begin + (most if peers is None else min(most, peers * one)) + over)
        return min(found)

    def bytes_seconds(self, nbytes: float, protocol: int) -> float:
        """Seconds for the bytes of messages by the protocol of this number; a measured link has one for all."""
        return self.messages[min(protocol, len(self.messages) - 1)].slowed * self.link.seconds(nbytes)


@cached("network", 8192)
def terms_of(collective: Collective, mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> Terms:
    """The terms of a collective along `axes`."""
    n = prod([mesh.shape[mesh.axis(axis)] for axis in axes])
    if n == 1:
        return Terms(1, Link(0.0, inf), (), 0.0)
    if collective == "reduce_scatter" and not topology.measured:  # an all_gather the other way
        return terms_of("all_gather", mesh, axes, topology)
    link = topology.link(mesh, axes, collective)
    terms = Terms(n, link, (), (n - 1) * link.latency)
    if len(axes) > 1 and not link.measured:
        along = [terms_of(collective, mesh, (axis,), topology) for axis in axes]
        beside = n - 1 - sum([each.ranks - 1 for each in along])
        latency = sum([each.latency for each in along]) + beside * BESIDE * link.latency
        terms = terms._replace(latency=min(terms.latency, latency))
    if collective in SENT:
        where = None if link.measured else topology.nodes(mesh, axes)
        return terms._replace(messages=_message_prices(topology, terms, where))
    if not topology.algorithms or link.measured or collective not in COLLECTIVES_OF["ring"]:
        return terms
    where = topology.nodes(mesh, axes)
    if where is None:
        return terms
    alike: Collective = "all_gather" if collective == "reduce_scatter" else collective
    return terms._replace(algorithms=_algorithm_prices(topology, alike, n, *where, link.bandwidth))


def message_terms(mesh: Mesh, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]], topology: Topology) -> Terms:
    """The terms of one message between each of these pairs of ranks of each group along `axes`, all sent at once."""
    link, where = topology.link_within(mesh, axes, pairs)
    terms = Terms(2, link, (), link.latency)
    return terms._replace(messages=_message_prices(topology, terms, None if link.measured else where))


def _message_prices(
    topology: Topology, terms: Terms, where: tuple[int, Hardware | None] | None
) -> tuple[MessagePrice, ...]:
    """The prices of messages: by NCCL's protocols LL and Simple, of its rings, where it is priced so.

    NCCL has no prices of messages: by one from each rank to each it takes the steps of a ring, and here as long.
    """
    n, link = terms.ranks, terms.link
    sending = [each for each in topology.algorithms if each.kind == "ring" and each.protocol != "LL128"]
    bare = (MessagePrice(0.0, link.latency, terms.latency, 1.0),)
    if where is None:
        return bare
    nodes, inside = where
    prices = []
    for each in sending:
        step, between = each.step(inside), each.alone if n == nodes else each.network
        most = (n - nodes) * step + (nodes - 1) * between
        rate = each.bandwidth(link.bandwidth, nodes)
        if rate:
            prices.append(MessagePrice(each.base, between if nodes > 1 else step, most, link.bandwidth / rate))
    return tuple(prices) or bare


@cached("network", 1024)
def _algorithm_prices(
    topology: Topology, collective: Collective, n: int, nodes: int, inside: Hardware | None, bandwidth: float
) -> tuple[AlgorithmPrice, ...]:
    running = [algorithm for algorithm in topology.algorithms if collective in COLLECTIVES_OF[algorithm.kind]]
    prices = [algorithm_price(algorithm, collective, n, nodes, inside, bandwidth) for algorithm in running]
    return tuple([price for price in prices if price is not None])


def algorithm_price(
    algorithm: Algorithm, collective: Collective, n: int, nodes: int, inside: Hardware | None, bandwidth: float
) -> AlgorithmPrice | None:
    """The price of a collective of `n` ranks on so many nodes with links of this bandwidth; None where it cannot run.

    The formulas are those of NCCL's own choice (src/graph/tuning.cc). A ring takes n - 1 steps, an all_reduce two
    rings; a tree a chain through each node and back, and two tree walks between nodes. The switch of a node reads, and
    writes, each tensor once: an all_reduce takes half of a ring's bytes, an all_gather the n / (n - 1) of a sender, at
    the part of its bandwidth that n - 1 others leave. The result of an all_reduce passes each link in any case.
    """
    rate = algorithm.bandwidth(bandwidth, nodes)
    if not rate or not algorithm.runs(nodes, inside):
        return None
    step, between = algorithm.step(inside), algorithm.alone if n == nodes else algorithm.network
    levels = 2 * (nodes.bit_length() - 1)
    received = (n - 1) / n  # of a tensor, by each rank of a ring
    match algorithm.kind:
        case "ring":
            rings = 2 if collective == "all_reduce" else 1
            return AlgorithmPrice(algorithm.base + rings * ((n - nodes) * step + (nodes - 1) * between), rate)
        case "tree":
            chains = 2 * (n // nodes - 1)
            return AlgorithmPrice(algorithm.base + chains * step + levels * between, rate * received)
        case "nvls" if collective == "all_reduce":
            return AlgorithmPrice(algorithm.base + step, 2 * min(rate, bandwidth * received))
        case "nvls":
            return AlgorithmPrice(algorithm.base + step, rate * received**2)
        case "nvls-tree":
            return AlgorithmPrice(algorithm.base + step + levels * between, min(rate, 2 * bandwidth * received))
        case _:
            assert_never(algorithm.kind)


def work_seconds(flops: float, nbytes: float, topology: Topology, dtype: str = "") -> float:
    """Seconds of local work that takes `flops` operations and touches `nbytes` of memory: the roofline."""
    device = topology.device
    return device.launch + max(flops / topology.flops(dtype), nbytes / device.memory_bandwidth)


def together_seconds(seconds: Sequence[float], topology: Topology) -> float:
    """Seconds until all ranks have done work that takes each of them so long while all compute.

    Ranks that share cores share them equally: as some have done theirs, the others compute faster, up to the rate of a
    rank alone.
    """
    if topology.device.alone >= 1.0:  # none shares with others
        return max(seconds, default=0.0)
    total, before, n = 0.0, 0.0, len(seconds)
    for done, each in enumerate(sorted(seconds)):
        total += (each - before) * max((n - done) / n, topology.device.alone)
        before = each
    return total


def copy_seconds(nbytes: float, topology: Topology) -> float:
    """Seconds of a copy of `nbytes` within a rank's memory, which reads and writes each."""
    return topology.launch + 2 * nbytes / topology.memory_bandwidth


def hidden_seconds_lost(nbytes: float, seconds: float, topology: Topology) -> float:
    """Seconds that local work takes longer beside an exchange in which a rank receives `nbytes` in `seconds`.

    Over gloo the cores that compute move the bytes, as fast as over the fastest link; while a slower one takes longer,
    they compute. Devices that have other means compute at part of their rate: of registers, caches and memory
    bandwidth the exchange takes its share (`SLOWDOWN`).
    """
    if topology.backend != "gloo":
        return seconds * SLOWDOWN / (1 + SLOWDOWN)
    moved = (each.link for each in topology.measured if each.collective in ("permute", None))
    links = list(moved) or [Link(layer.latency, layer.group_bandwidth) for layer in topology.layers]
    return min(seconds, *(messages_seconds(nbytes, 1, link) for link in links))


@cached("network", 1024)
def _terms_along(mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> tuple[Terms, ...]:
    """The terms of an exchange along each of these axes alone."""
    return tuple([terms_of("exchange", mesh, (axis,), topology) for axis in axes])


def _crossing_seconds(nbytes: float, crossing: Sequence[tuple[Terms, float]], protocol: int) -> float:
    """Seconds for the bytes of an exchange, each over the slowest of the links along which it crosses an axis.

    Bytes that cross one axis are not counted again on a faster one: what stays within a host does not load its link,
    nor is it sent at the rate of a protocol between hosts.
    """
    crossed = [each for each in crossing if each[0].messages]  # none along an axis of one rank
    slowest_first = sorted(crossed, key=lambda each: -each[0].bytes_seconds(nbytes, protocol))
    seconds, left = 0.0, nbytes
    for terms, most in slowest_first:
        seconds, left = seconds + terms.bytes_seconds(min(left, most), protocol), left - min(left, most)
    return seconds + slowest_first[-1][0].bytes_seconds(left, protocol)


def _log2(n: int) -> int:
    """The logarithm of `n` to base 2, rounded up."""
    return (n - 1).bit_length()


@dataclass(slots=True)
class StepClock:
    """Seconds since a step began: local work one after the other, and beside it collectives one after the other.

    `now` is when the next work begins, `network` when the next collective can. The step takes the later of both.

    A collective for which work does not wait delays it by the part of its seconds that is not in `overlap`, see
    `Topology.overlap`.

    >>> clock = StepClock()
    >>> clock.send(2.0, waits=False), clock.work(3.0), clock.send(1.0), clock.seconds
    (0.0, 0.0, 3.0, 4.0)
    """

    now: float = 0.0
    network: float = 0.0

    def work(self, seconds: float) -> float:
        """Work for so long; returns when that begins."""
        begin, self.now = self.now, self.now + seconds
        return begin

    def send(self, seconds: float, *, waits: bool = True, overlap: float = 1.0) -> float:
        """Run a collective, for which the work that follows waits or not; returns when it begins."""
        begin = max(self.now, self.network)
        self.network = begin + seconds
        self.now = self.network if waits else self.now + (1 - overlap) * seconds
        return begin

    def wait(self, end: float) -> None:
        """Let the work that follows wait for a collective that ends then."""
        self.now = max(self.now, end)

    @property
    def seconds(self) -> float:
        """Seconds until all has ended."""
        return max(self.now, self.network)


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective that will run: its kind, its mesh axes, bytes that the busiest rank receives, predicted seconds."""

    collective: str
    axis: str
    nbytes: int
    seconds: float


def planned_collective(
    collective: str, mesh: Mesh, axes: tuple[str, ...], nbytes: int, topology: Topology
) -> PlannedCollective:
    """A collective along these mesh axes, priced by a topology."""
    return PlannedCollective(
        collective, ",".join(axes), nbytes, predicted_seconds(collective, nbytes, mesh, axes, topology)
    )


def predicted_seconds(collective: str, nbytes: int, mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> float:
    """Predicted seconds of a collective; one without a price takes a link's latency and bandwidth."""
    if collective in COLLECTIVES:
        return collective_seconds(collective, nbytes, mesh, axes, topology)
    link = topology.link(mesh, axes)
    return link.latency + link.seconds(nbytes)
