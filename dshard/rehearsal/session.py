"""The session of a thread: what answers its calls on distributed tensors while a rehearsed module runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from threading import local
from typing import Any, ParamSpec, TypeVar

from torch.compiler import is_dynamo_compiling

from dshard.comm import Scoped
from dshard.core.signature import Args, Function, Kwargs
from dshard.dispatch import fast_path
from dshard.dispatch.fast_path import through

P = ParamSpec("P")
T = TypeVar("T")
Answer = Callable[[Any, Args, Kwargs], Any]
"""Runs a call: `(function, args, kwargs)`."""


class _Here(local):
    answer: Answer | None = None


HERE = _Here()
"""The session of this thread; autograd's own threads have none."""
OWN_CALLS: dict[object, Function] = {}
"""The functions of dshard that are calls by themselves, with what runs them."""


_GATHERED: Scoped[None, bool] = Scoped("rehearsing gathered weights", bool)


def rehearsing_gathered() -> AbstractContextManager[None]:
    """Within the block, which only tests use, modules whose weights are gathered are rehearsed."""
    return _GATHERED.entered(None)


def why_not_gathered() -> str:
    """Why calls that gather weights are not rehearsed; empty if they are."""
    return "" if _GATHERED.value() else "its weights are gathered, which is not rehearsed yet"


def own_call(run: Callable[P, T]) -> Callable[P, T]:
    """A function of dshard on distributed tensors that a session compares as it compares torch's functions."""

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        answer = None if is_dynamo_compiling() else HERE.answer
        return run(*args, **kwargs) if answer is None else answer(call, args, kwargs)

    OWN_CALLS[call] = run
    return call


def run_eagerly(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a call as if there were no session."""
    own = OWN_CALLS.get(func)
    return fast_path.call(func, args, kwargs, through) if own is None else own(*args, **kwargs)
