"""Plans as values: they end where they should, nothing cheaper exists, and they say what each rank receives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from helpers.default_cases import THOROUGH, one_way_each
from helpers.layout_steps import before_partial, steps_from, steps_straight, useful_dims
from hypothesis import given
from hypothesis import strategies as st

from dshard.caches import clear_caches
from dshard.comm import CommEvent, listen, runner
from dshard.cost import copy_seconds
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, Region, Shape, parse_layout
from dshard.mesh import Coordinate, Mesh
from dshard.placements import REDUCE_OPS, Partial, Replicate, Shard, chunk
from dshard.redistribute import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Plan,
    ReduceExchange,
    ReduceScatter,
    Step,
    plan,
)
from dshard.redistribute.layout_state import load_of, step_seconds
from dshard.redistribute.plan import Search
from dshard.redistribute.step import after, messages, sizes_received
from dshard.step_timeline import event_seconds
from dshard.testing import Redistribution, layouts, meshes, redistributions, shapes
from dshard.topology import FLAT_CPU, FLAT_CUDA, Layer, Topology

MESH = Mesh((2, 4), ("dp", "tp"))
SMALL = redistributions(meshes(max_axes=2), shapes(max_dims=2))
HOST, HOSTS = Topology.preset("dgx-a100"), Topology.preset("dgx-h100", nodes=4, ranks=2)
TOPOLOGIES = st.sampled_from([FLAT_CPU, FLAT_CUDA])


def planned(src: str, dst: str, shape: Shape = (2048, 2048), mesh: Mesh = MESH) -> Plan:
    return plan(parse_layout(src, mesh), parse_layout(dst, mesh), shape, 4, FLAT_CPU)


def trail(found: Plan) -> list[Layout]:
    """The layouts that a plan passes through, its ends included."""
    layouts_before = list(found.layouts())
    return [*layouts_before, after(found.steps[-1], layouts_before[-1])] if found.steps else [found.src]


# -- laws


@pytest.mark.parametrize(
    ("sizes", "topology"),
    one_way_each(
        [((2, 2), (8, 0)), ((2, 2), (4, 6)), ((2, 1, 2), (0, 7)), ((2, 1, 2), (5,))],
        [Topology.preset("bytes"), FLAT_CPU],
    ),
)
def test_plans_do_not_depend_on_what_was_planned_before(sizes: tuple[Shape, Shape], topology: Topology) -> None:
    """Many ways cost the same. Ranks that have planned other tensors, or read layouts from text, take the same one."""
    axes, shape = sizes
    mesh = Mesh(axes, tuple("xyz"[: len(axes)]))
    placements = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    every = [Layout(mesh, each) for each in product(placements, repeat=len(axes))]
    pairs = list(product(every, repeat=2))[:: 3 if THOROUGH else 7]

    def plans_in(order: list[tuple[Layout, Layout]]) -> dict[tuple[Layout, Layout], Plan]:
        clear_caches()
        return {pair: plan(*pair, shape, 4, topology) for pair in order}

    expected = plans_in(pairs)

    assert plans_in(pairs[::-1]) == expected
    assert plans_in([(parse_layout(str(src), mesh), parse_layout(str(dst), mesh)) for src, dst in pairs]) == expected


@given(redistributions(partial=REDUCE_OPS), TOPOLOGIES)  # type: ignore[arg-type]
def test_a_plan_leads_from_source_to_destination(case: Redistribution, topology: Topology) -> None:
    src, dst, shape = case

    found = plan(src, dst, shape, 4, topology)

    assert (trail(found)[0], trail(found)[-1]) == (src, dst)
    assert found.seconds == pytest.approx(
        sum(step_seconds(step, before, shape, 4, topology) for step, before in found.stages())
    )


@given(redistributions())
def test_a_lean_plan_holds_no_more_than_its_ends(case: Redistribution) -> None:
    src, dst, shape = case
    room = max(src.local_numel(shape), dst.local_numel(shape))

    lean = plan(src, dst, shape, 4, FLAT_CPU)
    free = plan(src, dst, shape, 4, FLAT_CPU, search="free")

    assert all(layout.local_numel(shape) <= room for layout in trail(lean))
    assert free.seconds <= lean.seconds * (1 + 1e-9)


@given(
    redistributions(st.sampled_from([MESH, Mesh((8,), ("x",))])), st.sampled_from([FLAT_CPU, HOST]), st.integers(0, 24)
)
def test_a_joined_plan_is_one_collective_where_that_takes_no_more_alone_or_beside_others(
    case: Redistribution, topology: Topology, power: int
) -> None:
    (src, dst, shape), itemsize = case, 2**power
    joined, lean = (plan(src, dst, shape, itemsize, topology, search=search) for search in ("joined", "lean"))

    if joined is not lean:
        (step,) = joined.steps
        assert isinstance(step, AllGather | AllReduce | ReduceScatter)
        assert trail(joined)[-1] == dst
        assert min(joined.seconds, joined.joined_seconds(itemsize, topology)) <= lean.seconds * (1 + 1e-9)


@pytest.mark.parametrize("search", ["lean", "joined"])
def test_gathers_and_reductions_within_a_host_are_collectives_of_nccl(search: Search) -> None:
    """Messages from each rank to each take at least as long as its rings."""
    mesh = Mesh((8,), ("x",))
    for src, dst, kind in (("S(0)", "R", AllGather), ("P(sum)", "R", AllReduce), ("P(sum)", "S(0)", ReduceScatter)):
        for rows in (8, 2**12, 2**16, 2**20):
            ends = parse_layout(f"x:{src}", mesh), parse_layout(f"x:{dst}", mesh)

            assert [type(step) for step in plan(*ends, (rows, 64), 4, HOST, search=search).steps] == [kind]


@given(SMALL, TOPOLOGIES)
def test_no_sequence_of_three_steps_is_cheaper(case: Redistribution, topology: Topology) -> None:
    src, dst, shape = case

    found = plan(src, dst, shape, 4, topology, search="free")

    cheapest = min(prices(src, dst, shape, topology, depth=3), default=float("inf"))
    assert found.seconds <= cheapest * (1 + 1e-9)


def prices(src: Layout, dst: Layout, shape: Shape, topology: Topology, depth: int) -> Iterator[float]:
    """The seconds of every sequence of at most `depth` steps from `src` to `dst`, over all dims of the tensor."""
    if src == dst:
        yield 0.0
    elif depth:
        partial = {i: p.reduce_op for i, p in enumerate(dst.placements) if i in dst.partial_axes()}  # type: ignore[union-attr]
        targets = (dst, before_partial(src, dst))
        straight = [step for target in targets for step in steps_straight(src, target)]
        for step in (*steps_from(src, useful_dims(src, dst, shape), partial), *straight):
            first = step_seconds(step, src, shape, 4, topology)
            yield from (first + rest for rest in prices(after(step, src), dst, shape, topology, depth - 1))


@given(redistributions(shape=shapes(max_dims=3)), st.data())
def test_a_detour_is_never_cheaper(case: Redistribution, data: st.DataObject) -> None:
    src, dst, shape = case
    via = data.draw(layouts(src.mesh, len(shape)))

    direct = plan(src, dst, shape, 4, FLAT_CPU, search="free")
    detour = [plan(a, b, shape, 4, FLAT_CPU, search="free") for a, b in ((src, via), (via, dst))]

    searched = not any(
        isinstance(step, Exchange | ReduceExchange) for step in detour[0].steps
    )  # they lead to ends only
    if searched and set(via.sharded_dims()) <= set(useful_dims(src, dst, shape)):
        assert direct.seconds <= (detour[0].seconds + detour[1].seconds) * (1 + 1e-9)


@given(redistributions())
def test_planning_again_gives_the_same_plan(case: Redistribution) -> None:
    src, dst, shape = case
    first = plan(src, dst, shape, 4, FLAT_CPU)
    clear_caches()

    assert plan(src, dst, shape, 4, FLAT_CPU) == first


# -- what is sent


@given(redistributions())
def test_what_a_rank_sends_its_peer_receives(case: Redistribution) -> None:
    for step, layout, shape in steps_of(case):
        for at in layout.mesh.coordinates():
            moved = messages(step, layout, shape, at)
            if moved is None:
                continue
            peers = layout.mesh.peers(step.axes, at)
            for i, peer in enumerate(peers):
                theirs = messages(step, layout, shape, peer)
                assert theirs is not None
                sent = moved.send[i if len(moved.send) > 1 else 0]
                got = theirs.recv[peers.index(at) if len(theirs.recv) > 1 else 0]
                assert globally(sent, layout, shape, at) == globally(got, after(step, layout), shape, peer)


@given(redistributions())
def test_each_element_arrives_once(case: Redistribution) -> None:
    for step, layout, shape in steps_of(case):
        for at in layout.mesh.coordinates():
            moved = messages(step, layout, shape, at)
            if moved is not None:
                arrived = sorted(index for region in moved.recv for index in product(*region))
                assert arrived == list(product(*map(range, after(step, layout).local_shape(shape, at))))


@given(redistributions())
def test_what_a_rank_receives_is_counted(case: Redistribution) -> None:
    found = plan(*case, 4, FLAT_CPU)
    for at in found.src.mesh.coordinates():
        total = 0
        for step, layout, shape in steps_of(case):
            total += count_received(step, layout, shape, at)
            assert sum(sizes_received(step, layout, shape, at)) == count_received(step, layout, shape, at)
        assert found.received(at) == total


def count_received(step: Step, layout: Layout, shape: Shape, at: Coordinate) -> int:
    """The elements that the rank at `at` gets from others, element by element."""
    n = len(layout.mesh.group(step.axes, at))
    held = set(product(*layout.region(shape, at)))
    needed = set(product(*after(step, layout).region(shape, at)))
    if isinstance(step, ReduceScatter | ReduceExchange):
        return (n - 1) * len(needed)
    if isinstance(step, AllReduce):
        slots = sorted(layout.mesh.group(step.axes, at))  # a process group deals out the chunks
        own = len(chunk(len(held), n, slots.index(layout.mesh.rank(at))))
        return (n - 1) * own + len(held) - own
    return len(needed - held)


def steps_of(case: Redistribution) -> Iterator[tuple[Step, Layout, Shape]]:
    src, dst, shape = case
    found = plan(src, dst, shape, 4, FLAT_CPU)
    for step, layout in found.stages():
        yield step, layout, shape


def globally(region: Region, layout: Layout, shape: Shape, at: Coordinate) -> list[Coordinate]:
    """The global indices of a region of the local tensor of the rank at `at`."""
    origin = [held.start for held in layout.region(shape, at)]
    return list(product(*([i + start for i in held] for held, start in zip(region, origin, strict=True))))


# -- cases


def test_a_plan_reads_like_a_list() -> None:
    found = planned("dp:P(sum) tp:S(1)", "dp:R tp:R")

    assert str(found) == (
        f"dp:P(sum) tp:S(1)  ->  dp:R tp:R   ({found.seconds * 1e6:.1f} us)\n"
        "  1. reduce_scatter  dp      P(sum) -> S(0)\n"
        "  2. all_to_all      tp      S(1) -> S(0)\n"
        "  3. all_gather      dp,tp   [dp:S(0) tp:S(0)] -> [dp:R tp:R]"
    )


def test_an_exchange_reads_as_layouts() -> None:
    assert str(planned("dp:S(0) tp:S(0)", "dp:S(0) tp:S(0); 0:tp,dp")).splitlines()[1:] == [
        "  1. exchange  dp,tp   [dp:S(0) tp:S(0)] -> [dp:S(0) tp:S(0); 0:tp,dp]"
    ]


def test_nothing_to_do_is_no_step() -> None:
    assert planned("dp:S(0) tp:R", "dp:S(0) tp:R").steps == ()
    assert str(planned("dp:R tp:R", "dp:R tp:R")) == "dp:R tp:R  ->  dp:R tp:R   (0.0 us)"


BOTH = ("dp", "tp")
JOINED = [
    ("dp:P(sum) tp:P(sum)", "dp:R tp:R", AllReduce(BOTH, "sum")),
    ("dp:S(0) tp:S(0)", "dp:R tp:R", AllGather(BOTH, 0)),
    ("dp:S(0) tp:S(0); 0:tp,dp", "dp:R tp:R", AllGather(("tp", "dp"), 0)),
    ("dp:P(sum) tp:P(sum)", "dp:S(0) tp:S(0)", ReduceScatter(BOTH, "sum", 0)),
    ("dp:P(sum) tp:P(sum)", "dp:S(0) tp:S(0); 0:tp,dp", ReduceScatter(("tp", "dp"), "sum", 0)),
    ("dp:S(0) tp:S(0)", "dp:S(1) tp:S(1)", AllToAll(BOTH, 0, 1)),
]


@pytest.mark.parametrize(("src", "dst", "step"), JOINED)
@pytest.mark.parametrize("shape", [(64, 64), (2048, 2048)])
@pytest.mark.parametrize("topology", [FLAT_CPU, FLAT_CUDA, Topology.flat(bandwidth=1e9)], ids=str)
def test_several_axes_are_one_collective(src: str, dst: str, step: Step, shape: Shape, topology: Topology) -> None:
    assert plan(parse_layout(src, MESH), parse_layout(dst, MESH), shape, 4, topology).steps == (step,)


def test_partial_placements_of_several_axes_are_one_step() -> None:
    assert planned("dp:R tp:R", "dp:P(sum) tp:P(sum)").steps == (MakePartial(BOTH, "sum"),)


def test_the_pieces_of_one_collective_are_the_nested_chunks() -> None:
    """Seven rows on two times two ranks are 2, 2, 2, 1 of them; five are 2, 1, 1, 1, and not 2, 2, 1, 0."""
    mesh = Mesh((2, 2), ("x", "y"))
    rows, moved = parse_layout("x:S(0) y:S(0)", mesh), AllGather(("x", "y"), 0)
    for size, expected in ((7, [2, 2, 2, 1]), (5, [2, 1, 1, 1])):
        found = messages(moved, rows, (size, 3), (0, 0))

        assert found is not None
        assert [len(region[0]) for region in found.recv] == expected
        assert load_of(moved, rows, (size, 3)).received == 3 * (size - expected[-1])


def test_a_slow_axis_is_passed_first_where_its_bytes_count() -> None:
    """Each chunk of a fast axis is split over hosts: little of it crosses, and the rest is gathered on each host."""
    mesh, topology = Mesh((2, 4), ("host", "rank")), Topology("hosts", (Layer("host", 2, 1e9), Layer("rank", 4, 1e12)))
    src, dst = parse_layout("host:S(0) rank:S(0); 0:rank,host", mesh), parse_layout("host:R rank:R", mesh)

    found = plan(src, dst, (1 << 20,), 4, topology)
    in_two = (AllGather(("host",), 0), AllGather(("rank",), 0))
    at_once = step_seconds(AllGather(("rank", "host"), 0), src, (1 << 20,), 4, topology)

    assert found.steps == in_two
    assert found.seconds < at_once


def test_a_small_gather_is_one_step_and_a_large_one_spares_its_copy() -> None:
    assert planned("dp:R tp:S(1)", "dp:R tp:R", (64, 64)).steps == (AllGather(("tp",), 1),)
    assert planned("dp:R tp:S(1)", "dp:R tp:R", (2048, 2048)).steps == (AllToAll(("tp",), 1, 0), AllGather(("tp",), 0))


def test_what_is_received_adds_up() -> None:
    found = planned("dp:R tp:S(0)", "dp:R tp:R", (10, 3))

    assert [found.received(at) for at in MESH.coordinates()] == [21, 21, 21, 27] * 2


@pytest.mark.parametrize("shape", [(), (4,)])
def test_layouts_beyond_the_tensor_are_refused(shape: Shape) -> None:
    with pytest.raises(
        LayoutError, match=rf"S\(1\) is out of range for shape .*: the tensor has {len(shape)} dims; use"
    ):
        planned("dp:S(1) tp:R", "dp:R tp:R", shape)


def test_a_plan_stays_on_its_mesh() -> None:
    other = parse_layout("x:R", Mesh((8,), ("x",)))
    with pytest.raises(MeshError, match=r"cannot redistribute from the mesh \(dp=2 tp=4\) to the mesh \(x=8\)"):
        plan(parse_layout("dp:R tp:R", MESH), other, (4,), 4, FLAT_CPU)


def test_numbers_of_elements_beyond_memory_are_no_trouble() -> None:
    mesh = Mesh((64, 8), ("dp", "tp"))
    found = planned("dp:S(0) tp:R", "dp:R tp:S(1)", (2**20, 2**20), mesh)

    assert found.received((0, 0)) == 2**20 * 2**17 - 2**14 * 2**17


@given(redistributions(meshes(max_ranks=8), shapes(max_dims=3)), st.sampled_from([FLAT_CPU, HOST, HOSTS]))
def test_recorded_collectives_take_the_seconds_of_their_steps(case: Redistribution, topology: Topology) -> None:
    """Of an exchange these depend on how many ranks send, and along which axes."""
    src, dst, shape = case
    moved, events = plan(src, dst, shape, 4, topology), list[CommEvent]()

    with listen(events.append):
        runner(moved)(torch.empty(src.local_shape(shape, (0,) * src.mesh.ndim), device="meta"))

    copies = sum(copy_seconds(load.copied * 4, topology) for load in moved.loads())
    assert sum(event_seconds(event, topology) for event in events) + copies == pytest.approx(moved.seconds)
