"""Redistributions that have begun and are waited for when their result is first used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dshard.comm import collectives, debug, transport
from dshard.comm.events import LISTENERS
from dshard.comm.legs import Leg, begin, finish, legs_of
from dshard.comm.perform import drive, launch_on
from dshard.comm.runtime import Runtime, runtime_of
from dshard.comm.workspace import Session, Workspace
from dshard.placements import Partial
from dshard.redistribute import AllReduce, Plan


class Later:
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


def start(plan: Plan, x: Tensor) -> Later | None:
    """Begin the first collective of a plan on the local tensor `x`, which must not be written until the end.

    What comes after it runs when the result is first used. None where nothing can run beside the computation: without
    processes, on simulated ranks, while torch.compile traces, or where what is pending is not a sum or a mean; nor
    while somebody listens, who would otherwise hear of a plan's second collective long after its operator.
    """
    runtime = runtime_of(plan.src.mesh)
    if LISTENERS or runtime is None or runtime.coordinate is None or type(x) is not Tensor or x.is_meta:
        return None
    pending = (p for p in (*plan.src.placements, *plan.dst.placements) if isinstance(p, Partial))
    if any(p.reduce_op not in ("sum", "avg") for p in pending):
        return None
    with torch.no_grad():
        return _reduced(plan, x, runtime) or _travelling(plan, x, runtime)


def _reduced(plan: Plan, x: Tensor, runtime: Runtime) -> Later | None:
    """An all_reduce alone, where the backend itself reduces."""
    step = plan.steps[0]
    if len(plan.steps) > 1 or not isinstance(step, AllReduce) or debug.enabled():
        return None
    group = runtime.group(step.axes)
    if len(group.ranks) == 1 or not transport.reduces(x.dtype, step.op, group.backend):
        return None
    out, work = collectives.begin_reduce(x, step.op, group)

    def wait() -> Tensor:
        work.wait()
        return out

    return Later(wait)


def _travelling(plan: Plan, x: Tensor, runtime: Runtime) -> Later | None:
    assert runtime.coordinate is not None
    backend = runtime.group(runtime.mesh.names).backend
    key = (plan, x.dtype)
    legs = runtime.legs.get(key)
    if legs is None:
        found = legs_of(plan, None, runtime.coordinate, x.dtype, backend, runtime.group)
        legs = runtime.legs.add(key, found)
    else:
        runtime.legs.hits += 1
    if not any(isinstance(leg, Leg) for leg in legs):
        return None
    if debug.enabled():
        debug.compare(plan, runtime)
    space, launch = Session(Workspace(), runtime), partial(launch_on, runtime)
    flight = drive(begin(legs, x.contiguous(), space), launch)

    def wait() -> Tensor:
        with torch.no_grad():
            return drive(finish(flight, space), launch)

    return Later(wait)
