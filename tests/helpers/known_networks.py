"""Networks whose bandwidths the papers state."""

from __future__ import annotations

from collections import Counter

from dshard.mesh import Mesh
from dshard.topology import Layer, Topology

GB = 1e9

# ATP (arXiv 2301.08658), figure 7a: four nodes on 200 Gb/s HDR with four GPUs each; in bytes per second.
FIG_7A = Topology(
    "fig 7a",
    (Layer("node", 4, 25 * GB, latency=2e-6), Layer("gpu", 4, 600 * GB, latency=1e-6, pair_bandwidth=200 * GB)),
)
# Figure 7b: a 4 x 4 torus with 25 GB/s links; between rings 100 GB/s, and twice that out of each ring.
FIG_7B = Topology.torus((4, 4), 25 * GB)


def bandwidths(topology: Topology, shape: tuple[int, ...], ranks: tuple[int, ...] = ()) -> list[float]:
    """Return the bandwidth of each axis of a mesh, in GB/s."""
    mesh = Mesh(shape, (), ranks)
    return [topology.link(mesh, [axis]).bandwidth / GB for axis in mesh.names]


def crossings(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[Layer, int]]:
    """Return for each layer the most groups that leave one of its units, counted pair by pair of ranks."""
    groups = {tuple(sorted(mesh.group(axes, at))) for at in mesh.coordinates()}
    most = []
    for i, layer in enumerate(topology.layers):
        leaving: Counter[tuple[int, ...]] = Counter()
        for group in groups:
            paths = {place(topology, rank)[: i + 1] for rank in group}
            leaving.update(path for path in paths if any(p != path and p[:-1] == path[:-1] for p in paths))
        most.append((layer, max(leaving.values(), default=0)))
    return most


def place(topology: Topology, rank: int) -> tuple[int, ...]:
    """Return the unit of each layer that contains a rank, the outermost first."""
    path = []
    for layer in reversed(topology.layers):
        path.append(rank % (layer.ranks or 1))
        rank //= layer.ranks or 1
    return tuple(reversed(path))
