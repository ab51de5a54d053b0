"""Topologies: what the groups of mesh axes get of a network, presets, measured figures, files."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf, isinf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topologies import cases, measured_on, meshes_on, topologies

from dshard.errors import DShardError, MeshError, TopologyError
from dshard.mesh import Mesh
from dshard.testing import meshes
from dshard.topology import (
    BYTES,
    COLLECTIVES,
    FLAT_CPU,
    FLAT_CUDA,
    PRESETS,
    Device,
    Layer,
    Link,
    Measured,
    Topology,
    default_topology,
)
from dshard.topology.presets import CPU, ring
from dshard.topology.sharing import groups_of

GB = 1e9
Case = tuple[Topology, Mesh, tuple[str, ...]]

# ATP (arXiv 2301.08658), figure 7a: four nodes on 200 Gb/s HDR with four GPUs each; in bytes per second.
FIG_7A = Topology(
    "fig 7a",
    (Layer("node", 4, 25 * GB, latency=2e-6), Layer("gpu", 4, 600 * GB, latency=1e-6, pair_bandwidth=200 * GB)),
)
# Figure 7b: a 4 x 4 torus with 25 GB/s links; between rings 100 GB/s, and twice that out of each ring.
FIG_7B = Topology.torus((4, 4), 25 * GB)


def bandwidths(topology: Topology, shape: tuple[int, ...], ranks: tuple[int, ...] = ()) -> list[float]:
    """The bandwidth of each axis of a mesh, in GB/s."""
    mesh = Mesh(shape, (), ranks)
    return [topology.link(mesh, [axis]).bandwidth / GB for axis in mesh.names]


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


def crossings(topology: Topology, mesh: Mesh, axes: tuple[str, ...]) -> list[tuple[Layer, int]]:
    """For each layer, how many groups leave the unit that the most of them leave, counted pair by pair of ranks."""
    groups = {tuple(sorted(mesh.group(axes, at))) for at in mesh.coordinates()}
    found = []
    for i, layer in enumerate(topology.layers):
        leaving: Counter[tuple[int, ...]] = Counter()
        for group in groups:
            paths = {place(topology, rank)[: i + 1] for rank in group}
            leaving.update(path for path in paths if any(p != path and p[:-1] == path[:-1] for p in paths))
        found.append((layer, max(leaving.values(), default=0)))
    return found


def place(topology: Topology, rank: int) -> tuple[int, ...]:
    """The unit of each layer that a rank is in, the outermost first."""
    path = []
    for layer in reversed(topology.layers):
        path.append(rank % (layer.ranks or 1))
        rank //= layer.ranks or 1
    return tuple(reversed(path))


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
    ("name", "size", "inner", "outer"),
    [
        ("cpu", 16, 2, 1.25 / 8),
        ("pcie", 16, 31.5, 25 / 8),
        ("nvlink-pairs", 16, 63, 25 / 8),
        ("dgx-a100", 16, 300, 25),
        ("dgx-h100", 16, 450, 50),
        ("gb200-nvl72", 144, 900, 50),
        ("tpu-torus", 128, 90, 22.5),
    ],
)
def test_a_preset_has_its_makers_bandwidths_in_one_direction(name: str, size: int, inner: float, outer: float) -> None:
    topology = Topology.preset(name, nodes=2)

    assert topology.size == size
    assert bandwidths(topology, (2, size // 2)) == [outer, inner]


def test_a_preset_of_other_node_sizes() -> None:
    assert Topology.preset("dgx-h100", 2, ranks=4).size == 8
    assert Topology.preset("cpu").size is None
    with pytest.raises(TopologyError, match="an even number of GPUs, not 3"):
        Topology.preset("pcie", ranks=3)
    with pytest.raises(TopologyError, match=r"a cube of 64 chips, not 8; use Topology.torus"):
        Topology.preset("tpu-torus", ranks=8)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(TopologyError, match=r"no preset is called 'dgx'; there are cpu, pcie, .*, tpu-torus"):
        Topology.preset("dgx")
    with pytest.raises(TopologyError, match="nodes: 0 is not a whole number above 0"):
        Topology.preset("cpu", nodes=0)


def test_the_default_follows_the_device_and_the_hosts() -> None:
    assert default_topology("cpu") is FLAT_CPU
    assert default_topology("cuda") is FLAT_CUDA
    hosts = default_topology("cpu", ranks_per_host=4)
    assert bandwidths(hosts, (2, 4)) == [1.25 / 4, 2]
    assert hosts.size is None


def test_rates_of_dtypes() -> None:
    topology = Topology.preset("dgx-h100")

    assert topology.flops() == topology.flops("bfloat16") == topology.flops("int32") == 989.4e12
    assert topology.flops("float8_e4m3fn") == 1978.9e12
    assert topology.flops("float32") == 66.9e12


def test_a_topology_reads_as_a_line() -> None:
    assert str(FIG_7A) == "fig 7a: 4 x node (25 GB/s), 4 x gpu (600 GB/s)"
    assert str(FLAT_CPU) == "flat-cpu: n x rank (2 GB/s)"


# -- worlds


def test_a_topology_of_another_world_is_refused() -> None:
    FIG_7A.check(16)
    FLAT_CPU.check(1000)
    with pytest.raises(TopologyError, match=r"'fig 7a' is one of 16 ranks \(4 x 4\), but the world has 8: use"):
        FIG_7A.check(8)
    with pytest.raises(
        TopologyError, match=r"the mesh \(x=32\) has rank 31, but the topology 'fig 7a' is one of 16 ranks"
    ):
        FIG_7A.link(Mesh((32,), ("x",)), ["x"])
    with pytest.raises(MeshError, match="no axis 'y'"):
        FIG_7A.link(Mesh((16,), ("x",)), ["y"])


def test_a_topology_of_thousands_of_ranks_answers() -> None:
    topology = Topology.preset("dgx-h100", nodes=512)
    mesh = Mesh((16, 16, 16), ("x", "y", "z"))

    found = [
        topology.link(mesh, axes, c).bandwidth / GB for axes in (["x"], ["z"]) for c in ("all_gather", "all_to_all")
    ]  # type: ignore[arg-type]

    assert found == pytest.approx([50, 50, 400, 400 * 15 / 64])


# -- files


@given(st.data())
def test_what_is_saved_is_what_is_loaded(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    topology = topology.with_measured(data.draw(st.lists(measured_on(topology), max_size=2)))

    assert Topology.from_json(topology.to_json()) == topology


@given(topologies())
def test_topologies_are_values(topology: Topology) -> None:
    same = pickle.loads(pickle.dumps(topology))

    assert same == topology
    assert hash(same) == hash(topology)


@pytest.mark.parametrize("topology", [FLAT_CPU, BYTES, FIG_7A, FIG_7B, FIG_7A.bytes_only()], ids=str)
def test_a_file_keeps_a_topology(tmp_path: Path, topology: Topology) -> None:
    topology.save(tmp_path / "t.json")

    assert Topology.load(tmp_path / "t.json") == topology


GOOD: dict[str, Any] = json.loads(FIG_7A.with_measured([Measured(Mesh((4, 4)), ("d0",), 1e-6, GB)]).to_json())


def wrong(change: Callable[[dict[str, Any]], object]) -> str:
    data = json.loads(json.dumps(GOOD))
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "this is not JSON"),
        ("[" * 100_000, "this is not JSON"),
        ("[1]", r"\[1\] is no object with fields"),
        ('{"schema": 1, "schema": 1}', "schema: given twice"),
        ("{}", "schema: missing; the fields are schema, name, layers"),
        (wrong(lambda d: d.update(schema=2)), "schema: 2 is not 1"),
        (wrong(lambda d: d.update(schema=True)), "schema: True is not 1"),
        (wrong(lambda d: d.update(name="")), "name: '' is not a name"),
        (wrong(lambda d: d.update(name=3)), "name: 3 is no text"),
        (wrong(lambda d: d.update(backend="mpi")), "backend: 'mpi' is none; use gloo, nccl, xla"),
        (wrong(lambda d: d.update(parent="node")), "parent: no such field"),
        (wrong(lambda d: d.update(layers=[])), "ranks: 16 is not the number of ranks"),
        (wrong(lambda d: (d.update(layers=[]), d.pop("ranks"))), "layers: a topology needs at least one"),
        (wrong(lambda d: d.update(layers={})), "layers: {} is no list"),
        (wrong(lambda d: d.update(ranks=8)), "ranks: 8 is not the number of ranks of the layers, 4 x 4"),
        (wrong(lambda d: d.update(ranks=None)), "ranks: None is not the number of ranks"),
        (
            wrong(lambda d: d["layers"].append(d["layers"][0])),
            "ranks: 16 is not the number of ranks of the layers, 4 x 4 x 4",
        ),
        (wrong(lambda d: d["layers"][0].pop("group_bandwidth")), r"layers\[0\].group_bandwidth: missing"),
        (
            wrong(lambda d: d["layers"][1].update(group_bandwidth=-1)),
            r"layers\[1\].group_bandwidth: -1 is not a number above",
        ),
        (
            wrong(lambda d: d["layers"][1].update(group_bandwidth=None)),
            r"layers\[1\].group_bandwidth: None is not a number",
        ),
        (
            wrong(lambda d: d["layers"][1].update(group_bandwidth="25")),
            r"layers\[1\].group_bandwidth: '25' is not a number",
        ),
        (
            wrong(lambda d: d["layers"][1].update(group_bandwidth=True)),
            r"layers\[1\].group_bandwidth: True is not a number",
        ),
        (
            wrong(lambda d: d["layers"][1].update(group_bandwidth=float("inf"))),
            r"layers\[1\].group_bandwidth: inf is not",
        ),
        (
            wrong(lambda d: d["layers"][1].update(latency=float("nan"))),
            r"layers\[1\].latency: nan is not a number of at least",
        ),
        (
            wrong(lambda d: d["layers"][1].update(latency=10**400)),
            r"layers\[1\].latency: 1000.* is not a number of at least",
        ),
        (wrong(lambda d: d["layers"][0].update(ranks=0)), r"layers\[0\].ranks: 0 is not a whole number above 0"),
        (wrong(lambda d: d["layers"][0].update(ranks=4.0)), r"layers\[0\].ranks: 4.0 is not a whole number above 0"),
        (
            wrong(lambda d: d["layers"][1].update(ranks=None)),
            "ranks: 16 is not the number of ranks of the layers, 4 x any",
        ),
        (
            wrong(lambda d: (d["layers"][1].update(ranks=None), d.pop("ranks"))),
            r"layers\[1\].ranks: only the outermost layer may have any number",
        ),
        (
            wrong(lambda d: d["layers"][0].update(color="red")),
            r"layers\[0\].color: no such field; the fields are name, ranks",
        ),
        (
            wrong(lambda d: d["layers"][0].update(rank_bandwidth=0)),
            r"layers\[0\].rank_bandwidth: 0 is not a number above 0",
        ),
        (
            wrong(lambda d: d["layers"][0].update(pair_bandwidth=[[0]])),
            r"layers\[0\].pair_bandwidth: 1 rows of \[1\] for 4",
        ),
        (wrong(lambda d: d["layers"][0].update(pair_bandwidth=[0])), r"layers\[0\].pair_bandwidth\[0\]: 0 is no list"),
        (wrong(lambda d: d["layers"][0].update(pair_bandwidth="x")), r"layers\[0\].pair_bandwidth: 'x' is no"),
        (
            wrong(lambda d: d["layers"][0].update(pair_bandwidth=[[0, 1, 0, 0], [2, 0, 0, 0], [0] * 4, [0] * 4])),
            r"layers\[0\].pair_bandwidth\[0\]\[1\]: 1: the matrix must be symmetric",
        ),
        (
            wrong(
                lambda d: d["layers"][0].update(pair_bandwidth=[[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
            ),
            r"layers\[0\].pair_bandwidth: no link leads from unit 0 to unit 2",
        ),
        (
            wrong(lambda d: d["layers"][0].update(pair_bandwidth=[[0, -1, 0, 0]] * 4)),
            r"layers\[0\].pair_bandwidth\[0\]\[1\]: -1 is not a number of at least 0",
        ),
        (wrong(lambda d: d["device"].update(flops={})), "device.flops: give the rate of at least one dtype"),
        (wrong(lambda d: d["device"].update(flops=[1])), r"device.flops: \[1\] is no object"),
        (wrong(lambda d: d["device"]["flops"].update(float32=0)), "device.flops.float32: 0 is not a number above 0"),
        (wrong(lambda d: d["device"].update(launch=-1)), "device.launch: -1 is not a number of at least 0"),
        (wrong(lambda d: d["device"].update(memory_bandwidth=0)), "device.memory_bandwidth: 0 is not a number above 0"),
        (
            wrong(lambda d: d["measured"][0].update(collective="gather")),
            r"measured\[0\].collective: 'gather' is none; use",
        ),
        (
            wrong(lambda d: d["measured"][0].update(axes=["tp"])),
            r"measured\[0\].axes: \('tp',\) of the mesh \(d0=4 d1=4\)",
        ),
        (
            wrong(lambda d: d["measured"][0].update(spread=-0.1)),
            r"measured\[0\].spread: -0.1 is not a number of at least 0",
        ),
        (wrong(lambda d: d["measured"][0].update(date=20260101)), r"measured\[0\].date: 20260101 is no text"),
        (wrong(lambda d: d["measured"][0].update(sizes=[0])), r"measured\[0\].sizes: 0 is not a whole number above 0"),
        (wrong(lambda d: d["measured"][0].pop("bandwidth")), r"measured\[0\].bandwidth: missing"),
        (
            wrong(lambda d: d["measured"][0]["mesh"].update(shape=[8, 4])),
            r"measured\[0\].mesh: the mesh .* has rank 31, but",
        ),
        (
            wrong(lambda d: d["measured"][0]["mesh"].update(shape=[0, 4])),
            r"measured\[0\].mesh: a mesh of shape \(0, 4\)",
        ),
        (
            wrong(lambda d: d["measured"][0]["mesh"].update(shape=[10**6] * 2)),
            r"mesh.shape: .* has more than 1048576 ranks",
        ),
        (
            wrong(lambda d: d["measured"][0]["mesh"].update(names=["a", "a"])),
            r"measured\[0\].mesh: 2 mesh axes cannot be",
        ),
    ],
)
def test_a_bad_file_is_refused_with_the_field_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)

    with pytest.raises(TopologyError, match=message) as caught:
        Topology.load(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, DShardError | ValueError)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match=r"cannot read the topology .*none.json"):
        Topology.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(-1, 1), "latency: -1 is not a number of at least 0"),
        (lambda: Link(0, 0), "bandwidth: 0 is not a number above 0"),
        (lambda: Link(float("nan"), 1), "latency: nan"),
        (lambda: Device("d", (("a", 1), ("a", 2)), 1, 0), "flops: give the rate of at least one dtype, each once"),
        (lambda: Topology("t", (Layer("a", 2, 1), Layer("b", None, 1)), CPU), r"layers\[1\].ranks: only the outermost"),
        (lambda: Topology.torus((0,), 1), "shape: 0 is not a whole number above 0"),
        (lambda: FLAT_CPU.link(Mesh((2,)), ["d0"], "gather"), "collective: 'gather' is none; use all_gather, "),  # type: ignore[arg-type]
    ],
)
def test_values_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        make()


@given(st.data())
def test_a_mesh_of_all_ranks_crosses_every_layer_that_has_several(data: st.DataObject) -> None:
    topology = data.draw(topologies())
    mesh = data.draw(meshes_on(topology, whole=True))

    crossed = [most > 0 for _, most in crossings(topology, mesh, mesh.names)]

    assert crossed == [(layer.ranks or 1) > 1 for layer in topology.layers]
