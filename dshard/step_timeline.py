"""The timeline of a step: its local work on one queue and its collectives on another, and the memory that it holds.

`StepTimeline` records it of any step that runs: on tensors without data and a mesh without processes, of any number of
ranks, or on the ranks of a process group. Local work is priced by the roofline from torch's own counts of operations,
collectives by the planner, joined ones overlapping with work until its first wait, and each distributed operator by the
topology's host time. Memory is the storages alive after each operator. Prices of plans and recorded steps are both read
from it, so that they cannot differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor

from dshard.chrome import Bar, to_chrome
from dshard.comm import MOVES, has_only_shape, listen
from dshard.comm import CommEvent as Sent
from dshard.core.alike_operators import AlikeCalls, AlikeOperators
from dshard.core.context import planning_context
from dshard.core.local_work import LocalCall, host_seconds, strided_in
from dshard.core.observe import Allocations, Decision, OperatorMode, observing
from dshard.core.spec import is_for_shapes
from dshard.cost import StepClock, copy_seconds, predicted_seconds
from dshard.mesh import Mesh
from dshard.topology import Topology

Queue: TypeAlias = Literal["compute", "network"]


@dataclass(frozen=True, slots=True)
class Event:
    """Local work, or a redistribution: its seconds, operations, and bytes that the busiest rank receives.

    `waits`: whether the next event needs it; a gradient's reduction, for example, may run behind the rest of the
    backward pass. `collectives` is their number, `axes` their mesh axes. `needs` is a collective for which the
    following events wait: an event with `needs` takes no time. One without `waits` delays the work beside it by all but
    the part `overlap` of its seconds (`Topology.overlap`).
    """

    name: str
    queue: Queue
    seconds: float
    flops: float = 0.0
    nbytes: int = 0
    collectives: int = 0
    axes: tuple[str, ...] = ()
    waits: bool = True
    needs: Event | None = None
    overlap: float = 1.0


@dataclass(frozen=True, slots=True)
class PlacedEvent:
    """An event and when it begins, in seconds from the first."""

    event: Event
    begin: float

    @property
    def end(self) -> float:
        """Seconds at which the event ends."""
        return self.begin + self.event.seconds


def place_events(events: Iterable[Event]) -> tuple[PlacedEvent, ...]:
    """Place events in the order of the program, each as early as its queue allows.

    Work and collectives wait for each other, but that collectives without `waits` delay the work that follows by all
    but their `overlap`.

    >>> a, b = Event("reduce", "network", 2.0, waits=False), Event("gemm", "compute", 3.0)
    >>> [[slot.begin for slot in place_events((replace(a, overlap=part), b))] for part in (0.0, 0.5, 1.0)]
    [[0.0, 2.0], [0.0, 1.0], [0.0, 0.0]]
    """
    clock, ends, slots = StepClock(), dict[int, float](), list[PlacedEvent]()
    for event in events:
        if event.needs is not None:
            clock.wait(ends.get(id(event.needs), 0.0))
            continue
        if event.queue == "compute":
            begin = clock.work(event.seconds)
        else:
            begin = clock.send(event.seconds, waits=event.waits or not event.overlap, overlap=event.overlap)
        slots.append(PlacedEvent(event, begin))
        ends[id(event)] = slots[-1].end
    return tuple(slots)


def makespan(slots: Sequence[PlacedEvent]) -> float:
    """Seconds until the last event ends."""
    return max((slot.end for slot in slots), default=0.0)


def chrome_trace(slots: Sequence[PlacedEvent]) -> str:
    """The timeline in the Chrome trace format, for Perfetto or a browser's about:tracing."""
    return to_chrome(map(_slice, slots), [(0, "compute"), (0, "network")])


def _slice(slot: PlacedEvent) -> Bar:
    event = slot.event
    shown = {"bytes": event.nbytes, "flops": event.flops, "axes": " ".join(event.axes)}
    return Bar(event.name, "step", (0, event.queue), slot.begin, event.seconds, shown)


_COPY = "copy"
"""The name of copies in memory of redistributions, of which there is one event for each step."""
_MOMENT, _AGREED = 2e-3, 5
"""Seconds between two counts of bytes alive, and how many equal counts in a row end the wait."""


class _KnownWork(NamedTuple):
    """The event of calls that are alike on one topology, if they do any work."""

    topology: Topology
    event: Event | None


_ALIKE: AlikeOperators[_KnownWork] = AlikeOperators()


class StepTimeline:
    """Records every local operator, also those of distributed operators, and every collective, on a topology.

    Without one, on the topology in use for each mesh. In a step with data, operators on tensors without data only infer
    shapes, and are not recorded. Numbers on the host, such as Adam's count of steps, are no data, and with `for_shapes`
    no tensors that the step makes are: operators that ran on tensors like theirs are not run again. Storages of tensors
    in `known` existed before, and do not count.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        known: Iterable[Tensor] = (),
        *,
        for_shapes: bool = False,
    ) -> None:
        self.topology, self.memory, self.for_shapes = topology, Allocations(known), for_shapes
        self.alike = _ALIKE if for_shapes else None
        self.real = self.sends = False
        self.events: list[Event] = []
        self.running: list[Decision] = []
        self.joined: dict[int, tuple[Event, Decision]] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what runs within the block."""
        observed = observing(self._dispatched, self._waited, self.found)
        with listen(self._sent, copies=self._copied), observed as self.running, OperatorMode(self.run):
            yield

    @property
    def slots(self) -> tuple[PlacedEvent, ...]:
        """The events with their begins, joined collectives beside the work up to their first wait."""
        return place_events(self.events)

    def seconds(self, queue: Queue) -> float:
        """Seconds of all local work, or of all collectives."""
        return sum(event.seconds for event in self.events if event.queue == queue)

    def stable_bytes(self, above: int = -1) -> int:
        """Wait until the bytes alive no longer fall, or are at most `above`, and return them.

        A thread of the backend releases the tensors that it sent a moment after the collective has ended.
        """
        nbytes, agreed = self.memory.alive(), 0 if self.real and self.sends else _AGREED
        while nbytes > above and agreed < _AGREED:
            time.sleep(_MOMENT)
            before, nbytes = nbytes, self.memory.alive()
            agreed = 0 if nbytes < before else agreed + 1
        return nbytes

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on local tensors, and record it."""
        if is_for_shapes():  # nothing is kept of what is asked for shapes alone
            return self._call(func, args, kwargs)[1]
        operands = strided_in((*args, *kwargs.values()))
        alike, out = self._call(func, args, kwargs)
        outputs = strided_in(out)
        if not (self.real or self.for_shapes) and any(x.dim() and not has_only_shape(x) for x in outputs):
            self.real = True
            self.memory.clear()
            self.events = [event for event in self.events if event.queue != "compute" or event.name == _COPY]
        if self.real and all(map(has_only_shape, outputs)):
            return out
        self.memory.existed(operands)
        self.hold(outputs)
        if MOVES.value():
            return out
        topology = self.topology or planning_context().topology_of(Mesh((1,)))
        work: _KnownWork | None = None if alike is None else alike.note
        if work is None or work.topology is not topology:
            before = {x.untyped_storage()._cdata for x in operands}
            fresh = [t for t in outputs if t.untyped_storage()._cdata not in before]
            work = _KnownWork(topology, _work_of(LocalCall(func, args, kwargs, out, operands, fresh), topology))
            if alike is not None:
                alike.note = work
        if work.event is not None:
            self.add(work.event)
        return out

    def _call(self, func: Any, args: Any, kwargs: Any) -> tuple[AlikeCalls[_KnownWork] | None, Any]:
        """The result of an operator, and the calls that are alike, if it was answered for these."""
        return (None, func(*args, **kwargs)) if self.alike is None else self.alike.run(func, func, args, kwargs)

    def add(self, event: Event) -> None:
        """Record an event."""
        self.events.append(event)

    def hold(self, outputs: Sequence[Tensor]) -> None:
        """Count what an operator has made."""
        if self.memory.add(outputs) > self.memory.most:
            self.memory.most = max(self.memory.most, self.stable_bytes(self.memory.most))

    def found(self, told: object) -> None:
        """Heed what operators tell of themselves: nothing."""

    def _dispatched(self, decision: Decision) -> None:
        """Record the host's time of a distributed operator, before the work within it."""
        seconds = host_seconds(decision.op, self.topology or decision.topology)
        if seconds:
            self.add(Event(decision.op, "compute", seconds))

    def _copied(self, nbytes: int) -> None:
        """Record the copies in memory of a step of a redistribution, priced as the planner does."""
        topology = self.topology or planning_context().topology_of(Mesh((1,)))
        self.add(Event(_COPY, "compute", copy_seconds(nbytes, topology)))

    def _sent(self, event: Sent) -> None:
        self.sends = True
        seconds = event_seconds(event, self.topology)
        decision = self.running[-1] if self.running and self.running[-1].members else None
        axes = tuple(event.axis.split(","))
        collective = Event(event.collective, "network", seconds, 0.0, event.nbytes, 1, axes)
        if decision is not None:  # kept, so that no other has its id
            topology = self.topology or planning_context().topology_of(event.mesh)
            collective = replace(collective, waits=False, overlap=topology.overlap(event.mesh, axes))
            self.joined[id(decision)] = collective, decision
        self.add(collective)

    def _waited(self, decision: Decision) -> None:
        """Record that the following events wait for a joined collective."""
        if id(decision) in self.joined:
            self.add(Event("wait", "compute", 0.0, needs=self.joined[id(decision)][0]))


def _work_of(call: LocalCall, topology: Topology) -> Event | None:
    """The local work of an operator on a topology; None for a view, which does none."""
    if not call.works:
        return None
    flops = call.flops()
    return Event(str(call.func.overloadpacket.__name__), "compute", call.seconds(flops, topology), flops)


def event_seconds(event: Sent, topology: Topology | None = None) -> float:
    """Seconds of a collective that ran, as the plan of a move between meshes, or the topology, predicts.

    Without `topology`, the one in use for its mesh.
    """
    if event.predicted is not None:
        return event.predicted
    topology, axes = topology or planning_context().topology_of(event.mesh), tuple(event.axis.split(","))
    if event.load is not None:
        return event.load.seconds(event.mesh, axes, topology)
    return predicted_seconds(event.collective, event.nbytes, event.mesh, axes, topology)
