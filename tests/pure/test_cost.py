"""Prices: they grow with the bytes, stay above what the network allows, and follow the algorithm that runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil, inf, prod

import pytest
from helpers.layout_steps import copied, steps_from, steps_straight
from helpers.topologies import cases
from hypothesis import example, given
from hypothesis import strategies as st

from dshard.cost import (
    collective_seconds,
    copy_seconds,
    hidden_seconds_lost,
    messages_seconds,
    together_seconds,
    tree_all_reduce_seconds,
    work_seconds,
)
from dshard.layout import Layout, Shape, parse_layout
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Partial
from dshard.redistribute import AllGather, AllReduce, Exchange, ReduceScatter, plan
from dshard.redistribute.layout_state import load_of, step_seconds
from dshard.redistribute.step import messages, numel, sizes_received
from dshard.testing import Redistribution, redistributions
from dshard.topology import BYTES, COLLECTIVES, FLAT_CPU, FLAT_CUDA, Collective, Layer, Link, Measured, Topology

Case = tuple[Topology, Mesh, tuple[str, ...]]
SIZES = st.integers(0, 1 << 30)
COLLECTIVE = st.sampled_from(COLLECTIVES)
LATENCY = FLAT_CPU.layers[0].latency
HOSTS = Topology("hosts", (Layer("host", 2, 1e9, 100e-6), Layer("rank", 4, 8e9, 10e-6)))


# -- laws


@given(cases(), COLLECTIVE, SIZES, SIZES)
def test_more_bytes_never_cost_less(case: Case, collective: Collective, some: int, more: int) -> None:
    topology, mesh, axes = case
    low, high = sorted((some, more))

    assert price(collective, low, mesh, axes, topology) <= price(collective, high, mesh, axes, topology)


def price(collective: Collective, nbytes: float, mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> float:
    return collective_seconds(collective, nbytes, mesh, axes, topology)


@given(cases(), COLLECTIVE, st.integers(1, 1 << 20))
def test_no_price_is_below_the_bytes_over_a_cut(case: Case, collective: Collective, piece: int) -> None:
    topology, mesh, axes = case
    n = len(mesh.group(axes, (0,) * mesh.ndim))
    received_bytes = {"all_reduce": 2 * (n - 1) * piece, "broadcast": n * piece, "permute": piece}

    seconds = price(collective, received_bytes.get(collective, (n - 1) * piece), mesh, axes, topology)

    for nbytes, bandwidth in cuts(topology, mesh, axes, collective, piece):
        assert seconds >= nbytes / bandwidth * (1 - 1e-9)


def cuts(
    topology: Topology, mesh: Mesh, axes: tuple[str, ...], collective: Collective, piece: int
) -> Iterator[tuple[float, float]]:
    """The bytes that must enter each unit of each layer from others of the same parent, and the unit's bandwidth.

    Each group has a tensor of one piece for each of its ranks. What all of a unit's ranks need crosses once.
    """
    groups = {tuple(sorted(mesh.group(axes, at))) for at in mesh.coordinates()}
    below = 1
    for layer in reversed(topology.layers):
        entering: Counter[int] = Counter()
        for group in groups:
            for unit in {rank // below for rank in group}:
                parent = unit // (layer.ranks or 1)
                family = [rank for rank in group if rank // (below * (layer.ranks or 1)) == parent]
                inside = sum(rank // below == unit for rank in group)
                outside = len(family) - inside
                if outside:
                    entering[unit] += piece * needed(collective, inside, outside, len(group))
        yield from ((nbytes, layer.group_bandwidth) for nbytes in entering.values())
        below *= layer.ranks or 1


def needed(collective: Collective, inside: int, outside: int, n: int) -> int:
    """How many of `n` pieces a unit with `inside` ranks of a group must get from the `outside` others, at the least."""
    match collective:
        case "all_gather":
            return outside
        case "all_to_all":
            return inside * outside
        case "exchange":
            return inside * (n - 1)  # where all that a rank gets is from others
        case "reduce_scatter":
            return inside  # sums of the others' terms
        case "all_reduce" | "broadcast":
            return n
        case "permute":
            return 1


@given(redistributions())
def test_the_busiest_rank_receives_what_the_closed_form_says(case: Redistribution) -> None:
    src, dst, shape = case
    partial = {i: p.reduce_op for i, p in enumerate(dst.placements) if isinstance(p, Partial)}

    for step in (*steps_from(src, range(len(shape)), partial), *steps_straight(src, dst)):
        most = max(sum(sizes_received(step, src, shape, at)) for at in src.mesh.coordinates())
        found = load_of(step, src, shape)
        assert found.received <= most if isinstance(step, Exchange) else found.received == most
        assert found.copied == copied(step, src, shape)


GRID = Mesh((2, 2), ("a", "b"))


@given(redistributions())
@example((parse_layout("a:S(0) b:S(0)", GRID), parse_layout("a:S(1) b:R", GRID), (5, 6)))
@example((parse_layout("a:S(0) b:S(1)", GRID), parse_layout("a:S(1) b:S(0)", GRID), (6, 5)))
def test_an_exchange_is_counted_by_the_axes_that_it_crosses(case: Redistribution) -> None:
    """What a rank receives in all, and from elsewhere on each axis: the most, and the average."""
    src, dst, shape = case
    for step in steps_straight(src, dst):
        found = load_of(step, src, shape)
        if not isinstance(step, Exchange) or found.average is None:
            continue
        places = [
            at for at in src.mesh.coordinates() if not any(i for i, name in zip_names(at, src) if name not in step.axes)
        ]
        crossing = {axis: [received_across(step, src, shape, at, [axis]) for at in places] for axis in step.axes}
        totals = [received_across(step, src, shape, at, step.axes) for at in places]
        assert found.average == ceil(sum(totals) / len(places))
        if len(step.axes) > 1:
            assert found.along == tuple((max(each), ceil(sum(each) / len(each))) for each in crossing.values())


def zip_names(at: Coordinate, layout: Layout) -> Iterator[tuple[int, str]]:
    return zip(at, layout.mesh.names, strict=True)


def received_across(step: Exchange, src: Layout, shape: Shape, at: Coordinate, axes: Sequence[str]) -> int:
    """The elements that a rank receives from peers that are elsewhere on some of these axes."""
    moved = messages(step, src, shape, at)
    assert moved is not None
    across = [src.mesh.axis(axis) for axis in axes]
    peers = src.mesh.peers(step.axes, at)
    return sum(
        numel(part) for peer, part in zip(peers, moved.recv, strict=True) if any(peer[i] != at[i] for i in across)
    )


@given(redistributions(), st.data())
def test_no_exchange_is_priced_below_what_enters_a_host(case: Redistribution, data: st.DataObject) -> None:
    """Hosts are slices of the mesh along its first axes, and ranks of one host do not load its link."""
    src, dst, shape = case
    cut = data.draw(st.integers(1, src.mesh.ndim))
    hosts, ranks = prod(src.mesh.shape[:cut]), prod(src.mesh.shape[cut:])
    layers = (Layer("host", hosts, 1.0), Layer("rank", ranks, 1e6))
    topology = replace(BYTES, layers=layers)
    src, dst = (in_order(layout) for layout in (src, dst))
    for step in steps_straight(src, dst):
        outer = [axis for axis in step.axes if src.mesh.axis(axis) < cut]
        if not isinstance(step, Exchange) or not outer:
            continue
        entering = Counter[Coordinate]()
        for at in src.mesh.coordinates():
            entering[at[:cut]] += received_across(step, src, shape, at, outer)
        assert step_seconds(step, src, shape, 1, topology) >= max(entering.values()) * (1 - 1e-9)


def in_order(layout: Layout) -> Layout:
    """The layout on ranks 0, 1, 2, ..."""
    return replace(layout, mesh=replace(layout.mesh, ranks=()))


def test_bytes_that_stay_in_a_host_do_not_load_its_link() -> None:
    """Columns for rows, nested: each rank gets half of its columns from the other host, and half of these at home."""
    mesh = Mesh((2, 2), ("host", "rank"))
    src, dst = (parse_layout(text, mesh) for text in ("host:S(0) rank:S(1)", "host:S(1) rank:S(1)"))
    layers = (Layer("host", 2, 1e6), Layer("rank", 2, 1e12))
    topology = replace(BYTES, layers=layers, backend="nccl")
    step, quarter = Exchange(("host", "rank"), dst), 64 * 64 // 4

    assert load_of(step, src, (64, 64)).received == quarter
    assert step_seconds(step, src, (64, 64), 4, topology) == pytest.approx(2 * 4 * quarter / 2 / 1e6, rel=1e-3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_idle_ranks_leave_their_share_of_measured_links_under_gloo(backend: str) -> None:
    """Swapping the dims of two axes, the ranks of the diagonal keep what they have."""
    mesh = Mesh((2, 2), ("a", "b"))
    src, dst = (parse_layout(text, mesh) for text in ("a:S(0) b:S(1)", "a:S(1) b:S(0)"))
    axes = (("a",), ("b",), ("a", "b"))
    computed = replace(FLAT_CPU if backend == "gloo" else FLAT_CUDA, device=BYTES.device)
    measured = replace(computed, measured=tuple(Measured(mesh, each, 0.0, 1e6) for each in axes))
    whole = 100 * 100 * 4 / 4
    assert step_seconds(Exchange(("a", "b"), dst), src, (100, 100), 4, measured) == pytest.approx(
        whole / 1e6 / (2 if backend == "gloo" else 1)
    )


@given(redistributions())
def test_a_plan_on_a_network_that_counts_bytes_costs_its_bytes(case: Redistribution) -> None:
    src, dst, shape = case

    found = plan(src, dst, shape, 4, BYTES)

    assert found.seconds == pytest.approx(4 * found.busiest())


@given(redistributions())
def test_no_collective_costs_an_axis_of_one_rank(case: Redistribution) -> None:
    src, dst, shape = case
    alone = Mesh((1,) * src.mesh.ndim, src.mesh.names)

    found = plan(replace_mesh(src, alone), replace_mesh(dst, alone), shape, 4, FLAT_CPU.bytes_only())

    assert found.seconds == 0


def replace_mesh(layout, mesh):  # type: ignore[no-untyped-def]
    return replace(layout, mesh=mesh)


# -- algorithms


def test_gloo_sums_what_it_exchanged() -> None:
    mesh = Mesh((2, 4), ("host", "rank"))
    piece, everything = 1e6, 8e6

    seconds = collective_seconds("reduce_scatter", 7e6, mesh, mesh.names, HOSTS)

    moved = collective_seconds("all_to_all", 7e6, mesh, mesh.names, HOSTS)
    assert seconds == pytest.approx(moved + work_seconds(0, everything + piece, HOSTS))
    assert seconds > collective_seconds("reduce_scatter", 7e6, mesh, mesh.names, replace(HOSTS, backend="nccl"))


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_a_collective_along_several_axes_begins_as_soon_as_one_after_the_other(collective: Collective) -> None:
    """Bytes take as long as the link of all its ranks lets them; what was measured there is taken as it is."""
    mesh, rounds = Mesh((2, 4), ("host", "rank")), 2 if collective == "all_reduce" else 1
    outer, inner = (HOSTS.link(mesh, [axis]).latency for axis in mesh.names)
    bare = replace(HOSTS, device=replace(HOSTS.device, memory_bandwidth=inf, launch=0.0))

    def seconds(axes: Sequence[str], nbytes: float, topology: Topology = bare) -> float:
        return collective_seconds(collective, nbytes, mesh, axes, topology)

    assert seconds(mesh.names, 0) == pytest.approx(rounds * (1 * outer + 3 * inner + 3 * outer / 1000))
    assert seconds(mesh.names, 0) == pytest.approx(seconds(["host"], 0) + seconds(["rank"], 0), rel=0.01)
    ran = "all_to_all" if collective == "reduce_scatter" else collective  # over gloo
    joined = HOSTS.link(mesh, mesh.names, ran)
    assert seconds(mesh.names, 1e6) - seconds(mesh.names, 0) == pytest.approx(joined.seconds(1e6))
    measured = bare.with_measured([Measured(mesh, ("host", "rank"), 1e-3, 1e9, collective)])
    assert seconds(mesh.names, 0, measured) == pytest.approx(rounds * 7 * 1e-3)


def test_nccl_takes_a_tree_for_a_small_all_reduce_and_a_ring_for_a_large_one() -> None:
    """Where its own algorithms are not known."""
    topology = replace(Topology.preset("dgx-h100", nodes=64), algorithms=())
    mesh = Mesh((64, 8), ("node", "gpu"))
    link = topology.link(mesh, ["node"], "all_reduce")

    assert link == Link(4e-6, 50e9)
    small, large = (collective_seconds("all_reduce", n, mesh, ["node"], topology) for n in (1e4, 1e10))
    assert small == tree_all_reduce_seconds(1e4, 64, link) == pytest.approx(12 * 4e-6 + 1e4 * 64 / 63 / 50e9)
    assert large == messages_seconds(1e10, 126, link) == pytest.approx(126 * 4e-6 + 1e10 / 50e9)


def test_a_two_level_all_reduce_is_a_plan() -> None:
    mesh = Mesh((2, 4), ("host", "rank"))
    topology = replace(HOSTS.bytes_only(), backend="nccl")
    src, dst = (parse_layout(text, mesh) for text in ("host:P(sum) rank:P(sum)", "host:R rank:R"))
    nbytes = 4 * 1024 * 1024

    found = plan(src, dst, (1024, 1024), 4, topology)

    assert found.steps == (ReduceScatter(("rank",), "sum", 0), AllReduce(("host",), "sum"), AllGather(("rank",), 0))
    inner, outer = 8e9, 1e9 / 4  # four groups share the host's link
    assert found.seconds == pytest.approx(2 * 3 / 4 * nbytes / inner + 2 * 1 / 2 * nbytes / 4 / outer)


def test_a_broadcast_in_gloo_sends_all_from_the_root_time_and_again() -> None:
    mesh = Mesh((8,), ("x",))

    assert collective_seconds("broadcast", 1e9, mesh, ["x"], FLAT_CPU) == pytest.approx(3 * (LATENCY + 0.5))
    assert collective_seconds("broadcast", 1e9, mesh, ["x"], FLAT_CUDA) == pytest.approx(7 * 10e-6 + 0.01)
    assert collective_seconds("permute", 1e9, mesh, ["x"], FLAT_CUDA) == pytest.approx(10e-6 + 0.01)


def test_an_exchange_with_few_peers_has_few_messages() -> None:
    mesh = Mesh((8,), ("x",))

    two, all_ = (collective_seconds("exchange", 0, mesh, ["x"], FLAT_CPU, peers=peers) for peers in (2, None))

    assert (two, all_) == (pytest.approx(2 * LATENCY), pytest.approx(7 * LATENCY))


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_measured_figures_include_all_that_a_collective_does(collective: Collective, backend: str) -> None:
    mesh = Mesh((4,), ("x",))
    figures = Measured(mesh, ("x",), 1e-3, 1e6, collective)
    topology = replace(FLAT_CPU, backend=backend, measured=(figures,))
    rounds = {"all_reduce": 6, "permute": 1, "broadcast": 2 if backend == "gloo" else 3}.get(collective, 3)
    sent = 2 if (collective, backend) == ("broadcast", "gloo") else 1

    assert collective_seconds(collective, 1e6, mesh, ["x"], topology) == pytest.approx(rounds * 1e-3 + sent)


# -- local work, and steps


def test_local_work_follows_the_roofline_of_its_dtype() -> None:
    topology = Topology.preset("dgx-h100")

    assert work_seconds(989.4e12, 1, topology) == pytest.approx(1 + 5e-6)
    assert work_seconds(66.9e12, 1, topology, "float32") == pytest.approx(1 + 5e-6)
    assert work_seconds(1, 3.35e12, topology) == pytest.approx(1 + 5e-6)
    assert copy_seconds(3.35e12, topology) == pytest.approx(2 + 5e-6)


def test_beside_a_slow_link_the_cores_compute_that_move_bytes_over_a_fast_one() -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    slow, fast = (Measured(mesh, (axis,), 1e-3, rate, "permute") for axis, rate in (("a", 1e7), ("b", 1e9)))
    alone, both = FLAT_CPU.with_measured([slow]), FLAT_CPU.with_measured([slow, fast])

    assert hidden_seconds_lost(1e7, 1.001, alone) == 1.001  # nothing is hidden
    assert hidden_seconds_lost(1e7, 1.001, both) == pytest.approx(1e-3 + 1e-2)
    assert hidden_seconds_lost(1e7, 1e-3, both) == 1e-3
    assert hidden_seconds_lost(1e7, 1.0, FLAT_CPU) == pytest.approx(100e-6 + 1e7 / 2e9)
    work = 1.0
    beside = work - hidden_seconds_lost(1e7, work, FLAT_CUDA)  # what is computed of it in as long
    assert work / beside == pytest.approx(1.189)


def test_a_gather_that_interleaves_pays_for_its_copies() -> None:
    mesh = Mesh((4,), ("x",))
    shape = (1024, 1024)
    rows, columns = parse_layout("x:S(0)", mesh), parse_layout("x:S(1)", mesh)

    plain = step_seconds(AllGather(("x",), 0), rows, shape, 4, FLAT_CPU)
    strided = step_seconds(AllGather(("x",), 1), columns, shape, 4, FLAT_CPU)

    assert strided - plain == pytest.approx(2 * 4 * prod(shape) / FLAT_CPU.memory_bandwidth)


def test_an_outer_axis_is_not_priced_at_inner_speed() -> None:
    mesh = Mesh((2, 4), ("host", "rank"))

    inner = step_seconds(AllGather(("rank",), 0), parse_layout("host:R rank:S(0)", mesh), (1 << 20,), 4, HOSTS)
    outer = step_seconds(AllGather(("host",), 0), parse_layout("host:S(0) rank:R", mesh), (1 << 20,), 4, HOSTS)

    assert outer == pytest.approx(5e-6 + 100e-6 + (1 << 21) / (1e9 / 4))  # all four groups share the host's link
    assert inner == pytest.approx(5e-6 + 3 * 10e-6 + 3 * (1 << 20) / 8e9)


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_ranks_that_share_cores_end_between_the_mean_and_the_busiest(seconds: list[float], alone: float) -> None:
    shared = replace(FLAT_CPU, device=replace(FLAT_CPU.device, alone=alone))

    together = together_seconds(seconds, shared)

    assert max(seconds) * alone * (1 - 1e-9) <= together <= max(seconds) * (1 + 1e-9)
    assert together >= sum(seconds) / len(seconds) * (1 - 1e-9)
    assert together_seconds(seconds, FLAT_CPU) == pytest.approx(max(seconds))


def test_two_ranks_on_one_core_take_as_long_as_their_work() -> None:
    one_core = replace(FLAT_CPU, device=replace(FLAT_CPU.device, alone=0.5))

    assert together_seconds([2.0, 6.0], one_core) == 4.0  # each at half the rate until the first has done
