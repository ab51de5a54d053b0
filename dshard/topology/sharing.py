"""Bandwidths of groups along mesh axes that communicate at once and share the network.

A topology has layers: with `ranks` units each, a unit of layer j has D_j ranks, the product of `ranks` of the layers
below. A group crosses a layer where it has ranks in several units of one unit above. Its bandwidth in each layer that
it crosses is that of the layer's units, divided among all groups that leave the same unit; the least of these counts.
This is the hierarchical communication matrix of ATP (arXiv 2301.08658, section 3.4 and equation 3), computed from the
groups themselves, so that any mesh of any ranks in any order has its links.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from math import inf
from typing import TypeAlias

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.mesh import Mesh
from dshard.topology.links import Collective, Hardware, Layer, Link, Matrix, Measured, reached_from

Groups: TypeAlias = tuple[tuple[int, ...], ...]

DIRECT: frozenset[Collective] = frozenset({"all_to_all", "exchange"})
"""Collectives in which each rank has a message for each other; in all others, bytes pass along a ring or a tree."""


@dataclass(frozen=True, slots=True)
class UnitShare:
    """The ranks of a group within one unit of the layer above: the units they are in, and how many are in each."""

    units: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks in these units."""
        return sum(self.counts)


def groups_of(mesh: Mesh, axes: Iterable[str]) -> Groups:
    """Return the sorted ranks of each group along `axes`; equal groups compare equal whatever the axes' names.

    >>> groups_of(Mesh((2, 2), ("dp", "tp")), ["tp"])
    ((0, 1), (2, 3))
    """
    return _groups_of(mesh, frozenset(map(mesh.axis, axes)))


@cached("network", 1024)
def _groups_of(mesh: Mesh, inside: frozenset[int]) -> Groups:
    starts, offsets, stride = [0], [0], 1
    for axis in reversed(range(mesh.ndim)):
        steps = [i * stride for i in range(mesh.shape[axis])]
        if axis in inside:
            offsets = [step + offset for step in steps for offset in offsets]
        else:
            starts = [step + start for step in steps for start in starts]
        stride *= mesh.shape[axis]
    return tuple(sorted([tuple(sorted([mesh.ranks[start + offset] for offset in offsets])) for start in starts]))


def measured_link(measured: Sequence[Measured], groups: Groups, collective: Collective | None) -> Link | None:
    """Return the link measured for these groups, or None; figures of this collective precede general ones."""
    kinds = [collective, "all_to_all", None] if collective == "exchange" else [collective, None]
    for kind in kinds:
        for figures in reversed(measured):
            if figures.collective == kind and groups_of(figures.mesh, figures.axes) == groups:
                return figures.link
    return None


def link_within(measured: Sequence[Measured], layers: Sequence[Layer], pairs: Groups) -> Link:
    """The link of a rank whose messages, all at once, are between these pairs of ranks alone.

    That of the smallest measured groups that have both ranks of every pair, or else that of the layers.
    """
    by_size: dict[int, Link] = {}
    for figures in measured:
        if figures.collective in ("permute", None):
            sets = list(map(frozenset, groups_of(figures.mesh, figures.axes)))
            if all(any(one.issuperset(pair) for one in sets) for pair in pairs):
                by_size[len(sets[0])] = figures.link
    return by_size[min(by_size)] if by_size else shared_link(layers, pairs, "permute")


def shared_link(layers: Sequence[Layer], groups: Groups, collective: Collective | None) -> Link:
    """Return the link of one rank of these groups: least bandwidth, and latency of the outermost layer crossed."""
    return _shared_link(tuple(layers), groups, collective if collective in DIRECT else None)


@cached("network", 4096)
def _shared_link(layers: tuple[Layer, ...], groups: Groups, collective: Collective | None) -> Link:
    latency, bandwidth = None, inf
    below = _ranks_below(layers)
    for layer, inner in zip(layers, below, strict=True):
        parts = crossing(layer, inner, groups)
        if parts:
            latency = layer.latency if latency is None else latency
            if collective in DIRECT:
                peers = len(groups[0]) - 1 if collective == "all_to_all" else None
                bandwidth = min(bandwidth, _direct_bandwidth(layer, parts, peers))
            if collective != "all_to_all":
                bandwidth = min(bandwidth, _ring_bandwidth(layer, parts))
    return Link(latency or 0.0, bandwidth)


@cached("network", 1024)
def nodes_of(layers: tuple[Layer, ...], groups: Groups) -> tuple[int, Hardware | None] | None:
    """Return the most nodes that a group spans, and the connection within one; None if a layer's is unknown."""
    nodes, inside = 1, None
    for layer, inner in zip(layers, _ranks_below(layers), strict=True):
        if not crossing(layer, inner, groups):
            continue
        if layer.hardware is None:
            return None
        if layer.hardware == "network":
            nodes = max(len({rank // inner for rank in group}) for group in groups)
        else:
            inside = inside or layer.hardware
    return nodes, inside


@cached("network", 1024)
def host_size(layers: tuple[Layer, ...], groups: Groups) -> int:
    """Return the ranks of one host: of what the innermost network that groups cross connects, or the outermost layer.

    The latter where nobody said what connects; 1 where groups are on one host, or what they cross connects ranks.
    """
    size = 0
    for layer, inner in zip(layers, _ranks_below(layers), strict=True):
        is_network = layer.hardware == "network" or (layer.hardware is None and not size)
        if is_network and crossing(layer, inner, groups):
            size = inner
    return size or 1


def cut_bandwidth(layers: Sequence[Layer], groups: Groups, collective: Collective) -> float:
    """Return an upper bound on one rank's bytes per second, from the bytes that must enter each unit.

    Bytes are counted as `dshard.cost` counts them. What several ranks of a unit need enters once, and so do the sums of
    the terms of several ranks outside.
    """
    n, bandwidth = len(groups[0]), inf
    counted = {"all_reduce": 2 * (n - 1), "broadcast": n, "permute": 1}.get(collective, n - 1)
    for layer, inner in zip(layers, _ranks_below(layers), strict=True):
        entering: Counter[int] = Counter()
        for part, times in crossing(layer, inner, groups).items():
            for unit, inside in zip(part.units, part.counts, strict=True):
                entering[unit] += times * _least_entering(collective, inside, part.size - inside, n)
        bandwidth = min(bandwidth, *(layer.group_bandwidth * counted / most for most in entering.values() if most), inf)
    return bandwidth


def _least_entering(collective: Collective, inside: int, outside: int, n: int) -> int:
    """Count the pieces of a tensor's `n` that a unit of `inside` ranks must receive from `outside` others."""
    match collective:
        case "all_gather":
            return outside
        case "all_to_all" | "exchange":
            return inside * outside
        case "reduce_scatter":
            return inside
        case "all_reduce" | "broadcast":
            return n
        case "permute":
            return 1
        case _:
            assert_never(collective)


@cached("network", 1024)
def crossing(layer: Layer, inner: int, groups: Groups) -> Counter[UnitShare]:
    """Count the parts of `groups` that cross `layer`, whose units have `inner` ranks each."""
    spans = Counter[tuple[tuple[int, int], ...]]()  # units and counts of groups, of which most are in the same
    for group in groups:
        first, last = group[0] // inner, group[-1] // inner
        if first != last:  # ranks are in order: one unit would have them all
            is_pair, unit_of = len(group) == 2, inner.__rfloordiv__
            spans[((first, 1), (last, 1)) if is_pair else tuple(sorted(Counter(map(unit_of, group)).items()))] += 1
    crossing_parts = Counter[UnitShare]()
    for counts, times in spans.items():
        parents: dict[int, list[tuple[int, int]]] = {}
        for unit, count in counts:
            parents.setdefault(0 if layer.ranks is None else unit // layer.ranks, []).append((unit, count))
        for units in parents.values():
            if len(units) > 1:
                crossing_parts[UnitShare(*zip(*units, strict=True))] += times
    return crossing_parts


def _ranks_below(layers: Sequence[Layer]) -> list[int]:
    """Return the number of ranks in a unit of each layer (D_j of ATP)."""
    sizes = [1]
    for layer in reversed(layers[1:]):
        assert layer.ranks is not None
        sizes.append(sizes[-1] * layer.ranks)
    return sizes[::-1]


def _ring_bandwidth(layer: Layer, parts: Counter[UnitShare]) -> float:
    """Return one rank's bandwidth on a ring: each group enters and leaves each of its units once."""
    sharing: Counter[int] = Counter()
    for part, times in parts.items():
        for unit in part.units:
            sharing[unit] += times
    pairs = _pair_rates(layer, parts)
    rank = inf if layer.rank_bandwidth is None else layer.rank_bandwidth
    return min(
        [
            min(layer.group_bandwidth / sharing[unit], pairs.get((part, unit), inf) if pairs else inf, count * rank)
            for part in parts
            for unit, count in zip(part.units, part.counts, strict=True)
        ]
    )


def _pair_rates(layer: Layer, parts: Counter[UnitShare]) -> dict[tuple[UnitShare, int], float]:
    """Return each group's bandwidth out of each of its units, over the links between pairs of units."""
    wiring = wiring_of(layer)
    if wiring is None:
        return {}
    hops = {part: wiring.hops(part.units) for part in parts}
    loads: dict[Edge, float] = defaultdict(float)
    for part, times in parts.items():
        for links in hops[part].values():
            for edge, share in links.items():
                loads[edge] += times * share
    rates: dict[tuple[UnitShare, int], float] = defaultdict(float)
    for part, routes in hops.items():
        for pair, links in routes.items():
            rate = min(wiring.pair(edge) / loads[edge] for edge in links)
            for unit in pair:
                rates[part, unit] += rate
    return rates


def _direct_bandwidth(layer: Layer, parts: Counter[UnitShare], peers: int | None) -> float:
    """Return one rank's bandwidth when every rank sends to every other, and a unit's ranks share its links.

    Each of `peers` peers gets as many bytes, and only some of these cross the layer; with None all bytes cross it.
    """
    leaving: dict[int, float] = defaultdict(float)
    bandwidth = inf
    for part, times in parts.items():
        for unit, count in zip(part.units, part.counts, strict=True):
            outside = 1.0 if peers is None else (part.size - count) / peers
            leaving[unit] += times * count * outside
            if layer.rank_bandwidth is not None:
                bandwidth = min(bandwidth, layer.rank_bandwidth / outside)
    bandwidth = min(bandwidth, *[layer.group_bandwidth / share for share in leaving.values()])
    wiring = wiring_of(layer)
    return bandwidth if wiring is None else min(bandwidth, least_rate(wiring, wiring.spread(_demands(parts, peers))))


def _demands(parts: Counter[UnitShare], peers: int | None) -> dict[Edge, float]:
    """Return the bytes from each unit to each other, per byte that a rank sends."""
    demands: dict[Edge, float] = defaultdict(float)
    for part, times in parts.items():
        counts = dict(zip(part.units, part.counts, strict=True))
        for a, b in permutations(part.units, 2):
            most = part.size - max(counts[a], counts[b]) if peers is None else peers
            demands[a, b] += times * counts[a] * counts[b] / most
    return demands


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
