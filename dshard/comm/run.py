"""Run plans: on the process groups of a mesh, or on all its ranks simulated in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import collectives, rank_checks, transport
from dshard.comm.events import LISTENERS, emit
from dshard.comm.runtime import Group, LocalTensor, Runtime, own_coordinate, runtime_of
from dshard.comm.simulated import exchange, plain, stack, unstack
from dshard.comm.timing import timed
from dshard.comm.traced_collectives import traced
from dshard.comm.transfer import Local, Transfer, compile_step
from dshard.comm.transport import reduce_number
from dshard.errors import MeshError
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute import AllReduce, Pend, Plan, Slice, Step
from dshard.redistribute.price import load_of

Stage = Local | Transfer


def run(plan: Plan, x: Tensor) -> Tensor:
    """The local tensor of this rank under `plan.dst`, from its local tensor under `plan.src`.

    The result shares no memory with `x` unless the plan has no steps.

    Raises:
        MeshError: the mesh has no processes.
    """
    if not plan.steps:
        return x
    with torch.no_grad():
        if type(x) is LocalTensor:
            return _simulate(plan, x)
        if x.is_meta:
            if LISTENERS:
                for collective, axes, nbytes in collectives_of(plan, x.itemsize):
                    emit(collective, plan.src.mesh, axes, nbytes)
            return x.new_empty(plan.dst.local_shape(plan.shape, own_coordinate(plan.dst.mesh)))
        return runner(plan)(x)


def collectives_of(plan: Plan, itemsize: int) -> list[tuple[str, tuple[str, ...], int]]:
    """Each collective that a plan runs: its kind, its mesh axes, and the bytes that the busiest rank receives."""
    first = (0,) * plan.src.mesh.ndim
    entries: list[tuple[str, tuple[str, ...], int]] = []
    for step, layout in plan.stages():
        stage = compile_step(step, layout, plan.shape, first)
        if isinstance(stage, Transfer):
            entries.append((stage.collective, stage.axes, load_of(step, layout, plan.shape).received * itemsize))
    return entries


def run_number(plan: Plan, x: Tensor) -> Tensor:
    """Run a plan on a tensor of one element, in messages that no other collective can be mistaken for.

    So a rank that calls it alone waits until it learns of an error of the others. It needs a plan of one all_reduce
    over gloo with few ranks; all else takes `run`.
    """
    runtime = runtime_of(plan.src.mesh)
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if runtime is None or runtime.coordinate is None or type(x) is not Tensor or x.is_meta:
        return run(plan, x)
    if not isinstance(step, AllReduce) or rank_checks.enabled():
        return run(plan, x)
    group = runtime.group(step.axes)
    if group.backend != "gloo" or not 1 < len(group.ranks) <= _FEW_RANKS:
        return run(plan, x)
    stage = stages_of(plan, runtime.coordinate)[0]
    assert isinstance(stage, Transfer)
    nbytes, op = stage.received * x.itemsize, step.op
    with torch.no_grad():
        return timed("all_reduce", plan.src.mesh, nbytes, group, x.device, lambda: reduce_number(x, op, group))


_FEW_RANKS = 64  # the most that send numbers in pairs
Sizes = Callable[[Coordinate], tuple[tuple[int, ...], tuple[int, ...]]]


def swap(x: Tensor, mesh: Mesh, axes: tuple[str, ...], sizes: Sizes) -> Tensor:
    """Flat pieces for each rank of the group along `axes` -> the flat pieces from each, in the order of the group.

    `sizes` says how many elements the rank at a coordinate sends to, and receives from, each.

    Raises:
        MeshError: the mesh has no processes.
    """

    def transfer(at: Coordinate) -> Transfer:
        send, recv = sizes(at)
        ranks = mesh.group(axes, at)
        index = ranks.index(mesh.rank(at))
        return Transfer("all_to_all", mesh, axes, ranks, index, None, send, recv, sum(recv) - recv[index], _same, _same)

    if type(x) is LocalTensor:
        transfers = {rank: transfer(mesh.coordinate(rank)) for rank in mesh.ranks}
        with plain():
            emit("all_to_all", mesh, axes, max(t.received for t in transfers.values()) * x.itemsize)
            return stack(exchange(transfers, unstack(x)))
    if x.is_meta:
        first = (0,) * mesh.ndim
        if LISTENERS:
            received = max(transfer(peer).received for peer in mesh.peers(axes, first))
            emit("all_to_all", mesh, axes, received * x.itemsize)
        return x.new_empty(sum(sizes(own_coordinate(mesh))[1]))
    runtime = runtime_of(mesh)
    if runtime is None or runtime.coordinate is None:
        raise MeshError(f"the mesh ({mesh}) has no processes here: nothing can be sent; use init_device_mesh")
    for call in _transfer_calls(transfer(runtime.coordinate), runtime.group(axes)):
        x = call(x)
    return x


def _same(x: Tensor) -> Tensor:
    return x


def runner(plan: Plan) -> Callable[[Tensor], Tensor]:
    """The function that runs `plan` on this rank's local tensor, compiled once and cached.

    Raises:
        MeshError: the mesh has no processes.
    """
    runtime = runtime_of(plan.src.mesh)
    if runtime is None or runtime.coordinate is None:
        why = "has no processes" if runtime is None else f"does not contain this rank, {runtime.rank}"
        raise MeshError(f"the mesh ({plan.src.mesh}) {why}: nothing can be sent; use init_device_mesh under torchrun")
    cached_runner: Local | None = runtime.runners.get(plan)
    if cached_runner is None:
        return runtime.runners.add(plan, _runner(plan, runtime, runtime.coordinate))  # type: ignore[no-any-return]
    runtime.runners.hits += 1
    return cached_runner


def _runner(plan: Plan, runtime: Runtime, coordinate: Coordinate) -> Local:
    stages = stages_of(plan, coordinate)
    if not stages:
        return torch.clone
    calls: list[Local] = []
    for stage in stages:
        calls += _transfer_calls(stage, runtime.group(stage.axes)) if isinstance(stage, Transfer) else [stage]
    if rank_checks.enabled():
        calls.insert(0, partial(_compare_first, plan, runtime))
    if len(calls) == 1:
        return calls[0]
    if len(stages) == 1 and isinstance(stages[0], Transfer) and stages[0].collective == "all_reduce":
        return _all_reduce(stages[0], runtime.group(stages[0].axes), calls)
    return _sequence(calls)


def _all_reduce(transfer: Transfer, group: Group, calls: list[Local]) -> Local:
    """A plan of one all_reduce: without flat buffers where the backend can reduce the dtype."""
    general, op = _sequence(calls), transfer.op
    assert op is not None
    if len(calls) > 3:  # in debug mode the plan is compared first
        return general

    def reduce(x: Tensor) -> Tensor:
        if LISTENERS or type(x) is not Tensor or not transport.reduces(x.dtype, op, group.backend):
            return general(x)
        return collectives.reduce(x, op, group)

    return reduce


def _sequence(calls: list[Local]) -> Local:

    def run_all(x: Tensor) -> Tensor:
        values = [x]
        del x  # each call owns its argument, so that tensors are freed as soon as they are not needed
        for call in calls:
            values.append(call(values.pop()))
        return values.pop()

    return run_all


def _compare_first(plan: Plan, runtime: Runtime, x: Tensor) -> Tensor:
    if not traced(x):
        rank_checks.compare(plan, runtime)
    return x


@cached("stages", 65536)
def stages_of(plan: Plan, coordinate: Coordinate) -> tuple[Stage, ...]:
    """The stages of the rank at `coordinate`, in order; axes of one rank have none, and no copy is copied again."""
    compiled: list[tuple[Step, Stage]] = []
    steps = list(plan.stages())
    for i, (first, second) in enumerate(pairwise(plan.steps)):
        # slice before the terms of a partial are made: terms are as large as the tensor they are made of
        if isinstance(first, Pend) and isinstance(second, Slice):
            steps[i : i + 2] = reversed(steps[i : i + 2])
    for step, layout in steps:
        stage = compile_step(step, layout, plan.shape, coordinate, owned=bool(compiled))
        if stage is not None:
            compiled.append((step, stage))
    if len(compiled) > 1 and compiled[0][1] is torch.clone and not isinstance(compiled[1][0], Pend):
        compiled[0] = (compiled[0][0], _same)  # all ranks have the same number of stages
    return tuple(stage for _, stage in compiled)


def _transfer_calls(transfer: Transfer, group: Group) -> list[Local]:
    first, *others = _collective(transfer, group)

    def call(x: Tensor) -> Tensor:
        if LISTENERS and not traced(x):
            nbytes = transfer.received * x.itemsize
            return timed(transfer.collective, transfer.mesh, nbytes, group, x.device, lambda: first(x))
        return first(x)

    return [transfer.pack, call, *others, transfer.unpack]


def _collective(transfer: Transfer, group: Group) -> list[Local]:
    """The collective, then local work on its result, apart so that the sent buffer is freed in between."""
    send, recv, op = transfer.send, transfer.recv, transfer.op
    match transfer.collective:
        case "all_gather":
            return [partial(transport.all_gather, sizes=recv, group=group)]
        case "all_to_all":
            return [partial(transport.all_to_all, send=send, recv=recv, group=group)]
        case "reduce_scatter":
            assert op is not None
            return [
                partial(transport.exchange_terms, send=send, op=op, group=group),
                partial(transport.reduced, size=send[group.index], op=op),
            ]
        case "all_reduce":
            assert op is not None
            return [partial(transport.all_reduce, op=op, group=group)]


def _simulate(plan: Plan, x: Tensor) -> Tensor:
    mesh = plan.src.mesh
    stages = {rank: stages_of(plan, mesh.coordinate(rank)) for rank in mesh.ranks}
    tensors = unstack(x)
    with plain():
        tensors = {rank: tensors[rank] for rank in mesh.ranks}
        for rank_stages in zip(*stages.values(), strict=True):
            stage_of = dict(zip(stages, rank_stages, strict=True))
            transfers = {rank: stage for rank, stage in stage_of.items() if isinstance(stage, Transfer)}
            if transfers:
                busiest = max(transfers.values(), key=lambda transfer: transfer.received)
                itemsize = next(iter(tensors.values())).itemsize
                emit(busiest.collective, mesh, busiest.axes, busiest.received * itemsize)
                received = exchange(transfers, {rank: transfers[rank].pack(t) for rank, t in tensors.items()})
                tensors = {rank: transfers[rank].unpack(received[rank]) for rank in tensors}
            else:
                tensors = {
                    rank: stage(tensors[rank]) for rank, stage in stage_of.items() if not isinstance(stage, Transfer)
                }
        if not next(iter(stages.values())):
            tensors = {rank: t.clone() for rank, t in tensors.items()}
        return stack(tensors)
