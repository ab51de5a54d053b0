"""Layouts as searches see them: the same steps at the same prices, and bounds that no plan is below."""

from __future__ import annotations

import pytest
from helpers.layout_steps import steps_from, steps_straight, useful_dims
from hypothesis import given
from hypothesis import strategies as st

from dshard.layout import Layout, Shape, parse_layout
from dshard.mesh import Mesh
from dshard.ops.matmul.rules import matmul_rule
from dshard.placements import REDUCE_OPS, Partial
from dshard.redistribute import AllGather, AllReduce, Step, plan
from dshard.redistribute.layout_state import LayoutEdge, State, step_seconds
from dshard.redistribute.plan import plan_price_within
from dshard.redistribute.space import Space
from dshard.redistribute.step import after
from dshard.rules.expand import Operand
from dshard.rules.strategy import Constraints, Question
from dshard.rules.strategy_choice import choose, strategies
from dshard.testing import Redistribution, layouts, meshes, redistributions, shapes
from dshard.topology import BYTES, FLAT_CPU, FLAT_CUDA, Collective, Measured, Topology

CUBE, GRID, LINE = Mesh((2, 2, 2), ("x", "y", "z")), Mesh((2, 2), ("x", "y")), Mesh((4,), ("x",))
HOSTS = Topology.preset("dgx-h100", nodes=2, ranks=4)
POINTS = ((1000.0, 1e-5), (100000.0, 5e-3))
SLOW = FLAT_CUDA.with_measured([Measured(CUBE, ("z",), 1e-4, 1e8, points=POINTS), Measured(GRID, ("x",), 1e-3, 1e6)])
TOPOLOGIES = st.sampled_from([FLAT_CPU, FLAT_CUDA, BYTES, HOSTS, SLOW])
SMALL = redistributions(meshes(max_ranks=8), shapes(max_dims=3), partial=REDUCE_OPS)
SHAPES = st.sampled_from([(8, 8), (5, 7), (1024, 512), (2, 1)])
LAID = layouts(CUBE, 2, partial=("sum",))


@given(SMALL, TOPOLOGIES)
def test_steps_on_one_axis_are_those_of_layouts(case: Redistribution, topology: Topology) -> None:
    src, dst, shape = case
    space, dims = Space(src.mesh, topology, shape, 4), useful_dims(src, dst, shape)
    begins = tuple((i, p.reduce_op) for i, p in enumerate(dst.placements) if isinstance(p, Partial))

    found = space.successors(space.state_of(src), dims, begins)

    steps = steps_from(src, dims, dict(begins))
    assert [step_of(space, space.state_of(src), move) for move in found] == steps
    assert [space.layout_of(move.there) for move in found] == [after(step, src) for step in steps]
    assert [move.seconds for move in found] == [step_seconds(step, src, shape, 4, topology) for step in steps]


SECONDS = st.floats(1e-5, 1e-2)


@given(st.sampled_from(["x:S(0)", "x:S(1)", "x:P(sum)"]), SHAPES, st.data())
def test_weights_and_gradients_are_joined_whatever_latencies_are(src: str, shape: Shape, data: st.DataObject) -> None:
    """Exchanges cannot be: each gradient would take collectives of its own."""
    kinds: tuple[Collective, ...] = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
    figures = [Measured(LINE, ("x",), data.draw(SECONDS), 1e9, kind) for kind in kinds]
    ends = parse_layout(src, LINE), parse_layout("x:R", LINE)

    found = plan(*ends, shape, 4, FLAT_CPU.with_measured(figures), search="joined")

    assert [type(step) for step in found.steps] in ([AllGather], [AllReduce])


@given(LAID, layouts(CUBE, 2, partial=()), SHAPES, TOPOLOGIES)
def test_a_step_straight_to_the_end_is_that_of_layouts(
    src: Layout, dst: Layout, shape: Shape, topology: Topology
) -> None:
    space, steps = Space(src.mesh, topology, shape, 4), steps_straight(src, dst)
    ends = space.state_of(src), space.state_of(dst)

    found = space.direct(*ends)

    assert (found is None) == (not steps)
    if found is not None:
        assert found.seconds == step_seconds(steps[0], src, shape, 4, topology)
        assert step_of(space, ends[0], found) == steps[0]


def step_of(space: Space, here: State, move: LayoutEdge) -> Step:
    """The step of a move as a value, under the names that its mesh axes have."""
    return space.step(here, move.there, move.kind, range(space.mesh.ndim))


@given(redistributions(meshes(max_ranks=8), shapes(max_dims=2)), TOPOLOGIES)
def test_no_plan_takes_less_than_the_least(case: Redistribution, topology: Topology) -> None:
    below_every_plan(*case, topology)


@given(LAID, LAID, SHAPES, TOPOLOGIES)
def test_no_plan_takes_less_than_the_least_where_axes_differ(
    src: Layout, dst: Layout, shape: Shape, topology: Topology
) -> None:
    below_every_plan(src, dst, shape, topology)


BETWEEN_HOSTS = [
    ("x:S(0) y:R z:R", "x:R y:R z:R"),
    ("x:S(0) y:S(0) z:R", "x:R y:R z:R"),
    ("x:S(0) y:S(1) z:S(1)", "x:S(1) y:S(0) z:S(0)"),
    ("x:P(sum) y:R z:R", "x:R y:R z:R"),
    ("x:P(sum) y:P(sum) z:R", "x:R y:R z:R"),
    ("x:P(sum) y:R z:R", "x:S(0) y:R z:R"),
    ("x:P(sum) y:P(sum) z:P(sum)", "x:S(0) y:S(0) z:S(0)"),
]


@pytest.mark.parametrize(("src", "dst"), BETWEEN_HOSTS)
@pytest.mark.parametrize("shape", [(1024, 512), (16384, 16384)])
def test_the_least_between_hosts_is_near(src: str, dst: str, shape: Shape) -> None:
    """A search that knows what must pass between hosts leaves most other plans unpriced."""
    ends = parse_layout(src, CUBE), parse_layout(dst, CUBE)
    space = Space(CUBE, HOSTS, shape, 4)

    least = space.least(*map(space.state_of, ends))

    assert 0.43 < least / plan(*ends, shape, 4, HOSTS, search="free").seconds <= 1
    below_every_plan(*ends, shape, HOSTS)


def below_every_plan(src: Layout, dst: Layout, shape: Shape, topology: Topology) -> None:
    space = Space(src.mesh, topology, shape, 4)
    found = plan(src, dst, shape, 4, topology, search="free")

    layout, rest = src, found.seconds
    for step in found.steps:
        assert space.least(space.state_of(layout), space.state_of(dst)) <= rest * (1 + 1e-9)
        rest, layout = rest - step_seconds(step, layout, shape, 4, topology), after(step, layout)


@given(LAID, LAID, SHAPES, TOPOLOGIES, st.floats(0.5, 2))
def test_a_plan_is_found_within_its_seconds(
    src: Layout, dst: Layout, shape: Shape, topology: Topology, times: float
) -> None:
    expected = plan(src, dst, shape, 4, topology)

    space = Space(CUBE, topology, shape, 4)
    first, last = space.canonical(space.state_of(src), space.state_of(dst))
    found = plan_price_within(first, last, space, expected.seconds * times)

    if abs(times - 1) > 1e-9 and expected.seconds:
        assert (found is None) == (times < 1)
    if found is not None:
        assert found.seconds == pytest.approx(expected.seconds)


@given(st.data(), TOPOLOGIES)
def test_no_strategy_is_cheaper_than_the_chosen_one(data: st.DataObject, topology: Topology) -> None:
    m, k, n = data.draw(st.sampled_from([(64, 128, 32), (5, 7, 3), (2048, 512, 1024)]))
    rule, outputs = matmul_rule((m, k), (k, n)), (((m, n), 4),)
    operands = [Operand(data.draw(layouts(GRID, 2)), shape, 4) for shape in ((m, k), (k, n))]
    flags = st.tuples(st.booleans(), st.booleans())
    result = data.draw(st.none() | layouts(GRID, 2, partial=()))
    constraints = Constraints(result=result, gradients=data.draw(flags), kept=data.draw(flags))

    chosen = choose(Question(rule, operands, outputs, topology, constraints)).strategy

    cheapest = min(s.seconds for s in strategies(Question(rule, operands, outputs, topology, constraints)))
    assert chosen.seconds == pytest.approx(cheapest)
