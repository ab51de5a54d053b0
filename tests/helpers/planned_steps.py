"""What a plan says of each call of a step, and what ranks run of it: collectives, and seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dshard
from dshard import Topology, parallelize, use_topology
from dshard.comm import CommEvent, collectives_of, listen
from dshard.core.comparisons import nothing_compared
from dshard.core.observe import observing
from dshard.core.trees import tensors_in
from dshard.dispatch.planned_calls import Cursor, PlannedCall
from dshard.parallel import ModelPlan
from dshard.parallel.gather_groups import block_within, blocks_of
from dshard.parallel.step_price import StepPrices
from dshard.parallel.trace_step import record_step
from dshard.parallel.whole_plan import PlannedFunctions, as_plan
from dshard.placements import Shard
from dshard.planning.local_seconds import run_by_executor
from dshard.planning.move_prices import completion
from dshard.planning.plan_step import StepPlan, plan_step
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_tables import StepTables, Weights
from dshard.step_timeline import PlacedEvent, StepTimeline, makespan
from dshard.torch_private import current_autograd_node, sequence_number
from helpers.planned_models import FAMILIES as LANGUAGE
from helpers.planned_models import PlannedMove, batch, language_model, mesh_of, planned_moves
from helpers.real_models import build
from helpers.vision_transformer import classifier

SLOW = Topology.preset("cpu")
FAMILIES = (*LANGUAGE, "vit", "t5")
VOCABULARY = 512

Place: TypeAlias = int | tuple[str, ...]
"""The number of a function of the graph, or the parameters that a collective moves."""


class Sent(NamedTuple):
    """A collective of a step: where it runs, in which pass, its kind and axes, and the bytes that a rank receives."""

    place: Place
    direction: str
    collective: str
    axis: str
    nbytes: int


class Seconds(NamedTuple):
    """The seconds of a step: of local work, of collectives, and of those that are hidden behind work."""

    work: float
    sent: float
    hidden: float

    @classmethod
    def of(cls, slots: Sequence[PlacedEvent]) -> Seconds:
        """Those of a timeline."""
        work, sent = (sum(x.event.seconds for x in slots if x.event.queue == each) for each in ("compute", "network"))
        return cls(work, sent, work + sent - makespan(slots))


class Translator(nn.Module):
    """A T5 of Hugging Face that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 64, "d_ff": 256, "num_heads": 8, "d_kv": 8, "vocab_size": VOCABULARY}
        self.model = build("t5", use_cache=False, **sizes)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=labels).loss
        return loss


def model_and_batch(family: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of this family that returns its loss, in double precision, and a batch."""
    match family:
        case "vit":
            return classifier(heads=8, width=8)
        case "t5":
            return Translator(), batch(4, 16, VOCABULARY)
        case _:
            return language_model(family, 64, VOCABULARY), batch(4, 16, VOCABULARY)


# -- what is planned


def planned_step(family: str, shape: tuple[int, ...]) -> tuple[ModelPlan, list[Sent], Seconds, dict[int, set[int]]]:
    """The plan of a step in which bytes that are held have a price, all collectives that it says, and its seconds.

    The functions that a view may separate from each function are those where its moves may run, too.
    """
    (model, args), mesh = model_and_batch(family), mesh_of(shape)
    graph = record_step(model, args, {}).graph().copies()
    chosen = plan_step(StepTables(graph, mesh, SLOW), Weights(memory=1e-7))
    plan = replace(as_plan(graph, chosen, mesh), ndim=args[0].dim())
    with use_topology(SLOW):
        cost = StepPrices(model, args, {})(plan)
        sent = [*planned_collectives(with_kept(graph, model, plan), chosen, SLOW)]
    return replace(plan, cost=cost), sent, Seconds(cost.work, cost.communication, cost.hidden), beside_views(graph)


MAY_VIEW = ("flatten", "reshape", "contiguous")
"""Functions that copy only where a view does not do, which local tensors may decide otherwise than global ones."""


def beside_views(graph: StepGraph) -> dict[int, set[int]]:
    """For each function those that read what it makes, or make what it reads, with nothing but views between."""
    views = {i for i, each in enumerate(graph.functions) if each.is_view or each.name in MAY_VIEW}
    makers = {value: i for i, each in enumerate(graph.functions) for value in each.results}
    beside: dict[int, set[int]] = {i: set() for i in range(len(graph.functions))}
    for i, each in enumerate(graph.functions):
        for maker in {makers[value] for value in each.operands if value in makers}:
            if views & {i, maker}:
                beside[i].add(maker)
                beside[maker].add(i)

    def reached(first: int) -> set[int]:
        found, queue = {first}, [first]
        while queue:
            new = beside[queue.pop()] - found
            found |= new
            queue += new & views
        return found

    return {i: reached(i) for i in beside}


def planned_collectives(graph: StepGraph, chosen: StepPlan, topology: Topology) -> Iterator[Sent]:
    """The collectives of a plan, by the function that runs each, or by the parameter that it moves."""
    calls = PlannedFunctions(graph, chosen).calls()
    for move in planned_moves(graph, chosen):
        for kind, axes, nbytes, _ in collectives_of(move.steps(topology), move.value.itemsize):
            yield Sent(_place(graph, chosen, calls, move), move.direction, kind, ",".join(axes), nbytes)
    for value in graph.outputs:
        if value.producer is not None and not value.uses:
            call, i = value.producer
            made, within = chosen.calls[call].outputs[i], graph.calls[call].within
            end = completion(made, value.shape, value.itemsize, topology)[0]
            ways = [("forward", made, end), ("backward", end.cotangent(), chosen.calls[call].cotangent(i))]
            for direction, src, dst in ways:
                steps = PlannedMove(value, call, direction, src, dst).steps(topology) if src != dst else None
                for kind, axes, nbytes, _ in () if steps is None else collectives_of(steps, value.itemsize):
                    yield Sent(within, direction, kind, ",".join(axes), nbytes)
    for call, own in zip(graph.calls, chosen.calls, strict=True):
        if own.exchanges:
            events = list[CommEvent]()
            with listen(events.append):
                ran = run_by_executor(call, own.inputs, topology, call.attention_loops(own.rows))
            left = ran.received[0]
            for event in events:
                direction = "forward" if left > 0 else "backward"
                left -= event.nbytes
                yield Sent(call.within, direction, event.collective, event.axis, event.nbytes)


def _place(graph: StepGraph, chosen: StepPlan, calls: Sequence[PlannedCall], move: PlannedMove) -> Place:
    """Where a move runs: with its parameter, where its value is made if all that read it do so alike, or is read."""
    value, reader = move.value, graph.calls[move.call]
    if value.kind == "parameter":
        return (value.name,)
    assert value.producer is not None
    maker, i = value.producer
    within, made = graph.calls[maker].within, chosen.calls[maker].outputs[i]
    if within >= 0 and value.number in graph.functions[within].results:
        at = graph.functions[within].results.index(value.number)
        stays = all(chosen.calls[call].inputs[i] == made for call, i in value.uses if call == move.call)
        if calls[within].results[at] is not None or (calls[within].reduced[at] and stays):
            return within
    return reader.within


def with_kept(graph: StepGraph, model: nn.Module, plan: ModelPlan) -> StepGraph:
    """The graph in which the last block that has weights to gather keeps them, which may run before the last one."""
    blocks = [*blocks_of(model)]
    of = {x.name: {block_within(blocks, graph.calls[call].module) for call, _ in x.uses} for x in graph.parameters()}
    is_gathered = {
        name: any(isinstance(plan.parameters[name][plan.mesh.axis(axis)], Shard) for axis in plan.gathered_axes(name))
        for name in of
    }
    reads = [of[x.name] for call in reversed(graph.calls) for x in call.operands if is_gathered.get(x.name)]
    last = next((own for own in reads if len(own) == 1 and own != {""}), {""})
    return replace(graph, kept=frozenset([name for name, own in of.items() if len(own) > 1 or own <= {"", *last}]))


def differences(planned: Sequence[Sent], beside: dict[int, set[int]], *ran: Sequence[Sent]) -> list[str]:
    """The places, passes, kinds and axes of which the busiest of these ranks did not receive what was planned.

    A collective of several parameters moves the bytes of all of them, also those that one alone would exchange. What
    is planned at a function may run at one that only a view separates from it.
    """
    before, after = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for event in planned:
        before[event[:4]] += event.nbytes
    for events in zip(*ran, strict=True):
        after[events[0][:4]] += max(event.nbytes for event in events)
    for place, *how in [key for key in after if isinstance(key[0], tuple)]:
        direction, kind, axis = how
        kinds = (kind, "all_to_all") if len(place) > 1 else (kind,)
        before[(place, *how)] = sum(
            [before.pop(((name,), direction, each, axis), 0) for name in place for each in kinds]
        )
    for place, *how in [key for key in before if key not in after]:
        for there in beside.get(place, ()):
            if after[(there, *how)] == before[(place, *how)] and (there, *how) not in before:
                before[(there, *how)] = before.pop((place, *how))
                break
    keys = [key for key in before | after if before[key] != after[key]]
    return [f"{key}: {before[key]} planned, {after[key]} ran" for key in keys]


# -- what runs


class RanStep(NamedTuple):
    """A step of a rank under observers: its collectives, its seconds, and what process groups were asked for.

    `rehearsed` is what these were asked for in a step that nobody observes, of modules that are rehearsed.
    """

    sent: list[Sent]
    seconds: Seconds
    begun: list[tuple[object, ...]]
    rehearsed: list[tuple[object, ...]]


def ran_step(plan: ModelPlan, family: str) -> RanStep:
    """A step of a planned model on this rank, under observers and without them."""
    torch.set_num_threads(1)
    model, args = model_and_batch(family)
    mesh = dshard.init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.names)
    with use_topology(SLOW):
        model = parallelize(model, mesh, plan)
        names = {id(p): name for name, p in model.named_parameters()}
        step = _Step(model, args)
        step()
        step()  # gradients are joined in the order in which those of the pass before arose
        with nothing_compared(), collectives_begun() as begun:
            sent, seconds = _observed(step, names)
        for _ in range(3):  # which are recorded, and answered
            step()
        with nothing_compared(), collectives_begun() as rehearsed:
            step()
    return RanStep(sent, seconds, begun, rehearsed)


class _Step:
    """A forward and a backward pass, after whose end gradients are there; `direction` is the pass that runs."""

    def __init__(self, model: nn.Module, args: Sequence[object]) -> None:
        self.model, self.args, self.direction = model, args, "forward"

    def __call__(self) -> None:
        self.model.zero_grad()
        self.direction = "forward"
        loss = self.model(*self.args)
        self.direction = "backward"
        loss.backward()
        for p in self.model.parameters():
            p.grad is None or p.grad.to_local()  # type: ignore[attr-defined]


def _observed(step: _Step, names: dict[int, str]) -> tuple[list[Sent], Seconds]:
    """Run a step: each collective with the parameters that it moves, or the function whose operators need it.

    Nodes of autograd are numbered as functions make them, so that of a backward pass the number tells the function.
    """
    sent, starts, functions = list[Sent](), list[int](), list[int]()
    put = Cursor.put

    def noted(self: Cursor, of: Any, at: int) -> None:
        put(self, of, at)
        starts.append(sequence_number())
        functions.append(at if of is None else at - 1)

    def told(event: CommEvent) -> None:
        members = running[-1].members if running else ()
        place: Place = tuple([names[each] for each, _ in members])
        if not members:
            node = current_autograd_node()
            number = sequence_number() if node is None else node._sequence_nr()
            place = next((f for s, f in zip(reversed(starts), reversed(functions), strict=True) if s <= number), -1)
        sent.append(Sent(place, step.direction, event.collective, event.axis, event.nbytes))

    timeline, observed = StepTimeline(SLOW), observing(lambda _: None)
    with mock.patch.object(Cursor, "put", noted), timeline.recorded(), observed as running, listen(told):
        step()
    return sent, Seconds.of(timeline.slots)


BEGIN = ("allreduce", "_allgather_base", "_reduce_scatter_base", "alltoall_base", "broadcast", "send", "recv")


@contextmanager
def collectives_begun() -> Iterator[list[tuple[object, ...]]]:
    """The collectives that this rank begins on process groups: names, and sizes of tensors. It hinders no rehearsal."""
    begun = list[tuple[object, ...]]()

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def begin(group: Any, *args: Any) -> Any:
            begun.append((name, group.size(), *[x.nbytes for x in tensors_in(args)]))
            return run(group, *args)

        return begin

    patched = {name: counted(name, getattr(dist.ProcessGroup, name)) for name in BEGIN}
    with mock.patch.multiple(dist.ProcessGroup, **patched):
        yield begun
