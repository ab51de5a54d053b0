"""Timelines of any step: work, collectives and memory, operator by operator, on meta tensors or real ones.

The closed forms of this package cover standard blocks only. Here the program itself runs: on tensors without data and a
mesh without processes, of any number of ranks, or on the ranks of a process group. Local work is priced by the roofline
from torch's own counts of operations, collectives by the planner, joined ones overlapping with work until its first
wait, and each distributed operator by the topology's host time. Memory is the storages alive after each operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.comm import Event as Sent
from dshard.comm import listen
from dshard.core.context import planning_context
from dshard.core.local_work import LocalCall, host_seconds
from dshard.core.observe import Allocations, Decision, OperatorMode, observing
from dshard.core.spec import is_for_shapes
from dshard.cost import collective_seconds
from dshard.mesh import Mesh
from dshard.simulate.queues import Event, Slot, makespan, place_events
from dshard.topology import Topology
from dshard.torch_private import pytree
from dshard.validate import check_callable


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded step: its events in order, and bytes held.

    Attributes:
        slots: Each event and when it begins.
        peak: The most bytes of storages alive after any operator, of those made within the step, and of buffers lent.
        held: Of these, the bytes still alive at its end.
    """

    slots: tuple[Slot, ...]
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
    if not warm:
        _watched(step, _Recorder(topology))
    recorder = _Recorder(topology)
    result = _watched(step, recorder)
    held = recorder.stable_bytes()
    del result
    return Recorded(place_events(recorder.events, overlap=True), recorder.memory.most, held)


def _watched(step: Callable[[], object], recorder: _Recorder) -> object:
    observed = observing(recorder.dispatched, recorder.waited)
    with listen(recorder.sent), observed as recorder.running, OperatorMode(recorder.run):
        return step()


_MOMENT, _AGREED = 2e-3, 5
"""Seconds between two counts of bytes alive, and how many equal counts in a row end the wait."""


class _Recorder:
    """Records every local operator, also those of distributed operators.

    In a step with data, operators on tensors without data only infer shapes, and are not recorded. Numbers on the host,
    such as Adam's count of steps, are no data.
    """

    def __init__(self, topology: Topology | None) -> None:
        self.topology, self.memory = topology, Allocations()
        self.real = self.sends = False
        self.events: list[Event] = []
        self.running: list[Decision] = []
        self.joined: dict[int, tuple[Event, Decision]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on local tensors, and record its work and memory."""
        if is_for_shapes():
            return func(*args, **kwargs)
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = {StorageWeakRef(tensor.untyped_storage()) for tensor in operands}
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
        if not self.real and any(not tensor.is_meta and tensor.dim() for tensor in outputs):
            self.real = True
            self.memory.clear()
            self.events = [event for event in self.events if event.queue != "compute"]
        if self.real and all(tensor.is_meta for tensor in outputs):
            return out
        self.memory.existed(before)
        if self.memory.add(outputs):
            self.memory.most = max(self.memory.most, self.stable_bytes(self.memory.most))
        fresh = [t for t in outputs if StorageWeakRef(t.untyped_storage()) not in before]
        call = LocalCall(func, args, kwargs, out, operands, fresh)
        if call.works:
            flops, topology = call.flops(), self.topology or planning_context().topology_of(Mesh((1,)))
            seconds = call.seconds(flops, topology)
            self.events.append(Event(str(func.overloadpacket.__name__), "step", "compute", seconds, flops))
        return out

    def dispatched(self, decision: Decision) -> None:
        """Record the host's time of a distributed operator, before the work within it."""
        seconds = host_seconds(decision.op, self.topology or decision.topology)
        if seconds:
            self.events.append(Event(decision.op, "step", "compute", seconds))

    def sent(self, event: Sent) -> None:
        """Record a collective."""
        self.sends = True
        axes, mesh = tuple(event.axis.split(",")), event.mesh
        topology = self.topology or planning_context().topology_of(mesh)
        seconds = collective_seconds(event.collective, event.nbytes, mesh, axes, topology)  # type: ignore[arg-type]
        decision = self.running[-1] if self.running and self.running[-1].members else None
        collective = Event(event.collective, "step", "network", seconds, 0.0, event.nbytes, 1, axes, decision is None)
        self.events.append(collective)
        if decision is not None:  # kept, so that no other has its id
            self.joined[id(decision)] = collective, decision

    def waited(self, decision: Decision) -> None:
        """Record that the following events wait for a joined collective."""
        if id(decision) in self.joined:
            self.events.append(Event("wait", "step", "compute", 0.0, needs=self.joined[id(decision)][0]))

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
