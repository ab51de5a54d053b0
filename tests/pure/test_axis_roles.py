"""Redistributions equal up to the names of mesh axes share one plan, as good as a plan searched for each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dshard.layout import Layout, parse_layout
from dshard.mesh import Mesh
from dshard.placements import REDUCE_OPS
from dshard.redistribute import plan
from dshard.redistribute.axis_roles import roles
from dshard.redistribute.layout_state import step_seconds
from dshard.redistribute.plan import _search, plan_price
from dshard.redistribute.space import space_of
from dshard.redistribute.step import after
from dshard.testing import layouts
from dshard.topology import BYTES, FLAT_CPU, Measured, Topology

MESH = Mesh((2, 2, 2), ("x", "y", "z"))
HOSTS = Topology.preset("dgx-h100", nodes=2, ranks=4)
SHAPES = st.sampled_from([(8, 8), (5, 7), (1024, 512)])
LAYOUTS = layouts(MESH, 2, partial=REDUCE_OPS)


@given(LAYOUTS, LAYOUTS, SHAPES, st.sampled_from([FLAT_CPU, HOSTS, BYTES]))
def test_a_renamed_plan_takes_as_long_as_one_that_is_searched(
    src: Layout, dst: Layout, shape: tuple[int, int], topology: Topology
) -> None:
    found = plan(src, dst, shape, 4, topology)

    layout, seconds = src, 0.0
    for step in found.steps:
        seconds += step_seconds(step, layout, shape, 4, topology)
        layout = after(step, layout)
    assert layout == dst
    assert found.seconds == pytest.approx(seconds)
    room = max(src.local_numel(shape), dst.local_numel(shape))
    space = space_of(MESH, topology, shape, 4)
    searched = None if src == dst else _search(space, space.state_of(src), space.state_of(dst), room)
    if searched is not None:
        assert found.seconds == pytest.approx(searched.seconds)
    assert plan_price(space.state_of(src), space.state_of(dst), space) == (found.seconds, len(found.steps))
    alike = plan(*map(space.layout_of, space.canonical(space.state_of(src), space.state_of(dst))), shape, 4, topology)
    assert (alike.seconds, len(alike.steps)) == (found.seconds, len(found.steps))
    assert alike.busiest() == found.busiest()


@given(LAYOUTS, LAYOUTS, st.permutations(range(3)))
def test_one_redistribution_stands_for_all_that_are_alike(src: Layout, dst: Layout, names: list[int]) -> None:
    space = space_of(MESH, FLAT_CPU, (8, 8), 4)
    ends = space.state_of(src), space.state_of(dst)

    other = [space.with_axes(state, names) for state in ends]

    assert space.canonical(*other) == space.canonical(*ends)
    assert space.with_axes(other[0], [names.index(axis) for axis in range(3)]) is ends[0]
    for axis, name in enumerate(names):
        assert space.layout_of(other[0]).placements[name] == src.placements[axis]


def test_axes_of_one_role_have_one_size_and_the_same_links() -> None:
    assert roles(MESH, FLAT_CPU) == ((0, 1, 2),)
    assert roles(MESH, HOSTS) == ((0,), (1, 2))
    assert roles(Mesh((2, 1, 4, 1), tuple("wxyz")), FLAT_CPU) == ((0,), (1, 3), (2,))
    mixed = Mesh((2, 2), ("x", "y"), (0, 4, 1, 5))
    assert roles(mixed, HOSTS) == ((0,), (1,))


def test_what_is_measured_along_one_axis_parts_it_from_the_others() -> None:
    slow = FLAT_CPU.with_measured([Measured(MESH, ("z",), latency=1e-3, bandwidth=1e6)])

    assert roles(MESH, slow) == ((0, 1), (2,))
    src, dst = (parse_layout(text, MESH) for text in ("x:R y:R z:S(0)", "x:R y:R z:R"))
    assert plan(src, dst, (64, 64), 4, slow).seconds > plan(src, dst, (64, 64), 4, FLAT_CPU).seconds
