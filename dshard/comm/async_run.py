"""Run programs: on the process groups of a mesh, on all its ranks simulated in one process, or without data."""

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
# torch 2.13 has new names for these two
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_c10d = torch.ops._c10d_functional
Results: TypeAlias = tuple[Tensor, ...]
Make: TypeAlias = Callable[[Coordinate, Session, Sequence[Tensor]], Program[Results]]
"""The program of the rank at a coordinate, of its local tensors."""


def run_program(mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan] = ()) -> Results:
    """Run the program of this rank, or of each simulated rank, on local tensors; return its results.

    Collectives run beside the computation between their begin and their end. In debug mode the ranks first compare
    `plans`.

    Raises:
        MeshError: the mesh has no processes.
    """
    with torch.no_grad():
        if any(type(x) is LocalTensor for x in tensors):
            return _simulate(mesh, make, tensors)
        if any(x.is_meta for x in tensors):
            with Workspace().session() as space:
                return advance(make((0,) * mesh.ndim, space, tensors), _launch_without_data)
        runtime = runtime_of(mesh)
        if runtime is None or runtime.coordinate is None:
            why = "has no processes" if runtime is None else f"does not contain this rank, {runtime.rank}"
            raise MeshError(f"the mesh ({mesh}) {why}: nothing can be sent; use init_device_mesh under torchrun")
        if rank_checks.enabled() and not any(map(traced, tensors)):
            for plan in plans:
                rank_checks.compare(plan, runtime)
        if any(map(traced, tensors)):
            return advance(
                make(runtime.coordinate, FreshBuffers(WORKSPACE, runtime), tensors), partial(_launch_traced, runtime)
            )
        with WORKSPACE.session(runtime) as space:
            return advance(make(runtime.coordinate, space, tensors), partial(launch_on, runtime))


def run_without_data(make: Make, tensors: Sequence[Tensor], coordinate: Coordinate) -> tuple[Results, int]:
    """Run a program on tensors without data; return its results, and the peak bytes of its buffers."""
    workspace = Workspace()
    with torch.no_grad(), workspace.session() as space:
        return advance(make(coordinate, space, tensors), lambda request: _no_wait), workspace.peak


def advance(program: Program[T], launch: Callable[[Request], Wait]) -> T:
    """Run a program to its end, and return its value; `launch` begins each collective."""
    try:
        request = next(program)
        while True:
            request = program.send(launch(request))
    except StopIteration as stop:
        value: T = stop.value
        return value


def _simulate(mesh: Mesh, make: Make, tensors: Sequence[Tensor]) -> Results:
    """Run the programs of all ranks in step; they begin the same collectives in the same order."""
    with plain(), Workspace().session() as space:
        locals_of = [unstack(x) for x in tensors]
        programs = {r: make(mesh.coordinate(r), space, [parts[r] for parts in locals_of]) for r in mesh.ranks}
        results: dict[int, Results] = {}
        waits: dict[int, Wait | None] = dict.fromkeys(programs)
        while len(results) < len(programs):
            requests: dict[int, Request] = {}
            for rank, program in programs.items():
                wait = waits[rank]
                try:
                    requests[rank] = next(program) if wait is None else program.send(wait)
                except StopIteration as stop:
                    results[rank] = stop.value
            assert not (results and requests), "programs of all ranks have the same collectives"
            _exchange(requests)
            waits = dict.fromkeys(programs, _no_wait)
        n = len(results[mesh.ranks[0]])
        return tuple(stack({rank: results[rank][i] for rank in mesh.ranks}) for i in range(n))


def _exchange(requests: dict[int, Request]) -> None:
    if not requests:
        return
    busiest = max((request.leg for request in requests.values()), key=lambda leg: leg.elements)
    if busiest.event:
        itemsize = next(iter(requests.values())).buffer.itemsize
        emit(busiest.event, busiest.message.mesh, busiest.message.axes, busiest.elements * itemsize)
    messages = {rank: request.leg.message for rank, request in requests.items()}
    received = exchange(messages, {rank: request.buffer.reshape(-1) for rank, request in requests.items()})
    for rank, request in requests.items():
        request.out.copy_(received[rank].view(request.out.shape))


def launch_on(runtime: Runtime, request: Request) -> Wait:
    """Begin a collective, and return the function that waits for its end."""
    leg, group = request.leg, runtime.group(request.leg.message.axes)
    nbytes = leg.elements * request.buffer.itemsize
    if leg.event and measuring():
        device = request.buffer.device
        timed(leg.event, leg.message.mesh, nbytes, group, device, partial(_run_now, request, group))
        return _no_wait
    if LISTENERS and leg.event:
        emit(leg.event, leg.message.mesh, leg.message.axes, nbytes)
    return partial(_wait(request, group), _work_of(request, group), group)


def _run_now(request: Request, group: Group) -> Tensor:
    _wait(request, group)(_work_of(request, group), group)
    return request.out


def _wait(request: Request, group: Group) -> Callable[[list[dist.Work], Group], None]:
    """The function that waits for the works that `_work_of` returns."""
    pairs = in_pairs(group) and request.leg.message.collective in ("all_gather", "all_to_all")
    return wait_for_pairs if pairs else wait_all


def _launch_without_data(request: Request) -> Wait:
    leg = request.leg
    if LISTENERS and leg.event:
        emit(leg.event, leg.message.mesh, leg.message.axes, leg.elements * request.buffer.itemsize)
    return _no_wait


def _launch_traced(runtime: Runtime, request: Request) -> Wait:
    """Begin the functional collective while torch traces; return the function that waits for its end."""
    message = request.leg.message
    name, buffer, n = runtime.group(message.axes).name, movable(request.buffer), len(message.ranks)
    scale = request.buffer.itemsize // buffer.itemsize
    send, recv = ([size * scale for size in sizes] for sizes in (message.send, message.recv))
    match message.collective:
        case "all_gather" if len(set(recv)) == 1:
            result = _c10d.all_gather_into_tensor(buffer, n, name)
        case "all_gather":
            result = _c10d.all_to_all_single(buffer.repeat(n), recv, [buffer.numel()] * n, name)
        case "all_to_all":
            result = _c10d.all_to_all_single(buffer, recv, send, name)
        case "reduce_scatter":
            result = _c10d.reduce_scatter_tensor(buffer, message.op, n, name)
        case "all_reduce":
            result = _c10d.all_reduce(buffer, message.op, name)
    return lambda: movable(request.out).copy_(_c10d.wait_tensor(result))


def _work_of(request: Request, group: Group) -> list[dist.Work]:
    """Begin the collective on the process group, and return its works, which run beside the computation."""
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


def _no_wait() -> None: ...
