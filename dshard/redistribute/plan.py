"""The cheapest sequence of steps from one layout to another, found by uniform-cost search and cached by value."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf, prod
from typing import NamedTuple

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, Shape, interned
from dshard.placements import Partial, ReduceOp, Replicate
from dshard.redistribute.canonical import axis_relabelling, back, relabelled, relabelled_step
from dshard.redistribute.price import busiest, senders, step_seconds
from dshard.redistribute.space import Space, State, space_of
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
    describe,
    exchange_to,
    messages_received,
    received,
    reduce_exchange_to,
)
from dshard.topology import BYTES, Topology

MAX_STATES = 4000
"""A search that has settled this many layouts gives up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps that redistribute a tensor of global `shape` from `src` to `dst`: a value, priced, printed and run."""

    src: Layout
    dst: Layout
    shape: Shape
    steps: tuple[Step, ...]
    seconds: float

    def layouts(self) -> tuple[Layout, ...]:
        """The layout before each step."""
        before = [self.src]
        for step in self.steps[:-1]:
            before.append(after(step, before[-1]))
        return tuple(before[: len(self.steps)])

    def received(self, coordinate: tuple[int, ...]) -> int:
        """Elements that the rank at `coordinate` receives in all steps."""
        return sum(
            received(step, layout, self.shape, coordinate)
            for step, layout in zip(self.steps, self.layouts(), strict=True)
        )

    def messages_received(self, coordinate: tuple[int, ...]) -> int:
        """Messages that the rank at `coordinate` receives in all steps; empty ones do not count."""
        return sum(
            messages_received(step, layout, self.shape, coordinate)
            for step, layout in zip(self.steps, self.layouts(), strict=True)
        )

    def busiest(self) -> int:
        """Elements received by the busiest rank of each step, summed over the steps."""
        return sum(busiest(step, layout, self.shape) for step, layout in zip(self.steps, self.layouts(), strict=True))

    def messages(self) -> int:
        """The most messages that one rank receives one after the other; each is priced with the latency."""
        return sum(rounds(step, layout, self.shape) for step, layout in zip(self.steps, self.layouts(), strict=True))

    def __str__(self) -> str:
        rows = [describe(step, layout) for step, layout in zip(self.steps, self.layouts(), strict=True)]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"{self.src}  ->  {self.dst}   ({self.seconds * 1e6:.1f} us)"]
        for i, (name, axes, change) in enumerate(rows, 1):
            lines.append(f"  {i}. {name:{widths[0]}}  {axes:{widths[1]}}   {change}")
        return "\n".join(lines)


def plan(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology, *, lean: bool = True
) -> Plan:
    """The cheapest plan from `src` to `dst` for a tensor of global `shape` with elements of `itemsize` bytes.

    A lean plan never holds more than the larger of the two local tensors, and one message; with `lean=False` a plan
    that holds more on the way is taken where it is cheaper. The plan that moves the fewest bytes is the one on `BYTES`.

    Raises:
        MeshError: the layouts lie on different meshes.
        LayoutError: a layout shards a dim that the tensor does not have.
    """
    return _plan(src, dst, tuple(shape), itemsize, topology, lean)


def plan_of_fewest_bytes(moved: Plan, itemsize: int, topology: Topology) -> Plan:
    """The plan of fewest bytes between the layouts of `moved`, with its seconds on `topology`.

    Latency and local copies are weighed against it: `moved` takes no longer on `topology`, but may send more bytes.
    """
    fewest = plan(moved.src, moved.dst, moved.shape, itemsize, BYTES)
    pairs = zip(fewest.steps, fewest.layouts(), strict=True)
    return replace(
        fewest, seconds=sum(step_seconds(step, layout, moved.shape, itemsize, topology) for step, layout in pairs)
    )


def plan_alike(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology) -> Plan:
    """The canonical plan, alike up to the names of mesh axes: as many steps and seconds as `plan`, found faster.

    For searches, where thousands of plans are priced and few are run.
    """
    return _plan(*canonical_layouts(src, dst, topology), shape, itemsize, topology, True)


def canonical_layouts(src: Layout, dst: Layout, topology: Topology) -> tuple[Layout, Layout]:
    """Source and destination with mesh axes renamed: one pair for all redistributions alike but for those names."""
    names = axis_relabelling(src, dst, topology)
    return (src, dst) if names is None else (relabelled(src, names), relabelled(dst, names))


class PricedPlan(NamedTuple):
    """Seconds and number of steps of a plan."""

    seconds: float
    steps: int


def plan_within(
    src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology, most: float
) -> PricedPlan | None:
    """Seconds and steps of the cheapest plan; None, found sooner, if it takes more than `most` seconds."""
    if src == dst:
        return PricedPlan(0.0, 0)
    room = max(src.local_numel(shape), dst.local_numel(shape))
    end = _search(src, dst, space_of(dst.mesh, topology, shape, itemsize), room, most)
    return None if end is None else PricedPlan(end.seconds, len(list(_back(end))))


@cached("plans", 16384)
def _plan(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology, lean: bool) -> Plan:
    if src.mesh != dst.mesh:
        raise MeshError(f"cannot redistribute from the mesh ({src.mesh}) to the mesh ({dst.mesh}): use one mesh")
    src.check(shape)
    dst.check(shape)
    src, dst = interned(src), interned(dst)
    if src is dst:
        return Plan(src, dst, shape, (), 0.0)
    names = axis_relabelling(src, dst, topology)
    if names is not None:
        alike = _plan(relabelled(src, names), relabelled(dst, names), shape, itemsize, topology, lean)
        steps = tuple(relabelled_step(step, src.mesh, back(names)) for step in alike.steps)
        return Plan(src, dst, shape, steps, alike.seconds)
    room = max(src.local_numel(shape), dst.local_numel(shape)) if lean else inf
    space = space_of(dst.mesh, topology, shape, itemsize)
    end = _search(src, dst, space, room) or _search(src, dst, space)
    if end is None:
        raise LayoutError(
            f"found no way from [{src}] to [{dst}] within {MAX_STATES} layouts: redistribute in two calls"
        )
    return Plan(src, dst, shape, _steps(space, end), end.seconds)


def _search(src: Layout, dst: Layout, space: Space, room: float = inf, most: float = inf) -> Trail | None:
    """Search best-first over layouts for steps of at most `most` seconds, with a lower bound on what remains.

    Exchanges are priced when it is their turn. What comes back is how the end was left.
    """
    first, last = space.state_of(src), space.state_of(dst)
    dims, begins = useful_dims(src, dst, space.shape), tuple(_pending(dst).items())
    targets = tuple({last: None, space.state_of(before_pending(src, dst)): None})
    queue = _Queue(space, first, last, most)
    settled: set[State] = set()
    while queue.entries and len(settled) < MAX_STATES:
        _, _, seconds, state, trail, exact = heapq.heappop(queue.entries)
        if state in settled:
            continue
        if not exact:
            assert trail is not None
            seconds = trail.seconds + space.exact(trail.state, state)
            if queue.open(state, seconds):
                queue.push(state, seconds, trail)
            continue
        if state is last:
            return Trail(trail, state, seconds, None)
        settled.add(state)
        for there, took, step in space.onward(state, dims, begins):
            if queue.open(there, seconds + took) and there.numel <= room and there not in settled:
                queue.push(there, seconds + took, Trail(trail, state, seconds, step))
        for target in targets:
            straight = space.straight(state, target)
            if straight is not None and target not in settled and queue.open(target, seconds + straight.seconds):
                queue.push(target, seconds + straight.seconds, Trail(trail, state, seconds, None), straight.exact)
    return None


class Trail(NamedTuple):
    """The last step to a layout in a search: from `state`, reached after `seconds`."""

    before: Trail | None
    state: State
    seconds: float
    step: Step | None


def _back(end: Trail) -> Iterator[tuple[Trail, State]]:
    """The trails that lead to `end`, last step first, each with the state that it leads to."""
    there, trail = end.state, end.before
    while trail is not None:
        yield trail, there
        there, trail = trail.state, trail.before


def _steps(space: Space, end: Trail) -> tuple[Step, ...]:
    found = [space.step_to(trail.state, to) if trail.step is None else trail.step for trail, to in _back(end)]
    return tuple(reversed(found))


class _Queue:
    """Priority queue of reached states, ordered by a lower bound on the seconds of the whole plan."""

    def __init__(self, space: Space, first: State, last: State, most: float) -> None:
        self.space, self.last, self.found, self.ticket = space, last, most, count(1)
        self.best: dict[State, float] = {first: 0.0}
        self.entries: list[tuple[float, int, float, State, Trail | None, bool]] = [(0.0, 0, 0.0, first, None, True)]

    def open(self, there: State, total: float) -> bool:
        """Whether `total` seconds to reach `there` are below the best so far and within the limit."""
        return total <= self.found and total < self.best.get(there, inf)

    def push(self, there: State, total: float, trail: Trail, exact: bool = True) -> None:
        """Add a trail to `there`; a `total` that is not `exact` is a lower bound."""
        rest = self.space.least(there, self.last)
        if total + rest <= self.found:
            if exact:
                self.best[there] = total
                self.found = total if there is self.last else self.found
            heapq.heappush(self.entries, (total + rest, next(self.ticket), total, there, trail, exact))


def steps_straight(layout: Layout, target: Layout) -> list[Step]:
    """The single steps that lead from `layout` to `target` at once."""
    return [step for step in (exchange_to(layout, target), reduce_exchange_to(layout, target)) if step is not None]


def before_pending(src: Layout, dst: Layout) -> Layout:
    """`dst`, but replicated on the axes that are partial there and not in `src`."""
    pairs = zip(src.placements, dst.placements, strict=True)
    placements = tuple(Replicate() if isinstance(b, Partial) and a != b else b for a, b in pairs)
    return dst if placements == dst.placements else Layout(dst.mesh, placements, dst.order)


def rounds(step: Step, layout: Layout, shape: Shape) -> int:
    """Messages that a rank receives one after the other: n - 1 in a ring; an all_reduce is two rings."""
    n = prod(layout.mesh.shape[layout.mesh.axis(axis)] for axis in axes_of(step))
    match step:
        case Slice() | Pend():
            return 0
        case AllReduce():
            return 2 * (n - 1)
        case Exchange(_, dst):
            return min(n - 1, senders(layout, dst, shape))
        case AllGather() | ReduceScatter() | AllToAll() | ReduceExchange():
            return n - 1
        case _:
            assert_never(step)


def useful_dims(src: Layout, dst: Layout, shape: Shape) -> tuple[int, ...]:
    """The tensor dims that intermediate layouts may shard: those that either layout shards, and the largest other."""
    dims = {*src.sharded_dims(), *dst.sharded_dims()}
    others = [dim for dim in range(len(shape)) if dim not in dims]
    if others:
        dims.add(max(others, key=lambda dim: (shape[dim], -dim)))
    return tuple(sorted(dims))


def _pending(dst: Layout) -> dict[int, ReduceOp]:
    return {i: p.reduce_op for i, p in enumerate(dst.placements) if isinstance(p, Partial)}
