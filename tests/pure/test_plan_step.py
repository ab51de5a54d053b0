"""Plans of whole steps: no choice of layouts has a smaller sum, and bounds are bounds, whatever was priced before."""

from __future__ import annotations

from itertools import count, product
from math import inf, prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dshard import Mesh, Topology, plan_model, use_topology
from dshard.layout import Layout
from dshard.parallel import Auto, auto
from dshard.parallel.plan_values import PlanOptions
from dshard.parallel.trace_step import record_step
from dshard.placements import Replicate, Shard
from dshard.planning import deadline
from dshard.planning import plan_step as module
from dshard.planning.call_candidates import AxisGroups
from dshard.planning.plan_step import plan_step
from dshard.planning.step_limits import FREE, StepLimits
from dshard.planning.step_tables import StepTables, Weights

TOPOLOGIES = [Topology.preset("dgx-h100"), Topology.preset("cpu")]
PARTS = ("linear", "relu", "add", "norm", "tied")


class Chain(nn.Module):
    """A few operators one after the other, each of which reads what the one before made, or the first one's."""

    def __init__(self, parts: list[str], width: int) -> None:
        super().__init__()
        self.parts = parts
        self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for part in parts if part == "linear")
        self.tied = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        first, linears = x, iter(self.linears)
        for part in self.parts:
            match part:
                case "linear":
                    x = next(linears)(x)
                case "relu":
                    x = F.relu(x)
                case "add":
                    x = x + first
                case "norm":
                    x = self.norm(x)
                case "tied":
                    x = self.tied(x)
        return x


def tables_of(parts: list[str], sizes: tuple[int, int], mesh: Mesh, topology: Topology) -> StepTables:
    with torch.device("meta"):
        model, x = Chain(parts, sizes[1]), torch.empty(sizes, requires_grad=True)
    return StepTables(record_step(model, (x,), {}).graph().copies(), mesh, topology)


@st.composite
def problems(draw: st.DrawFn, most: int) -> tuple[StepTables, Weights]:
    parts = draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=4))
    sizes = draw(st.sampled_from([(64, 1024), (4096, 64), (6, 10), (1, 5)]))
    mesh = draw(st.sampled_from([Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y"))]))
    beside, byte = draw(st.sampled_from([0.3, 1.0])), draw(st.sampled_from([0.0, 1e-12, 1e-9]))
    tables = tables_of(parts, sizes, mesh, draw(st.sampled_from(TOPOLOGIES)))
    while torch.tensor([float(len(tables.domains[d])) for d in tables.domain_of]).prod() > most:
        parts = parts[:-1] or ["relu"]
        tables = tables_of(parts, sizes, mesh, tables.topology)
    return tables, Weights(beside, byte)


@given(problems(most=2000))
def test_no_choice_of_layouts_has_a_smaller_sum(problem: tuple[StepTables, Weights]) -> None:
    tables, weights = problem
    plan = plan_step(tables, weights)
    choices = product(*[range(len(tables.domains[domain])) for domain in tables.domain_of])
    least = min(weights.of(tables.price(choice, weights)[0]) for choice in choices)

    assert weights.of(plan.parts) == pytest.approx(least, rel=1e-8)
    assert plan.certificate == pytest.approx(1.0, abs=1e-8)


@pytest.mark.thorough
@given(problems(most=60000))
def test_no_choice_of_many_has_a_smaller_sum(problem: tuple[StepTables, Weights]) -> None:
    tables, weights = problem
    choices = product(*[range(len(tables.domains[domain])) for domain in tables.domain_of])
    plan = plan_step(tables, weights)

    assert weights.of(plan.parts) <= min(weights.of(tables.price(c, weights)[0]) for c in choices) * (1 + 1e-8)


@given(problems(most=10**9), st.integers(1, 3))
def test_a_plan_that_is_cut_short_has_a_bound(problem: tuple[StepTables, Weights], passes: int) -> None:
    tables, weights = problem
    short = plan_step(tables, weights, passes=passes)
    whole = plan_step(tables, weights)

    assert short.bound <= weights.of(whole.parts) * (1 + 1e-8)
    assert weights.of(whole.parts) <= weights.of(short.parts) * (1 + 1e-8)
    assert short.certificate >= 1 - 1e-8


@pytest.mark.parametrize("parts", [["linear", "relu"] * 4, ["linear", "relu", "tied", "norm"] * 3])
def test_where_tables_are_cut_the_first_bound_is_near(parts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are shifted before anything is eliminated, so that cuts hide little."""
    monkeypatch.setattr(module, "SMALLEST", 100)
    tables = tables_of(parts, (4096, 1024), Mesh((2, 2), ("x", "y")), TOPOLOGIES[0])

    assert plan_step(tables, passes=1).certificate < 1.1
    assert plan_step(tables).certificate == pytest.approx(1.0, abs=1e-8)


def test_pinned_parameters_lie_where_they_are_pinned() -> None:
    mesh = Mesh((2, 2), ("x", "y"))
    tables = tables_of(["linear", "relu", "tied", "tied"], (64, 1024), mesh, TOPOLOGIES[0])
    pins = {
        "linears.0.weight": Layout(mesh, (Shard(1), Replicate())),
        "tied.weight": Layout(mesh, (Shard(0), Shard(1))),
    }
    names = {value.number: value.name for value in tables.graph.parameters()}
    free, pinned = plan_step(tables), plan_step(tables.pinned(pins))

    assert {names[number]: layout for number, layout in pinned.parameters.items()} == pins
    assert pinned.weights.of(pinned.parts) >= free.weights.of(free.parts)
    assert plan_step(tables).parts == free.parts


def test_a_dearer_byte_is_held_less() -> None:
    tables = tables_of(["linear", "relu", "linear"], (64, 1024), Mesh((4,), ("x",)), TOPOLOGIES[0])
    held = [plan_step(tables, Weights(memory=byte)).parts.memory for byte in (0.0, 1e-12, 1e-10, 1e-6)]

    assert held == sorted(held, reverse=True)
    assert held[-1] < held[0]


def test_many_equal_blocks_are_planned_as_one() -> None:
    """Of equal blocks each has the plan of the others, but for the ends, and costs what it adds."""

    def seconds(copies: int) -> float:
        tables = tables_of(["linear", "relu"] * copies, (4096, 1024), Mesh((2, 2), ("x", "y")), TOPOLOGIES[0])
        plan: Any = plan_step(tables)
        assert plan.certificate == pytest.approx(1.0, abs=1e-8)
        return float(plan.weights.of(plan.parts))

    four, eight, twelve = map(seconds, (4, 8, 12))
    assert twelve - eight == pytest.approx(eight - four, rel=0.05)  # joined gradients are in larger buckets


class Gated(nn.Module):
    """Two layers whose results are multiplied, and one behind them; `packed` has the two as one."""

    def __init__(self, width: int, inner: int, packed: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner * (2 if packed else 1))
        self.up = None if packed else nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Any:
        gate, up = self.gate(x).chunk(2, -1) if self.up is None else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


@pytest.mark.parametrize("mesh", [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y"))], ids=["4", "2x2"])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["dgx", "cpu"])
def test_packed_layers_send_what_separate_ones_do(mesh: Mesh, topology: Topology) -> None:
    plans = {}
    for packed in (False, True):
        with torch.device("meta"):
            model, x = Gated(1024, 4096, packed), torch.empty(64, 1024, requires_grad=True)
        tables = StepTables(record_step(model, (x,), {}).graph().copies(), mesh, topology)
        plan = plan_step(tables)
        names = {value.number: value.name for value in tables.graph.parameters()}
        stored = next(layout for n, layout in plan.parameters.items() if names[n] == "gate.weight")
        plans[packed] = plan.parts.exposed, plan.parts.beside, dict(stored.blocks), plan.certificate

    assert plans[True][:2] == pytest.approx(plans[False][:2])
    assert plans[True][2] == {0: 2}
    assert plans[True][3] == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize("parts", [["linear", "relu", "linear"], ["norm", "tied", "add", "tied"]], ids=str)
def test_a_finer_mesh_has_the_plans_of_a_coarse_one(parts: list[str]) -> None:
    topology, sizes = TOPOLOGIES[0], (4096, 4096)

    coarse, fine = (plan_step(tables_of(parts, sizes, mesh, topology)) for mesh in (Mesh((4,)), Mesh((2, 2))))

    assert fine.total <= coarse.total * (1 + 1e-6)


@given(problems(most=10**9), st.sampled_from([0.5, 0.99, 1.01]))
def test_a_bound_is_one_where_dear_plans_are_not_looked_for(problem: tuple[StepTables, Weights], times: float) -> None:
    tables, weights = problem
    least = plan_step(tables, weights).total

    limited = plan_step(tables, weights, most=times * least)

    assert limited.bound <= least * (1 + 1e-8) <= limited.total * (1 + 2e-8)
    assert times < 1 or limited.total == pytest.approx(least)


@pytest.mark.parametrize("reads", [0, 1, 2, 5, 20, 60, 150])
def test_a_search_ends_at_its_deadline_with_a_choice_and_a_bound(reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = tables_of(["linear", "relu", "linear", "norm", "tied", "add"], (4096, 4096), Mesh((2, 2)), TOPOLOGIES[0])
    least, clock = plan_step(tables).total, count()
    tables = tables_of(["linear", "relu", "linear", "norm", "tied", "add"], (4096, 4096), Mesh((2, 2)), TOPOLOGIES[0])
    monkeypatch.setattr(deadline, "process_time", lambda: next(clock))

    plan = plan_step(tables, deadline=deadline.Deadline(reads))

    assert next(clock) <= reads + 2
    assert 0 < plan.bound <= least * (1 + 1e-8) <= plan.total * (1 + 2e-8)


@pytest.mark.parametrize(("shape", "alike"), [((2, 2), ((0, 1),)), ((2, 2, 2), ((1, 2),)), ((2, 2, 2), ((0, 1, 2),))])
@pytest.mark.parametrize("parts", [["linear", "norm", "linear", "add"], ["tied", "relu", "tied"]])
def test_plans_that_use_axes_alike_are_some_of_all_at_their_prices(
    shape: tuple[int, ...], alike: AxisGroups, parts: list[str]
) -> None:
    every = tables_of(parts, (4096, 1024), Mesh(shape), TOPOLOGIES[0])
    some = StepTables(every.graph, every.mesh, every.topology, StepLimits(alike=alike))

    for own, domain in zip(some.domains, every.domains, strict=True):
        assert len(own) < len(domain)
        for each in own:
            layouts = (each,) if isinstance(each, Layout) else each.layouts
            assert all(len({x.placements[axis] for axis in group}) == 1 for x in layouts for group in alike)
        if isinstance(own[0], Layout):
            assert {*own} <= {*domain}
        else:
            least = {(x.inputs, x.outputs, x.gradients, x.cotangents): x.seconds for x in domain}
            assert all(least[x.inputs, x.outputs, x.gradients, x.cotangents] <= x.seconds for x in own)
    assert plan_step(every).total <= plan_step(some).total * (1 + 1e-8)
    assert some.growth() > 1


ALL, PAIRS = ((0, 1, 2),), [((1, 2),), ((0, 1),)]
OF_FOUR = [((0, 1), (2, 3)), ((1, 2, 3),), ((0, 1, 2),)]


@pytest.mark.parametrize(
    ("shape", "rows", "seconds", "made"),
    [
        ((2, 2, 2), 4096, 1e-9, [ALL, PAIRS[0]]),
        ((2, 2, 2), 4095, 1e-9, PAIRS),
        ((2, 2, 2), 4096, 1e4, [ALL, ()]),
        ((2, 2, 2), 4096, inf, [ALL, ()]),
        ((2, 2, 2, 2), 4096, 1e4, [((0, 1, 2, 3),), *OF_FOUR, ()]),
        ((2, 2, 2, 2), 4095, 1e4, [*OF_FOUR, ()]),
        ((2, 2), 4095, 1e4, [()]),
        ((2, 2), 4096, 1e-9, [((0, 1),), ()]),
    ],
)
def test_tables_are_of_as_many_plans_as_there_is_time_for(
    shape: tuple[int, ...], rows: int, seconds: float, made: list[AxisGroups], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[AxisGroups]()
    graph = tables_of(["linear", "relu", "linear"], (rows, 64), Mesh((2,)), TOPOLOGIES[0]).graph
    search = auto.PlanSearch(Auto(seconds=seconds), PlanOptions(None, None), lambda plan: plan.cost, graph)

    def tables(*args: Any) -> StepTables:
        begun.append(args[3].alike)
        return StepTables(*args)

    monkeypatch.setattr(auto, "StepTables", tables)
    with use_topology(Topology.preset("dgx-h100", nodes=max(1, prod(shape) // 8))):
        *_, last = search.tables(graph, FREE, Mesh(shape), rows)

    assert begun == made
    assert last.limits.alike == (made[-1] if seconds > 1 else made[0])


def test_tables_are_given_up_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    with torch.device("meta"):
        graph = record_step(Chain(["linear", "relu"], 64), (torch.empty(64, 64),), {}).graph().copies()
    monkeypatch.setattr(deadline, "process_time", lambda: next(clock))

    with pytest.raises(deadline.TimeIsOver):
        StepTables(graph, Mesh((4,)), TOPOLOGIES[0], deadline=deadline.Deadline(2))


def test_all_choices_of_a_search_have_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[float]()
    with torch.device("meta"):
        model, x = Chain(["linear", "relu", "linear"], 1024), torch.empty(4096, 1024)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        begun.append(kwargs["deadline"].seconds)
        return plan_step(*args, **kwargs)

    monkeypatch.setattr(auto, "plan_step", chosen)
    with use_topology(TOPOLOGIES[0]):
        plan = plan_model(model, Mesh((8,)), Auto(seconds=500), x)

    assert {*begun} == {500.0}
    assert plan.certificate is not None
