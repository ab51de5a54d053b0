"""The plan of a model in which the layouts of all tensors of its step were chosen together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dshard.autograd.crossing import keep_partial_sums
from dshard.core.context import planning_context
from dshard.core.torch_placements import torch_placements
from dshard.dispatch.planned_calls import ANY, Placements, PlannedCall, PlannedMove
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.parallel.batch_rows import has_of_batch, layouts_of_batch, sizes_of_batch
from dshard.parallel.plan_values import ModelPlan
from dshard.placements import Replicate, Shard
from dshard.planning.call_candidates import CallCandidate
from dshard.planning.move_prices import completion
from dshard.planning.plan_step import StepPlan
from dshard.planning.step_graph import End, FunctionCall, GraphCall, StepGraph, Value, is_copy
from dshard.rules.expand import Row
from dshard.rules.rule import PassThrough

PLANNED = "planned"
"""The name of plans that no named strategy is."""


def as_plan(graph: StepGraph, chosen: StepPlan, mesh: Mesh) -> ModelPlan:
    """The plan by which `parallelize` runs a choice of layouts.

    Each function that the model calls has operands, results and a strategy in the layouts that were chosen, and a
    parameter is gathered along the axes on which it is stored sharded and used whole.
    """
    parameters: dict[str, Placements] = {}
    gathers: dict[str, tuple[str, ...]] = {}
    for value in graph.parameters():
        stored = chosen.parameters[value.number]
        parameters[value.name] = torch_placements(stored)
        gathers[value.name] = tuple(_gathered(stored, _first_used(value, chosen.calls)))
    common = tuple([axis for axis in mesh.names if all(axis in own for own in gathers.values())])
    return ModelPlan(
        PLANNED,
        mesh,
        parameters,
        _inputs(graph, chosen.calls, mesh),
        calls=PlannedFunctions(graph, chosen).calls(),
        gathers={"": common} | {name: own for name, own in gathers.items() if own != common},
    )


def _first_used(value: Value, chosen: Sequence[CallCandidate]) -> Layout:
    """The layout of a parameter for the call that reads it first."""
    return chosen[value.uses[0].call].inputs[value.uses[0].position]


def _gathered(stored: Layout, used: Layout) -> Iterator[str]:
    for name, at, there in zip(stored.mesh.names, stored.placements, used.placements, strict=True):
        if isinstance(at, Shard) and isinstance(there, Replicate):
            yield name


class PlannedFunctions:
    """The functions that a model calls, with the layouts of a choice.

    Where all that read a tensor have it in one layout, it is redistributed as soon as it is made, and else by each that
    reads it in another. Views are not redistributed when they are made, nor operands before a view of them is: what is
    written to either is written to both. Nor is what a function writes to, which would write to a copy. Within a
    function of several operators layouts follow by cost.
    """

    def __init__(self, graph: StepGraph, chosen: StepPlan) -> None:
        self.graph, self.chosen, self.stored = graph, chosen.calls, chosen.parameters
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
        rows = attention = experts = None
        one = self.chosen[calls[0].number] if len(calls) == 1 else None
        if one is not None and calls[0].rule.chosen is not None:
            experts = one.rows
        elif one is not None and calls[0].rule.loops and not any(x.blocks for x in one.layouts):
            if calls[0].name == "scaled_dot_product_attention":
                attention = calls[0].attention_loops(one.rows)
            elif not one.name:
                rows = tuple([_name(row) for row in one.rows])
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
            attention,
            experts,  # type: ignore[arg-type]
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
        if value in self._written(calls):
            return None
        for end, source in ((End(call.number, i), x) for call in calls for i, x in enumerate(call.operands)):
            if self._origin(source) is value and value.kind in ("made", "input", "buffer"):
                used = self._used(end)
                return _move(used, used.cotangent() if source.producer is None else self._made(source)[1])
            if value is source and value.name in self.graph.kept:
                return self._kept(value, end)
        return None

    def _kept(self, value: Value, end: End) -> PlannedMove | None:
        """The move of a parameter that a use has otherwise than gathered: autograd keeps it for the backward pass."""
        stored, used = self.stored[value.number], self._used(end)
        gathered = stored
        for axis in _gathered(stored, _first_used(value, self.chosen)):
            gathered = gathered.replace(stored.mesh.axis(axis), Replicate())
        if used == gathered:
            return None
        return _move(used, keep_partial_sums(self.chosen[end.call].gradients[end.position], stored))

    def _written(self, calls: Iterable[GraphCall]) -> Iterator[Value]:
        """The values to whose memory some of these calls write, through views of them, too."""
        for call in calls:
            maker = call if call.writes else None
            while maker is not None and (maker.shares_memory or is_copy(maker)):
                value = maker.operands[0]
                yield value
                maker = None if value.producer is None else self.graph.calls[value.producer.call]

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
    return PlannedMove(torch_placements(layout), torch_placements(gradient))


def _inputs(graph: StepGraph, chosen: Sequence[CallCandidate], mesh: Mesh) -> dict[str, Placements]:
    """The placements of the batch, and by name those of inputs that are read in others.

    A mesh axis on which the rows, or else the sequence, of any input are sharded shards those of the batch.
    """
    values = [value for value in graph.values if value.kind == "input" and value.shape]
    sizes = sizes_of_batch([value.shape for value in values], 1)
    of_batch = {value.name: has_of_batch(value.shape, sizes) for value in values}
    uses = {value.name: [chosen[use.call].inputs[use.position] for use in value.uses] for value in values}
    read = {name: _common(layouts) for name, layouts in uses.items() if layouts}
    ways = zip(*[layout.placements for name, layout in read.items() if of_batch[name] != "neither"], strict=True)
    shards = [next((p for p in (Shard(0), Shard(1)) if p in own), Replicate()) for own in ways]
    batch = Layout(mesh, tuple(shards)) if shards else replicated(mesh)
    rest = layouts_of_batch(batch)
    named = {name: torch_placements(layout) for name, layout in read.items() if layout != rest[of_batch[name]]}
    return {"": batch.placements} | named


def _common(layouts: Sequence[Layout]) -> Layout:
    """The layout in which an input is read; on a mesh axis on which it is read in several ways, whole."""
    if len({*layouts}) == 1 and not layouts[0].partial_axes():
        return layouts[0]
    ways = [{*each} for each in zip(*[layout.placements for layout in layouts], strict=True)]
    shards = [own.pop() if len(own) == 1 else Replicate() for own in ways]
    return Layout(layouts[0].mesh, tuple([p if isinstance(p, Shard) else Replicate() for p in shards]))
