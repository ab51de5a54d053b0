"""The cheapest sequence of steps from one layout to another, found by uniform-cost search and cached by value."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count

from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, Shape
from dshard.placements import Partial, ReduceOp
from dshard.redistribute.price import step_seconds
from dshard.redistribute.step import Step, after, describe, received, steps_from
from dshard.topology import Topology

MAX_STATES = 4000
"""A search that has settled this many layouts gives up on better plans and goes through the replicated layout."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How a tensor of global `shape` gets from layout `src` to `dst`: the same value is priced, printed and run."""

    src: Layout
    dst: Layout
    shape: Shape
    steps: tuple[Step, ...]
    seconds: float

    def layouts(self) -> tuple[Layout, ...]:
        """The layout before each step."""
        found = [self.src]
        for step in self.steps[:-1]:
            found.append(after(step, found[-1]))
        return tuple(found[: len(self.steps)])

    def received(self, coordinate: tuple[int, ...]) -> int:
        """The elements that the rank at `coordinate` receives."""
        return sum(
            received(step, layout, self.shape, coordinate)
            for step, layout in zip(self.steps, self.layouts(), strict=True)
        )

    def __str__(self) -> str:
        rows = [describe(step, layout) for step, layout in zip(self.steps, self.layouts(), strict=True)]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
        lines = [f"{self.src}  ->  {self.dst}   ({self.seconds * 1e6:.1f} us)"]
        for i, (name, axes, change) in enumerate(rows, 1):
            lines.append(f"  {i}. {name:{widths[0]}}  {axes:{widths[1]}}   {change}")
        return "\n".join(lines)


def plan(src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology) -> Plan:
    """The cheapest plan from `src` to `dst` for a tensor of global `shape` with elements of `itemsize` bytes.

    Raises:
        MeshError: the layouts lie on different meshes.
        LayoutError: a layout shards a dim that the tensor does not have.
    """
    return _plan(src, dst, tuple(shape), itemsize, topology)


@lru_cache(maxsize=16384)
def _plan(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology) -> Plan:
    if src.mesh != dst.mesh:
        raise MeshError(f"cannot redistribute from the mesh ({src.mesh}) to the mesh ({dst.mesh}): use one mesh")
    src.check(shape)
    dst.check(shape)
    if src == dst:
        return Plan(src, dst, shape, (), 0.0)
    steps, seconds = _search(src, dst, shape, itemsize, topology)
    return Plan(src, dst, shape, steps, seconds)


def _search(
    src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology
) -> tuple[tuple[Step, ...], float]:
    dims = useful_dims(src, dst, shape)
    pending = _pending(dst)
    floor = topology.launch
    ticket = count()
    settled: set[Layout] = set()
    best = {src: 0.0}
    queue: list[tuple[float, int, float, Layout, tuple[Step, ...]]] = [(0.0, next(ticket), 0.0, src, ())]
    while queue:
        _, _, seconds, layout, steps = heapq.heappop(queue)
        if layout == dst:
            return steps, seconds
        if layout in settled:
            continue
        settled.add(layout)
        if len(settled) > MAX_STATES:
            break
        for step in steps_from(layout, dims, pending):
            there = after(step, layout)
            total = seconds + step_seconds(step, layout, shape, itemsize, topology)
            if there not in settled and total < best.get(there, float("inf")):
                best[there] = total
                bound = total + floor * _distance(there, dst)
                heapq.heappush(queue, (bound, next(ticket), total, there, (*steps, step)))
    raise LayoutError(f"found no way from [{src}] to [{dst}] within {MAX_STATES} layouts: redistribute in two calls")


def useful_dims(src: Layout, dst: Layout, shape: Shape) -> tuple[int, ...]:
    """The tensor dims worth sharding on the way: those that either layout shards, and the largest other one."""
    dims = {*src.sharded_dims(), *dst.sharded_dims()}
    others = [dim for dim in range(len(shape)) if dim not in dims]
    if others:
        dims.add(max(others, key=lambda dim: (shape[dim], -dim)))
    return tuple(sorted(dims))


def _pending(dst: Layout) -> dict[int, ReduceOp]:
    return {i: p.reduce_op for i, p in enumerate(dst.placements) if isinstance(p, Partial)}


def _distance(layout: Layout, dst: Layout) -> int:
    """A lower bound on the steps still needed: one all_reduce may complete several axes, any other step changes one."""
    different = [mine for mine, theirs in zip(layout.placements, dst.placements, strict=True) if mine != theirs]
    partial = sum(isinstance(placement, Partial) for placement in different)
    return len(different) - max(0, partial - 1)
