"""Topologies as values: presets, rates, files, and what is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.known_networks import FIG_7A, FIG_7B, GB, bandwidths, crossings
from helpers.topologies import measured_on, meshes_on, topologies
from hypothesis import given
from hypothesis import strategies as st

from dshard.errors import DShardError, MeshError, TopologyError
from dshard.mesh import Mesh
from dshard.topology import BYTES, FLAT_CPU, FLAT_CUDA, Device, Layer, Link, Measured, Topology, default_topology
from dshard.topology.presets import CPU


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


def test_whole_numbers_of_numpy_are_kept_as_pythons() -> None:
    two = np.int64(2)
    layers = Layer("host", two, 1e9), *Topology.torus((two,), 1e9).layers
    topology = Topology("mine", layers, CPU, measured=(Measured(Mesh((2,), ("x",)), ("x",), 0, 1e9, sizes=(two,)),))

    assert Topology.from_json(topology.to_json()) == topology
    with pytest.raises(TopologyError, match=r"ranks: .*0.* is not a whole number above 0"):
        Layer("host", np.int64(0), 1e9)


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


def test_each_dtype_has_its_rate_or_the_default() -> None:
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
        (wrong(lambda d: d["device"].update(alone=2)), "device.alone: 2: work takes no longer while others wait"),
        (
            wrong(lambda d: d["device"].update(overlap=2)),
            "device.overlap: 2: all of a collective at most is beside work",
        ),
        (
            wrong(lambda d: d["measured"][0].update(overlap=-1)),
            r"measured\[0\].overlap: -1 is not a number of at least 0",
        ),
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


def test_a_field_that_has_a_default_may_be_left_out() -> None:
    text = wrong(lambda d: [each.pop("latency") for each in d["layers"]])

    assert [layer.latency for layer in Topology.from_json(text).layers] == [0.0, 0.0]


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
