"""Redistributions that have begun and are waited for when their result is first used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.comm import collectives, rank_checks, transport
from dshard.comm.async_ops import CollectiveOp, begin, collective_ops_of, finish
from dshard.comm.async_run import advance, launch_on
from dshard.comm.events import LISTENERS
from dshard.comm.peer_failure import wait_for
from dshard.comm.runtime import Runtime, runtime_of
from dshard.comm.workspace import Session, Workspace
from dshard.placements import Partial, ReduceOp
from dshard.redistribute import AllReduce, Plan


class AsyncLocal:
    """A local tensor that is still to come: whoever asks for it first waits, and gets the collective's error if any."""

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
    """What begins the first collective of a plan on a local tensor, which must not be written until the end.

    With True the tensor may be overwritten, for nobody else wants it. What comes after it runs when the result is first
    used. It gives None where nothing can run beside the computation: without processes, on simulated ranks, while
    torch.compile traces, or where what is pending is not a sum or a mean; nor while somebody listens, who would
    otherwise hear of a plan's second collective long after its operator.
    """
    runtime = runtime_of(plan.src.mesh)
    pending = (p for p in (*plan.src.placements, *plan.dst.placements) if isinstance(p, Partial))
    if not plan.steps or runtime is None or runtime.coordinate is None:
        return _not_begun
    if any(p.reduce_op not in ("sum", "avg") for p in pending):
        return _not_begun
    found, reduce = runtime, _reducing(plan, runtime)

    def start(x: Tensor, own: bool) -> AsyncLocal | None:
        if LISTENERS or type(x) is not Tensor or x.is_meta:
            return None
        if reduce is None or not transport.reduces(x.dtype, *reduce[1:]):
            with torch.no_grad():
                return _in_flight(plan, x, found)
        if not torch.is_grad_enabled():
            return reduce[0](x, own)
        with torch.no_grad():
            return reduce[0](x, own)

    return start


def _not_begun(x: Tensor, own: bool) -> None:
    return None


def _reducing(plan: Plan, runtime: Runtime) -> tuple[Start, ReduceOp, str] | None:
    """For an all_reduce alone what begins it, its reduction, and the backend, which may reduce by itself."""
    step = plan.steps[0]
    if len(plan.steps) > 1 or not isinstance(step, AllReduce) or rank_checks.enabled():
        return None
    op, group = step.op, runtime.group(step.axes)

    def reduce(x: Tensor, own: bool) -> AsyncLocal:
        out, work = collectives.begin_reduce(x, op, group, own=own)

        def wait() -> Tensor:
            wait_for(work, group)
            return out

        return AsyncLocal(wait)

    return None if len(group.ranks) == 1 else (reduce, op, group.backend)


def _in_flight(plan: Plan, x: Tensor, runtime: Runtime) -> AsyncLocal | None:
    assert runtime.coordinate is not None
    backend = runtime.group(runtime.mesh.names).backend
    key = (plan, x.dtype)
    legs = runtime.legs.get(key)
    if legs is None:
        found = collective_ops_of(plan, None, runtime.coordinate, x.dtype, backend, runtime.group)
        legs = runtime.legs.add(key, found)
    else:
        runtime.legs.hits += 1
    if not any(isinstance(leg, CollectiveOp) for leg in legs):
        return None
    if rank_checks.enabled():
        rank_checks.compare(plan, runtime)
    space, launch = Session(Workspace(), runtime), partial(launch_on, runtime)
    flight = advance(begin(legs, x.contiguous(), space), launch)

    def wait() -> Tensor:
        with torch.no_grad():
            return advance(finish(flight, space), launch)

    return AsyncLocal(wait)


class LazyLocal:
    """A tensor's local part while it has none of its own, which else comes before this: waited for, and kept."""

    def __get__(self, x: Any, owner: Any = None) -> Any:
        if x is None:
            return self
        if "_pending_local" not in x.__dict__:
            raise AttributeError(
                "a DTensor without a local part: it is made by DTensor.from_local or distribute_tensor"
            )
        x._local = local = x._pending_local()
        del x._pending_local
        return local
