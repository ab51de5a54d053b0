"""Seconds of a step: which collective it is, how many bytes it moves, what it copies on the way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from typing_extensions import assert_never

from dshard.cost import collective_seconds, copy_seconds
from dshard.layout import Layout
from dshard.mesh import Coordinate
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
    after,
    axes_of,
    kept,
    numel,
)
from dshard.topology import Topology


def step_seconds(step: Step, layout: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> float:
    """Seconds of `step` from `layout` for its busiest rank: latency, bytes over the link, and local copies."""
    copies = copy_seconds(copied(step, layout, shape) * itemsize, topology)
    mesh, axes = layout.mesh, axes_of(step)
    nbytes = busiest(step, layout, shape) * itemsize
    match step:
        case Slice() | Pend():
            return copies
        case AllGather():
            return copies + collective_seconds("all_gather", nbytes, mesh, axes, topology)
        case ReduceScatter() | ReduceExchange():
            return copies + collective_seconds("reduce_scatter", nbytes, mesh, axes, topology)
        case AllToAll():
            return copies + collective_seconds("all_to_all", nbytes, mesh, axes, topology)
        case Exchange(_, dst):
            peers = senders(layout, dst, shape)
            return copies + collective_seconds("exchange", nbytes, mesh, axes, topology, peers=peers)
        case AllReduce():
            return copies + collective_seconds("all_reduce", nbytes, mesh, axes, topology)
        case _:
            assert_never(step)


def copied(step: Step, layout: Layout, shape: Sequence[int]) -> int:
    """Elements that the busiest rank copies in its own memory, where pieces are not contiguous."""
    own = layout.local_numel(shape)
    n = group_size(step, layout)
    match step:
        case AllReduce():
            return 0
        case Slice():
            return own // n
        case Pend():
            return own
        case AllGather(_, dim):
            return 0 if dim == 0 else own * n
        case ReduceScatter(_, _, dim):
            return 0 if dim == 0 else own
        case ReduceExchange(_, _, dst):
            return n * dst.local_numel(shape)
        case AllToAll(_, src, dst):
            return own * ((src != 0) + (dst != 0))
        case Exchange(_, dst):
            return 2 * dst.local_numel(shape)
        case _:
            assert_never(step)


def busiest(step: Step, layout: Layout, shape: Sequence[int]) -> int:
    """The most elements that a rank receives, as `received` counts them, in closed form.

    This is the most along the axis of a step, of the ranks that come first on all other axes; for an exchange, the most
    at some corner of the mesh.
    """
    n = group_size(step, layout)
    match step:
        case Slice() | Pend():
            return 0
        case AllReduce():
            size = layout.local_numel(shape)
            return size + (n - 2) * len(chunk(size, n, 0)) if n > 1 else 0
        case ReduceScatter() | ReduceExchange():
            return (n - 1) * after(step, layout).local_numel(shape)
        case AllGather() | AllToAll():
            there = after(step, layout)
            return max(_missing(layout, there, shape, at) for at in _ends(step, layout, shape))
        case Exchange(_, dst):
            corners = product(*({0, size // 2, size - 1} for size in layout.mesh.shape))
            return max(_missing(layout, dst, shape, corner) for corner in corners)
        case _:
            assert_never(step)


def _ends(step: AllGather | AllToAll, layout: Layout, shape: Sequence[int]) -> list[Coordinate]:
    """Where on its axis a step brings most: to the last rank, which held least, of those that need a whole chunk.

    The next after these needs part of a chunk, and may have held nothing.
    """
    axis, first = layout.mesh.axis(step.axis), (0,) * layout.mesh.ndim
    n = layout.mesh.shape[axis]
    places = {n - 1}
    if isinstance(step, AllToAll):
        whole = len(layout.dim_range(step.dst, shape[step.dst], first))
        chunks = whole // -(-whole // n) if whole else 1
        places = {chunks - 1, min(chunks, n - 1)}
    return [(*first[:axis], i, *first[axis + 1 :]) for i in places]


def group_size(step: Step, layout: Layout) -> int:
    """How many ranks take part in a step together."""
    mesh = layout.mesh
    return prod(mesh.shape[mesh.axis(axis)] for axis in axes_of(step))


def senders(src: Layout, dst: Layout, shape: Sequence[int]) -> int:
    """From how many ranks, at most, a rank receives in an exchange: the chunks that its part can meet."""
    origin = (0,) * src.mesh.ndim
    held, needed = src.local_shape(shape, origin), dst.local_shape(shape, origin)
    return prod(_met(size, max(have, 1), max(want, 1)) for size, have, want in zip(shape, held, needed, strict=True))


def _missing(src: Layout, dst: Layout, shape: Sequence[int], at: Coordinate) -> int:
    """The elements that the rank at `at` needs under `dst` and does not hold under `src`."""
    return numel(dst.region(shape, at)) - kept(src, dst, shape, at)


def _met(size: int, have: int, want: int) -> int:
    """How many chunks of `have` elements a chunk of `want` can meet: one more than fit, unless their ends coincide."""
    aligned = want % have == 0 or have % want == 0
    return min(-(-size // have), -(-want // have) + (not aligned))
