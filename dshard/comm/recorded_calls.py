"""Calls that a recording of a step keeps as one instruction: collectives, and draws of random numbers.

Operators on tensors are recorded one by one. What a collective does, it does on its process group, where no operator is
seen; and the numbers of a draw are others each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from dshard.comm.collective import Collective
from dshard.comm.collectives import Begin, Wait
from dshard.comm.scoped import Scoped

T = TypeVar("T")


class CallRecorder(Protocol):
    """A recording of calls that are no operators on tensors."""

    def call(self, key: object, function: Callable[..., T], *args: object) -> T:
        """Call the function, and record that as one instruction: equal keys stand for equal functions."""

    def add_alias(self, x: Tensor, of: Tensor) -> None:
        """Record that `x` has got the memory of the tensor `of`, by no operator."""

    def add_leaf(self, number: int) -> None:
        """Record that a gradient of the leaf with this id arose."""

    def add_read(self) -> None:
        """Record that numbers of a tensor were read on the host, which decide what comes."""


_RECORDERS: Scoped[CallRecorder, CallRecorder | None] = Scoped(
    "recorders", lambda entered: entered[-1] if entered else None
)
ENDS = "end of a collective"
"""The key of the call that waits for one."""
DRAW = "draw"
"""The key of the call that takes the next random numbers, for calls that read them."""

RECORDERS: Sequence[object] = _RECORDERS.anywhere
"""Empty while no thread records a step."""
recorder = _RECORDERS.in_force
"""The recorder of this thread, if there is one."""


def recording_calls(recorder: CallRecorder) -> AbstractContextManager[None]:
    """Within the block, tell `recorder` of the calls of this thread and asynchronous task."""
    return _RECORDERS.entered(recorder)


def recorded(key: object, function: Callable[..., T], *args: object) -> T:
    """Call a function, by the recorder of this thread if there is one."""
    told = recorder()
    return function(*args) if told is None else told.call(key, function, *args)


def numbers_of(x: Tensor) -> Any:
    """`x.tolist()`, of which the recorder of this thread is told: torch runs no operator that it would see."""
    if (told := recorder()) is not None:
        told.add_read()
    return x.tolist()


def recorded_begin(c: Collective, begin: Begin) -> Begin:
    """The function that begins a collective, whose begin and end are recorded."""

    def begin_recorded(x: Tensor, out: Tensor | None) -> Wait:
        wait = recorded(("begin", c), begin, x, out)
        return lambda: recorded(ENDS, _end, wait)

    return begin_recorded


def _end(wait: Wait) -> Tensor:
    return wait()
