"""A lower bound on the elements that ranks receive in any redistribution."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.placements import Partial


def lower_bound(src: Layout, dst: Layout, shape: Sequence[int]) -> float:
    """The elements that a rank receives, averaged over the ranks, in the best possible plan.

    Counted exactly over the cells into which the layouts' regions cut the tensor. If nothing is partial, each rank that
    needs a cell and does not hold it receives it once. The h terms of a cell to reduce take h - 1 receives to meet, at
    a rank that needs the sum if one has a term, and each other rank that needs the sum receives it once.

    >>> from dshard.mesh import Mesh
    >>> from dshard.placements import Replicate, Shard
    >>> mesh = Mesh((4,))
    >>> lower_bound(Layout(mesh, (Shard(0),)), Layout(mesh, (Replicate(),)), (8, 2))
    12.0
    """
    coordinates = list(src.mesh.coordinates())
    held = {at: src.region(shape, at) for at in coordinates}
    needed = {at: dst.region(shape, at) for at in coordinates}
    ends = [p != q and isinstance(p, Partial) for p, q in zip(src.placements, dst.placements, strict=True)]
    total = 0
    for cell in _cells(list(held.values()) + list(needed.values()), shape):
        holders = [at for at in coordinates if _within(cell, held[at])]
        takers = [at for at in coordinates if _within(cell, needed[at])]
        total += prod(stop - start for start, stop in cell) * _receives(holders, takers, ends)
    return total / len(coordinates)


Cell = tuple[tuple[int, int], ...]


def _receives(holders: list[Coordinate], takers: list[Coordinate], ends: list[bool]) -> int:
    holding = set(holders)
    terms = {tuple(i for i, end in zip(at, ends, strict=True) if end) for at in holders}
    if len(terms) == 1:
        return sum(taker not in holding for taker in takers)
    return len(terms) - 1 + len(takers) - any(taker in holding for taker in takers)


def _cells(regions: Sequence[Sequence[range]], shape: Sequence[int]) -> product[Cell]:
    cuts = [{0, size} for size in shape]
    for region in regions:
        for dim, part in enumerate(region):
            cuts[dim] |= {part.start, part.stop} if part else set()
    return product(*(list(pairwise(sorted(points))) for points in cuts))


def _within(cell: Cell, region: Sequence[range]) -> bool:
    return all(part.start <= start and stop <= part.stop for (start, stop), part in zip(cell, region, strict=True))
