"""Simulate a pipeline: actions and costs of stages give a timeline, or the stages that deadlock; and choose by that.

A stage runs its actions in order. A message is sent once the receiver has posted the receive and the previous message
between the same two stages has arrived: each ordered pair of stages has a link of its own, and links do not share
bandwidth. With overlap sending takes a stage no time; without, it waits until its message has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from typing_extensions import assert_never

from dshard.errors import ScheduleError
from dshard.notebook import Drawn
from dshard.pipeline.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Edge,
    Forward,
    Receive,
    Send,
)
from dshard.pipeline.costs import Costs
from dshard.pipeline.program import SCHEDULES, Program
from dshard.pipeline.timeline import Crossing, Span, Timeline
from dshard.validate import as_number, as_tuple, check_type


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
