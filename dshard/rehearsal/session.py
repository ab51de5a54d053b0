"""The session of a thread: what answers its calls on distributed tensors while a rehearsed module runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from sys import _getframe
from threading import local
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from dshard.core.signature import Args, Function, Kwargs
from dshard.dispatch import torch_calls

P = ParamSpec("P")
T = TypeVar("T")
Answer = Callable[[Any, Args, Kwargs], Any]
"""Runs a call: `(function, args, kwargs)`."""


class Entered(NamedTuple):
    """A call of a module that has a session: its frame, and what closes the session, with whether the call failed.

    Around modules with sessions of their own it has one for each of its `stretches` of calls.
    """

    frame: FrameType
    close: Callable[[bool], None]
    stretches: Any = None


ENTERED: list[Entered] = []
"""Those of all threads: while it is empty there is no session, and calls need not look for that of the thread."""


class _Here(local):
    answer: Answer | None = None

    def __init__(self) -> None:
        self.entered: list[Entered] = []

    @property
    def stretches(self) -> Any:
        """Those of the innermost call, if it has such."""
        return self.entered[-1].stretches if self.entered else None

    @property
    def awaits_a_call(self) -> bool:
        """Whether the session of a stretch begins with the next call."""
        return self.stretches is not None and self.stretches.close is None

    def enter(self, call: Entered, answer: Answer) -> None:
        """Begin the session of a call, which answers the calls of this thread."""
        self.entered.append(call)
        ENTERED.append(call)
        self.answer = answer

    def _close_last(self, failed: bool) -> None:
        call = self.entered.pop()
        ENTERED.remove(call)
        call.close(failed)

    def leave(self, frames: tuple[FrameType | None, ...], *, failed: bool) -> None:
        """Close the session of the call with one of these frames, and those within, which no hook has closed."""
        if not any(each.frame in frames for each in self.entered):
            return  # the call failed before it was entered, or has no session
        while self.entered:
            is_own = self.entered[-1].frame in frames
            self._close_last(failed or not is_own)
            if is_own:
                return

    def drop_ended(self) -> bool:
        """Close the sessions of calls that have ended without a hook, such as by an interrupt; whether there were any.

        A session belongs to one call of a module, and nobody else's calls are for it.
        """
        n_entered = len(self.entered)
        while self.entered and not is_running(self.entered[-1].frame):
            self._close_last(True)
        return len(self.entered) < n_entered


def is_running(frame: FrameType) -> bool:
    """Whether a call that was entered goes on: torch runs no hook of a call that an interrupt has ended."""
    at: FrameType | None = _getframe(1)
    while at is not None and at is not frame:
        at = at.f_back
    return at is frame


HERE = _Here()
"""The session of this thread; autograd's own threads have none."""
OWN_CALLS: dict[object, Function] = {}
"""The functions of dshard that are calls by themselves, with what runs them."""


def own_call(run: Callable[P, T]) -> Callable[P, T]:
    """A function of dshard on distributed tensors that a session compares as it compares torch's functions."""

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        answer = None if is_dynamo_compiling() else HERE.answer
        return run(*args, **kwargs) if answer is None else answer(call, args, kwargs)

    OWN_CALLS[call] = run
    return call


def call_with_session(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a call by the session that is there."""
    return (HERE.answer or run_eagerly)(func, args, kwargs)


def run_eagerly(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a call as if there were no session."""
    own = OWN_CALLS.get(func)
    return torch_calls.call(func, args, kwargs) if own is None else own(*args, **kwargs)
