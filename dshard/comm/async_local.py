"""Asynchronous redistributions: begun at once, waited for at the first use of their result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.comm import collectives, rank_checks
from dshard.comm.collectives import Begin
from dshard.comm.drive import advance, begin, finish, without_buffer
from dshard.comm.events import LISTENERS
from dshard.comm.program_steps import Transfer, steps_of
from dshard.comm.recorded_calls import RECORDERS, recorded_begin
from dshard.comm.run import launch_on
from dshard.comm.runtime import Runtime, runtime_of
from dshard.comm.transport import report
from dshard.comm.workspace import WORKSPACE, FreshBuffers
from dshard.redistribute import Plan


class AsyncLocal:
    """A local tensor whose collective is in flight: the first call waits for it, and raises its error, if any."""

    __slots__ = ("_finish", "_value")

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._finish is not None:
            self._value, self._finish = self._finish(), None
        assert self._value is not None
        return self._value


Start: TypeAlias = Callable[[Tensor, bool], AsyncLocal | None]


def async_start(plan: Plan) -> Start:
    """A function that begins the first collective of `plan` on a local tensor, which must not be written until the end.

    Its second argument says whether the collective may overwrite the local tensor. The later steps of the plan run at
    the first use of the result. Listeners change nothing of this: ranks that listen run the collectives of the others,
    in their order. The function returns None if the plan cannot be asynchronous: without processes, on simulated ranks,
    while torch.compile traces, and if nothing is sent.
    """
    runtime = runtime_of(plan.src.mesh)
    if not plan.steps or runtime is None or runtime.coordinate is None:
        return _never_begins
    plan_runtime, by_dtype = runtime, dict[torch.dtype, Start]()

    def start(x: Tensor, own: bool) -> AsyncLocal | None:
        if type(x) is not Tensor or x.is_meta:
            return None
        begin_plan = by_dtype.get(x.dtype)
        if begin_plan is None:
            begin_plan = by_dtype[x.dtype] = _start_of(plan, x.dtype, plan_runtime)
        if not torch.is_grad_enabled():
            return begin_plan(x, own)
        with torch.no_grad():
            return begin_plan(x, own)

    return start


def _never_begins(x: Tensor, own: bool) -> None:
    return None


def _start_of(plan: Plan, dtype: torch.dtype, runtime: Runtime) -> Start:
    assert runtime.coordinate is not None
    steps = steps_of(plan, None, runtime.coordinate, dtype, runtime.backend)
    sent = [step.collective for step in steps if isinstance(step, Transfer)]
    if not sent:
        return _never_begins
    compares = rank_checks.enabled()
    if len(steps) == 1 and sent[0].kind == "all_reduce" and not compares:  # needs no flat buffers
        op, what, group = sent[0].op, sent[0].report, runtime.group(sent[0].axes)
        assert op is not None
        assert what is not None

        def begin_reduction(x: Tensor, own: bool) -> AsyncLocal:
            out = x if own and x.is_contiguous() else None
            start: Begin = partial(collectives.reduce, op, group)
            if RECORDERS:
                start = recorded_begin(sent[0], start)
            return AsyncLocal(report(what, group, start, x, out) if LISTENERS else start(x, out))

        return begin_reduction

    def begin_plan(x: Tensor, own: bool) -> AsyncLocal:
        if compares:
            rank_checks.compare(plan, runtime)
        space, launch = FreshBuffers(WORKSPACE, runtime), partial(launch_on, runtime)
        flight = advance(begin(steps, x, space), launch)

        def wait() -> Tensor:
            with torch.no_grad():
                return without_buffer(steps, advance(finish(flight, space), launch))

        return AsyncLocal(wait)

    return begin_plan


class LazyLocal:
    """Descriptor of a local tensor that is in flight: waits at the first access, and keeps the result.

    As it is no data descriptor, an instance's own `_local_tensor` takes precedence.
    """

    def __get__(self, x: Any, owner: Any = None) -> Any:
        if x is None:
            return self
        if "_lazy_local" not in x.__dict__:
            raise AttributeError(
                "a DTensor without a local part: it is made by DTensor.from_local or distribute_tensor"
            )
        x._local_tensor = local = x._lazy_local()
        del x._lazy_local
        return local
