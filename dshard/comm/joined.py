"""Several redistributions that need the same collectives, each of which runs once for all their local tensors.

The pieces for a rank are those of every tensor, one after the other, in one flat buffer. Reduced tensors are views of
the buffer received; gathered ones are copied out of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch

from dshard.caches import cached
from dshard.comm import rank_checks
from dshard.comm.backends import SIMULATED, Backend
from dshard.comm.collective import Collective, Kind
from dshard.comm.pieces import JoinedPieces, JoinedViews
from dshard.comm.program_steps import Moved, Steps, Transfer, kind_of, lowered, moved_in, reduction_of
from dshard.comm.world import COPY, Moving, SentStep
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import ReduceOp, chunk
from dshard.redistribute import AllGather, AllReduce, Plan, ReduceScatter, Step
from dshard.redistribute.step import after, all_reduce_sizes


class Lane(NamedTuple):
    """The kinds, mesh axes and reductions of a plan's collectives: plans with equal lanes can run as one."""

    mesh: Mesh
    collectives: tuple[tuple[Kind, tuple[str, ...], ReduceOp | None], ...]


_KINDS: frozenset[Kind] = frozenset({"all_gather", "all_reduce", "reduce_scatter"})


@cached("collective steps", 16384)
def lane_of(plan: Plan) -> Lane | None:
    """The lane of a plan; None if it sends nothing, or has a step of another kind."""
    mesh, steps = plan.src.mesh, [step for step, _, _ in plan.shaped_stages()]
    ranks = [prod([mesh.shape[mesh.axis(axis)] for axis in step.axes]) for step in steps]
    if not steps or 1 in ranks or any(kind_of(step) not in _KINDS for step in steps):
        return None
    if plan.src.blocks or plan.dst.blocks:
        corners = (0,) * mesh.ndim, tuple([n - 1 for n in mesh.shape])  # of blocks of one element the last has nothing
        if any(moved_in(plan, at) is None for at in corners):
            return None
    return Lane(mesh, tuple([(kind_of(step) or "all_gather", step.axes, reduction_of(step)) for step in steps]))


def joined(plans: tuple[Plan, ...], dtype: torch.dtype) -> Moving:
    """Plans of one lane as one collective, ready to run on a local tensor of each, all cast to `dtype`."""

    def planned(itemsize: int) -> list[SentStep]:
        copies = [SentStep(COPY, (), elements * itemsize) for elements in _packed(plans)]
        sent = joined_received(plans)
        return [*copies, *[SentStep(kind, axes, elements * itemsize) for kind, axes, elements in sent]]

    def text() -> str:
        return f"{len(plans)} joined: " + "; ".join(map(rank_checks.plan_text, plans))

    return Moving(plans[0].src.mesh, partial(_steps, plans), planned, text=text, dtype=dtype)


@cached("collective steps", 4096)
def _packed(plans: tuple[Plan, ...]) -> tuple[int, ...]:
    """The elements that each step copies: each tensor once, into a buffer that is sent, or out of one received."""
    stages = zip(*[plan.shaped_stages() for plan in plans], strict=True)
    return tuple(
        [
            sum([max(own.local_numel(shape), after(step, own).local_numel(shape)) for step, own, shape in members])
            for members in stages
        ]
    )


@cached("collective steps", 4096)
def _steps(plans: tuple[Plan, ...], at: Coordinate, dtype: torch.dtype, backend: Backend) -> Steps:
    moved = [moved_in(plan, at) or [] for plan in plans]
    return tuple(step for members in zip(*moved, strict=True) for step in _joined(members, dtype, backend))


def _joined(members: Sequence[Moved], dtype: torch.dtype, backend: Backend) -> tuple[Transfer, ...]:
    """The corresponding collectives of several plans as the transfers of one."""
    shapes = [moved.after for moved in members]
    sent = JoinedPieces([moved.sent for moved in members], [moved.before for moved in members], dtype)
    size, gathers = sum(map(prod, shapes)), members[0].collective.kind == "all_gather"
    received = JoinedPieces([moved.received for moved in members], shapes, dtype) if gathers else JoinedViews(shapes)
    return lowered(_collective([moved.collective for moved in members], size), sent, received, (size,), dtype, backend)


def _collective(of: Sequence[Collective], size: int) -> Collective:
    """One collective for several, whose result has `size` elements."""
    send = tuple(map(sum, zip(*(c.send for c in of), strict=True)))
    recv = tuple(map(sum, zip(*(c.recv for c in of), strict=True)))
    reports = [c.report for c in of if c.report is not None]
    elements = sum(report.elements for report in reports)
    if of[0].kind == "all_reduce":  # one rounding of chunks, not one for each
        elements = sum(all_reduce_sizes(size, of[0].ranks, of[0].ranks[of[0].index]))
    return replace(of[0], send=send, recv=recv, report=replace(reports[0], elements=elements, busiest=0, load=None))


class _Stage(NamedTuple):
    """A step of one of several joined plans: the layouts before and after it, and the shape of the tensor."""

    step: Step
    src: Layout
    dst: Layout
    shape: Shape

    def sizes(self, at: Coordinate) -> tuple[int, int]:
        """The elements that the rank at a coordinate has before, and after."""
        return prod(self.src.local_shape(self.shape, at)), prod(self.dst.local_shape(self.shape, at))


@cached("collective steps", 4096)
def joined_received(plans: tuple[Plan, ...]) -> tuple[tuple[Kind, tuple[str, ...], int], ...]:
    """The collectives of joined plans of one lane: the kind, axes, and busiest rank's elements of each."""
    mesh = plans[0].src.mesh
    staged = [
        [_Stage(step, src, after(step, src), shape) for step, src, shape in plan.shaped_stages()] for plan in plans
    ]
    lane = [*zip(*staged, strict=True)]
    if all(isinstance(each.step, AllGather | ReduceScatter | AllReduce) for members in lane for each in members):
        return tuple(
            [
                (kind_of(members[0].step) or "all_gather", members[0].step.axes, _busiest(mesh, members))
                for members in lane
            ]
        )
    of_ranks = [_steps(plans, mesh.coordinate(rank), torch.float32, SIMULATED) for rank in mesh.ranks]
    steps = [[step for step in ranks if isinstance(step, Transfer)] for ranks in zip(*of_ranks, strict=True)]
    firsts = ((ranks, ranks[0].collective) for ranks in steps)
    return tuple((c.kind, c.axes, max(step.elements for step in ranks)) for ranks, c in firsts)


def _busiest(mesh: Mesh, members: Sequence[_Stage]) -> int:
    """The elements that the busiest rank receives in the joined gathers or reductions of tensors.

    Where the first rank, which has the most of each tensor, has what the last has, all ranks have it.
    """
    first, last = (0,) * mesh.ndim, tuple([n - 1 for n in mesh.shape])
    if all(each.sizes(first) == each.sizes(last) for each in members):
        return _elements(mesh, members, first, 0)
    places = _places(mesh, members[0].step.axes)
    return max(map(partial(_elements, mesh, members), mesh.coordinates(), places))


def _places(mesh: Mesh, axes: Sequence[str]) -> list[int]:
    """The place of each rank of a mesh among the sorted ranks of its group along these axes."""
    others, groups = (
        [i for i, name in enumerate(mesh.names) if name not in axes],
        defaultdict[Coordinate, list[int]](list),
    )
    for rank, at in zip(mesh.ranks, mesh.coordinates(), strict=True):
        groups[tuple([at[i] for i in others])].append(rank)
    place = {rank: i for group in groups.values() for i, rank in enumerate(sorted(group))}
    return [place[rank] for rank in mesh.ranks]


def _elements(mesh: Mesh, members: Sequence[_Stage], at: Coordinate, place: int) -> int:
    """The elements that a rank, by its place in a group, receives in the joined gathers or reductions of tensors."""
    step = members[0].step
    own, then = map(sum, zip(*[each.sizes(at) for each in members], strict=True))
    n = prod([mesh.shape[mesh.axis(axis)] for axis in step.axes])
    if isinstance(step, AllGather):
        return then - own
    if isinstance(step, ReduceScatter):
        return (n - 1) * then
    return then + (n - 2) * len(chunk(then, n, place))  # a reduce_scatter and an all_gather
