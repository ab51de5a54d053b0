"""Record any step: its timeline, and the memory that it holds, on meta tensors or real ones, by running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dshard.step_timeline import Event, PlacedEvent, StepTimeline, makespan
from dshard.topology import Topology
from dshard.validate import check_callable

__all__ = ["Event", "PlacedEvent", "Recorded", "record"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step: its events in order, and bytes held.

    Attributes:
        slots: Each event and when it begins.
        peak: The most bytes of storages alive after any operator, of those made within the step, and of buffers lent.
        held: Of these, the bytes still alive at its end.
    """

    slots: tuple[PlacedEvent, ...]
    peak: int
    held: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return makespan(self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank receives, on simulated ranks those of the busiest."""
        return sum(slot.event.nbytes for slot in self.slots)

    @property
    def flops(self) -> float:
        """Local operations of this rank."""
        return sum(slot.event.flops for slot in self.slots)


def record(step: Callable[[], object], topology: Topology | None = None, *, warm: bool = False) -> Recorded:
    """Run `step` and record its events; by default on the topology in use for each mesh.

    The first call of an operator with new layouts infers the shapes of its results, which is recorded as work, too, and
    creates buffers that stay. So unless the step is `warm`, having been recorded before, it runs twice, and the second
    run counts.

    >>> import torch
    >>> x = torch.empty(4, 8, device="meta")
    >>> work = record(lambda: x @ x.T)
    >>> work.flops, work.peak
    (256.0, 64)
    """
    check_callable(step, "record", "give a function that runs one step")
    for _ in range(1 if warm else 2):
        timeline = StepTimeline(topology)
        with timeline.recorded():
            result = step()
        held = timeline.stable_bytes()
        del result
    return Recorded(timeline.slots, timeline.memory.most, held)
