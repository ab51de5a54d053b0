"""The least that a redistribution can take, found without a plan: what a search, or a choice, may leave unpriced."""

from __future__ import annotations

from typing import NamedTuple

from dshard.caches import remembered
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial
from dshard.redistribute.alike import links_of
from dshard.topology import Topology


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
            numel = lacking(src, dst, self.shape)
            found = self.limits.latency + numel * self.itemsize / self.limits.rate if numel else 0.0
            self.known[key] = found
        return found


def lacking(src: Layout, dst: Layout, shape: Shape) -> int:
    """Elements that the first rank needs and does not hold; of a reduction to complete it holds none."""
    needed = dst.local_numel(shape)
    for a, b, n in zip(src.placements, dst.placements, src.mesh.shape, strict=True):
        if n > 1 and isinstance(a, Partial) and a != b:
            return needed
    held = 1
    for mine, wanted in zip(src.first_region(shape), dst.first_region(shape), strict=True):
        held *= max(0, min(mine.stop, wanted.stop) - max(mine.start, wanted.start))
    return needed - held


@remembered("limits", 256)
def limits(mesh: Mesh, topology: Topology) -> Limits:
    """The fastest link along any axes of the mesh, and the least latency."""
    links = [link for found in links_of(mesh, topology).values() for link in found]
    rate = max((link.best_bandwidth for link in links), default=float("inf"))
    return Limits(rate, min((link.latency for link in links), default=0.0))
