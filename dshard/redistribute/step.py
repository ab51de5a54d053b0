"""The steps of a redistribution as values: most change the placement on one mesh axis, `Exchange` changes any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from typing_extensions import assert_never

from dshard.layout import Layout, Region, Shape
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
    """Replicate -> Shard on all `axes` at once: each rank keeps its chunk of `dst`; nothing is sent."""

    axes: tuple[str, ...]
    dst: Layout


@dataclass(frozen=True, slots=True)
class Pend:
    """Replicate -> Partial(op): each rank keeps a term of what it holds; nothing is sent."""

    axis: str
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class Exchange:
    """Any layout -> `dst`, partial axes unchanged: each rank receives just what it needs and does not hold.

    An all_to_all along `axes`, of the intersections of what peers hold with what each needs. Where several peers hold
    the same, the receiver takes it from the one at its own index on the axes that replicate it.
    """

    axes: tuple[str, ...]
    dst: Layout


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Partial(op) on all `axes` -> `dst`, nested in what each rank holds: reduced straight into place.

    A reduce_scatter along `axes` whose pieces are the peers' parts of `dst`: several axes at once, slices included.
    """

    axes: tuple[str, ...]
    op: ReduceOp
    dst: Layout


Step: TypeAlias = AllGather | ReduceScatter | AllReduce | AllToAll | Slice | Pend | Exchange | ReduceExchange


@dataclass(frozen=True, slots=True)
class Messages:
    """The regions that one rank sends to and receives from each peer of a step's group.

    `send` are regions of its local tensor before the step, one for each peer, or one for all. `recv` are regions of its
    local tensor after the step, one from each peer, or a single one, reduced, from all.
    """

    send: tuple[Region, ...]
    recv: tuple[Region, ...]


def axes_of(step: Step) -> tuple[str, ...]:
    """The names of the mesh axes along which a step's groups lie."""
    return step.axes if isinstance(step, AllReduce | Slice | Exchange | ReduceExchange) else (step.axis,)


_COLLECTIVES: dict[type[Step], str] = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllReduce: "all_reduce",
    AllToAll: "all_to_all",
    Slice: "slice",
    Pend: "pend",
    Exchange: "exchange",
    ReduceExchange: "reduce_exchange",
}


def describe(step: Step, layout: Layout) -> tuple[str, str, str]:
    """A step from `layout` in words: the collective, the mesh axes, and how the placement on them changes."""
    there = after(step, layout)
    if isinstance(step, Exchange | ReduceExchange) or len(axes_of(step)) > 1:
        change = f"[{layout}] -> [{there}]"
    else:
        axis = layout.mesh.axis(axes_of(step)[0])
        change = f"{layout.placements[axis]} -> {there.placements[axis]}"
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
        case ReduceScatter(axis, _, dim) | AllToAll(axis, _, dim):
            return layout.replace(layout.mesh.axis(axis), Shard(dim))
        case Pend(axis, op):
            return layout.replace(layout.mesh.axis(axis), Partial(op))
        case Slice(_, dst) | Exchange(_, dst) | ReduceExchange(_, _, dst):
            return dst
        case _:
            assert_never(step)


def messages(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> Messages | None:
    """The regions that the rank at `coordinate` sends and receives; None where the step sends nothing."""
    whole = _whole(layout.local_shape(shape, coordinate))
    if isinstance(step, Slice | Pend):
        return None
    if isinstance(step, AllReduce):
        return Messages((whole,), (whole,))
    there = after(step, layout)
    peers = layout.mesh.peers(axes_of(step), coordinate)
    match step:
        case AllGather(_, dim):
            sizes = [layout.local_shape(shape, peer)[dim] for peer in peers]
            return Messages((whole,), _pieces(there.local_shape(shape, coordinate), dim, sizes))
        case ReduceScatter(_, _, dim):
            sizes = [there.local_shape(shape, peer)[dim] for peer in peers]
            return Messages(_pieces(_sizes(whole), dim, sizes), (_whole(there.local_shape(shape, coordinate)),))
        case AllToAll(_, src, dst):
            give = [there.local_shape(shape, peer)[dst] for peer in peers]
            take = [layout.local_shape(shape, peer)[src] for peer in peers]
            return Messages(_pieces(_sizes(whole), dst, give), _pieces(there.local_shape(shape, coordinate), src, take))
        case Exchange():
            held, needed = layout.region(shape, coordinate), there.region(shape, coordinate)
            send = tuple(_part(layout, held, coordinate, peer, there.region(shape, peer), held) for peer in peers)
            recv = tuple(_part(layout, layout.region(shape, peer), coordinate, peer, needed, needed) for peer in peers)
            return Messages(send, recv)
        case ReduceExchange():
            held = layout.region(shape, coordinate)
            send = tuple(inside(there.region(shape, peer), held) for peer in peers)
            return Messages(send, (_whole(there.local_shape(shape, coordinate)),))
        case _:
            assert_never(step)


def received(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> int:
    """The elements that the rank at `coordinate` receives from its peers, by ring or pairwise algorithms.

    An all_reduce counts as a reduce_scatter and an all_gather of flat chunks: 2 (n-1)/n of the tensor.
    """
    if isinstance(step, Exchange):
        return numel(step.dst.region(shape, coordinate)) - kept(layout, step.dst, shape, coordinate)
    moved = messages(step, layout, shape, coordinate)
    if moved is None:
        return 0
    return received_of(step, moved, layout, coordinate)


def received_of(step: Step, moved: Messages, layout: Layout, coordinate: Coordinate) -> int:
    """The elements that the rank at `coordinate` receives from its peers with these messages."""
    n, here = _place(step, layout, coordinate)
    if isinstance(step, AllReduce):
        size = numel(moved.recv[0])
        own = len(chunk(size, n, here))
        return (n - 1) * own + size - own
    if isinstance(step, ReduceScatter | ReduceExchange):
        return (n - 1) * numel(moved.recv[0])
    return sum(map(numel, moved.recv)) - numel(moved.recv[here])


def messages_received(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> int:
    """The non-empty messages that the rank at `coordinate` receives from its peers, by ring or pairwise algorithms."""
    moved = messages(step, layout, shape, coordinate)
    if moved is None:
        return 0
    n, here = _place(step, layout, coordinate)
    if isinstance(step, AllReduce):
        chunks = [len(chunk(numel(moved.recv[0]), n, i)) for i in range(n)]
        return (n - 1) * bool(chunks[here]) + sum(map(bool, chunks)) - bool(chunks[here])
    if isinstance(step, ReduceScatter | ReduceExchange):
        return (n - 1) * bool(numel(moved.recv[0]))
    return sum(bool(numel(piece)) for i, piece in enumerate(moved.recv) if i != here)


def _place(step: Step, layout: Layout, coordinate: Coordinate) -> tuple[int, int]:
    """The size of the group of the rank at `coordinate`, and its index in the group."""
    mesh = layout.mesh
    if isinstance(step, AllReduce):  # a process group deals out the chunks, and sorts its ranks
        ranks = sorted(mesh.group(step.axes, coordinate))
        return len(ranks), ranks.index(mesh.rank(coordinate))
    n, here = 1, 0
    for name in axes_of(step):
        i = mesh.axis(name)
        n, here = n * mesh.shape[i], here * mesh.shape[i] + coordinate[i]
    return n, here


def kept(src: Layout, dst: Layout, shape: Sequence[int], coordinate: Coordinate) -> int:
    """The elements that the rank at `coordinate` holds under both layouts."""
    pairs = zip(src.region(shape, coordinate), dst.region(shape, coordinate), strict=True)
    return prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in pairs)


def numel(region: Region) -> int:
    """The number of elements of a region."""
    return prod(map(len, region))


def exchange_to(layout: Layout, dst: Layout) -> Exchange | Slice | None:
    """The exchange from `layout` to `dst` if both are partial on the same axes, else None.

    Its axes are those whose chunks change. Where each rank's chunk lies in what it holds, the step is a slice.
    """
    pending = {(i, p) for i, p in enumerate(layout.placements) if isinstance(p, Partial)}
    if pending != {(i, p) for i, p in enumerate(dst.placements) if isinstance(p, Partial)} or layout == dst:
        return None
    dims = {*layout.sharded_dims(), *dst.sharded_dims()}
    moved = reordered((layout.axes_of(dim), dst.axes_of(dim)) for dim in dims)
    names = layout.mesh.names
    if nested(layout, dst):
        return Slice(tuple(names[i] for i in moved if layout.placements[i] != dst.placements[i]), dst)
    return Exchange(tuple(names[i] for i in moved), dst)


def reduce_exchange_to(layout: Layout, dst: Layout) -> ReduceExchange | None:
    """The reduction of all partial axes straight to `dst`, if that shards them within what each rank holds."""
    names = layout.mesh.names
    pairs = list(zip(names, layout.placements, dst.placements, strict=True))
    ends = [(name, a.reduce_op, b) for name, a, b in pairs if isinstance(a, Partial) and a != b]
    ops = {op for _, op, _ in ends}
    begins = any(isinstance(b, Partial) and a != b for _, a, b in pairs)
    if len(ops) != 1 or begins or not all(isinstance(b, Shard) for _, _, b in ends):
        return None
    return ReduceExchange(tuple(name for name, _, _ in ends), ops.pop(), dst) if nested(layout, dst) else None


def nested(layout: Layout, dst: Layout) -> bool:
    """Whether each rank's chunk of `dst` lies in what it holds of `layout`, whatever the sizes."""
    return nests((layout.axes_of(dim), dst.axes_of(dim)) for dim in layout.sharded_dims())


def nests(axes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether chunks after a step lie in those before it, by the mesh axes that shard each dim (before, after)."""
    return all(want[: len(have)] == have for have, want in axes)


def reordered(axes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...]:
    """The mesh axes of the dims that are sharded by different mesh axes, or in another order, before and after."""
    return tuple(sorted({axis for have, want in axes if have != want for axis in (*have, *want)}))


def steps_from(layout: Layout, dims: Sequence[int], pending: dict[int, ReduceOp]) -> list[Step]:
    """The steps from `layout` that shard only `dims` and make partial only the axes, with the ops, of `pending`."""
    names = layout.mesh.names
    ops = {placement.reduce_op for placement in layout.placements if isinstance(placement, Partial)}
    steps: list[Step] = []
    for i, placement in enumerate(layout.placements):
        axis = names[i]
        match placement:
            case Shard(dim):
                if layout.axes_of(dim)[-1] == i:
                    steps.append(AllGather(axis, dim))
                    steps += [AllToAll(axis, dim, other) for other in dims if other != dim]
            case Partial(op):
                steps += [ReduceScatter(axis, op, dim) for dim in dims]
            case Replicate():
                steps += [Slice((axis,), layout.replace(i, Shard(dim))) for dim in dims]
                if i in pending and all(commute(op, pending[i]) for op in ops):
                    steps.append(Pend(axis, pending[i]))
            case _:
                assert_never(placement)
    return steps + _all_reduces(layout)


def commute(a: ReduceOp, b: ReduceOp) -> bool:
    """Whether partial reductions of these two kinds may be completed in either order."""
    return a == b or {a, b} == {"sum", "avg"}


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


def _whole(shape: Shape) -> Region:
    return tuple(map(range, shape))


def _sizes(region: Region) -> Shape:
    return tuple(map(len, region))


def _pieces(shape: Shape, dim: int, sizes: Sequence[int]) -> tuple[Region, ...]:
    """Consecutive regions of these sizes along `dim` of a tensor of `shape`."""
    regions, start = [], 0
    for size in sizes:
        regions.append((*map(range, shape[:dim]), range(start, start + size), *map(range, shape[dim + 1 :])))
        start += size
    return tuple(regions)


def _part(layout: Layout, held: Region, mine: Coordinate, peer: Coordinate, needed: Region, outer: Region) -> Region:
    """The intersection of `needed` and `held`, counted within `outer`; empty if another replica serves this pair."""
    replicas = (i for i, placement in enumerate(layout.placements) if isinstance(placement, Replicate))
    if any(mine[i] != peer[i] for i in replicas):
        return tuple(range(0) for _ in outer)
    both = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held, needed, strict=True)]
    return inside(both, outer) if all(both) else tuple(range(0) for _ in outer)


def inside(region: Sequence[range], outer: Region) -> Region:
    """`region`, counted from the origin of `outer`."""
    return tuple(range(a.start - b.start, a.stop - b.start) if a else a for a, b in zip(region, outer, strict=True))
