"""Layouts as numbers, and each step from a layout: its load on the busiest rank, and the seconds of that.

The seconds are those of its collective, of the bytes that it sends, and of its local copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from math import lcm, prod
from operator import mul
from typing import NamedTuple, TypeAlias

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.cost import collective_seconds, copy_seconds
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Partial, ReduceOp, Replicate, chunk, chunk_of, chunk_sizes
from dshard.redistribute.blocks import unflattened_shape
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
    after,
)
from dshard.topology import Collective, Topology

Axes: TypeAlias = tuple[tuple[int, ...], ...]
Partials: TypeAlias = tuple[ReduceOp | None, ...]
Begins: TypeAlias = tuple[tuple[int, ReduceOp], ...]
"""The mesh axes on which a reduction may be left partial anew."""


JOINED = 2**24
"""Bytes of a collective by which others are priced that are joined with it: its link is full, and it has begun."""


class State:
    """A layout in numbers: the mesh axes that shard each tensor dim, and the partial reduction on each mesh axis.

    `local` is the first rank's local shape, which begins at the origin and is the largest. `share` is the fraction of
    all elements that a rank holds on average, and that each holds if the layout is `even`. `exact` says for each dim
    whether it has elements and is sharded evenly. `split` is the dim that each mesh axis shards; `wide` are the axes of
    more than one rank that shard each dim. `successors` and `direct` cache steps, `rest` lower bounds. A layout with
    blocks is in `blocked`; its numbers are those of the unflattened tensor.
    """

    __slots__ = (
        "axes",
        "blocked",
        "direct",
        "even",
        "exact",
        "local",
        "numel",
        "partial",
        "rest",
        "shape",
        "share",
        "sizes",
        "split",
        "successors",
        "wide",
    )

    def __init__(
        self, axes: Axes, partial: Partials, shape: Shape, sizes: tuple[int, ...], blocked: Layout | None = None
    ) -> None:
        self.axes, self.partial, self.shape, self.sizes, self.blocked = axes, partial, shape, sizes, blocked
        self.split: dict[int, int] = {}
        local, self.exact, parts = list[int](), list[bool](), 1
        for dim, split in enumerate(axes):
            n = 1
            for axis in split:
                self.split[axis] = dim
                n *= sizes[axis]
            size = shape[dim]
            local.append(-(-size // n))
            self.exact.append(size > 0 == size % n)
            parts *= n
        self.wide = axes if 1 not in sizes else tuple([tuple([a for a in s if sizes[a] > 1]) for s in axes])
        self.local, self.numel, self.share = tuple(local), prod(local), 1 / parts
        self.even = all(self.exact)
        self.successors: dict[tuple[tuple[int, ...], Begins], tuple[LayoutEdge, ...]] = {}
        self.direct: dict[State, LayoutEdge | None] = {}
        self.rest: dict[State, float] = {}

    def others(self, dim: int) -> int:
        """The product of the first rank's sizes of all dims but `dim`."""
        size = self.local[dim]
        return self.numel // size if size else prod((*self.local[:dim], *self.local[dim + 1 :]))

    def gathered(self, dim: int, last: int) -> tuple[int, list[int]]:
        """The first rank's size of `dim` without the `last` mesh axes that shard it, and the sizes of these axes."""
        counts = [self.sizes[axis] for axis in self.axes[dim]]
        return -(-self.shape[dim] // prod(counts[:-last])), counts[-last:]


class LayoutEdge(NamedTuple):
    """A step: its destination state, its kind, and its seconds."""

    there: State
    kind: type[Step]
    seconds: float


class ReachedState(NamedTuple):
    """A state that a search has reached: from which state, after how many seconds, and by which kind of step."""

    before: ReachedState | None
    state: State
    seconds: float
    kind: type[Step] | None

    def path(self) -> list[tuple[State, State, type[Step]]]:
        """The states before and after each step of the path to this state, and its kind."""
        if self.before is None or self.kind is None:
            return []
        return [*self.before.path(), (self.before.state, self.state, self.kind)]


def axes_and_partial(layout: Layout, ndim: int) -> tuple[Axes, Partials]:
    """The mesh axes of each tensor dim and the partial reduction of each mesh axis, for a tensor of `ndim` dims."""
    partial = tuple([p.reduce_op if isinstance(p, Partial) else None for p in layout.placements])
    return tuple(map(layout.axes_of, range(ndim))), partial


@cached("plan spaces", 16384)
def state_of(layout: Layout, shape: Shape) -> State:
    """The state of a layout of a tensor of global `shape`, outside of any search."""
    if layout.blocks:
        return blocked_state(layout, shape)
    return State(*axes_and_partial(layout, len(shape)), shape, layout.mesh.shape)


def blocked_state(layout: Layout, shape: Shape) -> State:
    """The state of a layout with blocks: its numbers are those of the tensor with the blocked dims unflattened."""
    layout.check(shape)
    whole = unflattened_shape(shape, layout.blocks)
    ends = axes_and_partial(layout.unflattened(layout.blocks), len(whole))
    return State(*ends, whole, layout.mesh.shape, layout)


# -- the load of a step


class Load(NamedTuple):
    """The elements that the busiest rank of a step receives, the elements that it copies, and its serial messages.

    Elements are copied if regions are not contiguous in memory. A ring takes n - 1 messages, an all_reduce two rings.
    An exchange may leave ranks idle: `average` is the elements that a rank receives on average, None if not known to be
    less. For an exchange along several axes, `along` has for each axis the elements received from other positions on
    it, the most of a rank and the average; it is empty if they are not counted. The pieces of an all_gather or
    reduce_scatter that is not `even` differ in size.
    """

    received: int
    copied: int
    messages: int
    average: int | None = None
    along: tuple[tuple[int, int], ...] = ()
    even: bool = True


def all_gather_load(here: State, dim: int, last: int = 1) -> Load:
    """The load of an all_gather of `dim` along the `last` mesh axes that shard it."""
    size, counts = here.gathered(dim, last)
    n = prod(counts)
    even = not size % n
    least = size // n if even else min(chunk_sizes((size,), counts))[0]
    return Load((size - least) * here.others(dim), here.numel * n if dim and n > 1 else 0, n - 1, even=even)


def reduce_scatter_load(here: State, dim: int, n: int) -> Load:
    """The load of a reduce_scatter over `n` ranks to chunks of `dim`."""
    size = here.local[dim]
    received = (n - 1) * len(chunk(size, n, 0)) * here.others(dim)
    return Load(received, here.numel if dim and n > 1 else 0, n - 1, even=not size % n)


def all_reduce_load(here: State, n: int) -> Load:
    """The load of an all_reduce over `n` ranks."""
    received = here.numel + (n - 2) * len(chunk(here.numel, n, 0)) if n > 1 else 0
    return Load(received, 0, 2 * (n - 1))


def all_to_all_load(here: State, src: int, dst: int, last: int = 1) -> Load:
    """The load of an all_to_all from dim `src`, along the `last` mesh axes that shard it, to dim `dst`.

    Where chunks are uneven, a rank that needs a full chunk of `dst` may have held less of `src` than others.
    """
    size, counts = here.gathered(src, last)
    n, needed = prod(counts), here.local[dst]
    copied = here.numel * ((src != 0) + (dst != 0)) if n > 1 else 0
    if not needed:
        return Load(0, copied, n - 1)
    even = not size % n and not needed % n
    chunks = [(size // n, needed // n)] if even else chunk_sizes((size, needed), counts)
    received = max([(size - held) * kept for held, kept in chunks])
    return Load(received * (here.others(src) // needed), copied, n - 1)


def slice_load(there: State, n: int) -> Load:
    """The load of a slice, along axes of `n` ranks together: a copy of the chunk that each rank keeps."""
    return Load(0, there.numel if n > 1 else 0, 0)


def exchange_load(here: State, there: State, axes: Sequence[int]) -> Load:
    """The load of an exchange along these mesh axes."""
    n = prod([here.sizes[axis] for axis in axes])
    copied = 2 * there.numel if here.axes[1:] != there.axes[1:] and n > 1 else 0
    received, average, along = _exchange_counts(here, there, tuple(axes))
    return Load(received, copied, min(n - 1, _senders(here, there)), average, along)


def reduce_exchange_load(there: State, n: int) -> Load:
    """The load of a reduce_exchange over `n` ranks: all terms of the chunk that a rank keeps, packed to be sent."""
    return Load((n - 1) * there.numel, n * there.numel, n - 1, even=there.even)


def _senders(here: State, there: State) -> int:
    """The most ranks from which a rank receives in an exchange: one more chunk than fit, unless ends coincide."""
    senders = 1
    for size, held, needed in zip(here.shape, here.local, there.local, strict=True):
        have, want = max(held, 1), max(needed, 1)
        aligned = want % have == 0 or have % want == 0
        senders *= min(-(-size // have), -(-want // have) + (not aligned))
    return senders


COUNTED = 16
"""The most ranks of an exchange that are all counted: among more ranks, few are idle."""


def _exchange_counts(
    here: State, there: State, axes: tuple[int, ...]
) -> tuple[int, int | None, tuple[tuple[int, int], ...]]:
    """The most elements that a rank receives in an exchange, the average of its ranks, and both along each axis.

    Of a dim that is sharded evenly, before and after, all ranks need and hold as many times what they do of the
    smallest such dim: what is counted for that serves tensors of all sizes. Where all dims are, and ranks are many, one
    that holds nothing lacks most, or all lack as much.
    """
    if here.even and there.even and prod([here.sizes[axis] for axis in axes]) > COUNTED:
        apart = any(nested_and_apart_in(here, there, dim)[1] for dim in range(len(here.axes)))
        return there.numel - (0 if apart else prod(map(min, here.local, there.local))), None, ()
    dims, times = list[tuple[int, tuple[int, ...], tuple[int, ...]]](), 1
    for size, have, want in zip(here.shape, here.axes, there.axes, strict=True):
        chunks = lcm(*[prod([here.sizes[axis] for axis in split]) for split in (have, want)]) if have or want else 1
        even = size and size % chunks == 0
        times *= size // chunks if even else 1
        if have or want or not even:
            dims.append((chunks if even else size, have, want))
    ranks, counts_all, totals = _received(tuple(sorted(dims)), here.sizes, axes)
    (most, mean), *along = [(most * times, -(-total * times // ranks)) for most, total in totals]
    return most, mean if counts_all else None, tuple(along)


@cached("plan spaces", 65536)
def _received(
    dims: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...], sizes: tuple[int, ...], axes: tuple[int, ...]
) -> tuple[int, bool, list[tuple[int, int]]]:
    """The ranks that are counted of an exchange, whether these are all, the most elements received, and their sum.

    Of the whole, and of what comes along each axis. `dims` have a size, and the mesh axes that shard them before and
    after. Of more than `COUNTED` ranks only those at corners of the mesh are counted, where the maximum is, and there
    is no average. A rank receives the needed elements that it does not hold; along an axis, those that no rank with its
    own index there holds.
    """
    counts_all = prod([sizes[axis] for axis in axes]) <= COUNTED
    tables = [_table(size, have, want, sizes, axes, counts_all) for size, have, want in dims]
    varying = {axis for strides, _ in tables for axis, stride in enumerate(strides) if stride}
    received: list[list[int]] = []
    for corner in product(*[on if i in varying else (0,) for i, on in enumerate(_places(sizes, axes, counts_all))]):
        counts = [1] * (2 + len(_counted_axes(axes, counts_all)))
        for strides, table in tables:
            counts = list(map(mul, counts, table[sum(map(mul, corner, strides))]))
        received.append(list(map(counts[0].__sub__, counts[1:])))
    return len(received), counts_all, [(max(each), sum(each)) for each in zip(*received, strict=True)]


def _places(sizes: tuple[int, ...], axes: tuple[int, ...], counts_all: bool) -> list[Sequence[int]]:
    """The indices that are counted on each mesh axis."""
    return [
        (range(n) if counts_all else sorted({0, n // 2, n - 1})) if axis in axes else (0,)
        for axis, n in enumerate(sizes)
    ]


def _counted_axes(axes: tuple[int, ...], counts_all: bool) -> tuple[int, ...]:
    """The axes along each of which elements are counted."""
    return axes if counts_all and len(axes) > 1 else ()


Table: TypeAlias = tuple[list[int], dict[int, tuple[int, ...]]]
"""The stride of each mesh axis, 0 for those that do not shard a dim, and by their sum for a rank what it counts."""


@cached("plan spaces", 4096)
def _table(
    size: int,
    have_axes: tuple[int, ...],
    want_axes: tuple[int, ...],
    sizes: tuple[int, ...],
    axes: tuple[int, ...],
    counts_all: bool,
) -> Table:
    """The needed indices of one dim, and how many of them are held, by the rank and by all with its index on an axis.

    The dim is sharded by `have_axes` before an exchange along `axes`, and by `want_axes` afterwards.
    """
    places, crossed = _places(sizes, axes, counts_all), _counted_axes(axes, counts_all)
    have, want = (_chunks(size, order, sizes, places) for order in (have_axes, want_axes))
    held, together = (defaultdict[tuple[object, ...], int](int) for _ in range(2))
    for to, needed in want.items():
        for at, part in have.items():
            if part.start < needed.stop and needed.start < part.stop:
                both = min(needed.stop, part.stop) - max(needed.start, part.start)
                held[to, at] = both
                together[(to,)] += both
                for axis, i in zip(have_axes, at, strict=True):
                    together[to, axis, i] += both
    strides, counts, stride = [0] * len(sizes), dict[int, tuple[int, ...]](), 1
    split = sorted({*have_axes, *want_axes})
    for axis in split:
        strides[axis], stride = stride, stride * sizes[axis]
    for picked in product(*[places[axis] for axis in split]):
        index = dict(zip(split, picked, strict=True))
        at, to = (tuple(map(index.__getitem__, order)) for order in (have_axes, want_axes))
        beside = [together[(to, axis, index[axis]) if axis in have_axes else (to,)] for axis in crossed]
        counts[sum([strides[axis] * i for axis, i in index.items()])] = (len(want[to]), held[to, at], *beside)
    return strides, counts


def _chunks(
    size: int, axes: tuple[int, ...], sizes: tuple[int, ...], places: list[Sequence[int]]
) -> dict[Coordinate, range]:
    """The chunk of a dim of this size, sharded by `axes` from major to minor, at each of the places on these."""
    chunks: dict[Coordinate, range] = {(): range(size)}
    for axis in axes:
        chunks = {(*at, i): chunk_of(held, sizes[axis], i) for at, held in chunks.items() for i in places[axis]}
    return chunks


# -- relations of two states


def nests(before: Axes, after: Axes) -> bool:
    """Whether chunks after a step lie within the chunks before it, by the mesh axes that shard each dim."""
    return [want[: len(have)] for have, want in zip(before, after, strict=True)] == list(before)


def reordered_axes(here: State, there: State) -> tuple[int, ...]:
    """The mesh axes of the dims that are sharded by different mesh axes, or in another order, before and after."""
    pairs = zip(here.axes, there.axes, strict=True)
    return tuple(sorted({axis for have, want in pairs if have != want for axis in (*have, *want)}))


def changed_axes(here: State, there: State) -> tuple[int, ...]:
    """The mesh axes on which the placements differ."""
    return tuple(
        [
            axis
            for axis, partial in enumerate(here.partial)
            if partial != there.partial[axis] or here.split.get(axis) != there.split.get(axis)
        ]
    )


def nested_and_apart_in(here: State, there: State, dim: int) -> tuple[bool, bool]:
    """Whether chunks of one dim lie within those before, and whether it has different leading mesh axes, evenly."""
    have, want = here.wide[dim], there.wide[dim]
    if have == want or want[: len(have)] == have:
        return True, False
    return False, here.exact[dim] and there.exact[dim] and have[: len(want)] != want


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
    peers = layout.mesh.peers(step.axes, (0,) * layout.mesh.ndim)
    common = [_common_indices(layout, step.dst, dim, size, peers) for dim, size in enumerate(shape)]
    replicas = [i for i, placement in enumerate(layout.placements) if isinstance(placement, Replicate)]
    served = [[at[i] for i in replicas] for at in peers]
    sent: list[list[int]] = []
    for i, of_dims in enumerate(zip(*common, strict=True)):
        sizes = list(map(prod, zip(*of_dims, strict=True)))
        sent.append([n if served[i] == served[j] and i != j else 0 for j, n in enumerate(sizes)])
    received = [*zip(*sent, strict=True)]
    totals, messages = [*map(sum, received)], max([sum(map(bool, sizes)) for sizes in received])
    average = -(-sum(totals) // len(totals))
    return Load(max(totals), 2 * step.dst.local_numel(shape), messages, average)


def _common_indices(src: Layout, dst: Layout, dim: int, size: int, peers: Sequence[Coordinate]) -> list[list[int]]:
    """How many indices of a dim each of these ranks holds before that each of them holds afterwards."""
    wanted = [tuple(dst.ranges(dim, size, at)) for at in peers]
    known: dict[tuple[range, ...], list[int]] = {}
    rows: list[list[int]] = []
    for at in peers:
        held = tuple(src.ranges(dim, size, at))
        if held not in known:
            of = {each: _common(held, each) for each in {*wanted}}
            known[held] = [of[each] for each in wanted]
        rows.append(known[held])
    return rows


def _common(first: Sequence[range], second: Sequence[range]) -> int:
    """The number of indices in both of two lists of ranges, of which none overlap."""
    return sum([len(range(max(a.start, b.start), min(a.stop, b.stop))) for a in first for b in second])


class StepLoad(NamedTuple):
    """The load of the collective of a step of a kind on its busiest rank, for elements of so many bytes."""

    kind: type[Step]
    load: Load
    itemsize: int = 1

    def seconds(self, mesh: Mesh, axes: tuple[str, ...], topology: Topology) -> float:
        """Seconds of the collective along mesh axes.

        Measurements under gloo are of ranks that share the cores and links of their hosts, all of them busy: if an
        exchange leaves some idle, the others get their share.
        """
        kind, load, itemsize = self
        collective = RUNS[kind]
        assert collective is not None, f"a {kind.__name__} sends nothing"
        received, along = load.received, [most for most, _ in load.along] if load.along else []
        if load.average is not None and topology.backend == "gloo" and topology.link(mesh, axes, collective).measured:
            received, along = load.average, [average for _, average in load.along]
        return collective_seconds(
            collective,
            received * itemsize,
            mesh,
            axes,
            topology,
            peers=load.messages if kind is Exchange else None,
            along=[count * itemsize for count in along] if along else (),
            even=load.even,
        )


def step_seconds(step: Step, layout: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> float:
    """Seconds of `step` from `layout` for its busiest rank: latency, bytes over the link, and local copies."""
    return load_seconds(type(step), load_of(step, layout, tuple(shape)), itemsize, layout.mesh, step.axes, topology)


def joined_seconds(step: Step, layout: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> float:
    """Seconds by which `step` from `layout` lengthens a collective of `JOINED` bytes of other tensors.

    A tensor is copied once, into the buffer that is sent, or out of the one received.
    """
    load, others = load_of(step, layout, tuple(shape)), JOINED // itemsize
    packed = max(layout.local_numel(shape), after(step, layout).local_numel(shape))
    together = load._replace(received=load.received + others, copied=packed)
    beside = load._replace(received=others, copied=0)
    both = [load_seconds(type(step), each, itemsize, layout.mesh, step.axes, topology) for each in (together, beside)]
    return both[0] - both[1]


def load_seconds(
    kind: type[Step], load: Load, itemsize: int, mesh: Mesh, axes: tuple[str, ...], topology: Topology
) -> float:
    """Seconds of a step of this kind along mesh axes: its collective, if it runs one, and its copies in memory."""
    seconds = copy_seconds(load.copied * itemsize, topology)
    return seconds if RUNS[kind] is None else seconds + StepLoad(kind, load, itemsize).seconds(mesh, axes, topology)
