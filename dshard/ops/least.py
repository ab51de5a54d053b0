"""The least that a redistribution can take, found without a plan: what a choice may leave unpriced."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations
from math import prod

from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial
from dshard.topology import Collective, Topology


class Least:
    """Seconds on one mesh and topology: the bytes that the first rank lacks over the fastest link there is."""

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        self.rate = fastest(mesh, topology)
        self.first = (0,) * mesh.ndim
        self.known: dict[tuple[Layout, Layout, Shape], int] = {}

    def __call__(self, src: Layout, dst: Layout, shape: Shape, itemsize: int) -> float:
        """No plan from `src` to `dst` takes less."""
        key = (src, dst, shape)
        lacking = self.known.get(key)
        if lacking is None:
            lacking = self.known[key] = _lacking(src, dst, shape, self.first)
        return lacking * itemsize / self.rate


def _lacking(src: Layout, dst: Layout, shape: Shape, first: tuple[int, ...]) -> int:
    if src == dst:
        return 0
    terms = prod(src.mesh.shape[axis] for axis in src.partial_axes() if not isinstance(dst.placements[axis], Partial))
    needed = dst.local_numel(shape)
    if terms > 1:
        return needed * (terms - 1) // terms
    held = 1
    for dim, size in enumerate(shape):
        a, b = src.dim_range(dim, size, first), dst.dim_range(dim, size, first)
        held *= max(0, min(a.stop, b.stop) - max(a.start, b.start))
    return needed - held


@lru_cache(maxsize=256)
def fastest(mesh: Mesh, topology: Topology) -> float:
    """Bytes per second of the fastest link along any axes of the mesh."""
    names = [name for name, n in zip(mesh.names, mesh.shape, strict=True) if n > 1]
    collectives: tuple[Collective | None, ...] = (
        None,
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "exchange",
    )
    rates = [
        topology.link(mesh, axes, collective).best_bandwidth
        for count in range(1, len(names) + 1)
        for axes in combinations(names, count)
        for collective in collectives
    ]
    return max(rates, default=float("inf"))
