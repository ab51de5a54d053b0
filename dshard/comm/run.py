"""Run plans and programs: on process groups, on all ranks simulated in one process, or without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dshard.comm import rank_checks, simulated
from dshard.comm.backends import SIMULATED
from dshard.comm.collective import CollectiveReport
from dshard.comm.collectives import Wait
from dshard.comm.drive import Make, Program, Request, Results, advance, redistributed
from dshard.comm.events import LISTENERS, emit
from dshard.comm.pieces import Local, view_of
from dshard.comm.program_steps import Fill, Narrow, Steps, Transfer, flat_exchange, kind_of, steps_of
from dshard.comm.recorded_calls import RECORDERS, recorded_begin
from dshard.comm.runtime import Group, LocalTensor, Runtime, is_outside, own_coordinate, own_runtime, runtime_of
from dshard.comm.traced_collectives import traced
from dshard.comm.transport import launch, primitive, reduce_number, report
from dshard.comm.workspace import WORKSPACE, FreshBuffers, Session, Workspace
from dshard.layout import Region
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute import AllReduce, Plan, axes_of
from dshard.redistribute.price import load_of

Sizes = Callable[[Coordinate], tuple[tuple[int, ...], tuple[int, ...]]]
Planned = tuple[str, tuple[str, ...], int]
_FEW_RANKS = 64  # the most that send numbers in pairs


# -- plans, at once


def run(plan: Plan, x: Tensor) -> Tensor:
    """The local tensor of this rank under `plan.dst`, from its local tensor under `plan.src`.

    The result shares no memory with `x` unless the plan has no steps.

    Raises:
        MeshError: the mesh has no processes.
    """
    if not plan.steps:
        return x
    with torch.no_grad():
        mesh = plan.src.mesh
        if type(x) is LocalTensor:
            return simulated.run_program(mesh, partial(_redistribution, plan), (x,))[0]
        if x.is_meta:
            shape = plan.dst.local_shape(plan.shape, own_coordinate(mesh))
            return _without_data(x, shape, mesh, lambda: collectives_of(plan, x.itemsize))
        return runner(plan)(x)


def _redistribution(plan: Plan, at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[Results]:
    (x,) = tensors
    return ((yield from redistributed(steps_of(plan, None, at, x.dtype, SIMULATED), x, space)),)


def collectives_of(plan: Plan, itemsize: int) -> list[Planned]:
    """Each collective that a plan runs: its kind, its mesh axes, and the bytes that the busiest rank receives."""
    mesh, entries = plan.src.mesh, list[Planned]()
    for step, layout in plan.stages():
        kind = kind_of(step)
        if kind is not None and len(mesh.peers(axes_of(step), (0,) * mesh.ndim)) > 1:
            entries.append((kind, axes_of(step), load_of(step, layout, plan.shape).received * itemsize))
    return entries


def runner(plan: Plan) -> Local:
    """The function that runs `plan` on this rank's local tensor, compiled once for each dtype and cached.

    Raises:
        MeshError: the mesh has no processes.
    """
    runtime, coordinate = own_runtime(plan.src.mesh)
    cached_runner: Local | None = runtime.runners.get(plan)
    if cached_runner is None:
        return runtime.runners.add(plan, _runner(plan, runtime, coordinate))  # type: ignore[no-any-return]
    runtime.runners.hits += 1
    return cached_runner


def _runner(plan: Plan, runtime: Runtime, coordinate: Coordinate) -> Local:
    by_dtype: dict[torch.dtype, list[Local]] = {}
    compares = rank_checks.enabled()

    def compiled(dtype: torch.dtype, *, is_traced: bool) -> list[Local]:
        calls = _calls(steps_of(plan, None, coordinate, dtype, runtime.backend), runtime, dtype, is_traced)
        if compares and not is_traced:
            calls.insert(0, partial(_compare_first, plan, runtime))
        return calls

    def run_plan(x: Tensor) -> Tensor:
        calls: list[Local] | None
        if type(x) is not Tensor and traced(x):
            calls = compiled(x.dtype, is_traced=True)
        else:
            calls = by_dtype.get(x.dtype)
            if calls is None:
                calls = by_dtype[x.dtype] = compiled(x.dtype, is_traced=False)
        if len(calls) == 1:
            return calls[0](x)
        values = [x]
        del x  # each call owns its argument, so that tensors are freed as soon as they are not needed
        for call in calls:
            values.append(call(values.pop()))
        return values.pop()

    return run_plan


def _calls(steps: Steps, runtime: Runtime, dtype: torch.dtype, is_traced: bool) -> list[Local]:
    """The steps as functions to be called one after the other; all but the first may overwrite their argument."""
    calls: list[Local] = []
    for i, step in enumerate(steps):
        match step:
            case Transfer():
                calls += _transfer_calls(step, runtime.group(step.collective.axes), dtype, is_traced)
            case Narrow(region) if i == 0 and isinstance(steps[1:] and steps[1], Transfer):
                calls.append(partial(view_of, region=region))  # which packs it
            case Narrow(region):
                calls.append(_copier(region))
            case Fill(value):
                calls.append(partial(Tensor.fill_, value=value) if i else partial(torch.full_like, fill_value=value))
    return calls or [torch.clone]


def _copier(region: Region) -> Local:
    return lambda x: view_of(x, region).clone(memory_format=torch.contiguous_format)


def _transfer_calls(step: Transfer, group: Group, dtype: torch.dtype, is_traced: bool) -> list[Local]:
    """Pack, collective and unpack as separate functions, so that a buffer is freed once it is not needed."""
    collective = step.collective
    begin, what = primitive(collective, dtype, group, is_traced=is_traced), collective.report

    def run_collective(x: Tensor) -> Tensor:
        start = recorded_begin(collective, begin) if RECORDERS else begin
        if LISTENERS and what is not None:
            return report(what, group, start, x)()
        return start(x, None)()

    if collective.kind == "all_reduce" and not is_traced:
        return [run_collective]  # in a tensor of any shape
    return [step.packer(), run_collective, *step.unpackers()]


def _compare_first(plan: Plan, runtime: Runtime, x: Tensor) -> Tensor:
    rank_checks.compare(plan, runtime)
    return x


def _without_data(x: Tensor, shape: Sequence[int], mesh: Mesh, planned: Callable[[], Sequence[Planned]]) -> Tensor:
    """A result without data; listeners are told of the `planned` collectives."""
    if LISTENERS and not is_outside(mesh):
        for kind, axes, nbytes in planned():
            emit(kind, mesh, axes, nbytes)
    return x.new_empty(shape)


# -- single collectives, at once


def swap(x: Tensor, mesh: Mesh, axes: tuple[str, ...], sizes: Sizes) -> Tensor:
    """Flat pieces for each rank of the group along `axes` -> the flat pieces from each, in the order of the group.

    `sizes` says how many elements the rank at a coordinate sends to, and receives from, each.

    Raises:
        MeshError: the mesh has no processes.
    """

    def step(at: Coordinate) -> Transfer:
        return flat_exchange(mesh, axes, at, *sizes(at))

    def program(at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[Results]:
        return ((yield from redistributed((step(at),), tensors[0], space)),)

    def planned() -> list[Planned]:
        peers = mesh.peers(axes, (0,) * mesh.ndim)
        return [("all_to_all", axes, max(step(peer).elements for peer in peers) * x.itemsize)]

    if type(x) is LocalTensor:
        return simulated.run_program(mesh, program, (x,))[0]
    if x.is_meta:
        return _without_data(x, step(own_coordinate(mesh)).shape, mesh, planned)
    runtime, at = own_runtime(mesh)
    return launch(step(at).collective, x, runtime.group(axes))()


def run_number(plan: Plan, x: Tensor) -> Tensor:
    """Run a plan on a tensor of one element, in messages that cannot match those of another collective.

    So a rank that calls it alone waits until it learns of an error of the others. This holds for a plan of one
    all_reduce over gloo with few ranks; all others run by `run`.
    """
    runtime = runtime_of(plan.src.mesh)
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if runtime is None or runtime.coordinate is None or type(x) is not Tensor or x.is_meta:
        return run(plan, x)
    if not isinstance(step, AllReduce) or rank_checks.enabled():
        return run(plan, x)
    group = runtime.group(step.axes)
    if not group.backend.waits_on_host or not 1 < len(group.ranks) <= _FEW_RANKS:
        return run(plan, x)
    what = CollectiveReport("all_reduce", plan.src.mesh, plan.received(runtime.coordinate))
    with torch.no_grad():
        return report(what, group, partial(reduce_number, step.op, group), x)()


# -- programs, whose collectives overlap the computation


def run_program(mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan] = ()) -> Results:
    """Run the program of this rank, or of each simulated rank, on local tensors; return its results.

    Collectives run beside the computation between their begin and their end. In debug mode the ranks first compare
    `plans`.

    Raises:
        MeshError: the mesh has no processes.
    """
    with torch.no_grad():
        if any(type(x) is LocalTensor for x in tensors):
            return simulated.run_program(mesh, make, tensors)
        if any(x.is_meta for x in tensors):
            with Workspace().session() as space:
                return advance(make((0,) * mesh.ndim, space, tensors), _launch_without_data)
        runtime, coordinate = own_runtime(mesh)
        if any(map(traced, tensors)):
            return advance(make(coordinate, FreshBuffers(WORKSPACE, runtime), tensors), partial(launch_on, runtime))
        if rank_checks.enabled():
            for plan in plans:
                rank_checks.compare(plan, runtime)
        pool = Workspace() if RECORDERS else WORKSPACE  # a replay makes its own buffers
        with pool.session(runtime) as space:
            return advance(make(coordinate, space, tensors), partial(launch_on, runtime))


def run_without_data(make: Make, tensors: Sequence[Tensor], coordinate: Coordinate) -> tuple[Results, int]:
    """Run a program on tensors without data; return its results, and the peak bytes of its buffers."""
    workspace = Workspace()
    with torch.no_grad(), workspace.session() as space:
        return advance(make(coordinate, space, tensors), received_at_once), workspace.peak


def launch_on(runtime: Runtime, request: Request) -> Wait:
    """Begin a collective on its process group, and return the function that waits for its end."""
    collective = request.transfer.collective
    return launch(collective, request.buffer, runtime.group(collective.axes), request.out, request.factor)


def _launch_without_data(request: Request) -> Wait:
    collective = request.transfer.collective
    if LISTENERS and collective.report is not None and not is_outside(collective.report.mesh):
        nbytes = collective.report.elements * request.buffer.itemsize
        emit(collective.report.collective, collective.report.mesh, collective.axes, nbytes)
    return received_at_once(request)


def received_at_once(request: Request) -> Wait:
    """Begin a collective without data, which ends at once."""
    out = request.out
    assert out is not None
    return lambda: out
