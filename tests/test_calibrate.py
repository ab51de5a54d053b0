"""Measured topologies: what a fit recovers, what a price on it keeps to, and a real measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from topologies import LATENCIES, RATES, cases

from dshard import Topology, init_device_mesh, use_topology
from dshard.calibrate import COLLECTIVES, Fit, fit, measure, typical
from dshard.calibrate.fit import best_line
from dshard.calibrate.measure import axes_to_measure, parts_of
from dshard.calibrate.rounds import Case, Clock, Times, call_of, run_rounds
from dshard.cli import main
from dshard.comm import DeviceMesh, bind, listen, runtime_of, same_topology
from dshard.cost import collective_seconds
from dshard.errors import MeshError, TopologyError
from dshard.mesh import Mesh
from dshard.ops.settings import current
from dshard.testing import RankPool, simulated
from dshard.topology import FLAT_CPU, Collective, Link, Measured
from dshard.topology.sharing import cut_bandwidth, groups_of, shared_link

SIZES = [1 << power for power in range(12, 25)]
COLLECTIVE = st.sampled_from(COLLECTIVES)
MESSAGES, PASSES = st.integers(1, 30), st.integers(1, 5)


# -- the fit


def priced(found: Fit, nbytes: float, messages: float, passes: float) -> float:
    link = Link(found.latency, found.bandwidth, points=found.points)
    return messages * link.latency + passes * link.seconds(nbytes)


@given(st.floats(0, 1), st.floats(1e6, 1e11), st.sets(st.sampled_from(SIZES), max_size=3))
def test_a_line_is_found_again_though_some_sizes_went_wrong(part: float, bandwidth: float, wrong: set[int]) -> None:
    slope = 1 / bandwidth
    intercept = part * slope * SIZES[4]  # at most of the sizes bytes count for more than messages
    right = {x: intercept + slope * x for x in SIZES}

    start, rate = best_line([(x, y * (3 if x in wrong else 1)) for x, y in right.items()])

    assert rate == pytest.approx(slope, rel=0.05)
    for x, y in right.items():
        assert x < 1 << 20 or start + rate * x == pytest.approx(y, rel=0.05)


@given(LATENCIES, st.floats(1e6, 1e11), MESSAGES, PASSES)
def test_a_straight_network_needs_no_points(latency: float, bandwidth: float, messages: int, passes: int) -> None:
    found = fit([(x, messages * latency + passes * x / bandwidth) for x in SIZES], messages, passes)

    assert found.points == ()
    assert found.bandwidth == pytest.approx(bandwidth)
    assert priced(found, 0, messages, passes) == pytest.approx(messages * latency, abs=1e-9 * SIZES[-1] / bandwidth)


TIMES = st.lists(st.floats(1e-6, 10.0), min_size=len(SIZES), max_size=len(SIZES))


@given(st.floats(1e6, 1e11), MESSAGES, PASSES)
def test_a_line_keeps_to_the_cap(bandwidth: float, messages: int, passes: int) -> None:
    found = fit([(x, passes * x / bandwidth) for x in SIZES], messages, passes, cap=bandwidth / 2)

    assert found == Fit(0.0, bandwidth / 2)


def test_times_that_fall_take_their_mean() -> None:
    times = [1.0] * 4 + [2.0, 8.0, 2.0, 32.0]

    found = fit([(1000 * (i + 1), y) for i, y in enumerate(times)], 1, 1)

    assert [priced(found, 1000 * (i + 1), 1, 1) for i in (4, 5, 6, 7)] == pytest.approx([2.0, 5.0, 5.0, 32.0], rel=0.1)


@given(TIMES, MESSAGES, PASSES, st.integers(0, 1 << 26), st.integers(0, 1 << 26), RATES | st.just(inf))
def test_whatever_was_timed_prices_rise_and_keep_to_the_cap(
    times: list[float], messages: int, passes: int, some: int, more: int, cap: float
) -> None:
    found = fit(list(zip(SIZES, times, strict=True)), messages, passes, cap)
    low, high = sorted((some, more))

    assert found.latency >= 0
    assert 0 < found.bandwidth <= cap * (1 + 1e-9)
    assert priced(found, low, messages, passes) <= priced(found, high, messages, passes) * (1 + 1e-12)
    if high > low:
        assert priced(found, low, 0, passes) < priced(found, high, 0, passes)
    assert priced(found, high, messages, passes) >= passes * high / cap * (1 - 1e-9)


@given(st.lists(st.floats(1e-6, 1e-3), min_size=len(SIZES), max_size=len(SIZES)), MESSAGES, PASSES)
def test_rising_times_are_met_at_every_size(steps: list[float], messages: int, passes: int) -> None:
    times, total = [], 1e-3
    for x, step in zip(SIZES, steps, strict=True):
        total += step + x * 1e-9
        times.append((x, total))

    found = fit(times, messages, passes)

    for x, y in times:
        # A line is taken where it is within 15 %; in a table bytes are never quite free.
        assert priced(found, x, messages, passes) == pytest.approx(y, rel=0.16)


def test_the_outliers_of_half_of_the_rounds_do_not_count() -> None:
    assert typical([1.0, 1.0, 1.0, 50.0, 90.0]) == 1.0


# -- what prices are made of


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_price_is_the_fitted_formula(collective: Collective, backend: str) -> None:
    mesh = Mesh((2, 4), ("a", "b"))
    topology = replace(FLAT_CPU, backend=backend)
    messages, passes = parts_of(collective, mesh, ("b",), topology)
    found = fit([(x, 1e-3 + x * 1e-9 + (x > 1 << 20) * 5e-3) for x in SIZES], messages, passes)
    figures = Measured(mesh, ("b",), found.latency, found.bandwidth, collective, points=found.points)
    known = topology.with_measured([figures])

    assert found.points
    for x in (0, *SIZES, 1 << 27):
        price = collective_seconds(collective, x, mesh, ["b"], known)
        assert price == pytest.approx(priced(found, x, messages, passes))


@given(cases(), COLLECTIVE)
def test_no_layer_lets_more_through_than_its_cuts(
    case: tuple[Topology, Mesh, tuple[str, ...]], collective: Collective
) -> None:
    topology, mesh, axes = case
    groups = groups_of(mesh, axes)
    if len(groups[0]) == 1:
        return

    link = shared_link(topology.layers, groups, collective)
    passes = parts_of(collective, mesh, axes, topology)[1]

    assert link.bandwidth / passes <= cut_bandwidth(topology.layers, groups, collective) * (1 + 1e-9)


def test_the_cut_between_two_hosts() -> None:
    topology = Topology.preset("dgx-a100", nodes=2)
    mesh = Mesh((2, 8), ("node", "gpu"))
    rate = topology.layers[0].group_bandwidth

    everything = groups_of(mesh, mesh.names)
    assert cut_bandwidth(topology.layers, everything, "all_gather") == rate * 15 / 8
    assert cut_bandwidth(topology.layers, everything, "all_to_all") == rate * 15 / 64
    assert cut_bandwidth(topology.layers, groups_of(mesh, ["node"]), "all_reduce") == rate * 2 / 16


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), max_size=4), RATES, RATES, st.integers(0, 3000))
def test_the_slower_of_two_links_is_never_faster_than_either(
    steps: list[tuple[int, float]], one: float, other: float, nbytes: int
) -> None:
    x, y, points = 0, 0.0, []
    for dx, dy in steps:
        x, y = x + dx, y + dy
        points.append((x, y))
    a, b = Link(0.0, one, points=tuple(points)), Link(0.0, other)

    both = a.no_faster_than(b)

    assert a.seconds(nbytes) >= nbytes / a.best_bandwidth * (1 - 1e-9)
    assert both.seconds(nbytes) >= max(a.seconds(nbytes), b.seconds(nbytes)) * (1 - 1e-9)
    assert a.no_faster_than(a).seconds(nbytes) == pytest.approx(a.seconds(nbytes))


# -- files


CURVED = FLAT_CPU.with_measured(
    [
        Measured(
            Mesh((2, 2)), ("d0",), 1e-4, 1e9, "all_gather", "2026-01-02", "cpu", (10, 20), 0.1, ((10, 0.5), (20, 2.5))
        )
    ]
)


def test_points_survive_a_file() -> None:
    again = Topology.from_json(CURVED.to_json())

    assert again == CURVED
    assert again.link(Mesh((2, 2)), ["d0"], "all_gather").seconds(15) == 1.5


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[10, 1.0], [10, 2.0]], r"measured\[0\].points\[1\]: \(10, 2.0\) comes after \(10, 1.0\): more bytes"),
        ([[10, 1.0], [20, 0.5]], r"measured\[0\].points\[1\]: \(20, 0.5\) comes after"),
        ([[10]], r"measured\[0\].points\[0\]: \(10,\) is no pair of bytes and seconds"),
        ([[10, "1"]], r"measured\[0\].points\[0\]: '1' is not a number of at least 0"),
        ([[0, 1.0]], r"measured\[0\].points\[0\]: 0 is not a number above 0"),
        (3, r"measured\[0\].points: 3 is no list"),
    ],
)
def test_points_that_cannot_be_are_refused_by_their_place(points: object, message: str) -> None:
    data = json.loads(CURVED.to_json())
    data["measured"][0]["points"] = points

    with pytest.raises(TopologyError, match=message):
        Topology.from_json(json.dumps(data))


# -- on ranks


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def measured(shape: tuple[int, ...], base: Topology | None) -> tuple[Topology, list[tuple[float, str]]]:
    heard: list[tuple[float, str]] = []
    topology = Topology.measure(
        mesh_of(shape),
        base=base,
        sizes=(1 << 12, 1 << 16, 1 << 18),
        seconds=0.5,
        progress=lambda done, what: heard.append((done, what)),
    )
    return topology, heard


@pytest.mark.ranks
def test_all_ranks_measure_the_same_topology_and_price_on_it(ranks: RankPool) -> None:
    (topology, heard), *others = ranks.run(measured, (2, 2), None)
    mesh = Mesh((2, 2), ("a", "b"))

    assert all(other == topology for other, _ in others)
    assert [(found.axes, found.collective) for found in topology.measured] == [
        (axes, collective) for axes in (("a",), ("b",), ("a", "b")) for collective in COLLECTIVES
    ]
    for found in topology.measured:
        assert topology.link(mesh, found.axes, found.collective) == found.link
        assert found.mesh == mesh
        assert len(found.date) == 10
        assert 0 < collective_seconds(found.collective or "permute", 1 << 20, mesh, found.axes, topology) < 60
    assert topology.flops("float32") > 1e6
    assert 1e6 < topology.memory_bandwidth < inf
    assert heard[0] == (0.0, "local work")
    assert heard[-1] == (1.0, "done")
    assert sorted(done for done, _ in heard) == [done for done, _ in heard]


@pytest.mark.ranks
def test_what_is_known_is_not_measured_again(ranks: RankPool) -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    slow = Topology.flat(1e3, 1e-6, ranks=4)
    base = slow.with_measured(
        Measured(mesh, axes, 1e-3, 1e6, collective) for axes in (("a",), ("b",)) for collective in COLLECTIVES
    )

    topology, _ = ranks.run(measured, (2, 2), base)[0]

    assert topology.measured[: len(base.measured)] == base.measured
    assert {found.axes for found in topology.measured[len(base.measured) :]} == {("a", "b")}
    assert topology.layers == slow.layers


@pytest.mark.ranks
def test_no_figure_exceeds_the_limits_of_a_preset(ranks: RankPool) -> None:
    limits = Topology.flat(1e5, ranks=4)

    topology, _ = ranks.run(measured, (4,), limits)[0]

    for found in topology.measured:
        assert found.collective is not None
        least = (1 << 18) / cut_bandwidth(limits.layers, groups_of(found.mesh, found.axes), found.collective)
        assert collective_seconds(found.collective, 1 << 18, found.mesh, found.axes, topology) >= least * (1 - 1e-9)


def bytes_announced(collective: Collective, nbytes: int) -> tuple[int, int]:
    """What a timed call says that the busiest rank receives, and what its result can hold at most."""
    mesh = bind(mesh_of((4,)))
    runtime = runtime_of(mesh)
    assert runtime is not None
    call, counted = call_of(Case(("a",), collective), nbytes, runtime.group(("a",)), torch.ones(1 << 16))
    out = call()
    assert isinstance(out, torch.Tensor)
    return counted, out.nbytes


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("collective", "result"),
    [
        ("all_gather", 4 / 3),
        ("reduce_scatter", 1 / 3),
        ("all_reduce", 4 / 6),
        ("all_to_all", 4 / 3),
        ("broadcast", 1),
        ("permute", 1),
    ],
)
def test_a_timed_call_receives_the_bytes_it_stands_for(ranks: RankPool, collective: str, result: float) -> None:
    counted, held = ranks.run(bytes_announced, collective, 24_000)[0]

    assert counted == 24_000
    assert held == counted * result


def impatient(budgets: tuple[float, ...]) -> list[tuple[str, int, int]]:
    """Which sizes are measured, how often, where the ranks were given different budgets."""
    mesh = bind(mesh_of((4,)))
    runtime = runtime_of(mesh)
    assert runtime is not None
    work = [Case(("a",), "all_reduce"), Case(("a",), "broadcast")]
    times: Times = run_rounds(
        Clock(mesh, runtime), work, [1 << 10, 1 << 16], budgets[dist.get_rank()], lambda done, what: None
    )
    return [(str(case), nbytes, len(found)) for case, sizes in times.found.items() for nbytes, found in sizes.items()]


@pytest.mark.ranks
def test_ranks_agree_on_what_to_measure_whatever_their_clocks_say(ranks: RankPool) -> None:
    first, *others = ranks.run(impatient, (2.0, 1e-6, 0.01, 0.1))

    assert others == [first] * 3


def disagree(how: str) -> tuple[float, float, list[str]]:
    """Each rank has a topology of its own; what they use within the block, and what was sent."""
    own = Topology.flat(1e6 * (1 + dist.get_rank()), ranks=4)
    events: list[str] = []
    mesh = mesh_of((2, 2))
    with listen(lambda event: events.append(event.collective)):
        if how == "same":
            shared = same_topology(own, bind(mesh))
            return shared.layers[0].group_bandwidth, 0.0, events
        with use_topology(own, mesh=mesh if how == "mesh" else None):
            inside = current().topology
            assert inside is not None
            return inside.layers[0].group_bandwidth, own.layers[0].group_bandwidth, events


@pytest.mark.ranks
def test_the_first_rank_s_topology_is_everyone_s(ranks: RankPool) -> None:
    assert ranks.run(disagree, "same") == [(1e6, 0.0, ["broadcast"] * 2)] * 4
    assert [inside for inside, _, _ in ranks.run(disagree, "mesh")] == [1e6] * 4


@pytest.mark.ranks
def test_without_a_mesh_nothing_is_sent(ranks: RankPool) -> None:
    assert ranks.run(disagree, "alone") == [(1e6 * (1 + rank), 1e6 * (1 + rank), []) for rank in range(4)]


# -- what cannot be measured


def test_a_mesh_without_processes_cannot_be_measured() -> None:
    with pytest.raises(MeshError, match=r"measure: the mesh \(dp=2 tp=2\) has no processes: .*Topology.preset"):
        measure(Mesh((2, 2), ("dp", "tp")))


def test_simulated_ranks_cannot_be_measured() -> None:
    with simulated(4), pytest.raises(MeshError, match="simulated in one process, which has no network"):
        measure(Mesh((4,)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": ()}, r"sizes: \(\): give the bytes"),
        ({"sizes": (0, 4)}, r"sizes: \(0, 4\): give the bytes to measure at, each above 0"),
        ({"seconds": 0}, "seconds: 0: give the time to measure for, above 0"),
        ({"collectives": ["exchange"]}, "collectives: 'exchange' cannot be measured; use all_gather, reduce_scatter"),
    ],
)
@pytest.mark.ranks
def test_options_that_cannot_be(ranks: RankPool, options: dict[str, object], message: str) -> None:
    ranks.run(refuse, options, message)


def refuse(options: dict[str, object], message: str) -> None:
    with pytest.raises(TopologyError, match=message):
        measure(mesh_of((4,)), **options)  # type: ignore[arg-type]


def test_meshes_of_many_axes_are_measured_along_each_and_all() -> None:
    names = ("a", "b", "c", "d")

    assert axes_to_measure(Mesh((2, 2, 2, 2), names)) == [*((name,) for name in names), names]
    assert len(axes_to_measure(Mesh((2, 2, 2), names[:3]))) == 7
    assert axes_to_measure(Mesh((1,), ("a",))) == []


# -- the command line


@pytest.mark.ranks
def test_measure_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "here.json"
    command = ["topology", "measure", "--mesh", "dp=2", "--seconds", "0.5", "--device", "cpu", "--out", str(file)]

    assert main([*command, "--json"]) == 0

    printed = json.loads(capsys.readouterr().out)
    topology = Topology.load(file)
    assert printed == json.loads(topology.to_json())
    assert {found.axes for found in topology.measured} == {("dp",)}
    assert main(["topology", "--topology", str(file)]) == 0
    assert "6 measured figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--mesh", "2x2", "--ranks", "3"], 1, "the mesh (d0=2 d1=2) has 4 ranks, not 3: leave --ranks out"),
        (["--seconds", "0"], 2, "'0' is not a number of seconds above zero"),
        (["--mesh", "2y2"], 2, "'2y2' is no shape"),
    ],
)
def test_wrong_arguments_of_measure_are_explained(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = main(["topology", "measure", *arguments])
    except SystemExit as stop:
        ended = int(stop.code or 0)

    assert ended == status

    assert message in " ".join(capsys.readouterr().err.split())
