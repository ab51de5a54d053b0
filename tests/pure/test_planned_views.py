"""Plans move no view of a view: what is written to one is written to both, so ranks move what is behind them."""

from __future__ import annotations

from itertools import product

import pytest
from helpers.planned_models import mesh_of
from helpers.planned_steps import model_and_batch

from dshard import Topology
from dshard.parallel.trace_step import record_step
from dshard.planning.plan_step import plan_step
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_tables import StepTables, Weights


def views_of_views(graph: StepGraph) -> list[tuple[int, int]]:
    """The numbers of calls that are views, and of those that make their operand and are views, too."""
    ends = [(call.number, call.operands[0].producer) for call in graph.calls if graph.is_view(call)]
    makers = [(number, maker.call) for number, maker in ends if maker is not None]
    return [(number, maker) for number, maker in makers if graph.is_view(graph.calls[maker])]


@pytest.mark.parametrize("family", ["gpt", "vit"])
def test_a_view_of_a_view_lies_as_that_does(family: str) -> None:
    model, args = model_and_batch(family)
    graph = record_step(model, args, {}).graph().copies()
    views = views_of_views(graph)

    for shape, preset in product([(4,), (2, 2)], ["cpu", "dgx-h100"]):
        tables = StepTables(graph, mesh_of(shape), Topology.preset(preset))
        chosen = plan_step(tables, Weights(memory=1e-7)).calls
        assert [n for n, maker in views if chosen[n].inputs[0] != chosen[maker].outputs[0]] == []

    assert views
