"""Events of collectives: listeners are called with one for each collective that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from dshard.comm.scoped import Scoped, since_none
from dshard.mesh import Mesh
from dshard.redistribute.layout_state import StepLoad


@dataclass(frozen=True, slots=True)
class CommEvent:
    """One collective that ran.

    `axis` names the mesh axes of its groups, `ranks` is the size of one group, `nbytes` what this rank received from
    its peers (the busiest rank's share where all ranks are simulated in one process), `mesh` the mesh of these axes.
    Between meshes `axis` names both, `mesh` is the source, and `predicted` are the seconds of the plan. Of a step of a
    redistribution `load` is what it is priced by.
    """

    collective: str
    axis: str
    ranks: int
    nbytes: int
    mesh: Mesh
    measured: float | None = None
    predicted: float | None = None
    load: StepLoad | None = field(default=None, compare=False, repr=False)


Listener = Callable[[CommEvent], None]


class _Listening(NamedTuple):
    """A listener, whether it wants measured seconds, and what hears the bytes of copies in memory."""

    listener: Listener
    measures: bool = False
    copies: Callable[[int], None] | None = None


_LISTENERS: Scoped[_Listening | None, tuple[_Listening, ...]] = Scoped("listeners", since_none)
LISTENERS: Sequence[object] = _LISTENERS.anywhere
"""The listeners of all threads, for a quick look whether there are any; `tell` calls those of its own thread alone."""


def measuring() -> bool:
    """Whether a listener of this thread wants measured seconds."""
    return bool(LISTENERS) and any(each.measures for each in _LISTENERS.value())


@contextmanager
def listen(listener: Listener, *, measure: bool = False, copies: Callable[[int], None] | None = None) -> Iterator[None]:
    """Call `listener` with the event of each collective that this thread, or asynchronous task, runs within the block.

    With `measure` the ranks of each collective first wait for each other, and then for its end, so that the event has
    its seconds: collectives no longer overlap, and all ranks must measure. `copies` is called with the bytes that each
    step of a redistribution copies, as it is planned; operators that run meanwhile are within `MOVES`.

    >>> events = []
    >>> with listen(events.append):
    ...     pass
    >>> events
    []
    """
    with _LISTENERS.entered(_Listening(listener, measure, copies)):
        yield


def unheard() -> AbstractContextManager[None]:
    """Within the block only listeners that were added there are called."""
    return _LISTENERS.entered(None)


class _Once:
    """A listener that calls a function at the next collective, and removes itself."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.block = _LISTENERS.enter(_Listening(self))

    def __call__(self, event: CommEvent | None = None) -> None:
        if self.block in _LISTENERS.anywhere:
            _LISTENERS.leave(self.block)
            self.function()


def before_next_collective(function: Callable[[], None]) -> None:
    """Call a function just before the next collective that this thread, or asynchronous task, runs."""
    _Once(function)


def run_pending() -> None:
    """Call the functions of this thread that wait for its next collective."""
    for listener, *_ in _LISTENERS.value():
        if isinstance(listener, _Once):
            listener()


def emit(
    collective: str,
    mesh: Mesh,
    axes: tuple[str, ...],
    nbytes: int,
    measured: float | None = None,
    load: StepLoad | None = None,
) -> None:
    """Call the listeners of this thread, if there are any, with the event of one collective."""
    if LISTENERS:
        ranks = prod(mesh.shape[mesh.axis(axis)] for axis in axes)
        tell(CommEvent(collective, ",".join(axes), ranks, nbytes, mesh, measured, load=load))


def tell(event: CommEvent) -> None:
    """Call the listeners of this thread with an event."""
    for listener, *_ in _LISTENERS.value():
        listener(event)


def tell_copies(find: Callable[[], Iterable[int]]) -> None:
    """Tell listeners of this thread of copies in memory, of the bytes that `find` finds; it is called if one hears."""
    told = [each.copies for each in _LISTENERS.value() if each.copies is not None]
    for nbytes in find() if told else ():
        for copies in told:
            copies(nbytes)


MOVES: Scoped[None, bool] = Scoped("moves", bool)
"""Whether local operators are those of a redistribution, of which listeners are told what it copies."""
