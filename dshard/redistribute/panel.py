"""Panels: sets of indices of one tensor dim that are redistributed one after the other.

A panel is a set of indices of a dim, the same set for every tensor that has the dim, however it is sharded. A rank
holds the indices of a panel that are in its shard. As a shard is a range, and panels are ascending, each piece that a
step sends is again a range within the panel: so every step of every plan can run panel by panel, with the messages of
the full tensor, counted within the panel. All panels together send the bytes of the full tensor.

Design: docs/design/0006-panels.md
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from dshard.layout import Layout, Region, Shape
from dshard.mesh import Coordinate
from dshard.placements import chunk_of
from dshard.redistribute.step import Messages, Step, after, messages

Ranges = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """A set of indices of tensor dim `dim`: its `ranges` ascend and do not overlap.

    >>> panel = Panel(0, (range(0, 2), range(4, 6)))
    >>> panel.count(5), panel.within(range(1, 5))
    (3, (range(0, 1), range(3, 4)))
    """

    dim: int
    ranges: Ranges

    def count(self, end: int) -> int:
        """The number of the panel's indices below `end`."""
        return sum(max(0, min(part.stop, end) - part.start) for part in self.ranges)

    def within(self, held: range) -> Ranges:
        """The panel's indices in the range `held`, counted from its start."""
        both = (range(max(part.start, held.start), min(part.stop, held.stop)) for part in self.ranges)
        return tuple(range(part.start - held.start, part.stop - held.start) for part in both if part)

    def shape(self, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> Shape:
        """The local shape, on the rank at `coordinate`, of this panel of a tensor of global `shape`."""
        held = layout.region(shape, coordinate)
        return tuple(
            self.count(part.stop) - self.count(part.start) if dim == self.dim else len(part)
            for dim, part in enumerate(held)
        )

    def messages(self, step: Step, layout: Layout, shape: Sequence[int], coordinate: Coordinate) -> Messages | None:
        """The regions of this panel that the rank at `coordinate` sends and receives in `step`."""
        moved = messages(step, layout, shape, coordinate)
        if moved is None:
            return None
        before = layout.dim_range(self.dim, shape[self.dim], coordinate).start
        there = after(step, layout).dim_range(self.dim, shape[self.dim], coordinate).start
        send = tuple(self.region(region, before) for region in moved.send)
        return Messages(send, tuple(self.region(region, there) for region in moved.recv))

    def region(self, region: Region, origin: int) -> Region:
        """This panel's part of `region` of a local tensor that begins at `origin`, counted within the panel."""
        part, start = region[self.dim], self.count(origin)
        if not part:
            return region
        kept = range(self.count(origin + part.start) - start, self.count(origin + part.stop) - start)
        return (*region[: self.dim], kept, *region[self.dim + 1 :])


def cuts(size: int, tensors: Iterable[tuple[Layout, int]]) -> tuple[int, ...]:
    """The indices at which the local range of some rank begins or ends, for a dim of `size` in these tensors.

    >>> from dshard.mesh import Mesh
    >>> from dshard.placements import Shard
    >>> mesh = Mesh((2, 3), ("r", "c"))
    >>> cuts(12, [(Layout(mesh, (Shard(0), Shard(1))), 0), (Layout(mesh, (Shard(0), Shard(1))), 1)])
    (0, 4, 6, 8, 12)
    """
    points = {0, size}
    for layout, dim in tensors:
        for at in _coordinates(layout, dim):
            held = layout.dim_range(dim, size, at)
            points |= {held.start, held.stop}
    return tuple(sorted(points))


def slices(points: Sequence[int], n: int) -> tuple[Ranges, ...]:
    """Split every segment between `points` over `n` panels: all ranks send in each panel.

    MeshSlice (ISCA 2025) slices like this, where all parts are equal.

    >>> slices((0, 4, 6), 2)
    ((range(0, 2), range(4, 5)), (range(2, 4), range(5, 6)))
    """
    return tuple(_merged(chunk_of(segment, n, i) for segment in _segments(points)) for i in range(n))


def summa_panels(points: Sequence[int], bounds: Sequence[int], n: int) -> tuple[Ranges, ...]:
    """Split every segment between `points` into `n` panels, one after another: one rank sends all of a panel.

    The segments within one range between two of `bounds`, where the work is split, follow each other; those of
    different ranges are taken at the same time. This is the order of SUMMA (van de Geijn and Watts, 1997).

    >>> summa_panels((0, 2, 4, 6, 8), (0, 4, 8), 1)
    ((range(0, 2), range(4, 6)), (range(2, 4), range(6, 8)))
    """
    rows = [[s for s in _segments(points) if a <= s.start and s.stop <= b] for a, b in pairwise(bounds)]
    return tuple(
        _merged(chunk_of(row[number], n, i) for row in rows if number < len(row))
        for number in range(max(map(len, rows), default=0))
        for i in range(n)
    )


def owned(layout: Layout, dim: int, size: int, axis: int, n: int) -> tuple[Ranges, ...]:
    """Split the indices that the ranks at index 0 of mesh axis `axis` hold into `n` panels, then index 1, and so on."""
    held: list[dict[range, None]] = [{} for _ in range(layout.mesh.shape[axis])]
    for at in _coordinates(layout, dim):
        held[at[axis]][layout.dim_range(dim, size, at)] = None
    return tuple(_merged(chunk_of(part, n, i) for part in parts) for parts in held for i in range(n))


def _coordinates(layout: Layout, dim: int) -> Iterable[Coordinate]:
    """One coordinate for each local range of `dim`."""
    axes = layout.axes_of(dim)
    return product(*(range(n) if axis in axes else (0,) for axis, n in enumerate(layout.mesh.shape)))


def _segments(points: Sequence[int]) -> list[range]:
    return [range(start, stop) for start, stop in pairwise(points)]


def _merged(parts: Iterable[range]) -> Ranges:
    """Merge adjacent ranges: as few as possible, ascending."""
    merged: list[range] = []
    for part in sorted((part for part in parts if part), key=lambda part: part.start):
        if merged and merged[-1].stop == part.start:
            merged[-1] = range(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return tuple(merged)
