"""Placements of torch's classes, read without torch: by their names and fields."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from dshard.errors import LayoutError
from dshard.placements.types import TORCH_PLACEMENTS, TORCH_TWINS, Partial, Placement, Replicate, Shard


def from_torch(
    placements: Sequence[object], sizes: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[tuple[int, tuple[int, ...]], ...]]:
    """`placements`, one for each mesh axis, with those of torch's classes as dshard's, and the order of the axes.

    torch's `_StridedShard(dim, split_factor=n)` says that `n` chunks of the dim were made by later mesh axes, of
    `sizes`, before this axis split each. What is no placement stays as it is.

    >>> from_torch([Shard(0), Replicate()], (2, 4))
    ((Shard(dim=0), Replicate()), ())

    Raises:
        LayoutError: a placement of torch's that no order of the axes makes, or that dshard does not have.
    """
    for placement in placements:
        if type(placement) not in TORCH_TWINS:
            break
    else:
        return tuple(placements), ()
    own = tuple(own_placement(placement) for placement in placements)
    factors = [getattr(placement, "split_factor", 1) for placement in placements]
    if len(own) != len(sizes) or all(factor == 1 for factor in factors):
        return own, ()
    dims = sorted({placement.dim for placement in own if isinstance(placement, Shard)})
    return own, tuple((dim, _axes(dim, own, factors, sizes)) for dim in dims)


def _axes(dim: int, placements: Sequence[Placement], factors: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes that shard `dim`, from major to minor: before each are the later axes that make its factor."""
    axes: list[int] = []
    for axis in reversed(range(len(placements))):
        if placements[axis] == Shard(dim):
            before = [i for i in range(len(axes) + 1) if prod(sizes[a] for a in axes[:i]) == factors[axis]]
            if not before:
                strided = f"_StridedShard(dim={dim}, split_factor={factors[axis]}) on mesh axis {axis}"
                raise LayoutError(
                    f"{strided}, of {sizes[axis]} ranks: no order of the axes {axes}, of {[sizes[a] for a in axes]} "
                    "ranks, makes that many chunks first"
                )
            axes.insert(before[0], axis)
    return tuple(axes)


def own_placement(placement: Any) -> Any:
    """`placement` in dshard's class, if its class is torch's or derives from that; as it is if not."""
    names = [kind.__name__ for kind in type(placement).__mro__ if kind.__module__ == TORCH_PLACEMENTS]
    match names[0] if names else "":
        case "Shard" | "_StridedShard":
            return Shard(placement.dim)
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(placement.reduce_op)
        case _:
            return placement
