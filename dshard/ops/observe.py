"""What an operator was about and what was chosen for it, told to whoever observes: `trace`, `explain` and `strict`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from dshard.comm import Scoped, outside_graphs
from dshard.layout import Shape
from dshard.ops.expand import Operand
from dshard.ops.matmul.priced import Panelled
from dshard.ops.rule import Rule
from dshard.ops.strategy import ANY, Strategy, Wanted
from dshard.redistribute import Plan
from dshard.reshard import ReshardPlan
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Decision:
    """One operator on given operands, and what was chosen for it.

    `rule` and `strategy` are None for an operator that only moves data or has no rule; `plans` are the redistributions
    of the operands, `explicit` whether the user asked for them by name. `panels` tells what a product takes in
    each number of panels, `run_in` the number that it runs in. `crossing` is the plan to another mesh.
    """

    op: str
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[Shape, int], ...]
    rule: Rule | None
    strategy: Strategy | None
    plans: tuple[Plan, ...]
    topology: Topology
    explicit: bool = False
    wanted: Wanted = ANY
    panels: Callable[[], tuple[Panelled, ...]] = tuple
    run_in: int = 1
    crossing: ReshardPlan | None = None


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
    """`run(*args)` within the contexts that the observers give."""
    with ExitStack() as stack:
        for observer in _OBSERVERS.value():
            stack.enter_context(observer(decision))
        return run(*args)
