"""Begin and end of each event of a step: local work on one queue, collectives on another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from dshard.chrome import Slice, to_chrome
from dshard.cost import StepClock

Phase: TypeAlias = Literal["forward", "backward", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Queue: TypeAlias = Literal["compute", "network"]


@dataclass(frozen=True, slots=True)
class Event:
    """Local work, or a redistribution: its seconds, operations, and bytes that the busiest rank receives.

    `waits`: whether the next event needs it; a gradient's reduction, for example, may run behind the rest of the
    backward pass. `collectives` is their number, `axes` their mesh axes. `needs` is a collective for which the
    following events wait: an event with `needs` takes no time.
    """

    name: str
    phase: Phase
    queue: Queue
    seconds: float
    flops: float = 0.0
    nbytes: int = 0
    collectives: int = 0
    axes: tuple[str, ...] = ()
    waits: bool = True
    needs: Event | None = None


@dataclass(frozen=True, slots=True)
class Slot:
    """An event and when it begins, in seconds from the first."""

    event: Event
    begin: float

    @property
    def end(self) -> float:
        """Seconds at which the event ends."""
        return self.begin + self.event.seconds


def place_events(events: Iterable[Event], *, overlap: bool = False) -> tuple[Slot, ...]:
    """Place events in the order of the program, each as early as its queue allows.

    Work and collectives wait for each other; with `overlap`, collectives without `waits` do not delay following work.

    >>> a, b = Event("reduce", "backward", "network", 2.0, waits=False), Event("gemm", "backward", "compute", 3.0)
    >>> [slot.begin for slot in place_events((a, b))], [slot.begin for slot in place_events((a, b), overlap=True)]
    ([0.0, 2.0], [0.0, 0.0])
    """
    clock, ends, slots = StepClock(), dict[int, float](), list[Slot]()
    for event in events:
        if event.needs is not None:
            clock.wait(ends.get(id(event.needs), 0.0))
            continue
        if event.queue == "compute":
            begin = clock.work(event.seconds)
        else:
            begin = clock.send(event.seconds, waits=event.waits or not overlap)
        slots.append(Slot(event, begin))
        ends[id(event)] = slots[-1].end
    return tuple(slots)


def makespan(slots: Sequence[Slot]) -> float:
    """Seconds until the last event ends."""
    return max((slot.end for slot in slots), default=0.0)


def chrome_trace(slots: Sequence[Slot], rank: int = 0) -> str:
    """The timeline in the Chrome trace format, for Perfetto or a browser's about:tracing."""
    queues: tuple[Queue, ...] = ("compute", "network")
    return to_chrome((_slice(slot, rank) for slot in slots), [(rank, queue) for queue in queues])


def _slice(slot: Slot, rank: int) -> Slice:
    event = slot.event
    shown = {"bytes": event.nbytes, "flops": event.flops, "axes": " ".join(event.axes)}
    return Slice(event.name, event.phase, (rank, event.queue), slot.begin, event.seconds, shown)
