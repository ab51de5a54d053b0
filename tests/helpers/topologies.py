"""Hypothesis strategies for topologies, and meshes of their ranks."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from dshard.mesh import Mesh
from dshard.topology import COLLECTIVES, Device, Layer, Measured, Topology
from dshard.topology.algorithms import nccl_algorithms
from dshard.topology.links import Hardware
from dshard.topology.presets import ring

RATES = st.floats(1e6, 1e12)
LATENCIES = st.floats(0, 1e-3)
HARDWARE: tuple[Hardware | None, ...] = ("nvlink", "network", "pcie", None)
ALGORITHMS = (nccl_algorithms("hopper"), nccl_algorithms("ampere"), ())
NAMES = st.text("abcdefgh 0123456789", min_size=1, max_size=8)


@st.composite
def pair_matrices(draw: DrawFn, n: int) -> tuple[tuple[float, ...], ...]:
    """Symmetric bandwidths of pairs, some zero, that join all of `n` units."""
    matrix = [list(row) for row in ring(n, draw(RATES))] if n > 1 else [[0.0]]
    for i in range(n):
        for j in range(i):
            if draw(st.booleans()):
                matrix[i][j] = matrix[j][i] = draw(RATES)
    return tuple(map(tuple, matrix))


@st.composite
def layers(draw: DrawFn) -> Layer:
    n = draw(st.integers(1, 4))
    pair = draw(
        st.one_of(st.none(), RATES, st.builds(ring, st.just(n), RATES) if n > 1 else st.none(), pair_matrices(n))
    )
    alone = draw(st.none() | RATES)
    hardware = draw(st.sampled_from(HARDWARE))
    return Layer(draw(NAMES), n, draw(RATES), draw(LATENCIES), pair, alone, hardware)


@st.composite
def devices(draw: DrawFn) -> Device:
    dtypes = draw(st.lists(st.sampled_from(["float64", "float32", "bfloat16", "float8"]), min_size=1, unique=True))
    memory = draw(RATES | st.just(float("inf")))
    rates = tuple((dtype, draw(RATES)) for dtype in dtypes)
    times = [draw(LATENCIES) for _ in range(3)]
    alone, overlap = draw(st.floats(0.01, 1.0)), draw(st.floats(0.0, 1.0))
    return Device(draw(NAMES), rates, memory, *times, alone=alone, overlap=overlap)


@st.composite
def topologies(draw: DrawFn, *, max_layers: int = 3) -> Topology:
    drawn = draw(st.lists(layers(), min_size=1, max_size=max_layers))
    backend = draw(st.sampled_from(["gloo", "nccl", "xla"]))
    ways = draw(st.sampled_from(ALGORITHMS)) if backend == "nccl" else ()
    return Topology(draw(NAMES), tuple(drawn), draw(devices()), backend, (), draw(st.text(max_size=20)), ways)


@st.composite
def meshes_on(draw: DrawFn, topology: Topology, *, whole: bool = False) -> Mesh:
    """Meshes of some of a topology's ranks in any order, or of all of them."""
    assert topology.size is not None
    sizes: list[int] = []
    for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)):
        if prod(sizes) * n <= topology.size:
            sizes.append(n)
    if whole:
        divisors = [n for n in range(1, topology.size + 1) if topology.size % n == 0]
        first = draw(st.sampled_from(divisors))
        sizes = [first, topology.size // first]
    sizes = sizes or [1]
    ranks = draw(st.permutations(range(topology.size)))[: prod(sizes)]
    if draw(st.booleans()):
        ranks = sorted(ranks)
    return Mesh(tuple(sizes), (), tuple(ranks))


@st.composite
def measured_on(draw: DrawFn, topology: Topology) -> Measured:
    mesh = draw(meshes_on(topology))
    axes = draw(st.lists(st.sampled_from(mesh.names), min_size=1, unique=True))
    collective = draw(st.sampled_from([None, *COLLECTIVES]))
    sizes = tuple(draw(st.lists(st.integers(1, 1 << 30), max_size=3)))
    rates, overlap = (draw(LATENCIES), draw(RATES)), draw(st.none() | st.floats(0.0, 1.0))
    return Measured(mesh, tuple(axes), *rates, collective, "2026-01-02", "cpu", sizes, 0.1, overlap=overlap)


@st.composite
def cases(draw: DrawFn) -> tuple[Topology, Mesh, tuple[str, ...]]:
    """A topology, a mesh of its ranks, and some axes of the mesh."""
    topology = draw(topologies())
    mesh = draw(meshes_on(topology))
    return topology, mesh, tuple(draw(st.lists(st.sampled_from(mesh.names), unique=True)))
