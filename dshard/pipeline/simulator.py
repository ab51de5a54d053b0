"""Simulate a pipeline: actions and costs of stages give a timeline, or the stages that deadlock; and choose by that.

A stage runs its actions in order. A message is sent once the receiver has posted the receive and the previous message
between the same two stages has arrived: each ordered pair of stages has a link of its own, and links do not share
bandwidth. With overlap sending takes a stage no time; without, it waits until its message has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import assert_never

from dshard.chrome import Bar, to_chrome
from dshard.errors import ScheduleError
from dshard.notebook import Drawn
from dshard.pipeline.costs import Costs
from dshard.pipeline.program import (
    SCHEDULES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Program,
    Receive,
    Send,
)
from dshard.validate import as_int, as_number, as_tuple, check_type


def simulate(program: Program, costs: Costs) -> Timeline:
    """The timeline of a program.

    >>> from dshard.pipeline import StageCost, chain, uniform
    >>> costs = uniform(4, chain(4), StageCost(), seconds=0.5)
    >>> [simulate(Program(name, 4, 16, chain(4)), costs).makespan for name in ("1f1b", "eager-1f1b")]
    [71.0, 60.0]
    """
    check_type(program, Program, "program", "give a Program(schedule, n_stages, n_microbatches, edges)", ScheduleError)
    check_type(costs, Costs, "costs", "give Costs(stages, edges), as pipeline.uniform makes them", ScheduleError)
    if len(costs.stages) != program.n_stages:
        raise ScheduleError(f"costs of {len(costs.stages)} stages for a pipeline of {program.n_stages}")
    actions = [program.actions(stage) for stage in range(program.n_stages)]
    return play(actions, costs, overlap=program.overlap)


def play(actions: Sequence[Sequence[Action]], costs: Costs, *, overlap: bool = True) -> Timeline:
    """The timeline of stages that each run these actions, in order.

    Raises:
        ScheduleError: deadlocked stages, naming what each waits for; or a value that is no action.
    """
    check_type(costs, Costs, "costs", "give Costs(stages, edges), as pipeline.uniform makes them", ScheduleError)
    if len(actions) != len(costs.stages):
        raise ScheduleError(f"actions of {len(actions)} stages, and costs of {len(costs.stages)}: give both of each")
    for stage in actions:
        for action in as_tuple(stage, "the actions of a stage", "give them in order", ScheduleError):
            check_type(action, Action, "an action", "give Forward(0), Backward(0), Send(...), ...", ScheduleError)
    state = _State(costs, overlap, [[*stage] for stage in actions])
    while any(state.advance(stage) for stage in range(len(actions))):
        pass
    if any(state.at[stage] < len(todo) for stage, todo in enumerate(actions)):
        raise ScheduleError(f"the stages wait for each other forever: {state.waiting()}")
    spans = tuple(map(tuple, state.spans))
    return Timeline(spans, tuple(sorted(state.crossings, key=lambda c: (c.begin, c.end))), costs)


Item = tuple[Edge, int]


@dataclass(slots=True)
class _State:
    """The state of a simulation: the position and time of each stage."""

    costs: Costs
    overlap: bool
    actions: list[list[Action]]
    at: list[int] = field(init=False)
    now: list[float] = field(init=False)
    spans: list[list[Span]] = field(init=False)
    posted: dict[Item, float] = field(default_factory=dict)
    sent: dict[tuple[int, int], list[tuple[Item, float]]] = field(default_factory=dict)
    arrived: dict[Item, float] = field(default_factory=dict)
    expected: dict[tuple[int, int, bool], list[Item]] = field(default_factory=dict)
    free: dict[tuple[int, int], float] = field(default_factory=dict)
    crossings: list[Crossing] = field(default_factory=list)
    issued: set[Item] = field(default_factory=set)

    def __post_init__(self) -> None:
        n = len(self.actions)
        self.at, self.now, self.spans = [0] * n, [0.0] * n, [[] for _ in range(n)]

    def advance(self, stage: int) -> bool:
        """Run the actions that the stage can run now, and return whether there were any."""
        before = self.at[stage]
        while self.at[stage] < len(self.actions[stage]) and self._do(stage, self.actions[stage][self.at[stage]]):
            self.at[stage] += 1
        return self.at[stage] > before

    def _do(self, stage: int, action: Action) -> bool:
        match action:
            case Receive(edge, microbatch):
                self.posted[edge, microbatch] = self.now[stage]
                self.expected.setdefault((stage, microbatch, edge.backward), []).append((edge, microbatch))
                self._cross(edge)
                return True
            case Send(edge, microbatch):
                return self._send(stage, (edge, microbatch))
            case Forward() | Backward() | BackwardInput() | BackwardWeight():
                return self._compute(stage, action)
            case _:
                assert_never(action)

    def _send(self, stage: int, item: Item) -> bool:
        edge = item[0]
        if item not in self.issued:
            self.issued.add(item)
            self.sent.setdefault((edge.src, edge.dst), []).append((item, self.now[stage]))
            self._cross(edge)
        if self.overlap:
            return True
        if item not in self.arrived:
            return False
        self.now[stage] = max(self.now[stage], self.arrived[item])
        return True

    def _cross(self, edge: Edge) -> None:
        """Transfer the values sent between two stages, in order, for which memory is posted."""
        pair = edge.src, edge.dst
        queue = self.sent.get(pair, [])
        while queue and queue[0][0] in self.posted:
            item, sent = queue.pop(0)
            cost = self.costs.of(item[0])
            begin = max(sent, self.posted[item], self.free.get(pair, 0.0))
            end = begin + cost.latency + cost.seconds
            self.arrived[item] = self.free[pair] = end
            self.crossings.append(Crossing(*item, begin, end, self.posted[item]))

    def _compute(self, stage: int, action: Compute) -> bool:
        way = not isinstance(action, Forward)
        needed = [] if isinstance(action, BackwardWeight) else self.expected.get((stage, action.microbatch, way), [])
        if not all(item in self.arrived for item in needed):
            return False
        begin = max([self.now[stage], *(self.arrived[item] for item in needed)])
        self.now[stage] = begin + self.costs.stages[stage].seconds(action)
        self.spans[stage].append(Span(stage, action, begin, self.now[stage]))
        return True

    def waiting(self) -> str:
        """Text that says what each unfinished stage waits for."""
        return "; ".join(
            f"stage {stage} at {todo[self.at[stage]]}"
            for stage, todo in enumerate(self.actions)
            if self.at[stage] < len(todo)
        )


DELAYS = (None, 0, 1)


@dataclass(frozen=True, slots=True, repr=False)
class Choice(Drawn):
    """A program and its simulated timeline."""

    program: Program
    timeline: Timeline

    def __repr__(self) -> str:
        return f"Choice({self.program.schedule}, {self.timeline!r})"

    @property
    def peak_bytes(self) -> int:
        """The most bytes on any rank."""
        return max(map(self.timeline.peak_bytes, range(self.program.n_stages)))


def rank_schedules(
    costs: Costs, n_microbatches: int, edges: Sequence[Edge], delays: Iterable[int | None] = DELAYS
) -> tuple[Choice, ...]:
    """All schedules with each of these delays: the fastest first, equally fast ones by memory."""
    check_type(costs, Costs, "costs", "give Costs(stages, edges), as pipeline.uniform makes them", ScheduleError)
    delays = as_tuple(delays, "delays", "give some, such as (None, 0, 1)", ScheduleError)
    if not delays:
        raise ScheduleError("delays: none are given; None stands for a backward pass in one")
    edges = as_tuple(edges, "edges", "give the Edges that cross", ScheduleError)
    choices = []
    for schedule in SCHEDULES:
        for delay in delays:
            program = Program(schedule, len(costs.stages), n_microbatches, tuple(edges), delay)
            choices.append(Choice(program, simulate(program, costs)))
    return tuple(sorted(choices, key=_order))


def choose(
    costs: Costs,
    n_microbatches: int,
    edges: Sequence[Edge],
    budget: int | None = None,
    delays: Iterable[int | None] = DELAYS,
) -> Choice:
    """The fastest schedule under which no rank ever holds more than `budget` bytes.

    Raises:
        ScheduleError: none fits; or invalid costs, delays or budget.
    """
    if budget is not None:
        as_number(budget, "budget", ScheduleError, zero=True)
    ranked = rank_schedules(costs, n_microbatches, edges, delays)
    fitting = [choice for choice in ranked if budget is None or choice.peak_bytes <= budget]
    if not fitting:
        least = min(ranked, key=lambda choice: choice.peak_bytes)
        raise ScheduleError(
            f"no schedule of {n_microbatches} microbatches keeps within {budget:,} bytes on each rank: the least is "
            f"{least.peak_bytes:,}, with {least.program.schedule}; use smaller microbatches, more ranks or more stages"
        )
    return fitting[0]


def _order(choice: Choice) -> tuple[float, int, int]:
    """Sort key of a choice: seconds, equal within a millionth; then memory, then the simpler backward."""
    makespan = float(f"{choice.timeline.makespan:.6g}")
    return makespan, choice.peak_bytes, -1 if choice.program.delay is None else choice.program.delay


# -- timelines of a step, simulated or measured: when each stage computed and each value was sent


@dataclass(frozen=True, slots=True)
class Span:
    """One computation of a stage, from `begin` to `end` in seconds since the step began."""

    stage: int
    compute: Compute
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """One value sent between stages; the receiver gave memory for it at `posted`."""

    edge: Edge
    microbatch: int
    begin: float
    end: float
    posted: float


@dataclass(frozen=True, slots=True, repr=False)
class Timeline(Drawn):
    """A step of a pipeline, stage by stage: computations in order, values sent, and the costs behind them."""

    spans: tuple[tuple[Span, ...], ...]
    crossings: tuple[Crossing, ...]
    costs: Costs

    def __repr__(self) -> str:
        return f"Timeline({len(self.spans)} stages, {self.makespan:g} s)"

    @property
    def makespan(self) -> float:
        """Seconds from the beginning to the last end, of computing or crossing."""
        ends = [span.end for stage in self.spans for span in stage] + [crossing.end for crossing in self.crossings]
        return max(ends, default=0.0)

    def busy(self, stage: int) -> float:
        """Seconds that a stage computes."""
        if not 0 <= as_int(stage, "stage", ScheduleError) < len(self.spans):
            raise ScheduleError(f"there is no stage {stage}: they are 0 to {len(self.spans) - 1}")
        return sum(span.end - span.begin for span in self.spans[stage])

    def bubble(self, stage: int) -> float:
        """The part of the makespan in which a stage does not compute."""
        return 1 - self.busy(stage) / self.makespan if self.makespan else 0.0

    def in_flight(self, stage: int) -> int:
        """The most microbatches at once whose forward has begun and whose activations are still needed."""
        count = most = 0
        for span in self.spans[stage]:
            count += isinstance(span.compute, Forward)
            most = max(most, count)
            count -= isinstance(span.compute, Backward | BackwardInput)
        return most

    def peak_bytes(self, stage: int) -> int:
        """The most bytes at once on the busiest rank of a stage: fixed, activations, and what is received early."""
        cost = self.costs.stages[stage]
        changes = [change for span in self.spans[stage] for change in _changes(span, cost.activation, cost.kept)]
        begins = {(type(span.compute), span.compute.microbatch): span.begin for span in self.spans[stage]}
        for crossing in self.crossings:
            if crossing.edge.dst == stage:
                nbytes = self.costs.of(crossing.edge).nbytes
                changes += [(crossing.posted, nbytes), (_consumed(crossing, begins), -nbytes)]
        held = most = cost.fixed
        for _, change in sorted(changes):  # at one moment memory is first freed
            held += change
            most = max(most, held)
        return most

    def fits(self, budget: int) -> bool:
        """Whether no stage ever holds more than `budget` bytes on a rank."""
        return all(self.peak_bytes(stage) <= budget for stage in range(len(self.spans)))

    def data(self) -> dict[str, Any]:
        """Figures and spans as JSON values, in seconds and bytes."""
        stages = range(len(self.spans))
        return {
            "makespan": self.makespan,
            "stages": [
                {
                    "busy": self.busy(i),
                    "bubble": self.bubble(i),
                    "in_flight": self.in_flight(i),
                    "peak_bytes": self.peak_bytes(i),
                    "spans": [[str(span.compute), span.begin, span.end] for span in self.spans[i]],
                }
                for i in stages
            ],
            "crossings": [[str(c.edge), c.microbatch, c.begin, c.end] for c in self.crossings],
        }

    def to_chrome(self) -> str:
        """The timeline in the Chrome trace format: a thread for each stage, and one for each pair that sends."""
        pairs = sorted({(c.edge.src, c.edge.dst) for c in self.crossings})
        tracks = [(0, f"stage {stage}") for stage in range(len(self.spans))]
        tracks += [(1, f"{src} to {dst}") for src, dst in pairs]
        spans = [_span(span) for stage in self.spans for span in stage]
        return to_chrome([*spans, *map(_crossing, self.crossings)], tracks)


def _changes(span: Span, activation: int, kept: int) -> list[tuple[float, int]]:
    """Times within a span, and the change of the stage's activation bytes at each."""
    match span.compute:
        case Forward():
            return [(span.begin, activation)]
        case Backward():
            return [(span.end, -activation)]
        case BackwardInput():
            return [(span.end, kept - activation)]
        case BackwardWeight():
            return [(span.end, -kept)]


def _consumed(crossing: Crossing, begins: dict[tuple[type, int], float]) -> float:
    """Time at which the stage begins to compute with a received value: from then on it counts as an activation."""
    kinds = (Backward, BackwardInput) if crossing.edge.backward else (Forward,)
    return next(begins[kind, crossing.microbatch] for kind in kinds if (kind, crossing.microbatch) in begins)


def _span(span: Span) -> Bar:
    name, kind = str(span.compute), type(span.compute).__name__
    return Bar(name, kind, (0, f"stage {span.stage}"), span.begin, span.end - span.begin)


def _crossing(crossing: Crossing) -> Bar:
    edge, took = crossing.edge, crossing.end - crossing.begin
    return Bar(f"{edge} {crossing.microbatch}", "Crossing", (1, f"{edge.src} to {edge.dst}"), crossing.begin, took)
