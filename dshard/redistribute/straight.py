"""Plans made without a search, for where thousands are priced: each step finishes some mesh axis."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from dshard.caches import cached
from dshard.layout import Layout, Shape
from dshard.placements import Partial
from dshard.redistribute.plan import Plan, plan, steps_straight, useful_dims
from dshard.redistribute.price import step_seconds
from dshard.redistribute.step import Step, after, steps_from
from dshard.topology import Topology


@cached("straight plans", 65536)
def plan_straight(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology) -> Plan:
    """A plan from `src` to `dst` that goes straight: never cheaper than `plan`, and mostly the same.

    Of the steps after which more mesh axes are as in `dst`, the one that leaves the fewest elements is taken, so that
    reductions come before gathers. Where there is none, it is `plan` that answers.

    >>> from dshard.layout import parse_layout
    >>> from dshard.mesh import Mesh
    >>> mesh = Mesh((2, 2), ("x", "y"))
    >>> src, dst = parse_layout("x:P(sum) y:S(0)", mesh), parse_layout("x:S(1) y:R", mesh)
    >>> [type(step).__name__ for step in plan_straight(src, dst, (8, 8), 4, Topology.preset("bytes")).steps]
    ['ReduceScatter', 'AllGather']

    Raises:
        MeshError, LayoutError: as `plan`.
    """
    layout, seconds = src, 0.0
    steps: list[Step] = []
    while layout != dst:
        ways = list(_nearer(layout, dst, shape))
        if not ways:
            return plan(src, dst, shape, itemsize, topology)
        least = min(there.local_numel(shape) for _, there in ways)
        prices: list[tuple[float, int, float, Step, Layout]] = []
        for step, there in ways:
            if there.local_numel(shape) == least:
                cost = step_seconds(step, layout, shape, itemsize, topology)
                prices.append((cost / (_off(layout, dst) - _off(there, dst)), len(prices), cost, step, there))
        _, _, cost, step, layout = min(prices, key=lambda price: price[:2])
        steps.append(step)
        seconds += cost
    return Plan(src, dst, shape, tuple(steps), seconds)


def _nearer(layout: Layout, dst: Layout, shape: Shape) -> Iterator[tuple[Step, Layout]]:
    """The steps, with the layouts after them, that bring more mesh axes to their placement in `dst`."""
    pending = {i: p.reduce_op for i, p in enumerate(dst.placements) if isinstance(p, Partial)}
    off = _off(layout, dst)
    for step in chain(steps_from(layout, useful_dims(layout, dst, shape), pending), steps_straight(layout, dst)):
        there = after(step, layout)
        if _off(there, dst) < off:
            yield step, there


def _off(layout: Layout, dst: Layout) -> int:
    """The number of axes on which the layouts differ, plus one if their orders of axes differ."""
    return sum(a != b for a, b in zip(layout.placements, dst.placements, strict=True)) + (layout.order != dst.order)
