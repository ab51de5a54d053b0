"""Links between pairs of units, and what each carries of messages between units that no link joins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf
from typing import TypeAlias

from dshard.topology.links import Layer, Matrix

Edge: TypeAlias = tuple[int, int]
"""A link, from one unit to another."""

Hops: TypeAlias = dict[Edge, dict[Edge, float]]
"""Pairs of units that exchange messages, each with the links on its way and the part of its traffic on each of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """The links between pairs of units of one parent, in one layer. Messages take all shortest ways alike."""

    bandwidth: float | Matrix
    neighbours: tuple[tuple[int, ...], ...]

    def pair(self, edge: Edge) -> float:
        """The bandwidth between two units, zero if no link joins them."""
        if not isinstance(self.bandwidth, tuple):
            return self.bandwidth
        return self.bandwidth[edge[0] % len(self.bandwidth)][edge[1] % len(self.bandwidth)]

    def hops(self, units: Sequence[int]) -> Hops:
        """The pairs of units between which the bytes of a group in these `units` pass.

        These are all pairs with a link of their own, over which several rings run at once; where such links do not join
        all of the units, the pairs of neighbours on one ring, whose bytes pass through other units.
        """
        joined = [edge for edge in combinations(units, 2) if self.pair(edge) > 0]
        if not isinstance(self.bandwidth, tuple) or _joins(units, joined):
            return {edge: {edge: 1.0} for edge in joined}
        return {edge: self._way(*edge) for edge in {*pairwise(units), (units[0], units[-1])}}

    def spread(self, demands: Mapping[Edge, float]) -> dict[Edge, float]:
        """What each link carries if so much goes from one unit to another, for each pair of units of one parent."""
        loads: dict[Edge, float] = defaultdict(float)
        by_source: dict[int, dict[int, float]] = defaultdict(dict)
        for (a, b), amount in demands.items():
            if self.pair((a, b)) > 0:
                loads[a, b] += amount
            else:
                by_source[a][b] = amount
        for source, amounts in by_source.items():
            self._flow(source, amounts, loads)
        return loads

    def _way(self, a: int, b: int) -> dict[Edge, float]:
        """The links on the shortest ways between two units, named from the lower unit, with their shares of traffic."""
        loads: dict[Edge, float] = defaultdict(float)
        self._flow(a, {b: 1.0}, loads)
        return {(min(edge), max(edge)): share for edge, share in loads.items()}

    def _flow(self, source: int, amounts: Mapping[int, float], loads: dict[Edge, float]) -> None:
        """Add to `loads` what goes from `source` to others: from the farthest back, shared among the ways there."""
        first = source - source % len(self.neighbours)
        order, before, ways = self._search(source - first)
        passing = {unit - first: amount for unit, amount in amounts.items()}
        for unit in reversed(order):
            amount = passing.get(unit, 0.0)
            if amount:
                for other in before[unit]:
                    share = amount * ways[other] / ways[unit]
                    loads[first + other, first + unit] += share
                    passing[other] = passing.get(other, 0.0) + share

    def _search(self, source: int) -> tuple[list[int], dict[int, list[int]], dict[int, int]]:
        """All units by their distance, the units before each on its shortest ways, and the number of these ways."""
        order, distance, ways = [source], {source: 0}, {source: 1}
        before: dict[int, list[int]] = {source: []}
        for unit in order:  # which grows
            for other in self.neighbours[unit]:
                if other not in distance:
                    order.append(other)
                    distance[other], ways[other], before[other] = distance[unit] + 1, 0, []
                if distance[other] == distance[unit] + 1:
                    ways[other] += ways[unit]
                    before[other].append(unit)
        return order, before, ways


def wiring_of(layer: Layer) -> Wiring | None:
    """The links between units of a layer, or None if a single pair is never slower than a whole unit."""
    pair = layer.pair_bandwidth
    if pair is None or (not isinstance(pair, tuple) and pair >= layer.group_bandwidth):
        return None
    if not isinstance(pair, tuple):
        return Wiring(pair, ())
    return Wiring(pair, tuple(tuple(j for j, bandwidth in enumerate(row) if bandwidth > 0) for row in pair))


def least_rate(wiring: Wiring, loads: Mapping[Edge, float]) -> float:
    """The bytes per second at which the first link is full, where `loads` are bytes for each byte."""
    return min((wiring.pair(edge) / load for edge, load in loads.items()), default=inf)


def _joins(units: Sequence[int], edges: Sequence[Edge]) -> bool:
    """Whether the edges join all units."""
    others: dict[int, list[int]] = {unit: [] for unit in units}
    for a, b in edges:
        others[a].append(b)
        others[b].append(a)
    found = [units[0]]
    seen = {units[0]}
    for unit in found:  # which grows
        new = [other for other in others[unit] if other not in seen]
        seen.update(new)
        found += new
    return len(seen) == len(units)
