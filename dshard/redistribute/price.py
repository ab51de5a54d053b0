"""Seconds of a step: which collective it is, how many bytes it moves, what it copies on the way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from typing_extensions import assert_never

from dshard.cost import all_gather_seconds, all_reduce_seconds, all_to_all_seconds, reduce_scatter_seconds, work_seconds
from dshard.layout import Layout
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
    received,
)
from dshard.topology import Topology


def step_seconds(step: Step, layout: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> float:
    """Seconds of `step` from `layout` for its busiest rank: latency, bytes over the link, and local copies."""
    axes = axes_of(step)
    n = prod(layout.mesh.shape[layout.mesh.axis(axis)] for axis in axes)
    link = topology.link(axes)
    nbytes = busiest(step, layout, shape) * itemsize
    copies = work_seconds(0, 2 * copied(step, layout, shape) * itemsize, topology)
    match step:
        case Slice() | Pend():
            return copies
        case AllGather():
            return copies + all_gather_seconds(nbytes, n, link)
        case ReduceScatter() | ReduceExchange():
            return copies + reduce_scatter_seconds(nbytes, n, link)
        case AllToAll():
            return copies + all_to_all_seconds(nbytes, n, link)
        case Exchange(_, dst):
            return copies + all_to_all_seconds(nbytes, min(n, 1 + senders(layout, dst, shape)), link)
        case AllReduce():
            return copies + all_reduce_seconds(nbytes, n, link)
        case _:
            assert_never(step)


def copied(step: Step, layout: Layout, shape: Sequence[int]) -> int:
    """Elements that the busiest rank copies in its own memory, where pieces are not contiguous."""
    own = layout.local_numel(shape)
    n = prod(layout.mesh.shape[layout.mesh.axis(axis)] for axis in axes_of(step))
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
    """The most elements that any rank receives: the first rank's, or for an exchange that of some corner."""
    if not isinstance(step, Exchange):
        return received(step, layout, shape, (0,) * layout.mesh.ndim)
    corners = product(*({0, size // 2, size - 1} for size in layout.mesh.shape))
    return max(received(step, layout, shape, corner) for corner in corners)


def senders(src: Layout, dst: Layout, shape: Sequence[int]) -> int:
    """From how many ranks, at most, a rank receives in an exchange: the chunks that its part can meet."""
    origin = (0,) * src.mesh.ndim
    held, needed = src.local_shape(shape, origin), dst.local_shape(shape, origin)
    return prod(_met(size, max(have, 1), max(want, 1)) for size, have, want in zip(shape, held, needed, strict=True))


def _met(size: int, have: int, want: int) -> int:
    """How many chunks of `have` elements a chunk of `want` can meet: one more than fit, unless their ends coincide."""
    aligned = want % have == 0 or have % want == 0
    return min(-(-size // have), -(-want // have) + (not aligned))
