"""The network between hosts, for reshards: a topology as hosts whose ranks share network cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Literal, TypeAlias

from dshard.caches import cached
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
