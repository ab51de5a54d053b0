"""Topologies: what the groups of mesh axes get of a network, presets, measured figures, files."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isinf
from typing import Any

import pytest
from helpers.known_networks import FIG_7A, FIG_7B, GB, bandwidths, crossings
from helpers.topologies import cases, measured_on, topologies
from hypothesis import given
from hypothesis import strategies as st

from dshard.mesh import Mesh
from dshard.testing import meshes
from dshard.topology import COLLECTIVES, FLAT_CPU, PRESETS, Layer, Link, Measured, Topology
from dshard.topology.presets import ring
from dshard.topology.sharing import groups_of

Case = tuple[Topology, Mesh, tuple[str, ...]]


# -- the paper's examples, and other machines


def test_two_groups_share_a_node_in_figure_7a() -> None:
    assert bandwidths(FIG_7A, (8, 2)) == [12.5, 200]


def test_four_groups_share_each_ring_in_figure_7b() -> None:
    rings, devices = FIG_7B.layers

    assert (rings.group_bandwidth, rings.pair_bandwidth) == (200 * GB, ring(4, 100 * GB))
    assert (devices.group_bandwidth, devices.pair_bandwidth) == (50 * GB, ring(4, 25 * GB))
    assert bandwidths(FIG_7B, (4, 4)) == [50, 50]


def test_figure_7a_on_other_meshes() -> None:
    assert bandwidths(FIG_7A, (4, 4)) == [6.25, 600]
    assert bandwidths(FIG_7A, (2, 8)) == [6.25, 25]
    assert bandwidths(FIG_7A, (16, 1)) == [25, inf]
    assert bandwidths(FIG_7A, (2, 2, 4)) == [6.25, 6.25, 600]


def test_the_order_of_ranks_decides_what_a_group_crosses() -> None:
    scattered = tuple(node * 4 + gpu for gpu in range(4) for node in range(4))

    assert bandwidths(FIG_7A, (4, 4), scattered) == [600, 6.25]


def test_groups_that_divide_no_node_evenly_are_seen_as_they_lie() -> None:
    topology = Topology("2 x 3", (Layer("node", 2, 10 * GB), Layer("gpu", 3, 100 * GB)))

    assert bandwidths(topology, (3, 2)) == [5, 10]  # the pair 2, 3 crosses; both d0 groups have ranks in each node


def test_a_device_has_its_own_nic() -> None:
    topology = Topology.preset("dgx-a100", nodes=2)

    assert bandwidths(topology, (2, 8)) == [25, 300]
    assert bandwidths(topology, (16, 1)) == [200, inf]  # one ring through each NIC
    assert bandwidths(topology, (2,), (0, 8)) == [25]  # nobody shares, and yet there is one NIC


def test_a_torus_carries_the_traffic_of_those_between() -> None:
    assert bandwidths(FIG_7B, (2, 8)) == [25, 50]  # rows 0 and 2 reach each other through 1 and 3, as do these
    assert bandwidths(FIG_7B, (4, 2, 2)) == [50, 25, 25]
    assert bandwidths(Topology.torus((8,), 10 * GB), (4,), (0, 2, 4, 6)) == [20]


def test_a_pair_link_bounds_a_pair_and_several_bound_a_larger_group() -> None:
    cube = ((0, 50, 50, 0), (50, 0, 0, 50), (50, 0, 0, 50), (0, 50, 50, 0))
    topology = Topology(
        "square", (Layer("gpu", 4, 100 * GB, pair_bandwidth=tuple(tuple(x * GB for x in r) for r in cube)),)
    )

    assert bandwidths(topology, (4,)) == [100]
    assert bandwidths(topology, (2, 2)) == [50, 50]
    assert bandwidths(topology, (2, 2), (0, 3, 1, 2)) == [50, 50]  # 0-3 and 1-2: two ways each, each shared by both


def test_an_all_to_all_sends_all_that_leaves_a_node_through_its_links() -> None:
    mesh = Mesh((4, 4), ("node", "gpu"))

    ring_, pairwise, worst = (
        FIG_7A.link(mesh, ["node", "gpu"], collective).bandwidth
        for collective in ("all_gather", "all_to_all", "exchange")
    )

    assert ring_ == 25 * GB
    assert pairwise == pytest.approx(25 * GB * 15 / (4 * 12))  # four ranks send 12 of 15 parts each through the NIC
    assert worst == 25 * GB / 4


def test_the_latency_is_that_of_the_outermost_layer_crossed() -> None:
    mesh = Mesh((4, 4), ("node", "gpu"))

    assert FIG_7A.link(mesh, ["gpu"]).latency == 1e-6
    assert FIG_7A.link(mesh, ["node"]).latency == FIG_7A.link(mesh, ["node", "gpu"]).latency == 2e-6


def test_a_group_of_one_rank_needs_no_network() -> None:
    assert FIG_7A.link(Mesh((1, 16), ("a", "b")), ["a"]) == Link(0.0, inf)
    assert FIG_7A.link(Mesh((16,), ("a",)), []) == Link(0.0, inf)


# -- laws


@given(st.data())
def test_row_major_meshes_follow_the_closed_form(data: st.DataObject) -> None:
    """Where all sizes are powers of two, reference/nd_tp.md section 2 has it: D_j ranks below, share min(d2, D_j)."""
    powers = st.sampled_from([1, 2, 4])
    rates = st.integers(1, 1000).map(float)
    layers = tuple(
        Layer(f"l{i}", data.draw(powers), data.draw(rates), pair_bandwidth=data.draw(st.none() | rates))
        for i in range(3)
    )
    size = layers[0].ranks * layers[1].ranks * layers[2].ranks  # type: ignore[operator]
    d1 = data.draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, 32, 64) if n <= size]))
    mesh = Mesh((d1, size // d1), ("d1", "d2"))

    topology = Topology("powers", layers)

    found = [topology.link(mesh, [axis]).bandwidth for axis in mesh.names]
    assert found == pytest.approx(closed_form(layers, d1, size // d1))


def closed_form(layers: tuple[Layer, ...], d1: int, d2: int) -> list[float]:
    first, second, below = inf, inf, 1
    for layer in reversed(layers):
        n = layer.ranks or 1
        if d2 > below:
            second = min(second, usable(layer, min(d2 // below, n)))
        if d2 < n * below and d1 > 1:
            peers = min(n, d1) if d2 <= below else n * below // d2
            first = min(first, usable(layer, peers) / min(d2, below))
        below *= n
    return [first, second]


def usable(layer: Layer, units: int) -> float:
    if units == 1:
        return inf
    assert not isinstance(layer.pair_bandwidth, tuple)
    return min(layer.group_bandwidth, inf if layer.pair_bandwidth is None else layer.pair_bandwidth * (units - 1))


@given(cases(), st.sampled_from([None, *COLLECTIVES]))
def test_a_link_is_no_better_than_any_layer_its_groups_cross(case: Case, collective: Any) -> None:
    topology, mesh, axes = case

    link = topology.link(mesh, axes, collective)

    crossed = [(layer, most) for layer, most in crossings(topology, mesh, axes) if most]
    if collective != "all_to_all":  # of which some bytes stay within a unit
        assert all(link.bandwidth <= layer.group_bandwidth * (1 + 1e-9) for layer, _ in crossed)
    if collective is None:
        assert all(link.bandwidth <= layer.group_bandwidth / most * (1 + 1e-9) for layer, most in crossed)
    assert link.latency == (crossed[0][0].latency if crossed else 0.0)
    assert isinf(link.bandwidth) == (not crossed)


@given(cases(), st.sampled_from([None, *COLLECTIVES]), st.data())
def test_only_the_groups_of_ranks_count(case: Case, collective: Any, data: st.DataObject) -> None:
    topology, mesh, axes = case
    order = data.draw(st.permutations(range(mesh.ndim)))
    names = tuple(f"n{i}" for i in order)
    shape = tuple(mesh.shape[i] for i in order)
    turned = Mesh(shape, names)
    ranks = tuple(mesh.rank([at[order.index(i)] for i in range(mesh.ndim)]) for at in turned.coordinates())

    same = topology.link(Mesh(shape, names, ranks), [f"n{mesh.axis(axis)}" for axis in axes], collective)

    assert same == topology.link(mesh, axes, collective)


@given(meshes(), st.data())
def test_on_a_flat_network_no_order_of_ranks_matters(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))
    other = Mesh(mesh.shape, mesh.names, tuple(data.draw(st.permutations(mesh.ranks))))

    links = {FLAT_CPU.link(m, axes, c) for m in (mesh, other) for c in (None, *COLLECTIVES)}

    alone = len(mesh.group(axes, (0,) * mesh.ndim)) == 1
    assert links == {Link(0.0, inf) if alone else Link(FLAT_CPU.layers[0].latency, 2e9)}


@given(cases(), st.sampled_from([None, *COLLECTIVES]))
def test_twice_the_bandwidth_everywhere_is_twice_the_bandwidth_of_each_link(case: Case, collective: Any) -> None:
    topology, mesh, axes = case

    faster = replace(topology, layers=tuple(map(doubled, topology.layers)))

    before, after = topology.link(mesh, axes, collective), faster.link(mesh, axes, collective)
    assert after.bandwidth == pytest.approx(2 * before.bandwidth)
    assert after.latency == before.latency


def doubled(layer: Layer) -> Layer:
    pair: Any = layer.pair_bandwidth
    if isinstance(pair, tuple):
        pair = tuple(tuple(2 * value for value in row) for row in pair)
    elif pair is not None:
        pair = 2 * pair
    alone = None if layer.rank_bandwidth is None else 2 * layer.rank_bandwidth
    return replace(layer, group_bandwidth=2 * layer.group_bandwidth, pair_bandwidth=pair, rank_bandwidth=alone)


@given(cases())
def test_one_bandwidth_for_all_pairs_is_a_matrix_of_it(case: Case) -> None:
    topology, mesh, axes = case

    def written_out(layer: Layer) -> Layer:
        pair, n = layer.pair_bandwidth, layer.ranks
        assert n is not None
        if not isinstance(pair, float):
            return layer
        return replace(layer, pair_bandwidth=tuple(tuple(pair * (i != j) for j in range(n)) for i in range(n)))

    same = replace(topology, layers=tuple(map(written_out, topology.layers)))

    for collective in (None, *COLLECTIVES):
        ours, theirs = topology.link(mesh, axes, collective), same.link(mesh, axes, collective)
        assert ours.bandwidth == pytest.approx(theirs.bandwidth)


@given(cases())
def test_an_exchange_expects_the_worst_of_an_all_to_all(case: Case) -> None:
    topology, mesh, axes = case

    exchange, uniform = (topology.link(mesh, axes, c).bandwidth for c in ("exchange", "all_to_all"))  # type: ignore[arg-type]

    assert exchange <= uniform * (1 + 1e-9)


@given(meshes(), st.data())
def test_groups_are_those_of_the_mesh(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.names), unique=True))

    assert set(groups_of(mesh, axes)) == {tuple(sorted(mesh.group(axes, at))) for at in mesh.coordinates()}


@given(topologies())
def test_bytes_only_keeps_the_bandwidths_and_nothing_else(topology: Topology) -> None:
    bare = topology.bytes_only()
    mesh = Mesh((topology.size or 1,), ("x",))

    assert bare.link(mesh, ["x"]) == replace(topology.link(mesh, ["x"]), latency=0.0)
    assert (bare.launch, bare.memory_bandwidth) == (0.0, inf)
    assert bare.bytes_only() == bare


# -- measured figures


@given(st.data())
def test_measured_figures_win(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    measured = data.draw(measured_on(topology))
    known = topology.with_measured([measured])

    for collective in (None, *COLLECTIVES):
        link = known.link(measured.mesh, measured.axes, collective)
        counts = measured.collective in (None, collective) or (collective, measured.collective) == (
            "exchange",
            "all_to_all",
        )
        assert link.measured == counts
        if counts and collective == "exchange":  # which is as slow as on any of its axes
            assert link.bandwidth <= measured.bandwidth
        elif counts:
            assert (link.latency, link.bandwidth) == (measured.latency, measured.bandwidth)
        else:
            assert link == topology.link(measured.mesh, measured.axes, collective)


def test_figures_belong_to_groups_of_ranks_not_to_names() -> None:
    taken = Measured(Mesh((2, 4), ("dp", "tp")), ("tp",), 1e-6, 7 * GB, "all_reduce")
    topology = FLAT_CPU.with_measured([taken])

    assert topology.link(Mesh((2, 2, 2), ("a", "b", "c")), ["c", "b"], "all_reduce").bandwidth == 7 * GB
    assert topology.link(Mesh((2, 4), ("dp", "tp")), ["dp"], "all_reduce") == Link(FLAT_CPU.layers[0].latency, 2e9)
    assert topology.link(Mesh((2, 4), ("dp", "tp"), (0, 2, 4, 6, 1, 3, 5, 7)), ["tp"], "all_reduce").bandwidth == 2e9
    assert topology.link(Mesh((4,), ("tp",)), ["tp"], "all_reduce").bandwidth == 2e9


def test_what_is_hidden_along_an_axis_is_that_of_its_groups_or_else_of_the_device() -> None:
    mesh, device = Mesh((2, 4), ("dp", "tp")), replace(FLAT_CPU.device, overlap=0.25)
    known, unknown = (
        Measured(mesh, (axis,), 1e-6, GB, collective, overlap=overlap)
        for axis, collective, overlap in (("tp", "all_reduce", 0.75), ("dp", "all_gather", None))
    )
    topology = replace(FLAT_CPU, device=device).with_measured([known, unknown])

    assert topology.overlap(mesh, ["tp"]) == 0.75  # of all collectives of these groups
    assert topology.overlap(Mesh((2, 2, 2), ("a", "b", "c")), ["c", "b"]) == 0.75
    assert topology.overlap(mesh, ["dp"]) == topology.overlap(mesh, ["dp", "tp"]) == 0.25


def test_a_figure_of_the_collective_comes_before_one_of_any_and_a_later_before_an_earlier() -> None:
    mesh = Mesh((4,), ("x",))
    figures = [
        Measured(mesh, ("x",), 0, bandwidth, collective) for bandwidth, collective in ((1, "all_gather"), (2, None))
    ]  # type: ignore[arg-type]
    topology = FLAT_CPU.with_measured(figures).with_measured([Measured(mesh, ("x",), 0, 3)])

    assert topology.link(mesh, ["x"], "all_gather").bandwidth == 1
    assert topology.link(mesh, ["x"], "all_reduce").bandwidth == 3


# -- presets and defaults


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_a_preset_says_where_its_figures_are_from(name: str, nodes: int) -> None:
    topology = Topology.preset(name, nodes)

    assert topology.source
    assert Topology.from_json(topology.to_json()) == topology
    assert nodes == 1 or (topology.size or 0) % nodes == 0


@pytest.mark.parametrize(
    ("topology", "hosts"),
    [
        (Topology.preset("dgx-h100", nodes=2), (2, 2, 1)),
        (Topology.preset("dgx-h100"), (1, 1, 1)),
        (Topology("cpus", (Layer("host", None, GB), Layer("rank", 4, 2 * GB))), (4, 4, 1)),
        (Topology.flat(GB), (1, 1, 1)),
    ],
)
def test_hosts_of_an_axis_are_those_of_the_slowest_layer(topology: Topology, hosts: tuple[int, ...]) -> None:
    line = Mesh((16,), ("x",))
    folded = line.unfolded("x", {"a": 4, "b": 4})

    assert tuple(topology.hosts(mesh, axis) for mesh, axis in ((line, "x"), (folded, "a"), (folded, "b"))) == hosts
