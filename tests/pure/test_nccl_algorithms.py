"""Prices of NCCL's algorithms: its own formulas, the cheapest for each size, and figures that no machine has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dshard.cost import LARGE_PIECE, algorithm_price, collective_seconds
from dshard.errors import TopologyError
from dshard.layout import parse_layout
from dshard.mesh import Mesh
from dshard.redistribute import plan
from dshard.redistribute.space import space_of
from dshard.topology import Collective, Topology
from dshard.topology.algorithms import COLLECTIVES_OF, Algorithm, nccl_algorithms

MB = 64e6


def ring(n: int, steps: int, base: float, step: float, bus: float) -> float:
    """Microseconds as NCCL writes them: the bus bandwidth, in GB/s, becomes that of the tensor by ranks over steps."""
    return base + steps * step + MB / (1e3 * bus * n / steps)


@pytest.mark.parametrize(
    ("preset", "collective", "microseconds", "chosen"),
    [
        ("dgx-a100", "all_gather", ring(8, 7, 8.4, 3.4, 12 * 20.0), "ring, Simple"),
        ("dgx-a100", "all_reduce", ring(8, 14, 8.4, 3.4, 12 * 20.0), "ring, Simple"),
        ("dgx-h100", "all_gather", ring(8, 7, 8.4, 3.4, 16 * 20.6), "ring, Simple"),
        ("dgx-h100", "reduce_scatter", ring(8, 7, 8.4, 3.4, 16 * 20.6), "ring, Simple"),
        ("dgx-h100", "all_reduce", 25 + MB / (1e3 * 2 * 15 * 20.6 * 0.85 * 8 / 14), "nvls, Simple"),
        ("gb200-nvl72", "all_reduce", 25 + MB / (1e3 * 2 * 15 * 40.0 * 0.74 * 72 / 142), "nvls, Simple"),
        ("pcie", "all_gather", ring(8, 7, 8.4, 5.7, 31.5), "ring, Simple"),
    ],
)
def test_64_mb_take_what_nccl_expects(preset: str, collective: Collective, microseconds: float, chosen: str) -> None:
    topology = Topology.preset(preset)

    seconds, name = cheapest(topology, collective, MB)

    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.03)
    assert name == chosen


def cheapest(topology: Topology, collective: Collective, nbytes: float) -> tuple[float, str]:
    """The price of a collective over all ranks of a tensor of so many bytes, and the algorithm that has it."""
    assert topology.size is not None
    n = topology.size
    mesh, received = Mesh((n,), ("x",)), nbytes * (n - 1) / n * (2 if collective == "all_reduce" else 1)
    where, link = topology.nodes(mesh, ["x"]), topology.link(mesh, ["x"], collective)
    assert where is not None
    prices = {
        str(each): price.begin + received / price.rate
        for each in topology.algorithms
        if collective in COLLECTIVES_OF[each.kind]
        and (price := algorithm_price(each, collective, n, *where, link.bandwidth)) is not None
    }
    name = min(prices, key=prices.__getitem__)
    assert collective_seconds(collective, received, mesh, ["x"], topology) == prices[name]
    return prices[name], name


@pytest.mark.parametrize(
    ("preset", "nodes", "collective", "small", "large"),
    [
        ("dgx-a100", 1, "all_reduce", "ring, LL", "ring, Simple"),
        ("dgx-a100", 8, "all_reduce", "tree, LL", "ring, Simple"),
        ("dgx-h100", 1, "all_reduce", "ring, LL", "nvls, Simple"),
        ("dgx-h100", 8, "all_reduce", "tree, LL", "nvls-tree, Simple"),
        ("dgx-h100", 8, "reduce_scatter", "ring, LL", "ring, Simple"),
        ("nvlink-pairs", 2, "all_reduce", "tree, LL", "ring, Simple"),
    ],
)
def test_small_messages_take_few_steps_and_large_ones_the_bandwidth(
    preset: str, nodes: int, collective: Collective, small: str, large: str
) -> None:
    topology = Topology.preset(preset, nodes=nodes)

    assert [cheapest(topology, collective, nbytes)[1] for nbytes in (1e4, 4e9)] == [small, large]


def test_a_group_of_one_rank_on_each_node_exposes_the_network() -> None:
    """Two nodes: one step between them, at the latency of a tree's."""
    topology = Topology.preset("dgx-h100", nodes=2)
    mesh = Mesh((2, 8), ("node", "gpu"))
    (simple,) = [each for each in topology.algorithms if str(each) == "ring, LL"]

    assert topology.nodes(mesh, ["node"]) == (2, None)
    assert topology.nodes(mesh, ["gpu"]) == (1, "nvlink")
    price = algorithm_price(simple, "all_gather", 2, 2, None, 50e9)
    assert price is not None
    assert price.begin == pytest.approx(6.6e-6 + 5.0e-6)
    assert collective_seconds("all_gather", 0.0, mesh, ["node"], topology) == price.begin


def test_no_all_reduce_in_a_switch_is_faster_than_the_link_brings_the_result() -> None:
    topology = Topology.preset("dgx-h100", ranks=2)
    mesh = Mesh((2,), ("x",))

    assert collective_seconds("all_reduce", 1e12, mesh, ["x"], topology) >= 1e12 / 450e9


def test_only_bytes_count_without_algorithms() -> None:
    topology = Topology.preset("dgx-h100")
    mesh = Mesh((8,), ("gpu",))
    src, dst = parse_layout("gpu:P(sum)", mesh), parse_layout("gpu:R", mesh)

    assert topology.bytes_only().algorithms == ()
    assert plan(src, dst, (1 << 20,), 4, topology.bytes_only()).seconds == pytest.approx(2 * 7 / 8 * (4 << 20) / 450e9)
    assert plan(src, dst, (1 << 24,), 4, topology).seconds < plan(src, dst, (1 << 24,), 4, rings_only(topology)).seconds


def test_no_plan_begins_sooner_than_the_algorithms() -> None:
    """Of a small tensor nearly all is counted before a plan is searched, so that few layouts are looked at."""
    topology = Topology.preset("dgx-h100", nodes=2)
    mesh = Mesh((2, 8), ("node", "gpu"))
    space = space_of(mesh, topology, (8,), 4)
    for text in ("node:R gpu:P(sum)", "node:P(sum) gpu:R", "node:P(sum) gpu:P(sum)"):
        src, dst = parse_layout(text, mesh), parse_layout("node:R gpu:R", mesh)

        least, seconds = (
            space.least(space.state_of(src), space.state_of(dst)),
            plan(src, dst, (8,), 4, topology).seconds,
        )

        assert 0.5 * seconds < least <= seconds


@pytest.mark.parametrize("shape", [(1, 8), (3, 2), (5, 7)])
def test_no_plan_of_uneven_pieces_is_priced_below_its_bound(shape: tuple[int, int]) -> None:
    mesh, topology = Mesh((2, 4), ("node", "gpu")), Topology.preset("dgx-h100", nodes=2)
    space = space_of(mesh, topology, shape, 4)
    texts = [f"node:{a} gpu:{b}" for a in ("R", "P(sum)", "S(0)", "S(1)") for b in ("R", "P(sum)", "S(0)", "S(1)")]
    every = [parse_layout(text, mesh) for text in texts]
    for src in every:
        for dst in every:
            least = space.least(space.state_of(src), space.state_of(dst))
            assert least <= plan(src, dst, shape, 4, topology).seconds * (1 + 1e-9)


def rings_only(topology: Topology) -> Topology:
    return replace(topology, algorithms=tuple(each for each in topology.algorithms if each.kind == "ring"))


def test_layers_that_do_not_say_what_they_are_take_a_ring_or_a_tree() -> None:
    topology = Topology.preset("dgx-h100")
    unknown = replace(topology, layers=tuple(replace(layer, hardware=None) for layer in topology.layers))
    mesh = Mesh((8,), ("x",))

    assert unknown.nodes(mesh, ["x"]) is None
    assert collective_seconds("all_gather", 7.0, mesh, ["x"], unknown) == pytest.approx(7 * 1.9e-6 + 7 / 450e9)


def test_topologies_with_algorithms_are_read_as_they_were_written() -> None:
    topology = Topology.preset("dgx-h100", nodes=2)

    assert Topology.from_json(topology.to_json()) == topology


RING = nccl_algorithms("hopper")[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "star"}, "kind: 'star' is none; use ring, tree, nvls, nvls-tree"),
        ({"base": -1.0}, r"base: -1\.0 is not a number of at least 0"),
        ({"most": (1.0, 2.0)}, r"most: \(1\.0, 2\.0\): give 3 numbers: on one node, on two, on more"),
        ({"share": 1.0}, "share"),
    ],
)
def test_figures_that_no_algorithm_has(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        replace(RING, **changes)  # type: ignore[arg-type]


def test_a_layer_of_unknown_hardware_is_refused() -> None:
    with pytest.raises(TopologyError, match="hardware: 'wire' is none; use nvlink, pcie, network, or None"):
        replace(Topology.preset("dgx-h100").layers[0], hardware="wire")  # type: ignore[arg-type]


def test_generations_without_a_switch_that_reduces_have_no_way_to_use_one() -> None:
    kinds: dict[str, set[str]] = {name: {each.kind for each in of(name)} for name in ("ampere", "blackwell")}

    assert kinds == {"ampere": {"ring", "tree"}, "blackwell": {"ring", "tree", "nvls", "nvls-tree"}}


def of(name: str) -> tuple[Algorithm, ...]:
    return nccl_algorithms(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [2048, 2049])
@pytest.mark.parametrize(("path", "kind"), [("x:S(0) -> x:R", "all_gather"), ("x:P(sum) -> x:S(0)", "reduce_scatter")])
def test_pieces_of_different_sizes_are_priced_as_they_are_sent(path: str, kind: Collective, rows: int) -> None:
    """Between hosts each rank would send to each, so a plan goes by pieces of one size instead."""
    mesh, topology = Mesh((32,), ("x",)), Topology.preset("dgx-h100", nodes=4)
    src, dst = (parse_layout(text, mesh) for text in path.split(" -> "))
    nbytes = 31 * -(-rows // 32) * 8192 * 4
    ring, messages = (collective_seconds(kind, nbytes, mesh, "x", topology, even=even) for even in (True, False))

    chosen = plan(src, dst, shape=(rows, 8192), itemsize=4, topology=topology)

    assert messages > 2.5 * ring
    if rows == 2048:
        assert chosen.seconds == pytest.approx(ring, abs=2 * topology.launch)
    else:
        assert len(chosen.steps) == 2
        assert ring < chosen.seconds < 0.6 * messages


def test_large_pieces_of_different_sizes_cross_a_link_between_hosts_once() -> None:
    mesh, topology = Mesh((32,), ("x",)), Topology.preset("dgx-h100", nodes=4)
    for piece, even in ((LARGE_PIECE, False), (LARGE_PIECE + 1, True)):
        uneven = collective_seconds("all_gather", 31 * piece, mesh, "x", topology, even=False)
        assert (uneven == collective_seconds("all_gather", 31 * piece, mesh, "x", topology)) is even
