"""The moves of one redistribution as values: each changes the placement on one mesh axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from typing_extensions import assert_never

from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.placements import Partial, ReduceOp, Replicate, Shard, chunk


@dataclass(frozen=True, slots=True)
class AllGather:
    """Shard(dim) -> Replicate: each rank receives the chunks of its peers."""

    axis: str
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Partial(op) -> Shard(dim): the terms are reduced, each rank keeps one chunk."""

    axis: str
    op: ReduceOp
    dim: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Partial(op) -> Replicate on all `axes` at once: each rank keeps the whole reduction."""

    axes: tuple[str, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Shard(src) -> Shard(dst): each rank gives each peer a block."""

    axis: str
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Replicate -> Shard(dim): each rank keeps its chunk; nothing is sent."""

    axis: str
    dim: int


@dataclass(frozen=True, slots=True)
class Pend:
    """Replicate -> Partial(op): each rank keeps a term of what it holds; nothing is sent."""

    axis: str
    op: ReduceOp


Step: TypeAlias = AllGather | ReduceScatter | AllReduce | AllToAll | Slice | Pend


@dataclass(frozen=True, slots=True)
class Messages:
    """What one rank gives to and gets from each peer of a step's group, as shapes.

    `send` are the pieces of its tensor along `split` (one piece for all peers where `split` is None), `recv` the pieces
    that it joins along `join` (one piece, reduced, where `join` is None).
    """

    send: tuple[Shape, ...]
    recv: tuple[Shape, ...]
    split: int | None
    join: int | None


def axes_of(step: Step) -> tuple[str, ...]:
    """The names of the mesh axes along which a step's groups lie."""
    return step.axes if isinstance(step, AllReduce) else (step.axis,)


_COLLECTIVES: dict[type[Step], str] = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllReduce: "all_reduce",
    AllToAll: "all_to_all",
    Slice: "slice",
    Pend: "pend",
}


def describe(step: Step, layout: Layout) -> tuple[str, str, str]:
    """A step from `layout` in words: what is done, the mesh axes, and how the placement on them changes."""
    axis = layout.mesh.axis(axes_of(step)[0])
    change = f"{layout.placements[axis]} -> {after(step, layout).placements[axis]}"
    return _COLLECTIVES[type(step)], ",".join(axes_of(step)), change


def after(step: Step, layout: Layout) -> Layout:
    """The layout that `step` leads to."""
    match step:
        case AllGather(axis, _):
            return layout.replace(layout.mesh.axis(axis), Replicate())
        case AllReduce(axes, _):
            for axis in axes:
                layout = layout.replace(layout.mesh.axis(axis), Replicate())
            return layout
        case ReduceScatter(axis, _, dim) | AllToAll(axis, _, dim) | Slice(axis, dim):
            return layout.replace(layout.mesh.axis(axis), Shard(dim))
        case Pend(axis, op):
            return layout.replace(layout.mesh.axis(axis), Partial(op))
        case _:
            assert_never(step)


def messages(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> Messages | None:
    """What the rank at `coordinate` sends and receives, or None where the step sends nothing."""
    own = layout.local_shape(shape, coordinate)
    match step:
        case Slice() | Pend():
            return None
        case AllReduce():
            return Messages((own,), (own,), None, None)
        case AllGather(axis, dim):
            peers = layout.mesh.peers([axis], coordinate)
            return Messages((own,), tuple(layout.local_shape(shape, peer) for peer in peers), None, dim)
        case ReduceScatter(axis, _, dim):
            there = after(step, layout)
            peers = layout.mesh.peers([axis], coordinate)
            send = tuple(there.local_shape(shape, peer) for peer in peers)
            return Messages(send, (there.local_shape(shape, coordinate),), dim, None)
        case AllToAll(axis, src, dst):
            peers = layout.mesh.peers([axis], coordinate)
            here = coordinate[layout.mesh.axis(axis)]
            send = tuple(_block(own, dst, len(peers), i) for i in range(len(peers)))
            recv = tuple(_block(layout.local_shape(shape, peer), dst, len(peers), here) for peer in peers)
            return Messages(send, recv, dst, src)
        case _:
            assert_never(step)


def received(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> int:
    """The elements that the rank at `coordinate` receives from its peers, by ring or pairwise algorithms.

    An all_reduce counts as a reduce_scatter and an all_gather of flat chunks: 2 (n-1)/n of the tensor.
    """
    moved = messages(step, layout, shape, coordinate)
    if moved is None:
        return 0
    mesh = layout.mesh
    indices = [mesh.axis(name) for name in axes_of(step)]
    n, here = 1, 0
    for i in indices:
        n, here = n * mesh.shape[i], here * mesh.shape[i] + coordinate[i]
    if isinstance(step, AllReduce):
        size = prod(moved.recv[0])
        kept = len(chunk(size, n, here))
        return (n - 1) * kept + size - kept
    if isinstance(step, ReduceScatter):
        return (n - 1) * prod(moved.recv[0])
    return sum(map(prod, moved.recv)) - prod(moved.recv[here])


def steps_from(layout: Layout, dims: Sequence[int], pending: dict[int, ReduceOp]) -> list[Step]:
    """The steps that lead on from `layout`, sharding only `dims` and pending only the axes and ops of `pending`."""
    names = layout.mesh.names
    found: list[Step] = []
    for i, placement in enumerate(layout.placements):
        axis = names[i]
        match placement:
            case Shard(dim):
                if layout.axes_of(dim)[-1] == i:
                    found.append(AllGather(axis, dim))
                    found += [AllToAll(axis, dim, other) for other in dims if other != dim]
            case Partial(op):
                found += [ReduceScatter(axis, op, dim) for dim in dims]
            case Replicate():
                found += [Slice(axis, dim) for dim in dims]
                if i in pending:
                    found.append(Pend(axis, pending[i]))
            case _:
                assert_never(placement)
    return found + _all_reduces(layout)


def _all_reduces(layout: Layout) -> list[Step]:
    by_op: dict[ReduceOp, list[str]] = {}
    for i, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            by_op.setdefault(placement.reduce_op, []).append(layout.mesh.names[i])
    return [
        AllReduce(tuple(name for bit, name in enumerate(names) if subset >> bit & 1), op)
        for op, names in by_op.items()
        for subset in range(1, 1 << len(names))
    ]


def _block(local: Shape, dim: int, n: int, i: int) -> Shape:
    return (*local[:dim], len(chunk(local[dim], n, i)), *local[dim + 1 :])
