"""The bytes of a plan by the planner's count are those that its traced step holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from helpers.expert_models import expert_model
from helpers.planned_models import batch, language_model, mesh_of

from dshard import Topology, use_topology
from dshard.core.alike_operators import AlikeOperators
from dshard.parallel.factors import trace_factors
from dshard.parallel.model_plan import plan_by_name
from dshard.parallel.plan_table import PlanTable, RankedPlan, ranked
from dshard.parallel.plan_values import Cost, Memory, ModelPlan
from dshard.parallel.roles import roles_of
from dshard.parallel.step_price import StepPrices
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import PLANNED, as_plan
from dshard.planning.call_candidates import candidates
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables, Weights
from dshard.topology import Layer

TOPOLOGY = Topology.preset("dgx-h100")
CASES = [(family, shape) for family in ("gpt", "llama", "mixtral") for shape in ((8,), (2, 4))]


def model_and_batch(family: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if family == "mixtral":
        tokens = torch.randint(3, 32, (16, 8))
        return expert_model(family), (), {"input_ids": tokens, "labels": tokens}
    return language_model(family, width=64, vocabulary=512), batch(16, 16, 512), {}


@pytest.mark.parametrize("case", one_in(6, CASES), ids=str)
def test_bytes_of_a_plan_are_those_of_its_traced_step(case: tuple[str, tuple[int, ...]]) -> None:
    """At the end of either pass; what is there for a moment within one is not counted."""
    family, shape = case
    model, args, kwargs = model_and_batch(family)
    graph, prices, mesh = (
        record_step(model, args, kwargs).graph().copies(),
        StepPrices(model, args, kwargs),
        mesh_of(shape),
    )
    with use_topology(TOPOLOGY):
        tables = StepTables(graph, mesh, TOPOLOGY)
        for weights in (Weights(), Weights(memory=1e-9)):
            chosen = plan_step(tables, weights)
            parts, held = chosen.parts, prices(as_plan(graph, chosen, mesh)).memory

            assert parts.stored == held.parameters + held.optimizer
            assert parts.gradients == held.gradients
            assert parts.saved == pytest.approx(held.activations, rel=0.05)
            assert parts.memory == pytest.approx(held.total - held.transient, rel=0.05)


@pytest.mark.parametrize("family", one_in(2, ["mixtral", "gpt"]))
def test_a_price_is_that_of_a_step_whose_operators_all_run(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = model_and_batch(family)

    def costs() -> list[Cost]:
        prices, mesh = StepPrices(model, args, kwargs), mesh_of((2, 2))
        roles = roles_of(trace_factors(model, args, kwargs))
        return [prices(plan_by_name(roles, name, mesh)[0]) for name in ("data x megatron", "fsdp x fsdp")]

    with use_topology(TOPOLOGY):
        answered = costs()
        monkeypatch.setattr(AlikeOperators, "run", lambda own, func, run, args, kwargs: (None, run(*args, **kwargs)))
        assert answered == costs()


def test_experts_are_planned_in_the_ragged_form_too() -> None:
    model, args, kwargs = model_and_batch("mixtral")
    graph = record_step(model, args, kwargs).graph()
    call = next(call for call in graph.calls if call.name == "experts")

    hosts = Topology("slow hosts", (Layer("host", 2, 1e7), Layer("rank", 2, 1e10)), TOPOLOGY.device)
    loops = {candidate.rows for candidate in candidates(call, mesh_of((2, 2)), hosts)}

    assert {("t", "e"), ("t", "ragged"), ("ragged", "f"), ("hop", "ragged")} <= loops


def test_a_planned_model_that_takes_and_holds_more_than_by_name_is_not_ranked() -> None:
    mesh, memory = mesh_of((4,)), Memory(1, 1, 2, 10, 20)

    def plan_of(name: str, seconds: float, peak: int) -> RankedPlan:
        cost = Cost((), replace(memory, peak=peak), work=seconds)
        return RankedPlan(ModelPlan(name, mesh, {}, (), cost=cost), mesh)

    named, fast, small, dear = (
        plan_of(*each) for each in (("fsdp", 2.0, 20), (PLANNED, 1.0, 30), (PLANNED, 3.0, 15), (PLANNED, 3.0, 30))
    )
    table = PlanTable((named, fast, small, dear), "", 1.0, 0.0, TOPOLOGY, 1.0)

    assert {each.plan.cost.seconds for each in ranked(table).plans if each.plan.strategy == PLANNED} == {1.0, 3.0}
    assert [each.plan.cost.memory.peak for each in ranked(table).plans] == [15, 20, 30]
    asked = ranked(table, keeps_planned=True).plans
    assert len(asked) == len(ranked(table).plans) + 1, "it was asked for by name"
