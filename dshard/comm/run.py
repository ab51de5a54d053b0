"""Run plans, exchanges and programs on local tensors, wherever they live: `world` has where that may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import rank_checks
from dshard.comm.collective import CollectiveReport
from dshard.comm.drive import Make, Results
from dshard.comm.program_steps import Transfer, flat_exchange, kind_of, steps_of
from dshard.comm.runtime import runtime_of
from dshard.comm.transport import reduce_number, report
from dshard.comm.world import COPY, Moving, OnProcesses, SentStep, world_of
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute import AllReduce, Plan
from dshard.redistribute.layout_state import StepLoad, load_of

Sizes = Callable[[Coordinate], tuple[tuple[int, ...], tuple[int, ...]]]
_FEW_RANKS = 64  # the most that send numbers in pairs


def runner(plan: Plan) -> Moving:
    """The plan, ready to run; on a mesh with processes there is one for each plan."""
    runtime = runtime_of(plan.src.mesh)
    cached_runner: Moving | None = None if runtime is None else runtime.runners.get(plan)
    if runtime is not None and cached_runner is not None:
        runtime.runners.hits += 1
        return cached_runner
    shape = partial(plan.dst.local_shape, plan.shape)
    text = partial(rank_checks.plan_text, plan)
    moving = Moving(plan.src.mesh, partial(steps_of, plan, None), partial(_planned, plan), shape, text)
    return moving if runtime is None else runtime.runners.add(plan, moving)


def run(plan: Plan, x: Tensor) -> Tensor:
    """The local tensor of this rank under `plan.dst`, from its local tensor under `plan.src`.

    The result shares no memory with `x` unless the plan has no steps.
    """
    if not plan.steps:
        return x
    with torch.no_grad():
        return runner(plan)(x)  # type: ignore[no-any-return]


def collectives_of(plan: Plan, itemsize: int) -> list[SentStep]:
    """Each collective that a plan runs: its kind, its mesh axes, and the bytes that the busiest rank receives."""
    return [each for each in _planned(plan, itemsize) if each.kind != COPY]


@cached("collective steps", 65536)
def _planned(plan: Plan, itemsize: int) -> tuple[SentStep, ...]:
    """The bytes that each step of a plan copies in memory, and its collective, if it runs one."""
    mesh, entries = plan.src.mesh, list[SentStep]()
    for stage in plan.shaped_stages():
        (step, *_), load, kind = stage, load_of(*stage), kind_of(stage[0])
        entries.append(SentStep(COPY, step.axes, load.copied * itemsize))
        if kind is not None and len(mesh.peers(step.axes, (0,) * mesh.ndim)) > 1:
            sent = StepLoad(type(step), load, itemsize)
            entries.append(SentStep(kind, step.axes, load.received * itemsize, sent))
    return tuple(entries)


def swap(x: Tensor, mesh: Mesh, axes: tuple[str, ...], sizes: Sizes) -> Tensor:
    """Flat pieces for each rank of the group along `axes` -> the flat pieces from each, in the order of the group.

    `sizes` says how many elements the rank at a coordinate sends to, and receives from, each.
    """

    def steps(at: Coordinate, *_: object) -> tuple[Transfer]:
        return (flat_exchange(mesh, axes, at, *sizes(at)),)

    def planned(itemsize: int) -> list[SentStep]:
        received = [steps(at)[0].elements for at in mesh.peers(axes, (0,) * mesh.ndim)]
        return [SentStep("all_to_all", axes, max(received) * itemsize)]

    with torch.no_grad():
        return Moving(mesh, steps, planned, lambda at: steps(at)[0].shape)(x)  # type: ignore[no-any-return]


def run_number(plan: Plan, x: Tensor) -> Tensor:
    """Run a plan on a tensor of one element, in messages that cannot match those of another collective.

    So a rank that calls it alone waits until it learns of an error of the others. This holds for a plan of one
    all_reduce over gloo with few ranks; all others run by `run`.
    """
    step = plan.steps[0] if len(plan.steps) == 1 else None
    if not isinstance(step, AllReduce) or rank_checks.enabled():
        return run(plan, x)
    world = world_of(plan.src.mesh, (x,))
    if type(world) is not OnProcesses:
        return run(plan, x)
    group = world.runtime.group(step.axes)
    if not group.backend.waits_on_host or not 1 < len(group.ranks) <= _FEW_RANKS:
        return run(plan, x)
    what = CollectiveReport("all_reduce", plan.src.mesh, plan.received(world.coordinate))
    with torch.no_grad():
        return report(what, group, partial(reduce_number, step.op, group), x)()


def run_program(mesh: Mesh, make: Make, tensors: Sequence[Tensor], plans: Sequence[Plan] = ()) -> Results:
    """Run the program of this rank, or of each simulated rank, on local tensors; return its results.

    Collectives run beside the computation between their begin and their end. In debug mode the ranks first compare
    `plans`.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run_program(mesh, make, tensors, plans)
    return world_of(mesh, tensors).run(mesh, make, tensors, plans)
