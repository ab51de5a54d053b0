"""Seconds of a step: its collective, the bytes that it sends, and its local copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.cost import collective_seconds, copy_seconds
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import chunk
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Pend,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
    axes_of,
)
from dshard.topology import Collective, Topology


def step_seconds(step: Step, layout: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> float:
    """Seconds of `step` from `layout` for its busiest rank: latency, bytes over the link, and local copies."""
    copies = copied(step, layout, shape) * itemsize
    nbytes = busiest(step, layout, shape) * itemsize
    peers = senders(layout, step.dst, shape) if isinstance(step, Exchange) else None
    return moved_seconds(RUNS[type(step)], nbytes, copies, layout.mesh, axes_of(step), topology, peers)


RUNS: dict[type[Step], Collective | None] = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    ReduceExchange: "reduce_scatter",
    AllToAll: "all_to_all",
    Exchange: "exchange",
    AllReduce: "all_reduce",
    Slice: None,
    Pend: None,
}
"""The collective that a step runs."""


def moved_seconds(
    collective: Collective | None,
    nbytes: float,
    copies: float,
    mesh: Mesh,
    axes: tuple[str, ...],
    topology: Topology,
    peers: int | None = None,
) -> float:
    """Seconds to receive `nbytes` in `collective`, if not None, and to copy `copies` bytes in memory."""
    seconds = copy_seconds(copies, topology)
    if collective is None:
        return seconds
    return seconds + collective_seconds(collective, nbytes, mesh, axes, topology, peers=peers)


def copied(step: Step, layout: Layout, shape: Sequence[int]) -> int:
    """Elements that the busiest rank copies in its own memory because regions are not contiguous."""
    own, new, strided = prod(_first_part(layout, tuple(shape))), 0, 0
    match step:
        case AllGather(_, dim) | ReduceScatter(_, _, dim):
            strided = int(dim != 0)
        case AllToAll(_, src, dim):
            strided = (src != 0) + (dim != 0)
        case Exchange(_, dst) | Slice(_, dst) | ReduceExchange(_, _, dst):
            new = dst.local_numel(shape)
            strided = int(any(layout.axes_of(dim) != dst.axes_of(dim) for dim in range(1, len(shape))))
        case AllReduce() | Pend():
            pass
        case _:
            assert_never(step)
    return copied_of(type(step), group_size(step, layout), own, new, strided)


def copied_of(kind: type[Step], n: int, own: int, new: int, strided: int) -> int:
    """Elements copied by a rank of `n` that holds `own` elements before a step of `kind` and `new` after it.

    `strided` counts the ends of the step, source and destination, that are not contiguous.
    """
    if kind is ReduceExchange:
        return n * new
    if kind is AllReduce or n == 1:
        return 0
    if kind is Slice or kind is Pend:
        return new if kind is Slice else own
    if kind is Exchange:
        return 2 * new * strided
    return own * strided * (n if kind is AllGather else 1)


def busiest(step: Step, layout: Layout, shape: Sequence[int]) -> int:
    """The most elements that one rank receives in `step`, as `received` counts them, in closed form.

    This is the most along the axis of a step, of the ranks that come first on all other axes; for an exchange, the most
    at some corner of the mesh.
    """
    shape, n = tuple(shape), group_size(step, layout)
    match step:
        case Slice() | Pend():
            return 0
        case AllReduce():
            return most_reduced(prod(_first_part(layout, shape)), n)
        case ReduceScatter(_, _, dim):
            size, rest = _sizes(layout, shape, dim)
            return most_scattered(size, rest, n)
        case ReduceExchange(_, _, dst):
            return (n - 1) * prod(_first_part(dst, shape))
        case AllGather(axis, dim):
            size, rest = _sizes(layout, shape, dim, axis)
            return most_gathered(size, rest, n)
        case AllToAll(axis, src, dst):
            size, rest = _sizes(layout, shape, src, axis)
            return most_swapped(size, _first_part(layout, shape)[dst], rest, n)
        case Exchange(axes, dst):
            return _most_of_exchange(layout, shape, axes, dst)
        case _:
            assert_never(step)


def most_gathered(size: int, rest: int, n: int) -> int:
    """Elements that the busiest of `n` ranks receives in an all_gather of a dim; `rest` is the size of all others."""
    return (size - len(chunk(size, n, n - 1))) * rest


def most_scattered(size: int, rest: int, n: int) -> int:
    """Elements that the busiest of `n` ranks receives in a reduce_scatter of a dim; `rest` is the size of others."""
    return (n - 1) * len(chunk(size, n, 0)) * rest


def most_reduced(size: int, n: int) -> int:
    """Elements that the busiest of `n` ranks receives in an all_reduce of `size` elements."""
    return size + (n - 2) * len(chunk(size, n, 0)) if n > 1 else 0


def most_swapped(size: int, needed: int, rest: int, n: int) -> int:
    """Elements that the busiest of `n` ranks receives in an all_to_all from one dim to another, of size `needed`.

    `rest` includes the latter. The last rank that needs a whole chunk held least of those; the next needs part of one,
    and may hold nothing.
    """
    if not needed:
        return 0
    chunks = needed // len(chunk(needed, n, 0))
    return max(
        (size - len(chunk(size, n, i))) * len(chunk(needed, n, i)) * (rest // needed)
        for i in (chunks - 1, min(chunks, n - 1))
    )


@cached("exchange sizes", 16384)
def _most_of_exchange(layout: Layout, shape: Shape, axes: tuple[str, ...], dst: Layout) -> int:
    """The most elements that a rank at a corner of the mesh receives in an exchange to `dst`.

    Sizes needed and held of a dim are looked up by the axes that shard it. Of a dim that all ranks shard evenly, in
    nested chunks, each rank needs and holds as much.
    """
    mesh, fixed, fixed_kept = layout.mesh, 1, 1
    places = [{0, n // 2, n - 1} if name in axes else {0} for name, n in zip(mesh.names, mesh.shape, strict=True)]
    tables: list[tuple[tuple[int, ...], dict[Coordinate, tuple[int, int]]]] = []
    for dim, size in enumerate(shape):
        have_axes, want_axes = layout.axes_of(dim), dst.axes_of(dim)
        longer = max(have_axes, want_axes, key=len)
        parts = prod(mesh.shape[i] for i in longer)
        if size % parts == 0 and (longer[: len(have_axes)], longer[: len(want_axes)]) == (have_axes, want_axes):
            fixed *= size // prod(mesh.shape[i] for i in want_axes)
            fixed_kept *= size // parts
            continue
        split = tuple(sorted({*have_axes, *want_axes}))
        table: dict[Coordinate, tuple[int, int]] = {}
        for picked in product(*(places[i] for i in split)):
            at = [0] * mesh.ndim
            for i, place in zip(split, picked, strict=True):
                at[i] = place
            have, want = layout.dim_range(dim, size, tuple(at)), dst.dim_range(dim, size, tuple(at))
            both = min(have.stop, want.stop) - max(have.start, want.start)
            table[picked] = len(want), max(0, both)
        tables.append((split, table))
    if not tables:
        return fixed - fixed_kept
    varying = {i for split, _ in tables for i in split}
    most = 0
    for corner in product(*(places[i] if i in varying else (0,) for i in range(mesh.ndim))):
        needed, kept = fixed, fixed_kept
        for split, table in tables:
            want_size, both = table[tuple([corner[i] for i in split])]
            needed, kept = needed * want_size, kept * both
        most = max(most, needed - kept)
    return most


@cached("local shapes", 16384)
def _first_part(layout: Layout, shape: Shape) -> Shape:
    """The local shape of the first rank, which is the largest."""
    return layout.local_shape(shape, (0,) * layout.mesh.ndim)


def _sizes(layout: Layout, shape: Shape, dim: int, axis: str | None = None) -> tuple[int, int]:
    """The first rank's size of `dim`, before the last axis that shards it if `axis` is given, and of all other dims."""
    own = _first_part(layout, shape)
    size = own[dim]
    if axis is not None:
        size = shape[dim]
        for i in layout.axes_of(dim)[:-1]:
            size = len(chunk(size, layout.mesh.shape[i], 0))
    return size, prod(own[:dim]) * prod(own[dim + 1 :])


def group_size(step: Step, layout: Layout) -> int:
    """The number of ranks in one group of a step."""
    mesh = layout.mesh
    return prod(mesh.shape[mesh.axis(axis)] for axis in axes_of(step))


def senders(src: Layout, dst: Layout, shape: Sequence[int]) -> int:
    """The most ranks that a rank receives from in an exchange: the chunks that its own can meet."""
    return met(shape, _first_part(src, tuple(shape)), _first_part(dst, tuple(shape)))


def met(shape: Sequence[int], held: Sequence[int], needed: Sequence[int]) -> int:
    """The most chunks of shape `held` that one of shape `needed` can meet: one more than fit, unless ends coincide."""
    return prod(_met(size, max(have, 1), max(want, 1)) for size, have, want in zip(shape, held, needed, strict=True))


def _met(size: int, have: int, want: int) -> int:
    aligned = want % have == 0 or have % want == 0
    return min(-(-size // have), -(-want // have) + (not aligned))
