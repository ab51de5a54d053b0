"""Choose the schedule that is fastest within the memory, by simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dshard.errors import ScheduleError
from dshard.notebook import Drawn
from dshard.pipeline.actions import Edge
from dshard.pipeline.costs import Costs
from dshard.pipeline.program import Program
from dshard.pipeline.schedule import SCHEDULES
from dshard.pipeline.simulator import simulate
from dshard.pipeline.timeline import Timeline
from dshard.validate import as_number, as_tuple, check_type

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
