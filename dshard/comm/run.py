"""Run plans, exchanges and programs on local tensors, wherever they live: `world` has where that may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dshard.comm import rank_checks
from dshard.comm.backends import SIMULATED, Backend
from dshard.comm.collective import CollectiveReport
from dshard.comm.drive import Make, Results
from dshard.comm.program_steps import Steps, Transfer, flat_exchange, kind_of, steps_of
from dshard.comm.runtime import runtime_of
from dshard.comm.transport import reduce_number, report
from dshard.comm.world import Moving, OnProcesses, Planned, world_of
from dshard.layout import Shape
from dshard.mesh import Coordinate, Mesh
from dshard.redistribute import AllReduce, Plan, axes_of
from dshard.redistribute.price import load_of

Sizes = Callable[[Coordinate], tuple[tuple[int, ...], tuple[int, ...]]]
_FEW_RANKS = 64  # the most that send numbers in pairs


class PlanRun(Moving):
    """A plan that is ready to run."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.src.mesh)
        self.plan = plan

    def steps(self, at: Coordinate, dtype: torch.dtype, backend: Backend) -> Steps:
        return steps_of(self.plan, None, at, dtype, backend)

    def planned(self, itemsize: int) -> Sequence[Planned]:
        return collectives_of(self.plan, itemsize)

    def shape(self, at: Coordinate) -> Shape:
        return self.plan.dst.local_shape(self.plan.shape, at)

    def text(self) -> str:
        return rank_checks.plan_text(self.plan)


def runner(plan: Plan) -> PlanRun:
    """The plan, ready to run; on a mesh with processes there is one for each plan."""
    runtime = runtime_of(plan.src.mesh)
    if runtime is None:
        return PlanRun(plan)
    cached_runner: PlanRun | None = runtime.runners.get(plan)
    if cached_runner is None:
        return runtime.runners.add(plan, PlanRun(plan))  # type: ignore[no-any-return]
    runtime.runners.hits += 1
    return cached_runner


def run(plan: Plan, x: Tensor) -> Tensor:
    """The local tensor of this rank under `plan.dst`, from its local tensor under `plan.src`.

    The result shares no memory with `x` unless the plan has no steps.

    Raises:
        MeshError: the mesh has no processes.
    """
    if not plan.steps:
        return x
    with torch.no_grad():
        return runner(plan)(x)  # type: ignore[no-any-return]


def collectives_of(plan: Plan, itemsize: int) -> list[Planned]:
    """Each collective that a plan runs: its kind, its mesh axes, and the bytes that the busiest rank receives."""
    mesh, entries = plan.src.mesh, list[Planned]()
    for step, layout in plan.stages():
        kind = kind_of(step)
        if kind is not None and len(mesh.peers(axes_of(step), (0,) * mesh.ndim)) > 1:
            entries.append((kind, axes_of(step), load_of(step, layout, plan.shape).received * itemsize))
    return entries


class _Swap(Moving):
    """An exchange of flat pieces of these sizes between all ranks of a group."""

    __slots__ = ("axes", "sizes")

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], sizes: Sizes) -> None:
        super().__init__(mesh)
        self.axes, self.sizes, self.compares = axes, sizes, False

    def steps(self, at: Coordinate, dtype: torch.dtype, backend: Backend) -> tuple[Transfer]:
        return (flat_exchange(self.mesh, self.axes, at, *self.sizes(at)),)

    def planned(self, itemsize: int) -> Sequence[Planned]:
        peers = self.mesh.peers(self.axes, (0,) * self.mesh.ndim)
        received = [sum(step.elements for step in self.steps(at, torch.int8, SIMULATED)) for at in peers]
        return [("all_to_all", self.axes, max(received) * itemsize)]

    def shape(self, at: Coordinate) -> Shape:
        return (sum(self.sizes(at)[1]),)


def swap(x: Tensor, mesh: Mesh, axes: tuple[str, ...], sizes: Sizes) -> Tensor:
    """Flat pieces for each rank of the group along `axes` -> the flat pieces from each, in the order of the group.

    `sizes` says how many elements the rank at a coordinate sends to, and receives from, each.
    """
    with torch.no_grad():
        return _Swap(mesh, axes, sizes)(x)  # type: ignore[no-any-return]


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
    with torch.no_grad():
        return world_of(mesh, tensors).run(mesh, make, tensors, plans)
