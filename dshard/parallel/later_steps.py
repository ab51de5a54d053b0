"""The timeline of the steps after the first, from that of the first: which gradients are to come is known then.

Gradients are reduced in buckets, each as soon as its last one has arisen. In the first step nobody knows which there
will be, and all buckets begin at the end of the backward pass (`autograd/joined_gradients.py`). Nothing else differs:
so each bucket is moved to where its last gradient has arisen, with the memory that it takes and frees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from dshard.autograd.joined_gradients import Arrived, Begins
from dshard.core.alike_operators import AlikeOperators
from dshard.core.observe import Decision
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
    """A bucket that begins: the bytes alive before, at most while it does, and after, and its events."""

    leaves: tuple[int, ...]
    before: int
    most: int
    after: int | None = None
    decision: Decision | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def grown(self) -> int:
        """Bytes that are alive because it has begun."""
        return (self.before if self.after is None else self.after) - self.before


Entry: TypeAlias = Event | int | _Arrival | _Bucket
"""What happens in a step, in order; a number is the bytes alive after an operator."""


class LaterSteps(StepTimeline):
    """Records a first step on tensors without data; `complete` makes of it the timeline and the peak of later ones."""

    def __init__(self, topology: Topology, known: Iterable[Tensor], alike: AlikeOperators[Any]) -> None:
        super().__init__(topology, known, for_shapes=True, alike=alike)
        self.log: list[Entry] = []
        self.last: _Bucket | None = None

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs within the block."""
        with super().recorded():
            yield
            self._open()

    def add(self, event: Event) -> None:
        """Record an event."""
        bucket = self._open()
        (self.log if bucket is None else bucket.events).append(event)

    def hold(self, outputs: Sequence[Tensor]) -> None:
        """Count what an operator has made."""
        self.memory.add(outputs)
        alive, bucket = self.memory.alive(), self._open()
        if bucket is None:
            self.log.append(alive)
        else:
            bucket.most = max(bucket.most, alive)

    def found(self, told: object) -> None:
        """Heed gradients that have arisen, and buckets that begin."""
        if isinstance(told, Arrived):
            self.log.append(_Arrival(told.leaf, self.memory.alive()))
        elif isinstance(told, Begins):
            self._open()
            alive = self.memory.alive()
            self.last = _Bucket(told.leaves, alive, alive)
            self.log.append(self.last)

    def dispatched(self, decision: Decision) -> None:
        """Record the begin of an operator."""
        if self.last is not None and self.last.decision is None:
            self.last.decision = decision
        super().dispatched(decision)

    def _open(self) -> _Bucket | None:
        """The bucket that is beginning now."""
        last = self.last
        if last is None or last.after is not None:
            return None
        if last.decision is None or any(each is last.decision for each in self.running):
            return last
        last.after = self.memory.alive()
        return None

    def waited(self, decision: Decision) -> None:
        """Record that what follows waits for a collective."""
        if self.last is not None and self.last.after is None:
            self.last.after = self.memory.alive()
        super().waited(decision)

    def complete(self) -> bool:
        """Order the events as in later steps; False if a bucket has begun before the backward pass was at its end."""
        arrived, turns, due = dict[int, int](), dict[Mesh, int](), defaultdict[int, list[_Bucket]](list)
        for n, entry in enumerate(self.log):
            if isinstance(entry, _Arrival):
                if turns or entry.leaf in arrived:
                    return False
                arrived[entry.leaf] = n
            elif isinstance(entry, _Bucket):
                assert entry.decision is not None
                mesh = entry.decision.operands[0].layout.mesh
                turns[mesh] = max(turns.get(mesh, 0), *(arrived[leaf] for leaf in entry.leaves))
                due[turns[mesh]].append(entry)
        moved = 0
        for n, entry in enumerate(self.log):
            if isinstance(entry, Event):
                self.events.append(entry)
            elif isinstance(entry, _Bucket):
                moved -= entry.grown
            else:
                alive = entry.alive if isinstance(entry, _Arrival) else entry
                self.memory.most = max(self.memory.most, alive + moved)
                for bucket in due.get(n, ()):
                    self.memory.most = max(self.memory.most, alive + moved + bucket.most - bucket.before)
                    self.events += bucket.events
                    moved += bucket.grown
        return True
