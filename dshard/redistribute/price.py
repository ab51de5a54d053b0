"""Seconds of a step: its collective, the bytes that it sends, and its local copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.cost import collective_seconds, copy_seconds
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.redistribute.layout_state import (
    Load,
    all_gather_load,
    all_reduce_load,
    all_to_all_load,
    exchange_load,
    reduce_exchange_load,
    reduce_scatter_load,
    slice_load,
    state_of,
)
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
    sizes_received,
)
from dshard.topology import Collective, Topology

RUNS: dict[type[Step], Collective | None] = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    ReduceExchange: "reduce_scatter",
    AllToAll: "all_to_all",
    Exchange: "exchange",
    AllReduce: "all_reduce",
    Slice: None,
    MakePartial: None,
}
"""The collective that a step runs."""


@cached("plan spaces", 16384)
def load_of(step: Step, layout: Layout, shape: Shape) -> Load:
    """The load of `step` from `layout`, in closed form, for a tensor of global `shape`.

    The received elements are the maximum along the axes of a step, over ranks with index 0 on all other axes; for an
    exchange, the maximum over the corners of the mesh.
    """
    if isinstance(step, Exchange) and (layout.blocks or step.dst.blocks):
        return _block_exchange_load(step, layout, shape)
    here, axes = state_of(layout, shape), [layout.mesh.axis(axis) for axis in step.axes]
    n = prod([layout.mesh.shape[axis] for axis in axes])
    match step:
        case AllGather(_, dim):
            return all_gather_load(here, dim, len(axes))
        case ReduceScatter(_, _, dim):
            return reduce_scatter_load(here, dim, n)
        case AllReduce():
            return all_reduce_load(here, n)
        case AllToAll(_, src, dim):
            return all_to_all_load(here, src, dim, len(axes))
        case MakePartial():
            return slice_load(here, n)
        case Slice(_, dst):
            return slice_load(state_of(dst, shape), n)
        case Exchange(_, dst):
            return exchange_load(here, state_of(dst, shape), axes)
        case ReduceExchange(_, _, dst):
            return reduce_exchange_load(state_of(dst, shape), n)
        case _:
            assert_never(step)


def _block_exchange_load(step: Exchange, layout: Layout, shape: Shape) -> Load:
    """The load of an exchange of blocks, counted on each rank of the first group."""
    first = (0,) * layout.mesh.ndim
    received = [sizes_received(step, layout, shape, at) for at in layout.mesh.peers(step.axes, first)]
    totals, messages = list(map(sum, received)), max(sum(map(bool, sizes)) for sizes in received)
    average = -(-sum(totals) // len(totals))
    return Load(max(totals), 2 * step.dst.local_numel(shape), messages, average)


def step_seconds(step: Step, layout: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> float:
    """Seconds of `step` from `layout` for its busiest rank: latency, bytes over the link, and local copies."""
    return load_seconds(type(step), load_of(step, layout, tuple(shape)), itemsize, layout.mesh, step.axes, topology)


def load_seconds(
    kind: type[Step], load: Load, itemsize: int, mesh: Mesh, axes: tuple[str, ...], topology: Topology
) -> float:
    """Seconds of a step of this kind along mesh axes: its collective, if it runs one, and its copies in memory.

    Measurements under gloo are of ranks that share the cores and links of their hosts, all of them busy: if an exchange
    leaves some idle, the others get their share.
    """
    seconds, collective = copy_seconds(load.copied * itemsize, topology), RUNS[kind]
    if collective is None:
        return seconds
    received, along = load.received, [most for most, _ in load.along] if load.along else []
    if load.average is not None and topology.backend == "gloo" and topology.link(mesh, axes, collective).measured:
        received, along = load.average, [average for _, average in load.along]
    return seconds + collective_seconds(
        collective,
        received * itemsize,
        mesh,
        axes,
        topology,
        peers=load.messages if kind is Exchange else None,
        along=[count * itemsize for count in along] if along else (),
        even=load.even,
    )
