"""The cost of a training step of a plan: traced on tensors without data, on a mesh without processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dshard.autograd.joined_gradients import Arrived, BucketBegins, BucketBegun
from dshard.comm import plain, planning
from dshard.core.context import planning_context
from dshard.core.observe import Decision, observing
from dshard.core.spec import Spec
from dshard.core.trees import map_tensors, nested_tensors, tensors_in
from dshard.distribute import distribute_tensor
from dshard.errors import DShardError, LayoutError
from dshard.mesh import Mesh
from dshard.ops.matmul.options import current_options
from dshard.parallel.apply_plan import applied
from dshard.parallel.expert_modules import experts_as_operators
from dshard.parallel.factors import ModelTrace, trace_factors
from dshard.parallel.forward_values import HostReadMissing, HostReads
from dshard.parallel.plan_values import Cost, Memory, ModelPlan, Moves
from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.trace_step import record_step, stand_in_for, without_data
from dshard.placements import Replicate
from dshard.planning.step_tables import MOMENTS
from dshard.planning.uncollected import uncollected
from dshard.step_timeline import Event, PlacedEvent, StepTimeline, makespan
from dshard.topology import Topology
from dshard.torch_private import disable_modes
from dshard.trace import Trace, trace


class _Run(NamedTuple):
    """What a step costs as it runs, the loops of layers of experts, in order, and the events."""

    cost: Cost
    loops: list[str]
    slots: tuple[PlacedEvent, ...]


class StepPrices:
    """Prices of a forward and a backward pass of `model` under plans; `model` is not changed.

    Modes around a call do not see its operators. Seconds are on the topology in use. `reached` is the state that the
    model and the batch lead to, and `model_trace` its trace, for callers that have them.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        reached: ReachableState | None = None,
        model_trace: ModelTrace | None = None,
    ) -> None:
        self.model, self.example = model, (args, kwargs)
        self.reached = reached or ReachableState(model, args, kwargs)
        self.model_trace = model_trace
        self.answers: Sequence[object] | None = None
        """The host values that the forward pass reads, once that is known to read some."""

    @plain()
    @planning()
    @disable_modes()
    @uncollected()
    def __call__(self, plan: ModelPlan) -> Cost:
        """The cost of a step under `plan`.

        Raises:
            LayoutError: a step that does not run without data.
        """
        try:
            run = self.run(plan)
            return replace(run.cost, experts=self._experts(run.loops), routing=current_options().routing)
        except Exception as error:
            known = isinstance(error, HostReadMissing | NotImplementedError)
            if not (known or _is_of_distributed(error, self.model, *self.example)):
                raise
            reason = f" ({str(error).partition('. ')[0]})" if str(error) else ""
            raise LayoutError(
                f"a step of {type(self.model).__name__} does not run without data{reason}, and is not priced: lay it "
                "out by parallelize, with data and the name of a strategy, or give the placements of its parameters by "
                "name"
            ) from error

    @plain()
    @planning()
    @disable_modes()
    @uncollected()
    def slots(self, plan: ModelPlan) -> tuple[PlacedEvent, ...]:
        """The timeline of a step under `plan`."""
        return self.run(plan).slots

    def run(self, plan: ModelPlan) -> _Run:
        """A step under `plan`."""
        try:
            return _run(self, plan)
        except HostReadMissing:
            self.answers = record_step(self.model, *self.example, self.reached).answers
            return _run(self, plan)

    def _experts(self, loops: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """The loops of each layer of experts."""
        if not loops:
            return ()
        if self.model_trace is None:
            self.model_trace = trace_factors(self.model, *self.example, self.reached)
        layers = [module for module in self.model_trace.order if module in self.model_trace.experts.modules]
        return tuple(zip(layers, loops, strict=False))


def _is_of_distributed(
    error: Exception, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> bool:
    """Whether a step fails that runs on plain tensors: with data alone, or where other code fails than dshard's."""
    try:
        needs_data = record_step(model, args, kwargs).answers is None
    except Exception:
        return False
    return needs_data or not isinstance(error, DShardError)


def _run(prices: StepPrices, plan: ModelPlan) -> _Run:
    """Run a step in which the forward pass reads the answers as host values."""
    model, reached = prices.model, prices.reached
    state = _state(model, plan, plan.mesh)
    stand_ins = {id(x): stand_in_for(x) for x in reached.tensors}
    stand_ins |= {id(x): state[name] for name, x in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = map_tensors(prices.example, without_data)
    known = [*(own._local_tensor for own in state.values()), *nested_tensors((args, kwargs))]
    topology, loops = planning_context().topology_of(plan.mesh), list[str]()

    def note_loops(decision: Decision) -> None:
        """Note the loops of a layer of experts."""
        if decision.op == "experts" and decision.strategy is not None:
            names = decision.strategy.inputs[0].mesh.names
            rows = zip(names, decision.strategy.rows, strict=True)
            loops.append(decision.strategy.name or " ".join([f"{name}:{row}" for name, row in rows if row is not None]))

    def step(timeline: StepTimeline) -> tuple[Trace, int, int]:
        """What a step sends, how much of it forward, and the bytes alive between its passes."""
        with (
            planning(topology.backend),
            reached.replaced(stand_ins),
            experts_as_operators(model),
            applied(model, plan),
            trace() as sent,
            observing(note_loops),
            timeline.recorded(),
        ):
            with HostReads(prices.answers):
                out = model(*args, **kwargs)
            between = len(sent.events), timeline.memory.alive()
            ends = _ends(out)
            gradients = [torch.empty_like(end) for end in ends]
            torch.autograd.backward(ends, gradients)
        for own in state.values():
            own.grad = None
        return sent, *between

    first = LaterSteps(topology, known)
    sent, in_forward, activations = step(first)
    timeline: StepTimeline = first
    if not first.complete():  # the second step is as later ones are
        timeline = StepTimeline(topology, known, for_shapes=True)
        step(timeline)
    parameters = {id(t): t for t in state.values() if isinstance(t, nn.Parameter)}.values()
    nbytes = sum(map(_local_bytes, parameters))
    trained = sum([_local_bytes(p) for p in parameters if p.requires_grad])
    memory = Memory(nbytes, trained, MOMENTS * trained, activations, max(timeline.memory.most, trained))
    work, network = timeline.seconds("compute"), timeline.seconds("network")
    slots = timeline.slots
    hidden = work + network - makespan(slots)
    flops = sum(event.flops for event in timeline.events)
    cost = Cost(_moves(sent, in_forward), memory, work, hidden if hidden > 1e-9 * (work + network) else 0.0, flops)
    return _Run(cost, loops, slots)


def _ends(out: object) -> list[Tensor]:
    """The results from which a backward pass runs, of which no other is made: not the logits of a loss."""
    made = [t for t in tensors_in(list(out.values()) if isinstance(out, Mapping) else out) if t.requires_grad]
    within = _nodes_before([t.grad_fn for t in made]) if len(made) > 1 else ()
    return [t for t in made if t.grad_fn not in within]


def _nodes_before(nodes: Sequence[Any]) -> set[Any]:
    """The nodes of autograd to which these lead in a backward pass."""
    reached, waiting = set[Any](), [*nodes]
    while waiting:
        node = waiting.pop()
        for other, _ in () if node is None else node.next_functions:
            if other is not None and other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached


def _state(model: nn.Module, plan: ModelPlan, mesh: Mesh) -> dict[str, Any]:
    replicated = (Replicate(),) * mesh.ndim
    state: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        stand_in = stand_in_for(parameter)
        state[name] = distribute_tensor(stand_in, mesh, plan.parameters.get(name, replicated))
        vars(state[name]).update(vars(stand_in))
    if plan.precision is not None:
        plan.precision.reduce(state.values())
    for name, buffer in model.named_buffers():
        state[name] = distribute_tensor(without_data(buffer), mesh, replicated)
    return state


def _local_bytes(x: Any) -> int:
    spec: Spec = x._spec
    return spec.layout.local_numel(spec.shape) * spec.itemsize


def _moves(sent: Trace, forward: int) -> tuple[Moves, ...]:
    groups: dict[tuple[str, str, str, str], list[tuple[int, int, float]]] = {}
    for i, event in enumerate(sent.events):
        direction = "forward" if i < forward else "backward"
        shares = event.members or ((event.module, event.nbytes),)
        for module, nbytes in shares:
            key = (module.partition(".")[2], direction, event.collective, event.axis)
            seconds = event.seconds * (nbytes / event.nbytes if event.nbytes else 1 / len(shares))
            is_last = module == shares[-1][0]  # with which it is complete
            groups.setdefault(key, []).append((int(is_last), nbytes, seconds))
    return tuple(Moves(*key, *map(sum, zip(*parts, strict=True))) for key, parts in groups.items())


# -- the timeline of the steps after the first, from that of the first: which gradients are to come is known then
# Gradients are reduced in buckets, each as soon as its last one has arisen. In the first step nobody knows which there
# will be, and all buckets begin at the end of the backward pass (`autograd/joined_gradients.py`). Nothing else differs:
# so each bucket is moved to where its last gradient has arisen, with the memory that it takes and frees.


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """The moment at which the gradient of a leaf has arisen, and the bytes alive then."""

    leaf: int
    alive: int


@dataclass(slots=True, eq=False)
class _Bucket:
    """A bucket that begins: what is told of it, the bytes alive before, at most and after, and its events."""

    told: BucketBegins
    before: int
    most: int
    after: int = 0
    events: list[Event] = field(default_factory=list)


Entry: TypeAlias = Event | int | _Arrival | _Bucket
"""What happens in a step, in order; a number is the bytes alive after an operator."""


class LaterSteps(StepTimeline):
    """Records a first step on tensors without data; `complete` makes of it the timeline and the peak of later ones."""

    def __init__(self, topology: Topology, known: Iterable[Tensor]) -> None:
        super().__init__(topology, known, for_shapes=True)
        self.log: list[Entry] = []
        self.begins: _Bucket | None = None

    def add(self, event: Event) -> None:
        """Record an event."""
        (self.log if self.begins is None else self.begins.events).append(event)

    def hold(self, outputs: Sequence[Tensor]) -> None:
        """Count what an operator has made."""
        alive = self.memory.add(outputs)
        if self.begins is None:
            self.log.append(alive)
        else:
            self.begins.most = max(self.begins.most, alive)

    def found(self, told: object) -> None:
        """Heed gradients that have arisen, and buckets that begin."""
        alive = self.memory.alive()
        if isinstance(told, Arrived):
            self.log.append(_Arrival(told.leaf, alive))
        elif isinstance(told, BucketBegins):
            self.begins = _Bucket(told, alive, alive)
            self.log.append(self.begins)
        elif isinstance(told, BucketBegun) and self.begins is not None:
            self.begins.after, self.begins = alive, None

    def complete(self) -> bool:
        """Order the events as in later steps; False if a bucket has begun before the backward pass was at its end."""
        arrived, turns, due = dict[int, int](), dict[Mesh, int](), defaultdict[int, list[_Bucket]](list)
        for n, entry in enumerate(self.log):
            if isinstance(entry, _Arrival):
                if turns or entry.leaf in arrived:
                    return False
                arrived[entry.leaf] = n
            elif isinstance(entry, _Bucket):
                mesh, leaves = entry.told
                turns[mesh] = max(turns.get(mesh, 0), *(arrived[leaf] for leaf in leaves))
                due[turns[mesh]].append(entry)
        moved = 0
        for n, entry in enumerate(self.log):
            if isinstance(entry, Event):
                self.events.append(entry)
            elif isinstance(entry, _Bucket):
                moved -= entry.after - entry.before
            else:
                alive = entry.alive if isinstance(entry, _Arrival) else entry
                self.memory.most = max(self.memory.most, alive + moved)
                for bucket in due.get(n, ()):
                    self.memory.most = max(self.memory.most, alive + moved + bucket.most - bucket.before)
                    self.events += bucket.events
                    moved += bucket.after - bucket.before
        return True
