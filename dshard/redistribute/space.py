"""The search graph of redistributions: each layout once, as numbers, with the steps from it and their seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from dshard.caches import cached
from dshard.layout import DimOrder, Layout, Shape, interned
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard
from dshard.redistribute.canonical import links_of
from dshard.redistribute.price import (
    RUNS,
    copied_of,
    met,
    most_gathered,
    most_reduced,
    most_scattered,
    most_swapped,
    moved_seconds,
    step_seconds,
)
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
    commute,
    exchange_to,
    nests,
    reduce_exchange_to,
    reordered,
)
from dshard.topology import Link, Topology

Axes = tuple[tuple[int, ...], ...]
Pending = tuple[ReduceOp | None, ...]
Begins = tuple[tuple[int, ReduceOp], ...]
"""The mesh axes on which a reduction may be left pending anew."""


class State:
    """A layout in numbers: the mesh axes that shard each tensor dim, and the partial reduction on each mesh axis.

    `local` is the shape of the first rank's part, which begins at the origin and is the largest; `share` what of all
    elements a rank holds on average, which each does if it is `even`; `exact` tells of each dim whether it has elements
    and is split evenly; `split` is the dim that a mesh axis splits; `wide` are the axes of more than one rank that
    split each dim; `onward` and `straight` are steps that were asked for, and `rest` is the least to come here.
    """

    __slots__ = (
        "axes",
        "even",
        "exact",
        "local",
        "numel",
        "onward",
        "pending",
        "rest",
        "share",
        "split",
        "straight",
        "wide",
    )

    def __init__(self, axes: Axes, pending: Pending, shape: Shape, sizes: tuple[int, ...]) -> None:
        self.axes, self.pending = axes, pending
        self.split = {axis: dim for dim, split in enumerate(axes) for axis in split}
        self.wide = tuple([tuple([axis for axis in split if sizes[axis] > 1]) for split in axes])
        parts = [prod([sizes[axis] for axis in split]) for split in axes]
        self.local = tuple([-(-size // n) for size, n in zip(shape, parts, strict=True)])
        self.numel, self.share = prod(self.local), 1 / prod(parts)
        self.exact = [size > 0 == size % n for size, n in zip(shape, parts, strict=True)]
        self.even = all(self.exact)
        self.onward: dict[tuple[tuple[int, ...], Begins], tuple[Move, ...]] = {}
        self.straight: dict[State, Straight | None] = {}
        self.rest: dict[State, float] = {}


class Move(NamedTuple):
    """A step on one axis, or an all_reduce: the state it leads to, and its seconds; a slice is built when it is run."""

    there: State
    seconds: float
    step: Step | None


class Straight(NamedTuple):
    """A single step to the target layout: its seconds, or a lower bound on them."""

    seconds: float
    exact: bool


class Space:
    """The states of tensors of one shape on one mesh and topology, made as searches reach them."""

    def __init__(self, mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> None:
        self.mesh, self.topology, self.shape, self.itemsize = mesh, topology, shape, itemsize
        self.launch, self.sizes, self.numel = topology.launch, mesh.shape, prod(shape)
        along = links_of(mesh, topology)
        self.rate, self.latency = _best([link for found in along.values() for link in found])
        self.slow: list[tuple[int, float, float]] = []
        """Mesh axes, and by how many seconds a byte, and a message, takes longer in whatever goes along them."""
        for axis, n in enumerate(mesh.shape):
            if n > 1:
                rate, latency = _best([link for axes, found in along.items() if axis in axes for link in found])
                if rate < self.rate or latency > self.latency:
                    self.slow.append((axis, 1 / rate - 1 / self.rate, latency - self.latency))
        self.states: dict[tuple[Axes, Pending], State] = {}
        self.laid: dict[Layout, State] = {}
        self.prices: dict[tuple[object, ...], float] = {}

    def state(self, axes: Axes, pending: Pending) -> State:
        """The one state that shards tensor dims over `axes` and is partial as `pending` says."""
        cached = self.states.get((axes, pending))
        if cached is None:
            cached = self.states[axes, pending] = State(axes, pending, self.shape, self.sizes)
        return cached

    def state_of(self, layout: Layout) -> State:
        """The state of a `Layout`."""
        state = self.laid.get(layout)
        if state is None:
            axes = tuple(map(layout.axes_of, range(len(self.shape))))
            pending = tuple([p.reduce_op if isinstance(p, Partial) else None for p in layout.placements])
            state = self.laid[layout] = self.state(axes, pending)
        return state

    def layout_of(self, state: State) -> Layout:
        """The `Layout` of a state."""
        placements: list[Placement] = [Replicate() if op is None else Partial(op) for op in state.pending]
        order: list[DimOrder] = []
        for dim, split in enumerate(state.axes):
            for axis in split:
                placements[axis] = Shard(dim)
            if split:
                order.append((dim, split))
        return interned(Layout(self.mesh, tuple(placements), tuple(order)))

    # -- the least that any plan takes

    def least(self, src: State, dst: State) -> float:
        """A lower bound on the seconds of any plan from `src` to `dst`: launches, messages, elements that ranks lack.

        Each message at most doubles the number of ranks whose chunks, or terms, a rank holds; chunks and terms come
        in steps of their own, unless the chunks are nested. Of `t` terms, as in `lower_bound`, `t` - 1 receives
        bring them together at a rank that needs the sum, and each other rank that does receives it.
        """
        seconds = dst.rest.get(src)
        if seconds is None:
            seconds = dst.rest[src] = self._least(src, dst) if src is not dst else 0.0
        return seconds

    def _least(self, src: State, dst: State) -> float:
        terms, begins, ends = 1, 0, False
        if src.pending != dst.pending:
            for op, target, n in zip(src.pending, dst.pending, self.sizes, strict=True):
                if op is not target:
                    begins += target is not None
                    if op is not None:
                        ends, terms = True, terms * n
        nested = nests(zip(src.wide, dst.wide, strict=True))
        held, sources = 1, 1
        for have, want in zip(src.local, dst.local, strict=True):
            if want > have:
                held *= have
                sources *= -(-want // have) if have else 1
            else:
                held *= want
        apart = not nested and self._apart(src, dst)
        rounds = 0 if nested or not self.numel else max(1, (sources - 1 + apart).bit_length())
        lacking = float(dst.numel - (0 if apart else held))
        if terms > 1:
            rounds += (terms - 1).bit_length()
            lacking = max(lacking, dst.numel, self.numel * (dst.share + (terms - 2) / self.mesh.size))
        steps = max(1, ends + begins + (ends and not nested))
        seconds = steps * self.launch + rounds * self.latency + lacking * self.itemsize / self.rate
        return seconds + self._crossing(src, dst) if self.slow else seconds

    def _crossing(self, src: State, dst: State) -> float:
        """A lower bound on the extra seconds for elements that must be sent along a slow axis.

        As much enters each slice of the mesh along the axis. Where a slice has, or sums up, one part in `n` of what all
        of it needs, it lacks the others; where the axis shards another dim afterwards, evenly, it needs one part in
        `n`, and has one in `n` of that.
        """
        most = 0.0
        for axis, byte, message in self.slow:
            n, ends = self.sizes[axis], src.pending[axis] is not dst.pending[axis]
            if ends and src.pending[axis] is not None:
                numel = 1.0 * self.numel * (n - 1) * (1 if axis in dst.split else 2)
            elif axis in src.split and axis not in dst.split:
                numel = self.numel * (n - 1)
            elif axis in src.split and src.split[axis] != dst.split[axis] and self._even(src, dst, axis):
                numel = self.numel * (n - 1) / n
            else:
                continue
            most = max(most, numel / self.mesh.size * self.itemsize * byte + message)
        return most

    def _even(self, src: State, dst: State, axis: int) -> bool:
        """Whether the dims that this axis shards, before and after, are sharded evenly."""
        ends = ((src.axes, src.split[axis]), (dst.axes, dst.split[axis]))
        return not any(self.shape[dim] % prod([self.sizes[i] for i in axes[dim]]) for axes, dim in ends)

    def _apart(self, src: State, dst: State) -> bool:
        """Whether some rank holds nothing of what it needs: an evenly sharded dim has different leading mesh axes."""
        for dim, (have, want) in enumerate(zip(src.wide, dst.wide, strict=True)):
            if have != want and src.exact[dim] and dst.exact[dim]:
                shared = min(len(have), len(want))
                if have[:shared] != want[:shared]:
                    return True
        return False

    # -- seconds

    def seconds(
        self, kind: type[Step], axes: tuple[int, ...], numel: int, copies: int, peers: int | None = None
    ) -> float:
        """Seconds of a step of this kind along these mesh axes, cached for all layouts."""
        key = (kind, axes, numel, copies, peers)
        found = self.prices.get(key)
        if found is None:
            names = tuple([self.mesh.names[axis] for axis in axes])
            moved, size = RUNS[kind], self.itemsize
            found = moved_seconds(moved, numel * size, copies * size, self.mesh, names, self.topology, peers)
            self.prices[key] = found
        return found

    def onward(self, state: State, dims: tuple[int, ...], begins: Begins) -> tuple[Move, ...]:
        """The steps from `state`, ordered as by `steps_from`, that shard only `dims`, partial only as `begins`."""
        key = (dims, begins)
        moves = state.onward.get(key)
        if moves is None:
            moves = state.onward[key] = tuple(self._onward(state, dims, dict(begins)))
        return moves

    def _onward(self, state: State, dims: tuple[int, ...], begins: dict[int, ReduceOp]) -> Iterator[Move]:
        split = state.split
        ops = {op for op in state.pending if op is not None}
        for axis, op in enumerate(state.pending):
            if op is not None:
                yield from (self._scatter(state, axis, op, dim) for dim in dims)
            elif axis in split:
                if state.axes[split[axis]][-1] == axis:
                    yield from self._leave(state, axis, split[axis], dims)
            else:
                yield from (self._slice(state, axis, dim) for dim in dims)
                if axis in begins and all(commute(each, begins[axis]) for each in ops):
                    yield self._pend(state, axis, begins[axis])
        for op in dict.fromkeys(op for op in state.pending if op is not None):
            yield from self._all_reduces(state, op)

    def _leave(self, state: State, axis: int, dim: int, dims: Sequence[int]) -> Iterator[Move]:
        """Shard -> Replicate or Shard of another dim: the steps that undo the sharding of `dim` by `axis`."""
        n, name = self.sizes[axis], self.mesh.names[axis]
        rest = state.numel // state.local[dim] if state.local[dim] else prod(_without(state.local, dim))
        axes = _with(state.axes, dim, state.axes[dim][:-1])
        size = -(-self.shape[dim] // prod([self.sizes[i] for i in axes[dim]]))
        copies = copied_of(AllGather, n, state.numel, 0, int(dim != 0))
        seconds = self.seconds(AllGather, (axis,), most_gathered(size, rest, n), copies)
        yield Move(self.state(axes, state.pending), seconds, AllGather(name, dim))
        for other in dims:
            if other != dim:
                copies = copied_of(AllToAll, n, state.numel, 0, (dim != 0) + (other != 0))
                seconds = self.seconds(AllToAll, (axis,), most_swapped(size, state.local[other], rest, n), copies)
                there = self.state(_with(axes, other, (*axes[other], axis)), state.pending)
                yield Move(there, seconds, AllToAll(name, dim, other))

    def _scatter(self, state: State, axis: int, op: ReduceOp, dim: int) -> Move:
        n, size = self.sizes[axis], state.local[dim]
        rest = state.numel // size if size else prod(_without(state.local, dim))
        copies = copied_of(ReduceScatter, n, state.numel, 0, int(dim != 0))
        seconds = self.seconds(ReduceScatter, (axis,), most_scattered(size, rest, n), copies)
        axes = _with(state.axes, dim, (*state.axes[dim], axis))
        there = self.state(axes, _with(state.pending, axis, None))
        return Move(there, seconds, ReduceScatter(self.mesh.names[axis], op, dim))

    def _slice(self, state: State, axis: int, dim: int) -> Move:
        there = self.state(_with(state.axes, dim, (*state.axes[dim], axis)), state.pending)
        copies = copied_of(Slice, self.sizes[axis], state.numel, there.numel, 0)
        return Move(there, self.seconds(Slice, (), 0, copies), None)

    def _pend(self, state: State, axis: int, op: ReduceOp) -> Move:
        there = self.state(state.axes, _with(state.pending, axis, op))
        seconds = self.seconds(Pend, (), 0, copied_of(Pend, self.sizes[axis], state.numel, 0, 0))
        return Move(there, seconds, Pend(self.mesh.names[axis], op))

    def _all_reduces(self, state: State, op: ReduceOp) -> Iterator[Move]:
        held = [axis for axis, each in enumerate(state.pending) if each == op]
        for subset in range(1, 1 << len(held)):
            axes = tuple([axis for bit, axis in enumerate(held) if subset >> bit & 1])
            n = prod([self.sizes[axis] for axis in axes])
            there = self.state(state.axes, tuple([None if i in axes else p for i, p in enumerate(state.pending)]))
            seconds = self.seconds(AllReduce, axes, most_reduced(state.numel, n), 0)
            yield Move(there, seconds, AllReduce(tuple([self.mesh.names[axis] for axis in axes]), op))

    # -- steps straight to some layout

    def straight(self, state: State, target: State) -> Straight | None:
        """The single step from `state` to `target`, if there is one; of an exchange a lower bound on its seconds."""
        if target not in state.straight:
            way = self._exchange if state.pending == target.pending else self._reduce_exchange
            state.straight[target] = way(state, target)
        return state.straight[target]

    def _exchange(self, state: State, target: State) -> Straight | None:
        if state is target:
            return None
        pairs = list(zip(state.axes, target.axes, strict=True))
        axes = reordered(pairs)
        if nests(pairs):
            n = prod([self.sizes[axis] for axis in axes if axis not in state.split])
            return Straight(self.seconds(Slice, (), 0, copied_of(Slice, n, state.numel, target.numel, 0)), True)
        n = prod([self.sizes[axis] for axis in axes])
        copies = copied_of(Exchange, n, state.numel, target.numel, int(state.axes[1:] != target.axes[1:]))
        lacking = target.numel - (0 if self._apart(state, target) else prod(map(min, state.local, target.local)))
        seconds = self.seconds(Exchange, axes, lacking, copies, met(self.shape, state.local, target.local))
        exact = state.even and target.even  # then one rank that holds nothing lacks most, or all lack as much
        return Straight(seconds, True) if exact else Straight(seconds * (1 - 1e-12), False)

    def _reduce_exchange(self, state: State, target: State) -> Straight | None:
        ends = [axis for axis, (a, b) in enumerate(zip(state.pending, target.pending, strict=True)) if a != b]
        ops = {state.pending[axis] for axis in ends}
        pairs = zip(state.axes, target.axes, strict=True)
        if None in ops or len(ops) > 1 or not target.split.keys() >= set(ends) or not nests(pairs):
            return None
        n = prod([self.sizes[axis] for axis in ends])
        copies = copied_of(ReduceExchange, n, state.numel, target.numel, 0)
        return Straight(self.seconds(ReduceExchange, tuple(ends), (n - 1) * target.numel, copies), True)

    def exact(self, state: State, target: State) -> float:
        """Seconds of the exchange from `state` to `target`, cached; `straight` only bounds them."""
        src = self.layout_of(state)
        step = self.step_to(state, target)
        seconds = step_seconds(step, src, self.shape, self.itemsize, self.topology)
        state.straight[target] = Straight(seconds, True)
        return seconds

    def step_to(self, state: State, target: State) -> Step:
        """The single step from `state` to `target`, as a value that can be run."""
        src, dst = self.layout_of(state), self.layout_of(target)
        step = exchange_to(src, dst) or reduce_exchange_to(src, dst)
        assert step is not None
        return step


def _best(links: Sequence[Link]) -> tuple[float, float]:
    """The highest bandwidth, in bytes per second, and the lowest latency, in seconds, of these links."""
    rate = max((link.best_bandwidth for link in links), default=float("inf"))
    return rate, min((link.latency for link in links), default=0.0)


def _with(values: tuple, i: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*values[:i], value, *values[i + 1 :])


def _without(values: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*values[:i], *values[i + 1 :])


@cached("plan spaces", 64)
def space_of(mesh: Mesh, topology: Topology, shape: Shape, itemsize: int) -> Space:
    """The cached search space of a mesh, topology, shape and item size."""
    return Space(mesh, topology, shape, itemsize)
