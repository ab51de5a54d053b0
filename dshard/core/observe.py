"""Observers of decisions for operators, of calls of operators, and of the memory that they allocate.

Listeners for collectives are in `dshard.comm.events`. An observer sees its own thread and asynchronous task alone;
without observers the cost is a check of an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import ReferenceType, ref

from torch import Tensor, UntypedStorage

from dshard.comm import Scoped, collectives_of, crossing_event, outside_graphs
from dshard.comm.events import unheard
from dshard.comm.scoped import since_none
from dshard.comm.workspace import lent_beside
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.wrapper import Wrapper
from dshard.cost import PlannedCollective
from dshard.errors import StrategyError
from dshard.redistribute import Plan
from dshard.reshard import ReshardPlan
from dshard.rules.expand import Operand
from dshard.rules.panel_stream import IN_BULK, Panels
from dshard.rules.strategy import Strategy, StrategyChoice
from dshard.topology import Topology
from dshard.torch_private import HigherOrderOperator, TorchDispatchMode

T = TypeVar("T")
ASKED, NEEDED = "asked for", "the operator needs it so"


class Members(NamedTuple):
    """Parameters whose values or gradients one collective moves, to layouts that the user asked for.

    `weights` has the id of each, and its bytes.
    """

    weights: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """One operator on given operands, and the strategy or redistributions that were chosen for it.

    `choice` is None for an operator that only redistributes or has no rule. `plans` redistribute the operands, then a
    matmul's bias, which no strategy counts, `ends` the outputs; `exchanges` are further collectives, `crossing` is the
    plan to another mesh. `why` says what needs the communication; `ASKED` or `Members`: the user. An alternative to the
    rule, or a `composed` operator, has all of its communication here, and decisions made while it runs repeat it.
    `panels` are those of a matmul.
    """

    op: str
    operands: tuple[Operand, ...]
    topology: Topology
    choice: StrategyChoice | None = None
    plans: tuple[Plan, ...] = ()
    ends: tuple[Plan, ...] = ()
    exchanges: tuple[PlannedCollective, ...] = ()
    crossing: ReshardPlan | None = None
    why: str | Members = NEEDED
    panels: Panels = IN_BULK
    composed: bool = False

    @property
    def strategy(self) -> Strategy | None:
        """The strategy chosen, if the operator has one."""
        return None if self.choice is None else self.choice.strategy

    @property
    def bias(self) -> Plan | None:
        """The plan that redistributes a matmul's bias, if there is one."""
        return self.plans[len(self.operands)] if len(self.plans) > len(self.operands) else None

    @property
    def explicit(self) -> bool:
        """Whether the user requested the communication."""
        return self.why == ASKED or bool(self.members)

    @property
    def reason(self) -> str:
        """The consumer that needs the communication, in words."""
        return ASKED if isinstance(self.why, Members) else self.why

    @property
    def members(self) -> tuple[tuple[int, int], ...]:
        """The parameters that one collective redistributes: the id of each, and its bytes."""
        return self.why.weights if isinstance(self.why, Members) else ()

    @property
    def is_alternative(self) -> bool:
        """Whether an alternative to the rule was chosen."""
        return self.strategy is not None and bool(self.strategy.name)

    @property
    def is_repeated(self) -> bool:
        """Whether decisions made while it runs repeat its own."""
        return self.composed or self.is_alternative

    def moves(self) -> tuple[tuple[Plan, int], ...]:
        """The plans that have steps, each with the bytes of one element."""
        plans = [(p, operand.itemsize) for p, operand in zip(self.plans, self.operands, strict=False)]
        if self.choice is not None:
            plans += [(p, self.choice.question.outputs[0][1]) for p in (self.bias, *self.ends) if p is not None]
        return tuple((p, itemsize) for p, itemsize in plans if p.steps)

    def collectives(self) -> tuple[PlannedCollective, ...]:
        """The collectives that this decision runs, in order, without the collectives of decisions made within it."""
        moves = [[*planned(plan, itemsize, self.topology)] for plan, itemsize in self.moves()]
        n = len(moves) - sum(bool(end.steps) for end in self.ends)
        before, after = ((sent for each in part for sent in each) for part in (moves[:n], moves[n:]))
        return (*before, *self.exchanges, *after, *self._crossing())

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
    for collective, axes, nbytes, load in collectives_of(plan, itemsize):
        assert load is not None
        yield PlannedCollective(collective, ",".join(axes), nbytes, load.seconds(plan.src.mesh, axes, topology))


# -- decisions

Observer: TypeAlias = Callable[[Decision], object]


class _Watch(NamedTuple):
    """What one block of `observing` is told, and the decisions whose operators are running in it."""

    observer: Observer
    running: list[Decision]
    waits: Observer | None
    found: Callable[[object], object] | None


_OBSERVERS: Scoped[_Watch | None, tuple[_Watch, ...]] = Scoped("observers", since_none)
OBSERVERS: Sequence[object] = _OBSERVERS.anywhere
"""Empty while no thread observes; `observed` tells the observers of its own thread alone."""


@contextmanager
def observing(
    observer: Observer, waits: Observer | None = None, found: Callable[[object], object] | None = None
) -> Iterator[list[Decision]]:
    """Call `observer` with the decision of each operator that this thread, or asynchronous task, begins in the block.

    Yields the decisions whose operators are running, outermost first; the last is the one that `observer` is called
    with. `waits` is called with the decision of a joined collective when its end is first waited for, `found` with what
    an operator tells of the values that it was given.
    """
    outside_graphs("trace, explain or strict")
    running: list[Decision] = []
    with _OBSERVERS.entered(_Watch(observer, running, waits, found)):
        yield running


@contextmanager
def unobserved() -> Iterator[None]:
    """Within the block, where nothing is sent or computed, no observer nor listener is called."""
    with _OBSERVERS.entered(None), unheard():
        yield


def observed(decision: Decision, run: Function, args: Sequence[object]) -> Any:
    """Call the observers of this thread, then `run(*args)`; an observer that raises prevents the call."""
    begun: list[list[Decision]] = []
    try:
        for watch in _OBSERVERS.value():
            watch.running.append(decision)
            begun.append(watch.running)
            watch.observer(decision)
        return run(*args)
    finally:
        for running in begun:
            running.pop()


def finish_observed(decision: Decision, finish: Callable[[], T]) -> T:
    """Call the observers of waits, then `finish`, which ends what a decision began and runs its other collectives.

    Those are the decision's own, whatever operator is the first to use its result.
    """
    within: list[tuple[list[Decision], list[Decision]]] = []
    for watch in _OBSERVERS.value():
        if watch.waits is not None:
            watch.waits(decision)
        within.append((watch.running, [*watch.running]))
        watch.running[:] = [decision]
    try:
        return finish()
    finally:
        for running, before in within:
            running[:] = before


def tell_observers(find: Callable[[], object]) -> None:
    """Call observers of this thread with what `find` finds of an operator's values; it is called if one would know."""
    told = [watch.found for watch in _OBSERVERS.value() if watch.found is not None]
    if told:
        found = find()
        for tell in told:
            tell(found)


# -- operators on local tensors, and their memory


class OperatorMode(TorchDispatchMode):
    """Within the block, operators on plain tensors run as `run(func, args, kwargs)`.

    So do the local operators of distributed tensors, which are dispatched as others are.
    """

    supports_higher_order_operators = True  # which are refused here, in words

    def __init__(self, run: Callable[[Any, Args, Kwargs], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run

    def __torch_dispatch__(
        self, func: Function, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if any(issubclass(kind, Wrapper) for kind in types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            raise StrategyError(
                f"torch's operator {func.name()} takes functions, and has no rule for distributed tensors: write "
                "branches and loops in Python (`if x.sum() > 0:`), which runs in each step: all ranks read one value"
            )
        return self.run(func, args, kwargs or {})


class Allocations:
    """Storages that operators made and that still exist, and their peak bytes, with the buffers lent by workspaces.

    Those of tensors in `known`, and those of operands that no operator made, existed before, and do not count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.sizes: dict[int, int] = {}  # by address; an entry goes with its storage, before another has the address
        self.storages: dict[int, ReferenceType[UntypedStorage]] = {}
        self.total = self.most = 0
        self.existed(known)

    def existed(self, tensors: Iterable[Tensor]) -> None:
        """Take the storages of an operator's operands for known, unless an operator made them."""
        for x in tensors:
            storage = x.untyped_storage()
            if storage._cdata not in self.sizes:
                self._note(storage, 0)

    def add(self, outputs: Iterable[Tensor]) -> int:
        """Add the storages of an operator's outputs; return the bytes that are `alive` now."""
        for x in outputs:
            storage = x.untyped_storage()
            if storage._cdata not in self.sizes:
                self._note(storage, storage.nbytes())
        return self.alive()

    def _note(self, storage: UntypedStorage, size: int) -> None:
        address = storage._cdata
        self.sizes[address] = size
        self.total += size
        self.storages[address] = ref(storage, partial(self._gone, address))

    def _gone(self, address: int, storage: object) -> None:
        self.total -= self.sizes.pop(address)
        del self.storages[address]

    def alive(self) -> int:
        """Bytes of the storages that still exist, and of the buffers that workspaces have lent."""
        return self.total + lent_beside(self.sizes)

    def clear(self) -> None:
        """Count nothing of what there is now, and forget the peak."""
        self.sizes = dict.fromkeys(self.sizes, 0)
        self.total = self.most = 0
