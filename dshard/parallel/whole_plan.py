"""The plan of a model in which the layouts of all tensors of its step were chosen together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dshard.core.context import planning_context
from dshard.core.torch_placements import torch_placements
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.plan_values import Placements, Plan
from dshard.placements import Placement, Replicate, Shard
from dshard.planning.call_candidates import CallCandidate
from dshard.planning.move_prices import completion
from dshard.planning.plan_step import StepPlan
from dshard.planning.step_graph import GraphCall, StepGraph
from dshard.rules.matmul_loops import Loop, Schedule
from dshard.rules.matmul_strategies import factors_of

PLANNED = "planned"
"""The name of plans that no named strategy is."""


def as_plan(graph: StepGraph, chosen: StepPlan, mesh: Mesh) -> Plan:
    """The plan by which `parallelize` runs a choice of layouts, as far as they can be told by module.

    The output of a module is redistributed to the layout in which it is read first, the only matmul of a module has its
    loops, and a parameter is gathered along the axes on which it is stored sharded and used whole. All else follows by
    cost, which from the same layouts comes to the same end.
    """
    parameters: dict[str, Placements] = {}
    gathers: dict[str, tuple[str, ...]] = {}
    for value in graph.parameters():
        stored = chosen.parameters[value.number]
        used = chosen.calls[value.uses[0].call].inputs[value.uses[0].position]
        parameters[value.name] = torch_placements(stored) if stored.order else stored.placements
        gathers[value.name] = tuple(_gathered(stored, used))
    common = tuple([axis for axis in mesh.names if all(axis in own for own in gathers.values())])
    return Plan(
        PLANNED,
        mesh,
        parameters,
        _batch(graph, chosen.calls, mesh),
        _outputs(graph, chosen.calls),
        _products(graph, chosen.calls),
        gathers={"": common} | {name: own for name, own in gathers.items() if own != common},
    )


def _gathered(stored: Layout, used: Layout) -> Iterator[str]:
    for name, at, there in zip(stored.mesh.names, stored.placements, used.placements, strict=True):
        if isinstance(at, Shard) and isinstance(there, Replicate):
            yield name


def _products(graph: StepGraph, candidates: Sequence[CallCandidate]) -> dict[str, Schedule]:
    """The loops of the matmul of each module that has one, with sums left partial."""
    products = [call for call in graph.calls if call.name in ("linear", "matmul")]
    of_module = Counter(call.module for call in products)
    schedules: dict[str, Schedule] = {}
    for call in products:
        loops = _loops(call, candidates[call.number])
        if of_module[call.module] == 1 and call.module and loops:
            schedules[call.module] = Schedule(loops, tuple(["P" if loop == "k" else "R" for loop in loops]))
    return schedules


def _loops(call: GraphCall, candidate: CallCandidate) -> tuple[Loop, ...]:
    """The loop of a matmul on each axis; none where on some axis it has none."""
    loops = [loop for row in candidate.rows for loop, factors in factors_of(call.rule).items() if row in factors]
    return tuple(loops) if len(loops) == len(candidate.rows) else ()


def _outputs(graph: StepGraph, candidates: Sequence[CallCandidate]) -> dict[str, Placements]:
    """The layouts in which what modules return is read first: each returns the result of its last call."""
    last: dict[str, GraphCall] = {}
    for call in graph.calls:
        names = call.module.split(".") if call.module and call.name != "copy" else []
        last |= {".".join(names[: n + 1]): call for n in range(len(names))}
    outputs: dict[str, Placements] = {}
    for module, call in last.items():
        value, made = call.results[0], candidates[call.number].outputs[0]
        for use in value.uses[:1]:
            outputs[module] = candidates[use.call].inputs[use.position].placements
        if not value.uses and made.partial_axes():  # what the model returns
            topology = planning_context().topology_of(made.mesh)
            outputs[module] = completion(made, value.shape, value.itemsize, topology)[0].placements
    return outputs


def _batch(graph: StepGraph, candidates: Sequence[CallCandidate], mesh: Mesh) -> Placements:
    """The placements of inputs that all of them are read in first; whole where they are read in several ways."""
    used = [
        candidates[value.uses[0].call].inputs[value.uses[0].position]
        for value in graph.values
        if value.kind == "input" and value.uses
    ]
    batch: list[Placement] = []
    for axis in range(mesh.ndim):
        ways = {layout.placements[axis] for layout in used}
        batch.append(ways.pop() if len(ways) == 1 else Replicate())
    return tuple(batch)
