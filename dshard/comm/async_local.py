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
    """A local tensor whose collective is in flight: the first call waits for it, and raises its error if it has one."""

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

    Its second argument says whether the collective may overwrite the local tensor. The later steps of the plan run when
    the result is first used. The function returns None where the plan cannot be in flight: without processes, on
    simulated ranks, while torch.compile traces, for partial placements other than sum and mean, and while there are
    listeners.
    """
    runtime = runtime_of(plan.src.mesh)
    pending = (p for p in (*plan.src.placements, *plan.dst.placements) if isinstance(p, Partial))
    if not plan.steps or runtime is None or runtime.coordinate is None:
        return _never_begins
    if any(p.reduce_op not in ("sum", "avg") for p in pending):
        return _never_begins
    plan_runtime, all_reduce = runtime, _single_all_reduce(plan, runtime)

    def start(x: Tensor, own: bool) -> AsyncLocal | None:
        # listeners would hear of the plan's second collective long after the operator that asked for it
        if LISTENERS or type(x) is not Tensor or x.is_meta:
            return None
        if all_reduce is None or not transport.reduces(x.dtype, *all_reduce[1:]):
            with torch.no_grad():
                return _begin_plan(plan, x, plan_runtime)
        if not torch.is_grad_enabled():
            return all_reduce[0](x, own)
        with torch.no_grad():
            return all_reduce[0](x, own)

    return start


def _never_begins(x: Tensor, own: bool) -> None:
    return None


def _single_all_reduce(plan: Plan, runtime: Runtime) -> tuple[Start, ReduceOp, str] | None:
    """For a plan of one all_reduce: the function that begins it, its reduction, and the backend; None for others."""
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


def _begin_plan(plan: Plan, x: Tensor, runtime: Runtime) -> AsyncLocal | None:
    assert runtime.coordinate is not None
    backend = runtime.group(runtime.mesh.names).backend
    key = (plan, x.dtype)
    ops = runtime.legs.get(key)
    if ops is None:
        compiled = collective_ops_of(plan, None, runtime.coordinate, x.dtype, backend, runtime.group)
        ops = runtime.legs.add(key, compiled)
    else:
        runtime.legs.hits += 1
    if not any(isinstance(op, CollectiveOp) for op in ops):
        return None
    if rank_checks.enabled():
        rank_checks.compare(plan, runtime)
    space, launch = Session(Workspace(), runtime), partial(launch_on, runtime)
    flight = advance(begin(ops, x.contiguous(), space), launch)

    def wait() -> Tensor:
        with torch.no_grad():
            return advance(finish(flight, space), launch)

    return AsyncLocal(wait)


class LazyLocal:
    """Descriptor of `_local` where the local tensor is in flight: waits at the first access, and keeps the result.

    It is no data descriptor, so a `_local` of the instance comes first.
    """

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
