"""The timeline of the steps after the first, from that of the first: which gradients are to come is known then.

Gradients are reduced in buckets, each as soon as its last one has arisen. In the first step nobody knows which there
will be, and all buckets begin at the end of the backward pass (`autograd/joined_gradients.py`). Nothing else differs:
so each bucket is moved to where its last gradient has arisen, with the memory that it takes and frees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from dshard.autograd.joined_gradients import Arrived, BucketBegins, BucketBegun
from dshard.mesh import Mesh
from dshard.step_timeline import Event, StepTimeline
from dshard.topology import Topology


@dataclass(frozen=True, slots=True, eq=False)
class _Arrival:
    """The moment at which the gradient of a leaf has arisen, and the bytes alive then."""

    leaf: int
    alive: int


@dataclass(slots=True, eq=False)
class _Bucket:
    """A bucket that begins: what is told of it, the bytes alive before, at most and after, and its events."""

    told: BucketBegins
    before: int
    most: int
    after: int = 0
    events: list[Event] = field(default_factory=list)


Entry: TypeAlias = Event | int | _Arrival | _Bucket
"""What happens in a step, in order; a number is the bytes alive after an operator."""


class LaterSteps(StepTimeline):
    """Records a first step on tensors without data; `complete` makes of it the timeline and the peak of later ones."""

    def __init__(self, topology: Topology, known: Iterable[Tensor]) -> None:
        super().__init__(topology, known, for_shapes=True)
        self.log: list[Entry] = []
        self.begins: _Bucket | None = None

    def add(self, event: Event) -> None:
        """Record an event."""
        (self.log if self.begins is None else self.begins.events).append(event)

    def hold(self, outputs: Sequence[Tensor]) -> None:
        """Count what an operator has made."""
        alive = self.memory.add(outputs)
        if self.begins is None:
            self.log.append(alive)
        else:
            self.begins.most = max(self.begins.most, alive)

    def found(self, told: object) -> None:
        """Heed gradients that have arisen, and buckets that begin."""
        alive = self.memory.alive()
        if isinstance(told, Arrived):
            self.log.append(_Arrival(told.leaf, alive))
        elif isinstance(told, BucketBegins):
            self.begins = _Bucket(told, alive, alive)
            self.log.append(self.begins)
        elif isinstance(told, BucketBegun) and self.begins is not None:
            self.begins.after, self.begins = alive, None

    def complete(self) -> bool:
        """Order the events as in later steps; False if a bucket has begun before the backward pass was at its end."""
        arrived, turns, due = dict[int, int](), dict[Mesh, int](), defaultdict[int, list[_Bucket]](list)
        for n, entry in enumerate(self.log):
            if isinstance(entry, _Arrival):
                if turns or entry.leaf in arrived:
                    return False
                arrived[entry.leaf] = n
            elif isinstance(entry, _Bucket):
                mesh, leaves = entry.told
                turns[mesh] = max(turns.get(mesh, 0), *(arrived[leaf] for leaf in leaves))
                due[turns[mesh]].append(entry)
        moved = 0
        for n, entry in enumerate(self.log):
            if isinstance(entry, Event):
                self.events.append(entry)
            elif isinstance(entry, _Bucket):
                moved -= entry.after - entry.before
            else:
                alive = entry.alive if isinstance(entry, _Arrival) else entry
                self.memory.most = max(self.memory.most, alive + moved)
                for bucket in due.get(n, ()):
                    self.memory.most = max(self.memory.most, alive + moved + bucket.most - bucket.before)
                    self.events += bucket.events
                    moved += bucket.after - bucket.before
        return True
