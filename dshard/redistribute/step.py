"""The steps of a redistribution as values: each runs along one mesh axis, or along several at once.

The group of a step along several axes is that of one mesh in which they are folded into one axis, the first of them
major. So a dim that several axes shard is gathered, or scattered, by one collective: the ranks of the group are in the
order of its chunks, of which the nested ones may differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import TypeAlias

from typing_extensions import assert_never

from dshard.layout import Layout, Region, Shape, overlap
from dshard.mesh import Coordinate
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard, chunk


@dataclass(frozen=True, slots=True)
class AllGather:
    """Shard(dim) -> Replicate on all `axes`, the last that shard `dim`: each rank receives the chunks of its peers."""

    axes: tuple[str, ...]
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Partial(op) -> Shard(dim) on all `axes`, from major to minor: each rank keeps one chunk of the reduction."""

    axes: tuple[str, ...]
    op: ReduceOp
    dim: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Partial(op) -> Replicate on all `axes` at once: each rank keeps the whole reduction."""

    axes: tuple[str, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Shard(src) -> Shard(dst) on all `axes`, the last that shard either dim: each rank gives each peer a block."""

    axes: tuple[str, ...]
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Replicate -> Shard on all `axes` at once: each rank keeps its chunk of `dst`; nothing is sent."""

    axes: tuple[str, ...]
    dst: Layout


@dataclass(frozen=True, slots=True)
class MakePartial:
    """Replicate -> Partial(op) on all `axes`: each rank keeps a term of its local tensor; nothing is sent."""

    axes: tuple[str, ...]
    op: ReduceOp


@dataclass(frozen=True, slots=True)
class Exchange:
    """Any layout -> `dst`, partial axes unchanged: each rank receives only the elements that it lacks.

    An all_to_all along `axes`, of the intersections of held and needed regions. Of several peers that hold the same,
    the receiver takes the one at its own index on the axes that replicate it.
    """

    axes: tuple[str, ...]
    dst: Layout


@dataclass(frozen=True, slots=True)
class ReduceExchange:
    """Partial(op) on all `axes` -> `dst`, whose shards lie within those before: reduced directly into place.

    A reduce_scatter along `axes` whose pieces are the peers' parts of `dst`: several axes at once, slices included.
    """

    axes: tuple[str, ...]
    op: ReduceOp
    dst: Layout


Step: TypeAlias = AllGather | ReduceScatter | AllReduce | AllToAll | Slice | MakePartial | Exchange | ReduceExchange


@dataclass(frozen=True, slots=True)
class Messages:
    """The regions that one rank sends to and receives from each peer of a step's group.

    `send` are regions of its local tensor before the step, one for each peer, or one for all. `recv` are regions of its
    local tensor after the step, one from each peer, or a single one, reduced, from all. Where blocks are exchanged they
    are `each` for a peer, one after the other.
    """

    send: tuple[Region, ...]
    recv: tuple[Region, ...]
    each: int = 1

    def sizes(self, regions: tuple[Region, ...]) -> tuple[int, ...]:
        """The elements of each message of these regions."""
        sizes = tuple(map(numel, regions))
        return tuple([sum(sizes[i : i + self.each]) for i in range(0, len(sizes), self.each)])


_COLLECTIVES: dict[type[Step], str] = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllReduce: "all_reduce",
    AllToAll: "all_to_all",
    Slice: "slice",
    MakePartial: "make_partial",
    Exchange: "exchange",
    ReduceExchange: "reduce_exchange",
}


def describe(step: Step, layout: Layout) -> tuple[str, str, str]:
    """A step from `layout` in words: the collective, the mesh axes, and how the placement on them changes."""
    there = after(step, layout)
    if isinstance(step, Exchange | ReduceExchange) or len(step.axes) > 1:
        change = f"[{layout}] -> [{there}]"
    else:
        axis = layout.mesh.axis(step.axes[0])
        change = f"{layout.placements[axis]} -> {there.placements[axis]}"
    return _COLLECTIVES[type(step)], ",".join(step.axes), change


def after(step: Step, layout: Layout) -> Layout:
    """The layout that `step` leads to."""
    placement: Placement
    match step:
        case AllGather() | AllReduce():
            placement = Replicate()
        case ReduceScatter(_, _, dim) | AllToAll(_, _, dim):
            placement = Shard(dim)
        case MakePartial(_, op):
            placement = Partial(op)
        case Slice(_, dst) | Exchange(_, dst) | ReduceExchange(_, _, dst):
            return dst
        case _:
            assert_never(step)
    for axis in step.axes:
        layout = layout.replace(layout.mesh.axis(axis), placement)
    return layout


def messages(step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> Messages | None:
    """The regions that the rank at `coordinate` sends and receives; None if the step sends nothing."""
    local = _full_region(layout.local_shape(shape, coordinate))
    if isinstance(step, Slice | MakePartial):
        return None
    if isinstance(step, AllReduce):
        return Messages((local,), (local,))
    there = after(step, layout)
    peers = layout.mesh.peers(step.axes, coordinate)
    match step:
        case AllGather(_, dim):
            sizes = [layout.local_shape(shape, peer)[dim] for peer in peers]
            return Messages((local,), _pieces(there.local_shape(shape, coordinate), dim, sizes))
        case ReduceScatter(_, _, dim):
            sizes = [there.local_shape(shape, peer)[dim] for peer in peers]
            return Messages(_pieces(_sizes(local), dim, sizes), (_full_region(there.local_shape(shape, coordinate)),))
        case AllToAll(_, src, dst):
            give = [there.local_shape(shape, peer)[dst] for peer in peers]
            take = [layout.local_shape(shape, peer)[src] for peer in peers]
            return Messages(_pieces(_sizes(local), dst, give), _pieces(there.local_shape(shape, coordinate), src, take))
        case Exchange():
            sent = [_pairs(layout, there, shape, coordinate, peer, 0) for peer in peers]
            received = [_pairs(layout, there, shape, peer, coordinate, 1) for peer in peers]
            return Messages(tuple(chain(*sent)), tuple(chain(*received)), len(sent[0]))
        case ReduceExchange():
            held = layout.region(shape, coordinate)
            send = tuple(inside(there.region(shape, peer), held) for peer in peers)
            return Messages(send, (_full_region(there.local_shape(shape, coordinate)),))
        case _:
            assert_never(step)


def sizes_received(
    step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate, moved: Messages | None = None
) -> list[int]:
    """The elements of each message that the rank at `coordinate` receives from its peers, some of them empty.

    By ring or pairwise algorithms: an all_reduce is a reduce_scatter and an all_gather of flat chunks. `moved` are the
    regions of the step, if at hand, or of a panel of it.
    """
    moved = messages(step, layout, shape, coordinate) if moved is None else moved
    if moved is None:
        return []
    sizes, ranks = list(moved.sizes(moved.recv)), layout.mesh.group(step.axes, coordinate)
    if isinstance(step, ReduceScatter | ReduceExchange):
        return (len(ranks) - 1) * sizes
    if isinstance(step, AllReduce):
        return all_reduce_sizes(sizes[0], ranks, layout.mesh.rank(coordinate))
    here = ranks.index(layout.mesh.rank(coordinate))
    return [*sizes[:here], *sizes[here + 1 :]]


def all_reduce_sizes(size: int, ranks: Sequence[int], rank: int) -> list[int]:
    """The elements of each message that a rank of a group receives in an all_reduce of `size` elements.

    A reduce_scatter and an all_gather of flat chunks, which a process group deals out to its sorted ranks.

    >>> all_reduce_sizes(10, (0, 1, 2), 0)
    [4, 4, 4, 2]
    """
    n, here = len(ranks), sorted(ranks).index(rank)
    sizes = [len(chunk(size, n, i)) for i in range(n)]
    return [*(n - 1) * [sizes[here]], *sizes[:here], *sizes[here + 1 :]]


def numel(region: Region) -> int:
    """The number of elements of a region."""
    return prod(map(len, region))


def _full_region(shape: Shape) -> Region:
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


def _pairs(
    layout: Layout, there: Layout, shape: Sequence[int], source: Coordinate, target: Coordinate, side: int
) -> list[Region]:
    """What `source` sends `target` in an exchange: regions of the local tensor of `source`, or on side 1 of `target`.

    There is a region for each pair of regions that they hold, before and after; all are empty if another replica serves
    this pair of ranks.
    """
    replicas = (i for i, placement in enumerate(layout.placements) if isinstance(placement, Replicate))
    serves = all(source[i] == target[i] for i in replicas)
    held, needed = layout.regions(shape, source), there.regions(shape, target)
    outer, within = (
        (held, layout.local_regions(shape, source)) if side == 0 else (needed, there.local_regions(shape, target))
    )
    regions: list[Region] = []
    for i, j in product(range(len(held)), range(len(needed))):
        both, at = overlap(held[i], needed[j]) if serves else None, (i, j)[side]
        regions.append((range(0),) * len(shape) if both is None else _moved(inside(both, outer[at]), within[at]))
    return regions


def _moved(region: Region, origin: Region) -> Region:
    """`region`, counted from where `origin` is counted from."""
    return tuple([range(a.start + b.start, a.stop + b.start) for a, b in zip(region, origin, strict=True)])


def inside(region: Sequence[range], outer: Region) -> Region:
    """`region`, counted from the origin of `outer`."""
    return tuple(range(a.start - b.start, a.stop - b.start) if a else a for a, b in zip(region, outer, strict=True))
