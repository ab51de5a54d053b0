"""Several redistributions that need the same collectives, each of which runs once for all their local tensors.

The pieces for a rank are those of every tensor, one after the other, in one flat buffer. Reduced tensors are views of
the buffer received; gathered ones are copied out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import rank_checks
from dshard.comm.backends import SIMULATED, Backend
from dshard.comm.collective import Collective, Kind
from dshard.comm.drive import Program, Request, Results, begun
from dshard.comm.events import LISTENERS, emit
from dshard.comm.pieces import JoinedPieces
from dshard.comm.program_steps import Moved, Transfer, lowered, moved_in
from dshard.comm.run import launch_on, received_at_once, run_program
from dshard.comm.runtime import LocalTensor, own_coordinate, own_runtime, planned_backend
from dshard.comm.scatter_shards import device_of
from dshard.comm.workspace import Session
from dshard.layout import Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import ReduceOp
from dshard.redistribute import Plan, all_reduce_sizes

Finish = Callable[[], Results]
"""Waits for the collective, and returns the local tensors."""

JoinedStart = Callable[[list[Tensor]], Finish]
"""Begins the collective on a local tensor of each plan; the list is emptied once they are packed."""


class Lane(NamedTuple):
    """The kinds, mesh axes and reductions of a plan's collectives: plans with equal lanes can run as one."""

    mesh: Mesh
    collectives: tuple[tuple[Kind, tuple[str, ...], ReduceOp | None], ...]


_KINDS: frozenset[Kind] = frozenset({"all_gather", "all_reduce", "reduce_scatter"})


@cached("lanes", 16384)
def lane_of(plan: Plan) -> Lane | None:
    """The lane of a plan; None if it sends nothing, or has a step of another kind."""
    moved = moved_in(plan, (0,) * plan.src.mesh.ndim)
    if not moved or any(each.collective.kind not in _KINDS for each in moved):
        return None
    return Lane(plan.src.mesh, tuple((c.kind, c.axes, c.op) for c in (each.collective for each in moved)))


class Joined:
    """Plans of one lane, run as one by the rank at a coordinate."""

    __slots__ = ("steps",)

    def __init__(self, plans: Sequence[Plan], at: Coordinate, dtype: torch.dtype, backend: Backend) -> None:
        moved = [moved_in(plan, at) or [] for plan in plans]
        self.steps = [JoinedStep(members, dtype, backend) for members in zip(*moved, strict=True)]

    def program(self, tensors: list[Tensor]) -> Program[Results]:
        """Run the collectives one by one on a local tensor of each plan; the list is emptied once they are packed."""
        for step in self.steps:
            tensors[:] = yield from step.program(tensors)
        return tuple(tensors)


class JoinedStep:
    """One collective that runs the corresponding collectives of several plans.

    `sent` are the pieces in the buffer to send, `received` those in the buffer received, after its terms are reduced.
    """

    __slots__ = ("dtype", "gathers", "members", "parts", "received", "sent")

    def __init__(self, members: Sequence[Moved], dtype: torch.dtype, backend: Backend) -> None:
        self.members, self.dtype = members, dtype
        self.sent = JoinedPieces([moved.sent for moved in members], [moved.before for moved in members])
        self.received = JoinedPieces([moved.received for moved in members], [moved.after for moved in members])
        self.gathers = members[0].collective.kind == "all_gather"
        self.parts = lowered(self._collective(), None, None, (sum(self.received.sizes),), dtype, backend)

    def _collective(self) -> Collective:
        of = [moved.collective for moved in self.members]
        send = tuple(map(sum, zip(*(c.send for c in of), strict=True)))
        recv = tuple(map(sum, zip(*(c.recv for c in of), strict=True)))
        reports = [c.report for c in of if c.report is not None]
        elements = sum(report.elements for report in reports)
        if of[0].kind == "all_reduce":  # one rounding of chunks, not one for each
            elements = sum(all_reduce_sizes(sum(self.received.sizes), of[0].ranks, of[0].ranks[of[0].index]))
        return replace(of[0], send=send, recv=recv, report=replace(reports[0], elements=elements))

    @property
    def elements(self) -> int:
        """The elements that this rank receives from its peers."""
        return sum(part.elements for part in self.parts)

    def program(self, tensors: list[Tensor]) -> Program[Results]:
        """Pack the tensors, run the collective, and unpack what arrives."""
        flat = self.pack(tensors)
        tensors.clear()  # which would stay in memory for as long as the collective runs
        for part in self.parts:
            flat = (yield Request(part, flat, _place_to_receive(part, flat)))()
            for call in part.unpackers():
                flat = call(flat)
        return self.unpack(flat)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat buffer to send."""
        return self.sent.pack(tensors, self.dtype)

    def unpack(self, flat: Tensor) -> Results:
        """The local tensors in the buffer received, whose terms are reduced."""
        if self.gathers:
            return tuple(self.received.unpack(flat))
        parts = zip(flat.split(self.received.sizes), self.members, strict=True)
        return tuple([_of_memory(part, moved.after) for part, moved in parts])


def _place_to_receive(part: Transfer, flat: Tensor) -> Tensor:
    """The buffer to receive in: for an all_reduce the buffer to send, which has no other user."""
    return flat if part.collective.kind == "all_reduce" else flat.new_empty(sum(part.collective.recv))


def _of_memory(part: Tensor, shape: Shape) -> Tensor:
    """A tensor of `shape` in the memory of the flat `part`, with a version counter of its own.

    A view would share the counter with all other views of the buffer: a write to one would count as a write to each.
    """
    return part.view(shape).data


def joined_start(plans: Sequence[Plan], dtype: torch.dtype) -> JoinedStart:
    """A function that begins plans of one lane as one collective of this process.

    Raises:
        MeshError: the mesh has no processes.
    """
    runtime, coordinate = own_runtime(plans[0].src.mesh)
    joined, compares = Joined(plans, coordinate, dtype, runtime.backend), rank_checks.enabled()

    def start(tensors: list[Tensor]) -> Finish:
        if compares:
            text = f"{len(plans)} joined: " + "; ".join(f"{tuple(plan.shape)} {plan}" for plan in plans)
            rank_checks.compare_on(text, runtime.group(runtime.mesh.names), device_of(runtime.mesh))
        return begun(joined.program(tensors), partial(launch_on, runtime))

    return start


def begin_joined(
    plans: Sequence[Plan], tensors: list[Tensor], dtype: torch.dtype, start: JoinedStart | None = None
) -> Finish:
    """Begin plans of one lane, on a local tensor each, as one collective; the function returned waits for its end.

    Tensors of another dtype are cast to `dtype`. The list is emptied once they are packed, so that they are freed while
    the collective runs. `start` is `joined_start(plans, dtype)`, if at hand. On simulated ranks the collective has
    ended on return.

    Raises:
        MeshError: the mesh has no processes.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return begin_joined(plans, tensors, dtype, start)
    mesh = plans[0].src.mesh
    if tensors[0].is_meta:
        if LISTENERS:
            for kind, axes, elements in joined_received(tuple(plans)):
                emit(kind, mesh, axes, elements * dtype.itemsize)
        joined = Joined(plans, own_coordinate(mesh), dtype, planned_backend(mesh))
        return begun(joined.program(tensors), received_at_once)  # whose buffers are there until the end
    if type(tensors[0]) is LocalTensor:

        def make(at: Coordinate, space: Session, parts: Sequence[Tensor]) -> Program[Results]:
            return Joined(plans, at, dtype, SIMULATED).program(list(parts))

        results = run_program(mesh, make, tensors)
        return lambda: results
    return (start or joined_start(plans, dtype))(tensors)


@cached("joined bytes", 4096)
def joined_received(plans: tuple[Plan, ...]) -> tuple[tuple[Kind, tuple[str, ...], int], ...]:
    """The collectives of joined plans of one lane: the kind, axes, and busiest rank's elements of each."""
    mesh = plans[0].src.mesh
    of_ranks = [Joined(plans, mesh.coordinate(rank), torch.float32, SIMULATED).steps for rank in mesh.ranks]
    steps = zip(*of_ranks, strict=True)
    firsts = ((ranks, ranks[0].parts[0].collective) for ranks in steps)
    return tuple((c.kind, c.axes, max(step.elements for step in ranks)) for ranks, c in firsts)
