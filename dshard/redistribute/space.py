"""The search graph of redistributions: each layout once, as numbers, with the steps from it and their seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from math import prod

from dshard.caches import cached
from dshard.layout import DimOrder, Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard
from dshard.redistribute.axis_roles import roles
from dshard.redistribute.blocks import unflattened_ends
from dshard.redistribute.layout_state import (
    Axes,
    Begins,
    LayoutEdge,
    Load,
    Partials,
    ReachedState,
    State,
    all_gather_load,
    all_reduce_load,
    all_to_all_load,
    axes_and_partial,
    blocked_state,
    changed_axes,
    exchange_load,
    load_seconds,
    nests,
    reduce_exchange_load,
    reduce_scatter_load,
    reordered_axes,
    slice_load,
)
from dshard.redistribute.lower_bound import LowerBound
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
)
from dshard.topology import Topology


class _StatesOf(dict[Layout, "State"]):
    """The states of layouts in a space, made as they are asked for."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def __missing__(self, layout: Layout) -> State:
        space = self.space
        if layout.blocks:
            state = blocked_state(layout, space.shape)
        else:
            state = space.state(*axes_and_partial(layout, len(space.shape)))
        self[layout] = state
        return state


class Space:
    """The states of tensors of one shape on one mesh and topology, created as searches reach them."""

    def __init__(self, mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> None:
        self.mesh, self.topology, self.shape, self.itemsize = mesh, topology, shape, itemsize
        self.sizes = mesh.shape
        self.bound = LowerBound(mesh, topology, shape, itemsize)
        self.roles = [role for role in roles(mesh, topology) if len(role) > 1]
        self.states: dict[tuple[Axes, Partials], State] = {}
        self.state_of: Callable[[Layout], State] = _StatesOf(self).__getitem__
        """The state of a `Layout`."""
        self.prices: dict[tuple[object, ...], float] = {}
        self.ends: dict[tuple[State, State, str], ReachedState] = {}

    def state(self, axes: Axes, partial: Partials) -> State:
        """The state that shards tensor dims over `axes` and has the partial reductions `partial`."""
        cached = self.states.get((axes, partial))
        if cached is None:
            cached = self.states[axes, partial] = State(axes, partial, self.shape, self.sizes)
        return cached

    # -- states that differ only in the names of their mesh axes

    def canonical_axes(self, src: State, dst: State) -> tuple[int, ...]:
        """For each mesh axis the one that replaces it in the canonical redistribution, equal up to axis names.

        Interchangeable axes are sorted by their placements before and after, and by their places in the orders of dims.
        """
        axes, keys = list(range(self.mesh.ndim)), list(zip(_axis_keys(src), _axis_keys(dst), strict=True))
        for role in self.roles:
            for axis, own in zip(role, sorted(role, key=keys.__getitem__), strict=True):
                axes[own] = axis
        return tuple(axes)

    def canonical(self, src: State, dst: State) -> tuple[State, State]:
        """Source and destination of the canonical redistribution; where one has blocks, they themselves."""
        if not self.roles or src.blocked or dst.blocked:
            return src, dst
        axes = self.canonical_axes(src, dst)
        return self.with_axes(src, axes), self.with_axes(dst, axes)

    def with_axes(self, state: State, axes: Sequence[int]) -> State:
        """The state with `axes` in place of its mesh axes."""
        if list(axes) == sorted(axes):
            return state
        partial = dict(zip(axes, state.partial, strict=True))
        return self.state(
            tuple([tuple([axes[axis] for axis in split]) for split in state.axes]),
            tuple([partial[axis] for axis in range(len(axes))]),
        )

    # -- steps and layouts as values that can be run

    def step(self, here: State, there: State, kind: type[Step], axes: Sequence[int]) -> Step:
        """The step of this kind from one state to another, with `axes` in place of its mesh axes."""
        moved = reordered_axes(here, there) if kind is Exchange else changed_axes(here, there)
        if kind is ReduceExchange:
            moved = tuple([axis for axis in moved if here.partial[axis] != there.partial[axis]])
        src, dst = (state.split.get(moved[0]) for state in (here, there))
        before, after = (state.partial[moved[0]] for state in (here, there))
        if kind is AllGather or kind is AllToAll:
            assert src is not None
            names = self._names([axes[axis] for axis in here.axes[src][-len(moved) :]])
            return AllGather(names, src) if dst is None else AllToAll(names, src, dst)
        if kind is ReduceScatter:
            assert dst is not None
            assert before is not None
            return ReduceScatter(self._names([axes[axis] for axis in there.axes[dst][-len(moved) :]]), before, dst)
        names = self._names(sorted([axes[axis] for axis in moved]))
        if kind is Slice:
            return Slice(names, self.layout_of(self.with_axes(there, axes)))
        if kind is Exchange:
            return Exchange(names, self.layout_of(self.with_axes(there, axes)))
        if kind is MakePartial:
            assert after is not None
            return MakePartial(names, after)
        assert before is not None
        if kind is AllReduce:
            return AllReduce(names, before)
        return ReduceExchange(names, before, self.layout_of(self.with_axes(there, axes)))

    def _names(self, axes: Sequence[int]) -> tuple[str, ...]:
        return tuple([self.mesh.names[axis] for axis in axes])

    def layout_of(self, state: State) -> Layout:
        """The `Layout` of a state."""
        if state.blocked is not None:
            return state.blocked
        placements: list[Placement] = [Replicate() if op is None else Partial(op) for op in state.partial]
        order: list[DimOrder] = []
        for dim, split in enumerate(state.axes):
            for axis in split:
                placements[axis] = Shard(dim)
            if split:
                order.append((dim, split))
        return Layout(self.mesh, tuple(placements), tuple(order))

    # -- seconds

    def least(self, src: State, dst: State) -> float:
        """A lower bound on the seconds of any plan from `src` to `dst`, cached; 0 where blocks become others."""
        seconds = dst.rest.get(src)
        if seconds is None:
            if src.blocked or dst.blocked:
                seconds = self._least_of_blocks(src, dst)
            else:
                seconds = self.bound.seconds(src, dst) if src is not dst else 0.0
            dst.rest[src] = seconds
        return seconds

    def _least_of_blocks(self, src: State, dst: State) -> float:
        """The bound of the tensor with its blocked dims unflattened."""
        ends = unflattened_ends(self.layout_of(src), self.layout_of(dst), self.shape)
        if ends is None:
            return 0.0
        before, after, shape = ends
        space = space_of(self.mesh, self.topology, shape, self.itemsize)
        return space.least(space.state_of(before), space.state_of(after))

    def seconds(self, kind: type[Step], axes: tuple[int, ...], load: Load) -> float:
        """Seconds of a step of this kind along these mesh axes, cached for all layouts."""
        key = (kind, axes, load)
        seconds = self.prices.get(key)
        if seconds is None:
            names = tuple([self.mesh.names[axis] for axis in axes])
            seconds = self.prices[key] = load_seconds(kind, load, self.itemsize, self.mesh, names, self.topology)
        return seconds

    # -- the steps from a state

    def successors(self, state: State, dims: tuple[int, ...], begins: Begins) -> tuple[LayoutEdge, ...]:
        """The steps that shard only `dims` and leave partial only as `begins` says, but those straight to some end."""
        key = (dims, begins)
        moves = state.successors.get(key)
        if moves is None:
            moves = state.successors[key] = tuple(self._successors(state, dims, dict(begins)))
        return moves

    def _successors(self, state: State, dims: tuple[int, ...], begins: dict[int, ReduceOp]) -> Iterator[LayoutEdge]:
        ops = list(dict.fromkeys([op for op in state.partial if op is not None]))
        for op in ops:
            for axes in _subsets([axis for axis, each in enumerate(state.partial) if each == op]):
                yield from self._reductions(state, axes, dims)
        for dim, split in enumerate(state.axes):
            for last in range(len(split), 0, -1):
                yield from self._gathers(state, dim, last, dims)
        free = [axis for axis, op in enumerate(state.partial) if op is None and axis not in state.split]
        for axis in free:
            for dim in dims:
                there = self.state(_with(state.axes, dim, (*state.axes[dim], axis)), state.partial)
                yield LayoutEdge(there, Slice, self.seconds(Slice, (), slice_load(there, self.sizes[axis])))
        for axes in _subsets([axis for axis in free if axis in begins]):
            op = begins[axes[0]]
            if all(begins[axis] == op for axis in axes) and all(commute(each, op) for each in ops):
                there = self.state(state.axes, _partial_on(state, axes, op))
                load = slice_load(state, prod([self.sizes[axis] for axis in axes]))
                yield LayoutEdge(there, MakePartial, self.seconds(MakePartial, (), load))

    def _gathers(self, state: State, dim: int, last: int, dims: tuple[int, ...]) -> Iterator[LayoutEdge]:
        """Shard -> Replicate or Shard of another dim: the steps that undo the `last` axes that shard a dim."""
        kept, moved = state.axes[dim][:-last], state.axes[dim][-last:]
        axes, along = _with(state.axes, dim, kept), tuple(sorted(moved))
        seconds = self.seconds(AllGather, along, all_gather_load(state, dim, last))
        yield LayoutEdge(self.state(axes, state.partial), AllGather, seconds)
        for other in dims:
            if other != dim:
                there = self.state(_with(axes, other, (*axes[other], *moved)), state.partial)
                seconds = self.seconds(AllToAll, along, all_to_all_load(state, dim, other, last))
                yield LayoutEdge(there, AllToAll, seconds)

    def _reductions(self, state: State, axes: tuple[int, ...], dims: tuple[int, ...]) -> Iterator[LayoutEdge]:
        """Partial -> Shard or Replicate on all `axes`, which are partial by one reduction."""
        partial, n = _partial_on(state, axes, None), prod([self.sizes[axis] for axis in axes])
        for dim in dims:
            seconds = self.seconds(ReduceScatter, axes, reduce_scatter_load(state, dim, n))
            for order in permutations(axes):
                there = self.state(_with(state.axes, dim, (*state.axes[dim], *order)), partial)
                yield LayoutEdge(there, ReduceScatter, seconds)
        seconds = self.seconds(AllReduce, axes, all_reduce_load(state, n))
        yield LayoutEdge(self.state(state.axes, partial), AllReduce, seconds)

    def before_partial(self, src: State, dst: State) -> State:
        """`dst`, but replicated on the axes that are partial there and not in `src`."""
        pairs = zip(src.partial, dst.partial, strict=True)
        return self.state(dst.axes, tuple([None if a != b else b for a, b in pairs]))

    # -- steps straight to some state

    def direct(self, state: State, target: State) -> LayoutEdge | None:
        """The single step from `state` to `target` that no walk along mesh axes is, if there is one."""
        if target not in state.direct:
            find = self._exchange if state.partial == target.partial else self._reduce_exchange
            state.direct[target] = find(state, target)
        return state.direct[target]

    def _exchange(self, state: State, target: State) -> LayoutEdge | None:
        """The exchange to `target`, which is partial on the same axes; a slice if it only cuts chunks."""
        if state is target:
            return None
        if nests(state.axes, target.axes):
            n = prod([self.sizes[axis] for axis in changed_axes(state, target)])
            return LayoutEdge(target, Slice, self.seconds(Slice, (), slice_load(target, n)))
        axes = reordered_axes(state, target)
        return LayoutEdge(target, Exchange, self.seconds(Exchange, axes, exchange_load(state, target, axes)))

    def _reduce_exchange(self, state: State, target: State) -> LayoutEdge | None:
        """The reduction of one kind, on all axes where it ends, directly to chunks within those of `state`."""
        ends = [axis for axis, (a, b) in enumerate(zip(state.partial, target.partial, strict=True)) if a != b]
        ops = {state.partial[axis] for axis in ends}
        nested = nests(state.axes, target.axes)
        if None in ops or len(ops) > 1 or not target.split.keys() >= set(ends) or not nested:
            return None
        load = reduce_exchange_load(target, prod([self.sizes[axis] for axis in ends]))
        return LayoutEdge(target, ReduceExchange, self.seconds(ReduceExchange, tuple(ends), load))


def commute(a: ReduceOp, b: ReduceOp) -> bool:
    """Whether partial reductions of these two kinds may be completed in either order."""
    return a == b or {a, b} == {"sum", "avg"}


def _axis_keys(state: State) -> list[tuple[int, int, str]]:
    """A key for each mesh axis, equal for axes with the same placement and order."""
    keys = [(-1, 0, "") if op is None else (-2, 0, op) for op in state.partial]
    for dim, split in enumerate(state.axes):
        for place, axis in enumerate(split):
            keys[axis] = dim, place, ""
    return keys


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All subsets of some mesh axes but the empty one, in ascending order of their bits."""
    for bits in range(1, 1 << len(axes)):
        yield tuple([axis for i, axis in enumerate(axes) if bits >> i & 1])


def _partial_on(state: State, axes: Sequence[int], op: ReduceOp | None) -> Partials:
    """The partial reductions of a state with that of these axes replaced."""
    return tuple([op if axis in axes else each for axis, each in enumerate(state.partial)])


def _with(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:i], value, *values[i + 1 :])


@cached("plan spaces", 64)
def space_of(mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> Space:
    """The cached search space of a mesh, topology, shape and item size."""
    return Space(mesh, topology, shape, itemsize)
