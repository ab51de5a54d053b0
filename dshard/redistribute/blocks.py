"""Redistributions of dims that are sharded in blocks: those of the tensor with these dims unflattened.

`Shard(dim, blocks=n)` is `Shard(dim + 1)` of the tensor whose dim has become (n, size / n), so all steps, prices and
messages are those of unblocked layouts. Layouts with other blocks of one dim are no layouts of one unflattened tensor:
from one to the other an exchange sends each rank what it lacks.

Design: docs/design/0027-blocks.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dshard.layout import Layout, Shape
from dshard.placements import Shard


def unflattened_ends(src: Layout, dst: Layout, shape: Shape) -> tuple[Layout, Layout, Shape] | None:
    """The layouts and the shape of the tensor with its blocked dims unflattened; None if a dim gets other blocks."""
    if with_blocks_of(src, dst) is not src:
        return None
    cuts = {**src.blocks, **dst.blocks}
    return src.unflattened(cuts), dst.unflattened(cuts), unflattened_shape(shape, cuts)


def unflattened_shape(shape: Sequence[int], cuts: Mapping[int, int]) -> Shape:
    """The shape with each dim of `cuts` unflattened into so many blocks and the rest.

    >>> unflattened_shape((6, 4), {0: 3})
    (3, 2, 4)
    """
    sizes: list[int] = []
    for dim, size in enumerate(shape):
        sizes += [cuts[dim], size // cuts[dim]] if dim in cuts else [size]
    return tuple(sizes)


def exchanged_axes(src: Layout, dst: Layout) -> tuple[str, ...] | None:
    """The mesh axes of the dims that have other blocks afterwards, if nothing else changes; else None."""
    if with_blocks_of(src, dst) is not dst:
        return None
    axes = {axis for dim in src.sharded_dims() if _differ(src, dst, dim) for axis in src.axes_of(dim)}
    return tuple([src.mesh.names[axis] for axis in sorted(axes)])


def with_blocks_of(layout: Layout, other: Layout) -> Layout:
    """`layout` with the blocks of `other` in the dims that both shard."""
    dims = [dim for dim in layout.sharded_dims() if _differ(layout, other, dim)]
    if not dims:
        return layout
    placements = [
        Shard(p.dim, blocks=other.blocks.get(p.dim, 1)) if isinstance(p, Shard) and p.dim in dims else p
        for p in layout.placements
    ]
    order = tuple((dim, layout.axes_of(dim)) for dim in layout.sharded_dims())
    return Layout(layout.mesh, tuple(placements), order)


def _differ(src: Layout, dst: Layout, dim: int) -> bool:
    """Whether both layouts shard the dim, in other blocks."""
    return bool(src.axes_of(dim) and dst.axes_of(dim)) and src.blocks.get(dim, 1) != dst.blocks.get(dim, 1)
