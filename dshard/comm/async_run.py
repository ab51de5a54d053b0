"""Programs run: on the process groups of a mesh, on all its ranks simulated in one process, or without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.comm import rank_checks
from dshard.comm.async_ops import Program, Request, Wait
from dshard.comm.events import LISTENERS, emit, measuring
from dshard.comm.peer_failure import wait_for_pairs
from dshard.comm.runtime import Group, LocalTensor, Runtime, runtime_of
from dshard.comm.simulated import exchange, plain, stack, unstack
from dshard.comm.timing import timed
from dshard.comm.traced_collectives import traced
from dshard.comm.transport import begin_exchange, in_pairs, movable, wait_all
from dshard.comm.workspace import WORKSPACE, FreshBuffers, Session, Workspace
from dshard.errors import MeshError
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute import Plan

T = TypeVar("T")
# what torch 2.13 calls them, and what it called them before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_c10d = torch.ops._c10d_functional
Results: TypeAlias = tuple[Tensor, ...]
Make: TypeAlias = Callable[[Coordinate, Session, Sequence[Tensor]], Program[Results]]
"""The program of the rank at a coordinate, of its local tensors."""


def run_program(mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan] = ()) -> Results:
    """What the program makes of the local tensors of this rank, or of each simulated one.

    Collectives run beside what the program computes between their begin and their end. `plans` are what the ranks
    compare beforehand in debug mode.

    Raises:
        MeshError: the mesh has no processes.
    """
    with torch.no_grad():
        if any(type(x) is LocalTensor for x in tensors):
            return _simulate(mesh, make, tensors)
        if any(x.is_meta for x in tensors):
            with Workspace().session() as space:
                return advance(make((0,) * mesh.ndim, space, tensors), _rehearsed)
        runtime = runtime_of(mesh)
        if runtime is None or runtime.coordinate is None:
            why = "has no processes" if runtime is None else f"does not contain this rank, {runtime.rank}"
            raise MeshError(f"the mesh ({mesh}) {why}: nothing can be sent; use init_device_mesh under torchrun")
        if rank_checks.enabled() and not any(map(traced, tensors)):
            for plan in plans:
                rank_checks.compare(plan, runtime)
        if any(map(traced, tensors)):
            return advance(
                make(runtime.coordinate, FreshBuffers(WORKSPACE, runtime), tensors), partial(_announced, runtime)
            )
        with WORKSPACE.session(runtime) as space:
            return advance(make(runtime.coordinate, space, tensors), partial(launch_on, runtime))


def run_without_data(make: Make, tensors: Sequence[Tensor], coordinate: Coordinate) -> tuple[Results, int]:
    """What the program makes of tensors without data, and the most bytes that it has in buffers at once."""
    workspace = Workspace()
    with torch.no_grad(), workspace.session() as space:
        return advance(make(coordinate, space, tensors), lambda request: _done), workspace.peak


def advance(program: Program[T], launch: Callable[[Request], Wait]) -> T:
    """Run a program, each collective begun by `launch`."""
    try:
        request = next(program)
        while True:
            request = program.send(launch(request))
    except StopIteration as stop:
        found: T = stop.value
        return found


def _simulate(mesh: Mesh, make: Make, tensors: Sequence[Tensor]) -> Results:
    """All programs in step: they begin the same collectives in the same order."""
    with plain(), Workspace().session() as space:
        locals_of = [unstack(x) for x in tensors]
        programs = {r: make(mesh.coordinate(r), space, [parts[r] for parts in locals_of]) for r in mesh.ranks}
        found: dict[int, Results] = {}
        sent: dict[int, Wait | None] = dict.fromkeys(programs)
        while len(found) < len(programs):
            requests: dict[int, Request] = {}
            for rank, program in programs.items():
                wait = sent[rank]
                try:
                    requests[rank] = next(program) if wait is None else program.send(wait)
                except StopIteration as stop:
                    found[rank] = stop.value
            assert not (found and requests), "programs of all ranks have the same collectives"
            _exchange(requests)
            sent = dict.fromkeys(programs, _done)
        n = len(found[mesh.ranks[0]])
        return tuple(stack({rank: found[rank][i] for rank in mesh.ranks}) for i in range(n))


def _exchange(requests: dict[int, Request]) -> None:
    if not requests:
        return
    busiest = max((request.leg for request in requests.values()), key=lambda leg: leg.elements)
    if busiest.event:
        itemsize = next(iter(requests.values())).buffer.itemsize
        emit(busiest.event, busiest.message.mesh, busiest.message.axes, busiest.elements * itemsize)
    messages = {rank: request.leg.message for rank, request in requests.items()}
    moved = exchange(messages, {rank: request.buffer.reshape(-1) for rank, request in requests.items()})
    for rank, request in requests.items():
        request.out.copy_(moved[rank].view(request.out.shape))


def launch_on(runtime: Runtime, request: Request) -> Wait:
    """Begin a collective, and return what waits for it."""
    leg, group = request.leg, runtime.group(request.leg.message.axes)
    nbytes = leg.elements * request.buffer.itemsize
    if leg.event and measuring():
        device = request.buffer.device
        timed(leg.event, leg.message.mesh, nbytes, group, device, partial(_at_once, request, group))
        return _done
    if LISTENERS and leg.event:
        emit(leg.event, leg.message.mesh, leg.message.axes, nbytes)
    return partial(_wait(request, group), _work_of(request, group), group)


def _at_once(request: Request, group: Group) -> Tensor:
    _wait(request, group)(_work_of(request, group), group)
    return request.out


def _wait(request: Request, group: Group) -> Callable[[list[dist.Work], Group], None]:
    """What waits for `_works`."""
    pairs = in_pairs(group) and request.leg.message.collective in ("all_gather", "all_to_all")
    return wait_for_pairs if pairs else wait_all


def _rehearsed(request: Request) -> Wait:
    leg = request.leg
    if LISTENERS and leg.event:
        emit(leg.event, leg.message.mesh, leg.message.axes, leg.elements * request.buffer.itemsize)
    return _done


def _announced(runtime: Runtime, request: Request) -> Wait:
    """The functional collective begun; what waits for it."""
    message = request.leg.message
    name, buffer, n = runtime.group(message.axes).name, movable(request.buffer), len(message.ranks)
    scale = request.buffer.itemsize // buffer.itemsize
    send, recv = ([size * scale for size in sizes] for sizes in (message.send, message.recv))
    match message.collective:
        case "all_gather" if len(set(recv)) == 1:
            begun = _c10d.all_gather_into_tensor(buffer, n, name)
        case "all_gather":
            begun = _c10d.all_to_all_single(buffer.repeat(n), recv, [buffer.numel()] * n, name)
        case "all_to_all":
            begun = _c10d.all_to_all_single(buffer, recv, send, name)
        case "reduce_scatter":
            begun = _c10d.reduce_scatter_tensor(buffer, message.op, n, name)
        case "all_reduce":
            begun = _c10d.all_reduce(buffer, message.op, name)
    return lambda: movable(request.out).copy_(_c10d.wait_tensor(begun))


def _work_of(request: Request, group: Group) -> list[dist.Work]:
    """The collective begun, beside what this process computes."""
    message, pg = request.leg.message, group.process_group
    buffer, out = movable(request.buffer), movable(request.out)
    scale = request.buffer.itemsize // buffer.itemsize
    works: list[dist.Work | None] = []
    pairs = in_pairs(group)
    match message.collective:
        case "all_gather" if not any(message.recv):
            pass
        case "all_gather" if pairs and not group.spread:
            parts = out.split([size * scale for size in message.recv])
            works += begin_exchange([buffer] * len(parts), parts, group)
        case "all_gather" if len(set(message.recv)) == 1:
            works.append(_all_gather(out, buffer, pg, async_op=True))
        case "all_gather":
            parts = zip(out.split([size * scale for size in message.recv]), message.ranks, strict=True)
            works += [dist.broadcast(part, rank, pg, async_op=True) for part, rank in parts if part.numel()]
        case "all_to_all":
            send, recv = ([size * scale for size in sizes] for sizes in (message.send, message.recv))
            if pairs:
                works += begin_exchange(buffer.split(send), out.split(recv), group)
            else:
                works.append(dist.all_to_all_single(out, buffer, recv, send, pg, async_op=True))
        case "reduce_scatter":
            works.append(_reduce_scatter(out, buffer, _op(message.op), pg, async_op=True))
        case "all_reduce":
            if buffer.numel():
                works.append(dist.all_reduce(buffer, _op(message.op), pg, async_op=True))
    return [work for work in works if work is not None]


def _op(op: str | None) -> dist.ReduceOp.RedOpType:
    return dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM


def _done() -> None: ...
