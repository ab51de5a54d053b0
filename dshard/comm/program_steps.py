"""Programs: a plan, or a panel of it, as the steps of one rank, each a value: pack, a collective, reduce, unpack.

Design: docs/design/0014-one-communication-engine.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch

from dshard.caches import cached
from dshard.comm.backends import Backend
from dshard.comm.collective import Collective, CollectiveReport, Kind, collectives_for
from dshard.comm.pieces import JoinedPieces, JoinedViews, Pieces
from dshard.layout import Layout, Region, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import ReduceOp
from dshard.redistribute import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    Panel,
    Plan,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
)
from dshard.redistribute.blocks import unflattened_shape
from dshard.redistribute.layout_state import RUNS, StepLoad, load_of
from dshard.redistribute.step import Messages, after, inside, messages, sizes_received


@dataclass(frozen=True, slots=True)
class Narrow:
    """Keep a region of the local tensor."""

    region: Region


@dataclass(frozen=True, slots=True)
class Fill:
    """Replace the local tensor by a term that leaves those of other ranks as they are: zeros of a sum."""

    value: int


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements as a tensor of another shape: blocked dims unflattened or flattened."""

    shape: Shape


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective, with the pieces of the local tensors that it sends and receives.

    `packed` are the pieces that are sent, `unpacked` those received; None for the flat tensor. Joined pieces are of
    several local tensors. `terms`, if not 0, is the number of equal terms that arrive and are reduced first. `shape` is
    the shape of the local tensor afterwards. `begins` keeps for a dtype what begins the collective.
    """

    collective: Collective
    packed: Pieces | JoinedPieces | None
    unpacked: Pieces | JoinedPieces | JoinedViews | None
    shape: Shape
    terms: int = 0
    begins: dict[torch.dtype, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def elements(self) -> int:
        """The elements that this rank receives from its peers; 0 if they count with another collective."""
        return 0 if self.collective.report is None else self.collective.report.elements


ProgramStep: TypeAlias = Transfer | Narrow | Fill | Reshape
Steps: TypeAlias = tuple[ProgramStep, ...]


def send_receive(mesh: Mesh, axis: int, at: Coordinate, to: int, source: int, size: int, shape: Shape) -> Transfer:
    """Send `size` elements to index `to` of a mesh axis, and receive a tensor of `shape` from index `source`."""
    names, n = (mesh.names[axis],), mesh.shape[axis]
    send = tuple(size if i == to else 0 for i in range(n))
    recv = tuple(prod(shape) if i == source else 0 for i in range(n))
    report = CollectiveReport("permute", mesh, 0 if source == at[axis] else prod(shape))
    collective = Collective("all_to_all", names, mesh.group(names, at), at[axis], send, recv, report=report)
    return Transfer(collective, None, None, shape)


def flat_exchange(
    mesh: Mesh,
    axes: tuple[str, ...],
    at: Coordinate,
    send: Shape,
    recv: Shape,
    name: Literal["all_to_all", "permute"] = "all_to_all",
) -> Transfer:
    """Exchange flat pieces of these sizes with each rank of the group along `axes`; listeners see it as `name`."""
    ranks, index = _group_of(mesh, axes, at)
    report = CollectiveReport(name, mesh, sum(recv) - recv[index])
    return Transfer(Collective("all_to_all", axes, ranks, index, send, recv, report=report), None, None, (sum(recv),))


@cached("collective steps", 4096)
def _group_of(mesh: Mesh, axes: tuple[str, ...], at: Coordinate) -> tuple[tuple[int, ...], int]:
    """The ranks of the group along `axes` of the rank at `at`, and its number among them."""
    ranks = mesh.group(axes, at)
    return ranks, ranks.index(mesh.rank(at))


@cached("collective steps", 65536)
def steps_of(plan: Plan, panel: Panel | None, at: Coordinate, dtype: torch.dtype, backend: Backend) -> Steps:
    """The steps of the rank at `at` that redistribute a panel, or the whole tensor for None, by `plan`.

    Axes of one rank have none. `backend` is that of the process groups, or `SIMULATED`.
    """
    if plan.parts:
        assert panel is None, "panels are of a dim that is sharded in ranges"
        steps_of_parts: list[ProgramStep] = []
        for part in plan.parts:
            steps_of_parts.append(Reshape(part.src.local_shape(part.shape, at)))
            steps_of_parts += steps_of(part, None, at, dtype, backend)
        return (*steps_of_parts, Reshape(plan.dst.local_shape(plan.shape, at)))
    steps = list(plan.shaped_stages())
    for i, (first, second) in enumerate(zip(plan.steps, plan.steps[1:], strict=False)):
        # slice before the terms of a partial are made: terms are as large as the tensor they are made of
        if isinstance(first, MakePartial) and isinstance(second, Slice):
            steps[i : i + 2] = reversed(steps[i : i + 2])
    compiled: list[ProgramStep] = []
    for step, layout, shape in steps:
        compiled += _compile(step, layout, shape, panel, at, dtype, backend)
    return tuple(compiled)


def _compile(
    step: Step, layout: Layout, shape: Shape, panel: Panel | None, at: Coordinate, dtype: torch.dtype, backend: Backend
) -> list[ProgramStep]:
    alone = len(layout.mesh.group(step.axes, at)) == 1
    match step:
        case MakePartial(axes, op):
            neutral, first = {"sum": 0, "product": 1}.get(op), not any(at[layout.mesh.axis(axis)] for axis in axes)
            return [] if neutral is None or first else [Fill(neutral)]
        case Slice():
            return [] if alone else [_narrow(layout, step.dst, shape, panel, at)]
        case _:
            pass
    moved = _transfer(step, layout, shape, panel, at)
    if alone:
        return [Narrow(moved.sent[0])] if isinstance(step, ReduceExchange) else []
    packed = None if isinstance(step, AllGather | AllReduce) else Pieces(moved.sent, moved.before)
    unpacked = Pieces(moved.received, moved.after) if isinstance(step, AllGather | AllToAll | Exchange) else None
    return [*lowered(moved.collective, packed, unpacked, moved.after, dtype, backend)]


class Moved(NamedTuple):
    """The regions that one rank sends and receives in a step with a collective, of local tensors of two shapes.

    There is one region for each rank of the group, or one for all.
    """

    collective: Collective
    sent: tuple[Region, ...]
    received: tuple[Region, ...]
    before: Shape
    after: Shape


def moved_in(plan: Plan, at: Coordinate) -> list[Moved] | None:
    """The regions that the rank at `at` sends and receives in each step of a plan; None for local steps.

    They are regions of the local tensors themselves, with no dim unflattened: None if a step cuts a blocked dim.
    """
    stages = list(plan.shaped_stages())
    for step, layout, _ in stages:
        if kind_of(step) is None or len(layout.mesh.group(step.axes, at)) == 1:
            return None
    moved = [_transfer(step, layout, shape, None, at) for step, layout, shape in stages]
    cuts = {**plan.src.blocks, **plan.dst.blocks}
    if not cuts:
        return moved
    alone = len(plan.parts) == 1 and plan.parts[0].shape == unflattened_shape(plan.shape, cuts)
    return _flattened(moved, cuts) if alone else None


def _flattened(moved: Sequence[Moved], cuts: Iterable[int]) -> list[Moved] | None:
    """What is moved of tensors whose dims `cuts` were unflattened, as regions of these; None if one cuts such a dim."""
    dims = [dim + i for i, dim in enumerate(sorted(cuts))]

    def whole(shape: Shape, regions: tuple[Region, ...]) -> bool:
        return all(region[i] == range(shape[i]) for region in regions for dim in dims for i in (dim, dim + 1))

    def joined(region: Region) -> Region:
        for dim in reversed(dims):
            region = (*region[:dim], range(len(region[dim]) * len(region[dim + 1])), *region[dim + 2 :])
        return region

    def joined_shape(shape: Shape) -> Shape:
        return tuple(map(len, joined(tuple(map(range, shape)))))

    if not all(whole(each.before, each.sent) and whole(each.after, each.received) for each in moved):
        return None
    return [
        each._replace(
            sent=tuple(map(joined, each.sent)),
            received=tuple(map(joined, each.received)),
            before=joined_shape(each.before),
            after=joined_shape(each.after),
        )
        for each in moved
    ]


def _transfer(step: Step, layout: Layout, shape: Shape, panel: Panel | None, at: Coordinate) -> Moved:
    regions = messages(step, layout, shape, at) if panel is None else panel.messages(step, layout, shape, at)
    assert regions is not None
    before, done = (
        there.local_shape(shape, at) if panel is None else panel.shape(there, shape, at)
        for there in (layout, after(step, layout))
    )
    received = sum(sizes_received(step, layout, shape, at, regions))
    load = StepLoad(type(step), load_of(step, layout, shape)) if panel is None else None
    busiest = load.load.received if load else 0
    report = CollectiveReport(kind_of(step) or "", layout.mesh, received, busiest, load)
    collective = _collective(step, regions, at, report)
    return Moved(collective, tuple(regions.send), tuple(regions.recv), before, done)


def lowered(
    collective: Collective,
    packed: Pieces | JoinedPieces | None,
    unpacked: Pieces | JoinedPieces | JoinedViews | None,
    shape: Shape,
    dtype: torch.dtype,
    backend: Backend,
) -> tuple[Transfer, ...]:
    """A collective as the transfers by which the backend runs it; the local tensor has `shape` afterwards."""
    parts = collectives_for(collective, dtype, backend)
    if len(parts) == 1:
        ((alone, terms),) = parts
        return (Transfer(alone, packed, unpacked, shape, terms),)
    (exchange, terms), (gather, _) = parts
    return Transfer(exchange, packed, None, exchange.recv[:1], terms), Transfer(gather, None, unpacked, shape)


def kind_of(step: Step) -> Kind | None:
    """The kind of collective that a step of a plan runs; None for a local step."""
    kind = RUNS[type(step)]
    return "all_to_all" if kind == "exchange" else cast("Kind | None", kind)


def reduction_of(step: Step) -> ReduceOp | None:
    """The reduction that the collective of a step does, if it does one."""
    return step.op if isinstance(step, ReduceScatter | ReduceExchange | AllReduce) else None


def _collective(step: Step, regions: Messages, at: Coordinate, report: CollectiveReport) -> Collective:
    axes, mesh = step.axes, report.mesh
    ranks = mesh.group(axes, at)
    kind = kind_of(step)
    assert kind is not None
    send, recv = regions.sizes(regions.send), regions.sizes(regions.recv)
    return Collective(kind, axes, ranks, ranks.index(mesh.rank(at)), send, recv, reduction_of(step), report=report)


def _narrow(src: Layout, dst: Layout, shape: Shape, panel: Panel | None, at: Coordinate) -> Narrow:
    region = inside(dst.region(shape, at), src.region(shape, at))
    if panel is not None:
        region = panel.region(region, src.dim_range(panel.dim, shape[panel.dim], at).start)
    return Narrow(region)
