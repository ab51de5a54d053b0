"""Unit tasks: intersections of the source's regions with the destination's, their holders and receivers.

A task is a slice of the tensor that all its holders have and all its receivers need ("On Optimizing the Communication
of Model Parallelism", section 2.2). Slices have their true sizes: regions may be uneven, and empty ones make no task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dshard.layout import Layout, Region, Shape, overlap
from dshard.placements import Partial

Holders: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A region to send from ranks that hold it to ranks that need it and do not hold it.

    `holders` are the replicas of each term: of one, unless the source is partial.
    """

    region: Region
    holders: Holders
    receivers: tuple[int, ...]


def tasks(src: Layout, dst: Layout, shape: Sequence[int]) -> tuple[Task, ...]:
    """The unit tasks from `src` to `dst`, in the order of the source's regions, then of the destination's.

    >>> from dshard.mesh import Mesh
    >>> from dshard.placements import Replicate, Shard
    >>> src = Layout(Mesh((2,)), (Shard(0),))
    >>> dst = Layout(Mesh((3,), ranks=(2, 3, 4)), (Shard(0),))
    >>> [(task.region[0], task.holders[0], task.receivers) for task in tasks(src, dst, (5,))]
    [(range(0, 2), (0,), (2,)), (range(2, 3), (0,), (3,)), (range(3, 4), (1,), (3,)), (range(4, 5), (1,), (4,))]
    """
    unit_tasks = []
    needed = {region: tuple(rank for ranks in terms for rank in ranks) for region, terms in parts(dst, shape).items()}
    for held, holders in parts(src, shape).items():
        for region, ranks in needed.items():
            both = overlap(held, region)
            if both is not None:
                receivers = tuple(rank for rank in ranks if len(holders) > 1 or rank not in holders[0])
                if receivers:
                    unit_tasks.append(Task(both, holders, receivers))
    return tuple(unit_tasks)


def parts(layout: Layout, shape: Sequence[int]) -> dict[Region, Holders]:
    """The non-empty regions of a tensor, and the ranks that hold the replicas of each term of each."""
    mesh, reduced = layout.mesh, reduced_axes(layout)
    holders: dict[Region, dict[tuple[int, ...], list[int]]] = {}
    for at, rank in zip(mesh.coordinates(), mesh.ranks, strict=True):
        region = layout.region(shape, at)
        if all(region):
            holders.setdefault(region, {}).setdefault(tuple(at[i] for i in reduced), []).append(rank)
    return {region: tuple(map(tuple, terms.values())) for region, terms in holders.items()}


def reduced_axes(layout: Layout) -> tuple[int, ...]:
    """The mesh axes of more than one rank on which the layout is partial; a single term is the value itself."""
    return tuple(i for i, p in enumerate(layout.placements) if isinstance(p, Partial) and layout.mesh.shape[i] > 1)


def region_of(layout: Layout, shape: Shape, rank: int) -> Region | None:
    """The region of a rank; None if the rank is not in the mesh or its region is empty."""
    if rank not in layout.mesh:
        return None
    region = layout.region(shape, layout.mesh.coordinate(rank))
    return region if all(region) else None
