"""The cheapest sequence of steps from one layout to another, found by uniform-cost search and cached by value."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from dshard.caches import cached
from dshard.errors import LayoutError, MeshError
from dshard.interned import Interned
from dshard.layout import Layout, Shape
from dshard.notebook import Tabled
from dshard.redistribute.blocks import exchanged_axes, unflattened_ends, with_blocks_of
from dshard.redistribute.layout_state import (
    LayoutEdge,
    Load,
    ReachedState,
    State,
    joined_seconds,
    load_of,
    step_seconds,
)
from dshard.redistribute.space import Space, space_of
from dshard.redistribute.step import (
    AllGather,
    AllReduce,
    Exchange,
    ReduceScatter,
    Step,
    after,
    describe,
    sizes_received,
)
from dshard.topology import Topology

Search: TypeAlias = Literal["lean", "free", "joined"]
"""The search of a plan, see `plan`."""

MAX_STATES = 4000
"""A search that has settled this many layouts gives up."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Plan(Interned, Tabled):
    """The steps that redistribute a tensor of global `shape` from `src` to `dst`: a value, priced, printed and run.

    Where a layout has blocks, the steps are those of `parts`: plans, one after the other, of the tensor with its
    blocked dims unflattened, or an exchange of blocks alone.
    """

    src: Layout
    dst: Layout
    shape: Shape
    steps: tuple[Step, ...]
    seconds: float
    parts: tuple[Plan, ...] = ()

    def unblocked(self) -> tuple[Plan, ...]:
        """The plans without blocks that are run one after the other: `parts`, or this one."""
        return self.parts or (self,)

    def layouts(self) -> tuple[Layout, ...]:
        """The layout before each step."""
        if self.parts:
            return tuple([layout for part in self.parts for layout in part.layouts()])
        before = [self.src]
        for step in self.steps[:-1]:
            before.append(after(step, before[-1]))
        return tuple(before[: len(self.steps)])

    def stages(self) -> tuple[tuple[Step, Layout], ...]:
        """Each step with the layout before it."""
        return tuple(zip(self.steps, self.layouts(), strict=True))

    def shaped_stages(self) -> tuple[tuple[Step, Layout, Shape], ...]:
        """Each step with the layout before it, and the shape of the tensor, which may have dims unflattened."""
        if self.parts:
            return tuple([stage for part in self.parts for stage in part.shaped_stages()])
        return tuple(zip(self.steps, self.layouts(), (self.shape,) * len(self.steps), strict=True))

    def sizes_received(self, coordinate: tuple[int, ...]) -> list[int]:
        """The elements of each message that the rank at `coordinate` receives, in all steps."""
        return [size for stage in self.shaped_stages() for size in sizes_received(*stage, coordinate)]

    def received(self, coordinate: tuple[int, ...]) -> int:
        """Elements that the rank at `coordinate` receives in all steps."""
        return sum(self.sizes_received(coordinate))

    def loads(self) -> tuple[Load, ...]:
        """The load of each step on its busiest rank."""
        return tuple(load_of(*stage) for stage in self.shaped_stages())

    def busiest(self) -> int:
        """Elements received by the busiest rank of each step, summed over the steps."""
        return sum(load.received for load in self.loads())

    def messages(self) -> int:
        """The most messages that one rank receives one after the other; each is priced with the latency."""
        return sum(load.messages for load in self.loads())

    def seconds_on(self, topology: Topology, itemsize: int, shape: Shape | None = None) -> float:
        """Seconds of these steps on a topology, for elements of `itemsize` bytes, or a tensor of another shape."""
        assert shape is None or not self.parts, "tensors of several shapes have blocked dims unflattened"
        return sum(step_seconds(step, at, shape or own, itemsize, topology) for step, at, own in self.shaped_stages())

    def joined_seconds(self, itemsize: int, topology: Topology) -> float:
        """Seconds by which these steps lengthen collectives with which they are joined."""
        return sum(joined_seconds(step, at, own, itemsize, topology) for step, at, own in self.shaped_stages())

    def words(self) -> tuple[tuple[str, str, str], ...]:
        """Each step in words: the collective, the mesh axes, and how the placement on them changes."""
        return tuple(describe(step, layout) for step, layout in self.stages())

    def __str__(self) -> str:
        rows = self.words()
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"{self.src}  ->  {self.dst}   ({self.seconds * 1e6:.1f} us)"]
        if self.parts:  # whose dims the steps name
            lines[0] += "   of " + ", then ".join(f"{part.shape}" for part in self.parts)
        for i, (name, axes, change) in enumerate(rows, 1):
            lines.append(f"  {i}. {name:{widths[0]}}  {axes:{widths[1]}}   {change}")
        return "\n".join(lines)


def plan(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology, *, search: Search = "lean"
) -> Plan:
    """The cheapest plan from `src` to `dst` for a tensor of global `shape` with elements of `itemsize` bytes.

    A "lean" plan never holds more than the larger of the two local tensors, and one message; a "free" plan may hold
    more in between if that is cheaper. A "joined" plan is lean, but that it gathers or reduces by one collective, which
    may be joined with those of other tensors, where that lengthens theirs by no more than a plan of its own takes.

    The plan that moves the fewest bytes is the one on `BYTES`.

    >>> from dshard.layout import parse_layout
    >>> from dshard.mesh import Mesh
    >>> mesh = Mesh((2, 2), ("x", "y"))
    >>> src, dst = parse_layout("x:P(sum) y:S(0)", mesh), parse_layout("x:S(1) y:R", mesh)
    >>> [type(step).__name__ for step in plan(src, dst, (8, 8), 4, Topology.preset("bytes")).steps]
    ['ReduceScatter', 'AllGather']

    Raises:
        MeshError: the layouts lie on different meshes.
        LayoutError: a layout shards a dim that the tensor does not have.
    """
    return _plan(src, dst, tuple(shape), itemsize, topology, search)


class PricedPlan(NamedTuple):
    """Seconds and number of steps of a plan."""

    seconds: float
    steps: int


def plan_price(src: State, dst: State, space: Space) -> PricedPlan:
    """The price of the cheapest plan between two states of a space, found without making its steps.

    For choices, where thousands of plans are priced and few are run. Redistributions that differ only by a permutation
    of interchangeable mesh axes share a price.
    """
    if src is dst:
        return PricedPlan(0.0, 0)
    if src.blocked or dst.blocked:
        found = plan(space.layout_of(src), space.layout_of(dst), space.shape, space.itemsize, space.topology)
        return PricedPlan(found.seconds, len(found.steps))
    end = _cheapest(space, *space.canonical(src, dst), "lean")
    return PricedPlan(end.seconds, len(end.path()))


def plan_price_within(first: State, last: State, space: Space, most: float) -> PricedPlan | None:
    """The price of the cheapest plan between two canonical states; None, found faster, if it takes more than `most`."""
    if first.blocked or last.blocked:
        priced = plan_price(first, last, space)
        return priced if priced.seconds <= most else None
    key: tuple[State, State, Search] = first, last, "lean"
    end = space.ends.get(key) or _search(space, first, last, max(first.numel, last.numel), most)
    if end is None or end.seconds > most:
        return None
    space.ends[key] = end  # a limit leaves out what is not looked at before this end, so it is that without one
    return PricedPlan(end.seconds, len(end.path()))


@cached("plans", 65536)
def _plan(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology, search: Search) -> Plan:
    if src.mesh != dst.mesh:
        raise MeshError(f"cannot redistribute from the mesh ({src.mesh}) to the mesh ({dst.mesh}): use one mesh")
    src.check(shape)
    if src is dst:
        return Plan(src, dst, shape, (), 0.0)
    dst.check(shape)
    if src.blocks or dst.blocks:
        return _plan_of_blocks(src, dst, shape, itemsize, topology, search)
    space = space_of(dst.mesh, topology, shape, itemsize)
    first, last = space.state_of(src), space.state_of(dst)
    kind = _joinable(first, last) if search == "joined" else None
    if kind is not None:
        step = space.step(first, last, kind, range(dst.mesh.ndim))
        lean = _plan(src, dst, shape, itemsize, topology, "lean")
        one = Plan(src, dst, shape, (step,), step_seconds(step, src, shape, itemsize, topology))
        return lean if lean.seconds < min(one.seconds, one.joined_seconds(itemsize, topology)) else one
    renamed = space.canonical_axes(first, last)
    axes = [renamed.index(axis) for axis in range(dst.mesh.ndim)]
    end = _cheapest(space, *space.canonical(first, last), search)
    steps = tuple(space.step(here, there, kind, axes) for here, there, kind in end.path())
    return Plan(src, dst, shape, steps, end.seconds)


def _joinable(first: State, last: State) -> type[Step] | None:
    """The kind of the one collective, of those that can be joined, that leads from one state to another; or None."""
    changed = [(have, want) for have, want in zip(first.axes, last.axes, strict=True) if have != want]
    ends = [(axis, op) for axis, (op, to) in enumerate(zip(first.partial, last.partial, strict=True)) if op != to]
    if not ends:
        gathers = len(changed) == 1 and changed[0][0][: len(changed[0][1])] == changed[0][1]
        return AllGather if gathers else None
    if any(last.partial[axis] for axis, _ in ends) or len({op for _, op in ends}) > 1:
        return None
    if not changed:
        return AllReduce
    (have, want), *others = changed
    new = want[len(have) :]
    scatters = not others and want[: len(have)] == have and {*new} == {axis for axis, _ in ends}
    return ReduceScatter if scatters else None


def _plan_of_blocks(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology, search: Search) -> Plan:
    """The plan of the tensor with its blocked dims unflattened; before or after it an exchange to other blocks."""
    ends = unflattened_ends(src, dst, shape)
    if ends is not None:
        part = plan(*ends, itemsize, topology, search=search)
        return Plan(src, dst, shape, part.steps, part.seconds, (part,))
    axes = exchanged_axes(src, dst)
    if axes is not None:
        exchange = Exchange(axes, dst)
        return Plan(src, dst, shape, (exchange,), step_seconds(exchange, src, shape, itemsize, topology))
    ways = []
    for between in with_blocks_of(src, dst), with_blocks_of(dst, src):
        halves = [plan(*pair, shape, itemsize, topology, search=search) for pair in ((src, between), (between, dst))]
        parts = tuple([part for half in halves for part in half.unblocked()])
        steps = tuple([step for part in parts for step in part.steps])
        ways.append(Plan(src, dst, shape, steps, sum(half.seconds for half in halves), parts))
    return min(ways, key=lambda way: way.seconds)


def _cheapest(space: Space, first: State, last: State, search: Search) -> ReachedState:
    """The end of the cheapest path, cached in its space."""
    end = space.ends.get((first, last, search))
    if end is None:
        room = inf if search == "free" else max(first.numel, last.numel)
        end = _search(space, first, last, room) or _search(space, first, last)
        if end is None:
            ends = " to ".join(f"[{space.layout_of(state)}]" for state in (first, last))
            raise LayoutError(f"found no way from {ends} within {MAX_STATES} layouts: redistribute in two calls")
        space.ends[first, last, search] = end
    return end


def _search(space: Space, first: State, last: State, room: float = inf, most: float = inf) -> ReachedState | None:
    """Search best-first over states for steps of at most `most` seconds, with a lower bound on what remains.

    A state is searched from again where it is reached sooner: a bound may fall by more than a step takes.
    """
    dims = useful_dims(first, last)
    begins = tuple([(axis, op) for axis, op in enumerate(last.partial) if op is not None])
    targets = tuple({last: None, space.before_partial(first, last): None})
    queue = _Queue(space, first, last, most)
    settled: set[State] = set()
    while queue.entries and len(settled) < MAX_STATES:
        _, _, here = heapq.heappop(queue.entries)
        state = here.state
        if here.seconds > queue.best.get(state, inf):
            continue
        if state is last:
            return here
        settled.add(state)
        for move in space.successors(state, dims, begins):
            if move.there.numel <= room:
                queue.push(here, move)
        for target in targets:
            if queue.may_push(here, target):
                straight = space.direct(state, target)
                if straight is not None:
                    queue.push(here, straight)
    return None


class _Queue:
    """Priority queue of reached states, ordered by a lower bound on the seconds of the whole plan."""

    def __init__(self, space: Space, first: State, last: State, most: float) -> None:
        self.space, self.last, self.least, self.ticket = space, last, most, count(1)
        self.best: dict[State, float] = {first: 0.0}
        self.entries: list[tuple[float, int, ReachedState]] = [(0.0, 0, ReachedState(None, first, 0.0, None))]

    def may_push(self, here: ReachedState, there: State) -> bool:
        """Whether a step to this state may be pushed, by a lower bound on its seconds."""
        known = self.best.get(there, inf)
        if here.seconds >= known:
            return False
        total = here.seconds + self.space.least(here.state, there)
        return total < known and total + self.space.least(there, self.last) <= self.least

    def push(self, here: ReachedState, move: LayoutEdge) -> None:
        """Add the state that a move leads to, if no path to it is as fast and the plan may be within the limit.

        Of paths that take as long up to rounding, the first counts: one collective along several axes, not several.
        """
        there, kind, seconds = move
        total = here.seconds + seconds
        if total > self.least or total >= self.best.get(there, inf) * (1 - 1e-12):
            return
        rest = self.space.least(there, self.last)
        if total + rest <= self.least:
            self.best[there] = total
            self.least = total if there is self.last else self.least
            heapq.heappush(self.entries, (total + rest, next(self.ticket), ReachedState(here, there, total, kind)))


def useful_dims(src: State, dst: State) -> tuple[int, ...]:
    """The tensor dims that intermediate layouts may shard: those that either layout shards, and the largest other."""
    dims = [dim for dim, axes in enumerate(zip(src.axes, dst.axes, strict=True)) if any(axes)]
    others = [dim for dim in range(len(src.shape)) if dim not in dims]
    if others:
        dims.append(max(others, key=lambda dim: (src.shape[dim], -dim)))
    return tuple(sorted(dims))
