"""The least that a redistribution can take, found without a plan: what a search, or a choice, may leave unpriced."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from dshard.caches import remembered
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial
from dshard.topology import Collective, Topology


class Limits(NamedTuple):
    """What no link of a mesh beats: bytes per second, and seconds of latency."""

    rate: float
    latency: float


class Least:
    """Seconds on one mesh and topology for tensors of one shape: the first message, and what the first rank lacks."""

    def __init__(self, mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> None:
        self.limits = limits(mesh, topology)
        self.shape, self.itemsize = shape, itemsize
        self.known: dict[tuple[Layout, Layout], float] = {}

    def __call__(self, src: Layout, dst: Layout) -> float:
        """No plan from `src` to `dst` takes less."""
        key = (src, dst)
        found = self.known.get(key)
        if found is None:
            lacking = self.lacking(src, dst)
            found = self.limits.latency + lacking * self.itemsize / self.limits.rate if lacking else 0.0
            self.known[key] = found
        return found

    def lacking(self, src: Layout, dst: Layout) -> int:
        """Elements that the first rank needs and does not hold; of a reduction to complete it holds none."""
        needed = dst.local_numel(self.shape)
        pairs = zip(src.placements, dst.placements, src.mesh.shape, strict=True)
        if any(isinstance(a, Partial) and a != b and n > 1 for a, b, n in pairs):
            return needed
        held = 1
        for a, b in zip(src.first_region(self.shape), dst.first_region(self.shape), strict=True):
            held *= max(0, min(a.stop, b.stop) - max(a.start, b.start))
        return needed - held


@remembered("limits", 256)
def limits(mesh: Mesh, topology: Topology) -> Limits:
    """The fastest link along any axes of the mesh, and the least latency."""
    names = [name for name, n in zip(mesh.names, mesh.shape, strict=True) if n > 1]
    collectives: tuple[Collective | None, ...] = (
        None,
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "exchange",
    )
    links = [
        topology.link(mesh, axes, collective)
        for count in range(1, len(names) + 1)
        for axes in combinations(names, count)
        for collective in collectives
    ]
    rate = max((link.best_bandwidth for link in links), default=float("inf"))
    return Limits(rate, min((link.latency for link in links), default=0.0))
