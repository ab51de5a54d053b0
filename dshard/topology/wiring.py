"""Links between pairs of units and their loads; messages between unlinked units pass through others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf
from typing import TypeAlias

from dshard.topology.links import Layer, Matrix, reached_from

Edge: TypeAlias = tuple[int, int]
"""A link, from one unit to another."""

Hops: TypeAlias = dict[Edge, dict[Edge, float]]
"""Pairs of units that exchange messages, each with the links of its routes and the share of its traffic on each."""


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """The links between pairs of units of one parent, in one layer. All shortest routes share messages evenly."""

    bandwidth: float | Matrix
    neighbours: tuple[tuple[int, ...], ...]

    def pair(self, edge: Edge) -> float:
        """The bandwidth between two units, zero if no link joins them."""
        if not isinstance(self.bandwidth, tuple):
            return self.bandwidth
        return self.bandwidth[edge[0] % len(self.bandwidth)][edge[1] % len(self.bandwidth)]

    def hops(self, units: Sequence[int]) -> Hops:
        """Return the routes of a group in these `units`: for each pair that exchanges bytes, the links on its way.

        These are all pairs with a link of their own, over which several rings run at once; where such links do not join
        all of the units, the pairs of neighbours on one ring, whose bytes pass through other units.
        """
        joined = [edge for edge in combinations(units, 2) if self.pair(edge) > 0]
        if not isinstance(self.bandwidth, tuple) or _joins(units, joined):
            return {edge: {edge: 1.0} for edge in joined}
        return {edge: self._way(*edge) for edge in {*pairwise(units), (units[0], units[-1])}}

    def spread(self, demands: Mapping[Edge, float]) -> dict[Edge, float]:
        """Return the load of each link, given the `demands` between pairs of units of one parent."""
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
        """Return the links on the shortest routes between two units, lower unit first, and their traffic shares."""
        loads: dict[Edge, float] = defaultdict(float)
        self._flow(a, {b: 1.0}, loads)
        return {(min(edge), max(edge)): share for edge, share in loads.items()}

    def _flow(self, source: int, amounts: Mapping[int, float], loads: dict[Edge, float]) -> None:
        """Add to `loads` the traffic from `source` to other units, shared among all shortest routes."""
        first = source - source % len(self.neighbours)
        order, before, routes = self._search(source - first)
        passing = {unit - first: amount for unit, amount in amounts.items()}
        for unit in reversed(order):
            amount = passing.get(unit, 0.0)
            if amount:
                for other in before[unit]:
                    share = amount * routes[other] / routes[unit]
                    loads[first + other, first + unit] += share
                    passing[other] = passing.get(other, 0.0) + share

    def _search(self, source: int) -> tuple[list[int], dict[int, list[int]], dict[int, int]]:
        """Return all units by distance, the units before each on its shortest routes, and the number of its routes."""
        order, distance, routes = [source], {source: 0}, {source: 1}
        before: dict[int, list[int]] = {source: []}
        for unit in order:  # which grows
            for other in self.neighbours[unit]:
                if other not in distance:
                    order.append(other)
                    distance[other], routes[other], before[other] = distance[unit] + 1, 0, []
                if distance[other] == distance[unit] + 1:
                    routes[other] += routes[unit]
                    before[other].append(unit)
        return order, before, routes


def wiring_of(layer: Layer) -> Wiring | None:
    """Return the links between units of a layer, or None if no link of a pair is slower than the unit."""
    pair = layer.pair_bandwidth
    if pair is None or (not isinstance(pair, tuple) and pair >= layer.group_bandwidth):
        return None
    if not isinstance(pair, tuple):
        return Wiring(pair, ())
    return Wiring(pair, tuple(tuple(j for j, bandwidth in enumerate(row) if bandwidth > 0) for row in pair))


def least_rate(wiring: Wiring, loads: Mapping[Edge, float]) -> float:
    """Return a rank's bytes per second at which the first link is full, given `loads` per byte that it sends."""
    return min((wiring.pair(edge) / load for edge, load in loads.items()), default=inf)


def _joins(units: Sequence[int], edges: Sequence[Edge]) -> bool:
    """Whether the edges connect all units."""
    others: dict[int, list[int]] = {unit: [] for unit in units}
    for a, b in edges:
        others[a].append(b)
        others[b].append(a)
    return len(reached_from(units[0], others)) == len(units)
