"""The cost of a training step of a plan: traced on tensors without data, on a mesh without processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dshard.autograd.joined_gradients import GRADIENTS
from dshard.comm import plain, planning
from dshard.core.alike_operators import AlikeOperators
from dshard.core.context import planning_context
from dshard.core.observe import Decision, OperatorMode, observing
from dshard.core.spec import Spec
from dshard.core.trees import map_tensors, nested_tensors, tensors_in
from dshard.distribute import distribute_tensor
from dshard.errors import LayoutError
from dshard.mesh import Mesh
from dshard.ops.matmul.options import current_options
from dshard.parallel.apply_plan import applied
from dshard.parallel.expert_modules import experts_as_operators
from dshard.parallel.factors import ModelTrace, trace_factors
from dshard.parallel.forward_values import HostReadMissing, HostReads
from dshard.parallel.plan_values import Cost, Memory, Moves, Plan
from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.repeated_blocks import KEPT, SPREAD, BlockLists, Entry, Repeat, ShortModel
from dshard.parallel.trace_step import record_step, stand_in_for, without_data
from dshard.placements import Replicate
from dshard.planning.step_recorder import SignedCall
from dshard.planning.step_tables import MOMENTS
from dshard.step_timeline import PlacedEvent, StepTimeline, makespan
from dshard.torch_private import disable_modes
from dshard.trace import Trace, trace

Levels: TypeAlias = Sequence[tuple[str, int]]
"""The operators of a pass, and the bytes alive after each."""


class _Run(NamedTuple):
    """What a step costs as it runs, and the bytes alive after each operator of its passes.

    `joined` are the modules whose gradients each collective reduces; `loops` those of layers of experts, in order;
    `slots` the events.
    """

    cost: Cost
    levels: tuple[Levels, Levels]
    joined: list[tuple[str, ...]]
    loops: list[str]
    slots: tuple[PlacedEvent, ...]


@dataclass(slots=True)
class _Case:
    """A model, or one with fewer units of repeats, as its steps are run: the state that model and batch lead to.

    `answers` are the host values that the forward pass reads, once that is known to read some.
    """

    model: nn.Module
    example: Any
    reached: ReachableState
    alike: AlikeOperators[Any]
    short: ShortModel | None = None
    answers: Sequence[object] | None = None

    def run(self, plan: Plan) -> _Run:
        """A step under a plan of the whole model."""
        if self.short is None:
            return self._run(plan)
        with GRADIENTS.entered(self.short.gradients()), self.short.applied():
            return self._run(self.short.plan(plan))

    def _run(self, plan: Plan) -> _Run:
        try:
            return _run(self, plan)
        except HostReadMissing:
            args, kwargs = self.example
            self.answers = record_step(self.model, args, kwargs, self.reached).answers
            return _run(self, plan)


class StepPrices:
    """Prices of a forward and a backward pass of `model` under plans; `model` is not changed.

    Modes around a call do not see its operators. Seconds are on the topology in use. Blocks that repeat are run a few
    times, and counted as often as the model has them. `reached` is the state that the model and the batch lead to, and
    `model_trace` its trace, for callers that have them.
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
        self.model_trace, self.blocks = model_trace, BlockLists(model)
        self.calls: Sequence[SignedCall] | None = None
        self.alike: AlikeOperators[Any] = AlikeOperators()
        self.whole = _Case(model, self.example, self.reached, self.alike)
        self.cases: dict[tuple[tuple[Repeat, ...], tuple[int, ...]], _Case | None] = {}

    @plain()
    @planning()
    @disable_modes()
    def __call__(self, plan: Plan) -> Cost:
        """The cost of a step under `plan`.

        Raises:
            LayoutError: a step that does not run without data.
        """
        try:
            return replace(self._price(plan), routing=current_options().routing)
        except Exception as error:
            known = isinstance(error, HostReadMissing | NotImplementedError)
            if not (known or _runs_on_data_alone(self.model, *self.example)):
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
    def slots(self, plan: Plan) -> tuple[PlacedEvent, ...]:
        """The timeline of a step under `plan`, of all blocks."""
        return self.whole.run(plan).slots

    def _repeats(self, plan: Plan) -> tuple[Repeat, ...]:
        if not self.blocks.may_repeat():
            return ()
        return self.blocks.repeats(self._calls(), plan)

    def _price(self, plan: Plan) -> Cost:
        repeats = self._repeats(plan)
        fewest = self._short(repeats, [KEPT] * len(repeats)) if repeats else None
        if fewest is None or fewest.short is None:
            whole = self.whole.run(plan)
            return replace(whole.cost, experts=self._experts(whole.loops, lambda module: module))
        first = fewest.run(plan)
        spread = SPREAD if any(map(fewest.short.are_apart, first.joined)) else 1
        parts = [_Part(fewest.short, first, 0)]
        for r, repeat in enumerate(repeats):
            added = min(spread, repeat.times - KEPT)
            more = self._short(repeats, [KEPT + added * (r == i) for i in range(len(repeats))])
            if more is None or more.short is None:
                return self.whole.run(plan).cost
            parts.append(_Part(more.short, more.run(plan), added))
        cost = _unfolded(repeats, parts)
        return replace(cost, experts=self._experts(first.loops, partial(_representative, fewest.short)))

    def _experts(self, loops: Sequence[str], ran: Callable[[str], str]) -> tuple[tuple[str, str], ...]:
        """The loops of each layer of experts, if it is known which module ran each: `ran` in its place."""
        if not loops:
            return ()
        model_trace = self._trace()
        layers = [module for module in model_trace.order if module in model_trace.experts.modules]
        in_order = dict(zip(dict.fromkeys(map(ran, layers)), loops, strict=False))
        return tuple((module, in_order[ran(module)]) for module in layers if ran(module) in in_order)

    def _trace(self) -> ModelTrace:
        if self.model_trace is None:
            self.model_trace = trace_factors(self.model, self.example[0], self.example[1], self.reached)
        return self.model_trace

    def _calls(self) -> Sequence[SignedCall]:
        """The operators of the forward pass."""
        if self.calls is None:
            self.calls = self._trace().step.recorder.signatures()
        return self.calls

    def _short(self, repeats: tuple[Repeat, ...], units: Sequence[int]) -> _Case | None:
        """The model with so many units of each repeat, if its forward pass is a part of the whole one."""
        key = repeats, tuple(units)
        if key not in self.cases:
            short = ShortModel(self.blocks, repeats, units)
            with short.applied():
                reached = ReachableState(self.model, *self.example)
                try:
                    own = record_step(self.model, *self.example, reached)
                    calls, answers = own.recorder.signatures(), own.answers or None
                except Exception:  # whatever a model raises that counts on the entries left out
                    calls, answers = [], None
            is_part = bool(calls) and short.is_part(calls, self._calls())
            self.cases[key] = _Case(self.model, self.example, reached, self.alike, short, answers) if is_part else None
        return self.cases[key]


def _runs_on_data_alone(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether the forward pass of `model` fails without data, and does not with it."""
    try:
        return record_step(model, args, kwargs).answers is None
    except Exception:
        return False


def price(model: nn.Module, plan: Plan, args: Sequence[object], kwargs: Mapping[str, object]) -> Cost:
    """The cost of a forward and a backward pass of `model` under one plan, as `StepPrices` has it."""
    return StepPrices(model, args, kwargs)(plan)


def _run(case: _Case, plan: Plan) -> _Run:
    """Run a step in which the forward pass reads the answers of the case as host values."""
    model, reached, answers = case.model, case.reached, case.answers
    state = _state(model, plan, plan.mesh)
    stand_ins = {id(x): stand_in_for(x) for x in reached.tensors}
    stand_ins |= {id(x): state[name] for name, x in (*model.named_parameters(), *model.named_buffers())}
    args, kwargs = map_tensors(case.example, without_data)
    known = [*(own._local_tensor for own in state.values()), *nested_tensors((args, kwargs))]
    topology = planning_context().topology_of(plan.mesh)
    timeline = StepTimeline(topology, known, for_shapes=True, alike=case.alike)

    def step() -> Iterator[None]:
        """A step, that stops between its passes."""
        with HostReads(answers):
            out = model(*args, **kwargs)
        yield
        _backward(out)

    runs, loops = partial(_as_planned, model, plan, reached, stand_ins), list[str]()
    noted, answered = observing(_loops_noted(loops)), OperatorMode(case.alike.result)
    with planning(topology.backend), runs(), trace() as sent, noted, answered:
        for _ in step():
            in_forward = len(sent.events)
    for own in state.values():
        own.grad = None
    with planning(topology.backend), runs(), timeline.recorded():
        for _ in step():  # gradients are joined in the order in which the pass before gave them
            activations, forward = timeline.memory.alive(), len(timeline.levels)
    parameters = {id(t): t for t in state.values() if isinstance(t, nn.Parameter)}.values()
    nbytes = sum(map(_local_bytes, parameters))
    trained = sum([_local_bytes(p) for p in parameters if p.requires_grad])
    memory = Memory(nbytes, trained, MOMENTS * trained, activations, max(timeline.memory.most, trained))
    work, network = timeline.seconds("compute"), timeline.seconds("network")
    slots = timeline.slots
    hidden = work + network - makespan(slots)
    flops = sum(event.flops for event in timeline.events)
    cost = Cost(_moves(sent, in_forward), memory, work, hidden if hidden > 1e-9 * (work + network) else 0.0, flops)
    joined = [tuple(module.partition(".")[2] for module, _ in event.members) for event in sent.events[in_forward:]]
    return _Run(cost, (timeline.levels[:forward], timeline.levels[forward:]), joined, loops, slots)


def _loops_noted(loops: list[str]) -> Callable[[Decision], None]:
    """An observer that notes the loops of layers of experts."""

    def note(decision: Decision) -> None:
        if decision.op == "experts" and decision.strategy is not None:
            names = decision.strategy.inputs[0].mesh.names
            rows = zip(names, decision.strategy.rows, strict=True)
            loops.append(decision.strategy.name or " ".join([f"{name}:{row}" for name, row in rows if row is not None]))

    return note


@contextmanager
def _as_planned(
    model: nn.Module, plan: Plan, reached: ReachableState, stand_ins: Mapping[int, Tensor]
) -> Iterator[None]:
    """Within the block `model` runs by the plan, on these stand-ins for its tensors."""
    with reached.replaced(stand_ins), experts_as_operators(model), applied(model, plan):
        yield


def _backward(out: object) -> None:
    """Run the backward pass from all results that no other is made of: not from the logits of a loss."""
    made = [t for t in tensors_in(list(out.values()) if isinstance(out, Mapping) else out) if t.requires_grad]
    within = _nodes_before([t.grad_fn for t in made]) if len(made) > 1 else ()
    ends = [t for t in made if t.grad_fn not in within]
    torch.autograd.backward(ends, [torch.empty_like(t) for t in ends])


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


def _state(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[str, Any]:
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
    return prod(spec.layout.local_shape(spec.shape, (0,) * spec.layout.mesh.ndim)) * spec.itemsize


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


# -- steps of models with all units, from steps with few


class _Part(NamedTuple):
    """A step with few units of each repeat, of one with so many `added`."""

    short: ShortModel
    run: _Run
    added: int


def _unfolded(repeats: Sequence[Repeat], parts: Sequence[_Part]) -> Cost:
    """The cost of a step with all units: that with the fewest, and for each unit beyond what one more adds."""
    (fewest, *more), beyond = parts, [each.times - KEPT for each in repeats]

    def total(of: Callable[[Cost], Any]) -> Any:
        base = of(fewest.run.cost)
        grown = [n * (of(part.run.cost) - base) / part.added for n, part in zip(beyond, more, strict=True)]
        return base + (sum(map(round, grown)) if isinstance(base, int) else sum(grown))

    held = Memory(*[total(lambda cost: getattr(cost.memory, name)) for name in _HELD])  # noqa: B023 (called at once)
    peaks = [_peak([part.run.levels[i] for part in parts], beyond, [part.added for part in more]) for i in range(2)]
    moves = [replace(each, module=_outer(fewest.short, repeats, each.module)) for each in fewest.run.cost.moves]
    for r, (repeat, part) in enumerate(zip(repeats, more, strict=True)):
        for each in part.run.cost.moves:
            entry, rest = part.short.whole(each.module)
            at = None if entry is None else part.short.unit(entry)
            if entry is not None and at is not None and at[0] == r and 1 <= at[1] <= part.added:
                for unit in range(at[1] + 1, repeat.times - 1, part.added):
                    ahead = (unit - at[1]) * repeat.period
                    moves.append(replace(each, module=_named(part.short, entry, ahead, rest)))
    memory = replace(held, peak=max(*peaks, held.peak))  # which the most bytes of few units bound from below
    hidden = min(max(0.0, total(lambda cost: cost.hidden)), total(lambda cost: cost.communication))
    return Cost(tuple(moves), memory, total(lambda cost: cost.work), hidden, total(lambda cost: cost.flops))


_HELD = tuple(each.name for each in fields(Memory))


def _outer(short: ShortModel, repeats: Sequence[Repeat], module: str) -> str:
    """The name in the whole model of a module in one with the fewest units: all but the first two of these are last."""
    entry, rest = short.whole(module)
    if entry is None:
        return module
    at = short.unit(entry)
    return _named(short, entry, 0 if at is None or at[1] < 2 else _skipped(repeats[at[0]]), rest)


def _representative(short: ShortModel, module: str) -> str:
    """The module of the whole model that ran in place of this one, in a unit that was left out."""
    entry, rest = short.blocks.entry(module)
    at = None if entry is None else short.unit(entry)
    if entry is None or at is None or at[1] < KEPT:
        return module
    return _named(short, entry, -(at[1] - KEPT + 1) * short.repeats[at[0]].period, rest)


def _skipped(repeat: Repeat) -> int:
    return (repeat.times - KEPT) * repeat.period


def _named(short: ShortModel, entry: Entry, ahead: int, rest: str) -> str:
    path, position = entry
    return ".".join(filter(None, (path, short.blocks.names[path][position + ahead], rest)))


def _peak(levels: Sequence[Levels], beyond: Sequence[int], added: Sequence[int]) -> int:
    """The most bytes alive in a pass with all units, from the pass with the fewest and those with units added.

    Counted from either end of the pass, an operator's bytes grow by as much with each unit that is added; of those
    within units, the first and the last hold the most.
    """
    fewest, *more = levels
    choices: list[list[tuple[int, int, int]]] = []
    for run in more:
        names, others = [name for name, _ in fewest], [name for name, _ in run]
        after = _common(names, others)
        before = len(names) - _common(names[::-1], others[::-1])
        choices.append([(0, 0, after), (len(run) - len(fewest), before, len(names))])
    most = 0
    for ways in product(*choices):
        first, end = max(way[1] for way in ways), min(way[2] for way in ways)
        for j in range(first, end):
            alive = fewest[j][1]
            each = zip(beyond, added, more, ways, strict=True)
            grown = [n * (run[j + way[0]][1] - alive) / units for n, units, run, way in each]
            most = max(most, alive + round(sum(grown)))
    return most


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """The number of first names that two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
