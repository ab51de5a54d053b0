"""Redistributions that differ only in the names of their mesh axes: planned once, then renamed."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import TypeAlias

from typing_extensions import assert_never

from dshard.caches import cached
from dshard.layout import Layout, interned
from dshard.mesh import Mesh
from dshard.placements import Partial, Replicate, Shard
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
)
from dshard.topology import Collective, Link, Topology

COLLECTIVES: tuple[Collective | None, ...] = (
    None,
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "exchange",
)
"""What a step may run."""

AxisRelabelling: TypeAlias = tuple[int, ...]
"""For each mesh axis the one that takes its part."""


@cached("links of a mesh", 256)
def links_of(mesh: Mesh, topology: Topology) -> dict[frozenset[int], tuple[Link, ...]]:
    """The link of each collective along each set of mesh axes; axes of one rank have none."""
    wide = [axis for axis, n in enumerate(mesh.shape) if n > 1]
    sets = [axes for count in range(1, len(wide) + 1) for axes in combinations(wide, count)]
    return {
        frozenset(axes): tuple(topology.link(mesh, [mesh.names[i] for i in axes], each) for each in COLLECTIVES)
        for axes in sets
    }


@cached("mesh roles", 256)
def roles(mesh: Mesh, topology: Topology) -> tuple[tuple[int, ...], ...]:
    """Groups of mesh axes that may trade places: of one size, and with the same links, together with any others.

    >>> roles(Mesh((2, 2, 2), ("x", "y", "z")), Topology.preset("dgx-h100", nodes=2, ranks=4))
    ((0,), (1, 2))
    """
    links, groups = links_of(mesh, topology), list[list[int]]()
    for axis, n in enumerate(mesh.shape):
        for group in groups:
            if mesh.shape[group[0]] == n and (n == 1 or _trade(group[0], axis, links)):
                group.append(axis)
                break
        else:
            groups.append([axis])
    return tuple(map(tuple, groups))


def _trade(a: int, b: int, links: dict[frozenset[int], tuple[Link, ...]]) -> bool:
    return all(links[axes ^ {a, b}] == found for axes, found in links.items() if a in axes and b not in axes)


def axis_relabelling(src: Layout, dst: Layout, topology: Topology) -> AxisRelabelling | None:
    """The renaming of mesh axes that leads to the canonical redistribution; None if this one is canonical.

    Axes of one role are sorted by their placements before and after, and by their places in the orders of tensor dims.
    """
    names = list(range(src.mesh.ndim))
    for role in roles(src.mesh, topology):
        if len(role) > 1:
            parts = sorted((*_part(src, axis), *_part(dst, axis), axis) for axis in role)
            for axis, part in zip(role, parts, strict=True):
                names[part[-1]] = axis
    return None if names == list(range(len(names))) else tuple(names)


def _part(layout: Layout, axis: int) -> tuple[int, int, str]:
    """Key of one mesh axis in a layout: equal for axes that do the same in it."""
    match layout.placements[axis]:
        case Replicate():
            return -1, 0, ""
        case Partial(op):
            return -2, 0, op
        case Shard(dim):
            return dim, layout.axes_of(dim).index(axis), ""
        case placement:
            assert_never(placement)


def relabelled(layout: Layout, names: AxisRelabelling) -> Layout:
    """The layout with its mesh axes renamed."""
    placements = list(layout.placements)
    for axis, name in enumerate(names):
        placements[name] = layout.placements[axis]
    order = tuple((dim, tuple(names[axis] for axis in layout.axes_of(dim))) for dim in layout.sharded_dims())
    return interned(Layout(layout.mesh, tuple(placements), order))


def back(names: AxisRelabelling) -> AxisRelabelling:
    """The inverse of a renaming of mesh axes."""
    return tuple(names.index(axis) for axis in range(len(names)))


def relabelled_step(step: Step, mesh: Mesh, names: AxisRelabelling) -> Step:
    """The step with its mesh axes renamed."""

    def name(axis: str) -> str:
        return mesh.names[names[mesh.axis(axis)]]

    def sort(axes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(map(name, axes), key=mesh.axis))

    match step:
        case AllGather(axis, _) | ReduceScatter(axis, _, _) | AllToAll(axis, _, _) | Pend(axis, _):
            return replace(step, axis=name(axis))
        case AllReduce(axes, _):
            return replace(step, axes=sort(axes))
        case Slice(axes, dst) | Exchange(axes, dst) | ReduceExchange(axes, _, dst):
            return replace(step, axes=sort(axes), dst=relabelled(dst, names))
        case _:
            assert_never(step)
