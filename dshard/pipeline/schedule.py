"""Schedules as generators: what one stage computes, in order.

A schedule is how many forwards a stage runs before its first backward, its lead. After that backwards and forwards
alternate, and the remaining backwards come last. With n stages and m microbatches stage i leads by

- gpipe: m (Huang et al., arXiv 1811.06965): all forwards, then all backwards;
- 1f1b: n - i (PipeDream-flush, Narayanan et al., arXiv 2104.04473), the least without idling;
- eager-1f1b: 2(n - i) - 1 (Zhuang et al., arXiv 2211.05322, section 4), so that messages between two neighbours overlap
  with the computation of both.

The lead is also how many microbatches are in flight at most: forward begun, backward not done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import TypeAlias

from dshard.errors import ScheduleError
from dshard.pipeline.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from dshard.validate import as_int, suggestion

Lead: TypeAlias = Callable[[int, int, int], int]
"""Stage, number of stages, number of microbatches -> forwards before the first backward."""


def gpipe(stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of GPipe.

    >>> [gpipe(i, 4, 16) for i in range(4)]
    [16, 16, 16, 16]
    """
    return n_microbatches


def one_f_one_b(stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of 1F1B.

    >>> [one_f_one_b(i, 4, 16) for i in range(4)]
    [4, 3, 2, 1]
    """
    return min(n_microbatches, n_stages - stage)


def eager_one_f_one_b(stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of eager-1F1B.

    >>> [eager_one_f_one_b(i, 4, 16) for i in range(4)]
    [7, 5, 3, 1]
    """
    return min(n_microbatches, 2 * (n_stages - stage) - 1)


SCHEDULES: MappingProxyType[str, Lead] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "eager-1f1b": eager_one_f_one_b}
)


def lead_of(schedule: str, stage: int, n_stages: int, n_microbatches: int) -> int:
    """The lead of a stage: the number of forwards before its first backward."""
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        known = f"use one of {', '.join(SCHEDULES)}{suggestion(schedule, SCHEDULES)}"
        raise ScheduleError(f"there is no schedule {schedule!r}: {known}")
    if not 0 <= stage < n_stages:
        raise ScheduleError(f"there is no stage {stage}: they are 0 to {n_stages - 1}")
    return SCHEDULES[schedule](stage, n_stages, n_microbatches)


def computes(lead: int, n_microbatches: int, delay: int | None = None) -> Iterator[Compute]:
    """The computes of a stage: `lead` forwards, one backward and one forward alternately, then the remaining backwards.

    With a `delay` each backward is split: the gradients of the inputs first, and those of the weights after the
    `delay` next ones (backward weight delaying, arXiv 2211.05322, section 4).

    >>> " ".join(map(str, computes(2, 4)))
    'F0 F1 B0 F2 B1 F3 B2 B3'
    >>> " ".join(map(str, computes(2, 4, delay=1)))
    'F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3'
    """
    least = {"n_microbatches": 1, "lead": 1, "delay": 0}
    for name, number in {"n_microbatches": n_microbatches, "lead": lead, "delay": delay}.items():
        if number is not None:
            as_int(number, name, ScheduleError, least=least[name])
    if lead > n_microbatches:
        raise ScheduleError(f"a lead of {lead} forwards is more than the {n_microbatches} microbatches")
    yield from map(Forward, range(lead))
    for microbatch in range(n_microbatches):
        yield from _backward(microbatch, delay)
        if microbatch + lead < n_microbatches:
            yield Forward(microbatch + lead)
    if delay is not None:
        yield from map(BackwardWeight, range(max(0, n_microbatches - delay), n_microbatches))


def _backward(microbatch: int, delay: int | None) -> Iterator[Compute]:
    if delay is None:
        yield Backward(microbatch)
        return
    yield BackwardInput(microbatch)
    if microbatch >= delay:
        yield BackwardWeight(microbatch - delay)
