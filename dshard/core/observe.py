"""The decision for each operator, observed by `trace`, `explain` and `strict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from dshard.comm import Scoped, collectives_of, crossing_event, outside_graphs
from dshard.core.panel_cost import PanelCost
from dshard.cost import collective_seconds
from dshard.layout import Shape
from dshard.mesh import Mesh
from dshard.redistribute import Plan
from dshard.reshard import ReshardPlan
from dshard.rules.expand import Operand
from dshard.rules.rule import Rule
from dshard.rules.strategy import ANY, Constraints, Strategy
from dshard.topology import COLLECTIVES, Topology

NEEDED = "the operator needs it so"


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """A collective that will run: its kind, its mesh axes, bytes that the busiest rank receives, predicted seconds."""

    collective: str
    axis: str
    nbytes: int
    seconds: float


def planned_collective(
    collective: str, mesh: Mesh, axes: tuple[str, ...], nbytes: int, topology: Topology
) -> PlannedCollective:
    """A collective along these mesh axes, priced by a topology."""
    return PlannedCollective(
        collective, ",".join(axes), nbytes, predicted_seconds(collective, nbytes, mesh, axes, topology)
    )


def predicted_seconds(collective: str, nbytes: int, mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> float:
    """Predicted seconds of a collective; one without a price takes a link's latency and bandwidth."""
    if collective in COLLECTIVES:
        return collective_seconds(collective, nbytes, mesh, axes, topology)
    link = topology.link(mesh, axes)
    return link.latency + link.seconds(nbytes)


@dataclass(frozen=True, slots=True)
class Decision:
    """One operator on given operands, and the strategy or redistributions that were chosen for it.

    `rule` and `strategy` are None for an operator that only moves data or has no rule; `plans` are the redistributions
    of the operands, `bias` that of a matmul's bias, which no strategy counts, `ends` those of the outputs, `exchanges`
    the collectives beside them. `explicit` says whether the user asked for all of it, else `why` what needs it. An
    `alternative` runs in place of the rule's strategies: what it sends is in the decisions made within it. `panels`
    tells what a matmul takes in each number of panels, `run_in` the number that it runs in. `crossing` is the plan to
    another mesh.
    """

    op: str
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[Shape, int], ...]
    rule: Rule | None
    strategy: Strategy | None
    plans: tuple[Plan, ...]
    topology: Topology
    explicit: bool = False
    wanted: Constraints = ANY
    panels: Callable[[], tuple[PanelCost, ...]] = tuple
    run_in: int = 1
    crossing: ReshardPlan | None = None
    exchanges: tuple[PlannedCollective, ...] = ()
    alternative: str = ""
    why: str = NEEDED
    bias: Plan | None = None
    ends: tuple[Plan, ...] = ()

    def moves(self) -> tuple[tuple[Plan, int], ...]:
        """The plans that have steps, each with the bytes of one element."""
        plans = [(p, operand.itemsize) for p, operand in zip(self.plans, self.operands, strict=False)]
        plans += [(p, self.outputs[0][1]) for p in (self.bias, *self.ends) if p is not None]
        return tuple((p, itemsize) for p, itemsize in plans if p.steps)

    def collectives(self) -> tuple[PlannedCollective, ...]:
        """The collectives that this decision runs, in order, without those of decisions made within it."""
        redistributions = [sent for plan, itemsize in self.moves() for sent in planned(plan, itemsize, self.topology)]
        return (*redistributions, *self.exchanges, *self._crossing())

    def _crossing(self) -> Iterator[PlannedCollective]:
        if self.crossing is None:
            return
        nbytes = max(map(self.crossing.received, self.crossing.ranks)) * self.crossing.itemsize
        event = crossing_event(self.crossing, nbytes)
        if event is not None:
            yield PlannedCollective(event.collective, event.axis, event.nbytes, event.predicted or 0.0)
        for around in (self.crossing.first, self.crossing.last):
            if around is not None:
                yield from planned(around, self.crossing.itemsize, self.topology)


def planned(plan: Plan, itemsize: int, topology: Topology) -> Iterator[PlannedCollective]:
    """The collectives of a redistribution."""
    for collective, axes, nbytes in collectives_of(plan, itemsize):
        yield planned_collective(collective, plan.src.mesh, axes, nbytes, topology)


Observer: TypeAlias = Callable[[Decision], AbstractContextManager[object]]
_OBSERVERS: Scoped[Observer, tuple[Observer, ...]] = Scoped("observers", tuple)
OBSERVERS: Sequence[object] = _OBSERVERS.anywhere
"""Empty while no thread observes; `observed` tells the observers of its own thread alone."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` wrap each operator that this thread, or asynchronous task, runs within the block."""
    outside_graphs("trace, explain or strict")
    with _OBSERVERS.entered(observer):
        yield


def observed(decision: Decision, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `run(*args)` within the contexts that the observers of this thread give."""
    with ExitStack() as stack:
        for observer in _OBSERVERS.value():
            stack.enter_context(observer(decision))
        return run(*args)
