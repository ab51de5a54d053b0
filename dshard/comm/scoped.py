"""Values that a `with` block changes for the thread, and the asynchronous task, that runs the block."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Generic, TypeVar

from dshard.torch_private import get_from_tls, is_in_tls, stash_in_tls

E = TypeVar("E")
T = TypeVar("T")


def since_none(changes: Sequence[E | None]) -> tuple[E, ...]:
    """The changes since the last that is None, which hides those before.

    >>> since_none([1, None, 2, 3])
    (2, 3)
    """
    first = 1 + max((i for i, change in enumerate(changes) if change is None), default=-1)
    return tuple([change for change in changes[first:] if change is not None])


class Changes:
    """How often a block was entered or left: while the count stays, a thread's values do, too."""

    count = 0


class _Block(Generic[E]):
    """An entered block, with its change; `is_first` says that the context was never changed before."""

    __slots__ = ("change", "is_first")

    def __init__(self, change: E, is_first: bool) -> None:
        self.change, self.is_first = change, is_first


class ScopedState(Generic[E, T]):
    """The blocks around a call, outermost first, and the value folded from their changes."""

    __slots__ = ("blocks", "value")

    def __init__(self, blocks: tuple[_Block[E], ...], value: T) -> None:
        self.blocks, self.value = blocks, value


class Scoped(Generic[E, T]):
    """A value folded from the changes of all blocks that this thread and asynchronous task has entered.

    Blocks may be left in any order: each removes its own change alone. A new thread is outside of all blocks, except
    those on which autograd runs the backward pass of an accelerator: they are within the blocks of the thread that
    called backward, which torch copies with its other thread-local state.

    `anywhere` has the blocks of all threads: while it is empty, every thread has the default value, and need not fold
    it. `here` returns the state of this context, None if it was never changed.
    """

    def __init__(self, name: str, fold: Callable[[list[E]], T]) -> None:
        self._fold, self._key = fold, f"dshard.{name}"
        self._var: ContextVar[ScopedState[E, T] | None] = ContextVar(name, default=None)
        self._none: ScopedState[E, T] = ScopedState((), fold([]))
        self.here = self._var.get
        self.anywhere: list[_Block[E]] = []

    def value(self) -> T:
        """The value in the context of the call."""
        return self.state().value

    def in_force(self) -> T:
        """The value in the context of the call, at once while no thread is in a block."""
        return self.value() if self.anywhere else self._none.value

    def outer(self) -> ScopedState[E, T]:
        """The state of a context that entered no block; on autograd's threads, that of the caller of backward."""
        return (self._backward_caller_state() if self.anywhere else None) or self._none

    @contextmanager
    def entered(self, change: E) -> Iterator[None]:
        """Add `change` to the value within the block."""
        block = self.enter(change)
        try:
            yield
        finally:
            self.leave(block)

    def enter(self, change: E) -> _Block[E]:
        """Begin a block, which `leave` ends."""
        before = self.here()
        block = _Block(change, before is None)
        self.anywhere.append(block)
        self._set(self._state((*(before or self.outer()).blocks, block)))
        return block

    def leave(self, block: _Block[E]) -> None:
        """End a block that was begun by `enter`."""
        self.anywhere.remove(block)
        remaining = tuple([other for other in (self.here() or self._none).blocks if other is not block])
        outside = block.is_first and remaining == self.outer().blocks
        self._set(None if outside else self._state(remaining))

    @contextmanager
    def restored(self, state: ScopedState[E, T]) -> Iterator[None]:
        """Within the block, the value is that of a `state` of before."""
        here = self.here()
        self.anywhere.extend(state.blocks)
        self._set(state)
        try:
            yield
        finally:
            for block in state.blocks:
                self.anywhere.remove(block)
            self._set(here)

    def state(self) -> ScopedState[E, T]:
        """The state in the context of the call."""
        return self.here() or self.outer()

    def _state(self, blocks: tuple[_Block[E], ...]) -> ScopedState[E, T]:
        return ScopedState(blocks, self._fold([block.change for block in blocks])) if blocks else self._none

    def _set(self, state: ScopedState[E, T] | None) -> None:
        Changes.count += 1
        self._var.set(state)
        if self._backward_caller_state() is None:
            _stash(self._key, (get_ident(), state))

    def _backward_caller_state(self) -> ScopedState[E, T] | None:
        """The state of the thread that called the backward pass which runs on this one, or None."""
        if not is_in_tls(self._key):
            return None
        thread, state = get_from_tls(self._key)
        return None if thread == get_ident() else state


def _stash(key: str, kept: object) -> None:
    """Keep an object in the state that torch copies to autograd's threads."""
    if _STASH_STEALS:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    stash_in_tls(key, kept)


def _stash_steals() -> bool:
    """Whether torch steals the caller's reference to the object that it keeps, as 2.11 does."""
    probe = object()
    before = sys.getrefcount(probe)
    stash_in_tls("dshard.probe", probe)
    steals = sys.getrefcount(probe) == before
    if steals:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    stash_in_tls("dshard.probe", None)
    return steals


_STASH_STEALS = _stash_steals()
