"""Placements of torch's classes, read without torch: by their names and fields."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, TypeGuard

from dshard.errors import LayoutError
from dshard.placements.types import TORCH_PLACEMENTS, TORCH_TWINS, Partial, Placement, Replicate, Shard


def from_torch(
    placements: Sequence[object], sizes: Sequence[int]
) -> tuple[tuple[Any, ...], tuple[tuple[int, tuple[int, ...]], ...]]:
    """`placements`, one for each mesh axis, with those of torch's classes as dshard's, and the order of the axes.

    torch's `_StridedShard(dim, split_factor=n)` says that this axis splits each of `n` parts of the dim: chunks that
    later mesh axes, of `sizes`, have made, or blocks, which are those that the last axis of the dim splits. What is no
    placement stays as it is.

    >>> from_torch([Shard(0), Replicate()], (2, 4))
    ((Shard(dim=0), Replicate()), ())

    Raises:
        LayoutError: a placement of torch's that no order of the axes makes, or that dshard does not have.
    """
    for placement in placements:
        if type(placement) not in TORCH_TWINS or getattr(placement, "blocks", 1) != 1:
            break
    else:
        return tuple(placements), ()
    own = tuple(own_placement(placement) for placement in placements)
    factors = [_factor(placement) for placement in placements]
    if len(own) != len(sizes) or all(factor == 1 for factor in factors):
        return own, ()
    blocks = {placement.dim: factor for placement, factor in zip(own, factors, strict=True) if _splits(placement)}
    dims = sorted(blocks)
    order = tuple((dim, _axes(dim, blocks[dim], own, factors, sizes)) for dim in dims)
    return tuple(Shard(p.dim, blocks=blocks[p.dim]) if _splits(p) else p for p in own), order


def _splits(placement: object) -> TypeGuard[Shard]:
    return isinstance(placement, Shard)


def _factor(placement: Any) -> int:
    """The number of parts of a dim that an axis splits: torch's split factor, or dshard's blocks."""
    return int(getattr(placement, "split_factor", getattr(placement, "blocks", 1)))


def _axes(
    dim: int, blocks: int, placements: Sequence[Placement], factors: Sequence[int], sizes: Sequence[int]
) -> tuple[int, ...]:
    """The mesh axes that shard `dim`, from major to minor: before each are the later axes that make its factor.

    All of them split `blocks`, too.
    """
    axes: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if isinstance(placement, Shard) and placement.dim == dim:
            before = [i for i in range(len(axes) + 1) if blocks * prod(sizes[a] for a in axes[:i]) == factors[axis]]
            if not before:
                if blocks > 1:
                    raise LayoutError(
                        f"mesh axis {axis} splits {factors[axis]} parts of dim {dim}, of which axis {axes[-1]} splits "
                        f"{blocks} blocks: give all axes that shard a dim the same, as in Shard({dim}, blocks={blocks})"
                    )
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
            return Shard(placement.dim)  # the parts that a strided one splits are seen beside the others
        case "Replicate":
            return Replicate()
        case "Partial":
            return Partial(placement.reduce_op)
        case _:
            return placement
