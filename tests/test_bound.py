"""Plans against the exact lower bound of what a redistribution must receive."""

from __future__ import annotations

from itertools import product
from statistics import geometric_mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard import Layout, Mesh, Partial, Replicate, Shard
from dshard.redistribute import plan
from dshard.redistribute.bound import lower_bound
from dshard.testing import layouts, meshes, shapes
from dshard.topology import FLAT_CPU

WORDS = (Replicate(), Partial(), Shard(0), Shard(1))


def mean_received(src: Layout, dst: Layout, shape: tuple[int, ...], topology=FLAT_CPU) -> float:
    moved = plan(src, dst, shape, 4, topology)
    return sum(moved.received(at) for at in src.mesh.coordinates()) / src.mesh.size


@pytest.mark.parametrize("sizes", [(2, 4), pytest.param((2, 2, 2), marks=pytest.mark.thorough)])
def test_the_plans_of_fewest_bytes_are_at_the_bound(sizes):
    """All transitions of a matrix that end without a pending reduction."""
    mesh, shape = Mesh(sizes), (2048, 2048)
    ratios = []
    for src, dst in product(product(WORDS, repeat=len(sizes)), repeat=2):
        if src != dst and Partial() not in dst:
            here, there = Layout(mesh, src), Layout(mesh, dst)
            bound, received = lower_bound(here, there, shape), mean_received(here, there, shape, FLAT_CPU.bytes_only())
            assert bound <= received
            if bound:
                ratios.append(received / bound)
            else:
                assert received == 0

    assert geometric_mean(ratios) <= 1.05
    assert max(ratios) <= 1.5


@given(st.data())
def test_no_plan_is_below_the_bound(data):
    mesh = data.draw(meshes(max_ranks=8))
    shape = data.draw(shapes())
    src, dst = data.draw(layouts(mesh, len(shape))), data.draw(layouts(mesh, len(shape)))

    assert mean_received(src, dst, shape) >= lower_bound(src, dst, shape) or dst.partial_axes()


def test_known_bounds():
    mesh = Mesh((8,))
    whole, rows, columns, pending = (Layout(mesh, (p,)) for p in (Replicate(), Shard(0), Shard(1), Partial()))

    assert lower_bound(rows, whole, (64, 64)) == 64 * 64 * 7 / 8
    assert lower_bound(rows, columns, (64, 64)) == 64 * 64 / 8 * 7 / 8
    assert lower_bound(pending, rows, (64, 64)) == 64 * 64 * 7 / 8
    assert lower_bound(pending, whole, (64, 64)) == 2 * 64 * 64 * 7 / 8
    assert lower_bound(whole, rows, (64, 64)) == 0
