"""Topologies measured on real ranks, and on the command line."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.measured_figures import measured, mesh_of

from dshard import Topology, use_topology
from dshard.calibrate import COLLECTIVES, measure
from dshard.comm import bind, listen, runtime_of, same_topology
from dshard.core.context import planning_context
from dshard.cost import collective_seconds
from dshard.errors import MeshError, TopologyError
from dshard.mesh import Mesh
from dshard.testing import RankPool, simulated
from dshard.tools.calibrate.measure import axes_to_measure
from dshard.tools.calibrate.rounds import Case, Clock, Times, call_of, run_rounds
from dshard.tools.cli import main
from dshard.topology import Collective, Measured
from dshard.topology.sharing import cut_bandwidth, groups_of


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
        assert topology.overlap(mesh, found.axes) == found.overlap
        assert 0 < collective_seconds(found.collective or "permute", 1 << 20, mesh, found.axes, topology) < 60
    assert topology.device.overlap == min([found.overlap or 0.0 for found in topology.measured]) <= 1.0
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
    return [(str(case), nbytes, len(seconds)) for case, sizes in times.items() for nbytes, seconds in sizes.items()]


@pytest.mark.ranks
def test_ranks_agree_on_what_to_measure_whatever_their_clocks_say(ranks: RankPool) -> None:
    first, *others = ranks.run(impatient, (0.3, 1e-6, 0.01, 0.1))

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
            inside = planning_context().topology
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
    command = ["topology", "measure", "--mesh", "dp=2", "--seconds", "0.03", "--device", "cpu", "--out", str(file)]

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
        (["--mesh", "2y2"], 2, "'2y2' is no mesh: write its axes like 2x4 or dp=2,tp=4"),
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
