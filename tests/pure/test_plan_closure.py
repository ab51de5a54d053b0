"""Bounds, and prices of plans, against the closure of all steps between all layouts."""

from __future__ import annotations

import pytest
from helpers.plan_closure import closure

from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.redistribute.plan import plan_price
from dshard.redistribute.space import Space
from dshard.topology import BYTES, FLAT_CPU, Layer, Topology

LINE, GRID, WIDE, CUBE = (Mesh(sizes, tuple("xyz"[: len(sizes)])) for sizes in ((8,), (2, 2), (2, 4), (2, 2, 2)))
GPUS, SLOW = Topology.preset("dgx-h100"), Topology("hosts", (Layer("host", 2, 1e8), Layer("rank", 4, 1e10)))
TOPOLOGIES = [GPUS, FLAT_CPU, BYTES, Topology.preset("dgx-h100", nodes=2, ranks=4), SLOW]
THOROUGH = [
    (mesh, shape, topology)
    for mesh in (LINE, WIDE, CUBE)
    for shape in ((2048, 1024), (5, 7), (64, 4096, 8192), (7, 5, 3), (8, 128, 16, 64))
    for topology in TOPOLOGIES
    if mesh is not CUBE or len(shape) < 4
]


@pytest.mark.parametrize("topology", [GPUS, FLAT_CPU, BYTES, Topology.preset("dgx-h100", nodes=2, ranks=2)], ids=str)
@pytest.mark.parametrize("shape", [(2048, 1024), (5, 3)])
def test_no_sequence_of_steps_is_below_the_bound(shape: Shape, topology: Topology) -> None:
    are_bounds(GRID, shape, topology)


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "shape", "topology"), THOROUGH, ids=str)
def test_no_sequence_of_steps_is_below_the_bound_on_more_meshes(mesh: Mesh, shape: Shape, topology: Topology) -> None:
    are_bounds(mesh, shape, topology)


def are_bounds(mesh: Mesh, shape: Shape, topology: Topology) -> None:
    """Compare all bounds with the closure, and all plans, which are none of its sequences if they take less."""
    known, space = closure(mesh, shape, topology), Space(mesh, topology, shape, 2)
    for src in known.layouts:
        for dst in known.layouts:
            ends = space.state_of(src), space.state_of(dst)
            if src != dst:
                assert space.least(*ends) <= known.seconds(src, dst, lean=False) * (1 + 1e-9)
                assert plan_price(*ends, space).seconds >= known.seconds(src, dst) * (1 - 1e-9)
