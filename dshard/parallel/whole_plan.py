"""The plan of a model in which the layouts of all tensors of its step were chosen together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dshard.core.context import planning_context
from dshard.core.torch_placements import torch_placements
from dshard.dispatch.planned_calls import ANY, Placements, PlannedCall, PlannedMove
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.plan_values import Plan
from dshard.placements import Placement, Replicate, Shard
from dshard.planning.call_candidates import CallCandidate
from dshard.planning.move_prices import completion
from dshard.planning.plan_step import StepPlan
from dshard.planning.step_graph import End, FunctionCall, GraphCall, StepGraph, Value, is_copy
from dshard.rules.attention_loops import LOOPS
from dshard.rules.expand import Row
from dshard.rules.rule import PassThrough

PLANNED = "planned"
"""The name of plans that no named strategy is."""


def as_plan(graph: StepGraph, chosen: StepPlan, mesh: Mesh) -> Plan:
    """The plan by which `parallelize` runs a choice of layouts.

    Each function that the model calls has operands, results and a strategy in the layouts that were chosen, and a
    parameter is gathered along the axes on which it is stored sharded and used whole.
    """
    parameters: dict[str, Placements] = {}
    gathers: dict[str, tuple[str, ...]] = {}
    for value in graph.parameters():
        stored = chosen.parameters[value.number]
        used = chosen.calls[value.uses[0].call].inputs[value.uses[0].position]
        parameters[value.name] = _placements(stored)
        gathers[value.name] = tuple(_gathered(stored, used))
    common = tuple([axis for axis in mesh.names if all(axis in own for own in gathers.values())])
    return Plan(
        PLANNED,
        mesh,
        parameters,
        _batch(graph, chosen.calls, mesh),
        calls=PlannedFunctions(graph, chosen.calls).calls(),
        gathers={"": common} | {name: own for name, own in gathers.items() if own != common},
    )


def _gathered(stored: Layout, used: Layout) -> Iterator[str]:
    for name, at, there in zip(stored.mesh.names, stored.placements, used.placements, strict=True):
        if isinstance(at, Shard) and isinstance(there, Replicate):
            yield name


def _placements(layout: Layout) -> Placements:
    return torch_placements(layout) if layout.order else layout.placements


class PlannedFunctions:
    """The functions that a model calls, with the layouts of a choice.

    Where all that read a tensor have it in one layout, it is redistributed as soon as it is made, and else by each that
    reads it in another. Views are not redistributed when they are made, nor operands before a view of them is: what is
    written to either is written to both. Within a function of several operators layouts follow by cost.
    """

    def __init__(self, graph: StepGraph, chosen: Sequence[CallCandidate]) -> None:
        self.graph, self.chosen = graph, chosen
        self.of_function: defaultdict[int, list[GraphCall]] = defaultdict(list)
        for call in graph.calls:
            self.of_function[call.within].append(call)

    def calls(self) -> tuple[PlannedCall, ...]:
        """The planned calls, in order."""
        return tuple([self._call(n, function) for n, function in enumerate(self.graph.functions)])

    def _call(self, n: int, function: FunctionCall) -> PlannedCall:
        graph, calls = self.graph, self.of_function[n]
        operands = [None if i is None else graph.values[i] for i in function.operands]
        results = [None if i is None else graph.values[i] for i in function.results]
        rows = attention = None
        one = self.chosen[calls[0].number] if len(calls) == 1 else None
        if one is not None and calls[0].rule.loops and not one.name and not any(each.blocks for each in one.layouts):
            own = one.rows
            if calls[0].name != "scaled_dot_product_attention":
                rows = tuple([_name(row) for row in own])
            elif all(row is None or row in LOOPS for row in own):
                attention = own
        return PlannedCall(
            function.name,
            function.module,
            function.visit,
            function.ordinal,
            function.begun,
            tuple([ANY if value is None else len(value.shape) for value in operands]),
            tuple([None if function.is_view or x is None else self._read(x, calls) for x in operands]),
            tuple([None if function.is_view or x is None else self.given(x) for x in results]),
            tuple([x is not None and self._is_reduced(x) for x in results]),
            rows,
            attention,  # type: ignore[arg-type]
        )

    def _made(self, value: Value) -> tuple[Layout, Layout]:
        """The layout in which the call that makes a value leaves it, and that of its gradient."""
        assert value.producer is not None
        call, i = value.producer
        return self.chosen[call].outputs[i], self.chosen[call].cotangent(i)

    def _used(self, use: End) -> Layout:
        return self.chosen[use.call].inputs[use.position]

    def given(self, value: Value) -> PlannedMove | None:
        """The move of a result as soon as it is made, if there is one."""
        if value.producer is None:
            return None
        made, wanted = self._made(value)
        if not value.uses and made.partial_axes() and value in self.graph.outputs:
            topology = planning_context().topology_of(made.mesh)
            return _move(completion(made, value.shape, value.itemsize, topology)[0], wanted)
        used = {self._used(use) for use in value.uses}
        return None if len(used) != 1 or used == {made} else _move(used.pop(), wanted)

    def _read(self, value: Value, calls: Iterable[GraphCall]) -> PlannedMove | None:
        """The move of an operand that a function reads by these calls, if it is in another layout."""
        for end, source in ((End(call.number, i), x) for call in calls for i, x in enumerate(call.operands)):
            if self._origin(source) is value and value.kind in ("made", "input", "buffer"):
                used = self._used(end)
                return _move(used, used.cotangent() if source.producer is None else self._made(source)[1])
        return None

    def _origin(self, value: Value) -> Value:
        """The value itself, or what it is a copy of."""
        call = None if value.producer is None else self.graph.calls[value.producer.call]
        return call.operands[0] if call is not None and is_copy(call) else value

    def _is_reduced(self, value: Value) -> bool:
        """Whether a gradient of the value, which is not moved when it is made, arises in another layout than it has."""
        if value.producer is None or not value.needs_grad or self.given(value) is not None:
            return False
        made, wanted = self._made(value)
        uses = [use for use in value.uses if self._used(use) == made]
        return any(self.chosen[call].gradients[i] != wanted for call, i in uses)


def _name(row: Row) -> str | None:
    """The name of a row of a mesh axis, as `PlannedCall` has it."""
    return " ".join(["sum", *map(str, sorted(row.operands))]) if isinstance(row, PassThrough) else row


def _move(layout: Layout, gradient: Layout) -> PlannedMove:
    return PlannedMove(_placements(layout), _placements(gradient))


def _batch(graph: StepGraph, candidates: Sequence[CallCandidate], mesh: Mesh) -> Placements:
    """The placements in which all inputs are read; on an axis along which they are read in several ways, whole."""
    used = [
        candidates[use.call].inputs[use.position]
        for value in graph.values
        if value.kind == "input"
        for use in value.uses
    ]
    batch: list[Placement] = []
    for axis in range(mesh.ndim):
        ways = {layout.placements[axis] for layout in used}
        batch.append(ways.pop() if len(ways) == 1 else Replicate())
    return tuple(batch)
