"""Placements whose classes derive from torch's and from dshard's, for the code of either library.

torch's functions ask for its own classes, and count what is none of them as replicated. So `Shard(0)` makes an instance
of both, once this module is there; equal ones are one object, so that warm calls make none and compare none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from typing_extensions import Self

from dshard.caches import Cache
from dshard.errors import LayoutError
from dshard.layout import Layout
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard
from dshard.placements.types import TORCH_TWINS, checked_blocks, checked_dim, checked_reduce_op
from dshard.torch_dtensor import TorchPartial, TorchReplicate, TorchShard, TorchStridedShard

__all__ = ["Partial", "Placement", "Replicate", "Shard", "check_blocks_of_torch", "strided", "torch_placements"]


_INTERNED = Cache("placements", 256, record=True)


def _interned(kind: Any, *fields: object) -> Any:
    """The one placement of class `kind` with these fields."""
    placement = _INTERNED.get((kind, *fields))
    if placement is None:
        placement = super(kind, kind).__new__(kind)
        super(kind, placement).__init__(*fields)
        _INTERNED.add((kind, *fields), placement)
    return placement


class TensorShard(TorchShard, Shard):
    """A Shard of both libraries: what `Shard(dim)` makes."""

    def __new__(cls, dim: int, blocks: int = 1) -> Self:
        dim = dim if type(dim) is int else checked_dim(dim)
        blocks = blocks if type(blocks) is int and blocks > 0 else checked_blocks(blocks)
        if blocks > 1:
            blocked: Any = TensorBlockedShard(dim, blocks)
            return blocked  # type: ignore[no-any-return]
        return _interned(cls, dim)  # type: ignore[no-any-return]

    __init__ = object.__init__

    __eq__, __hash__ = Shard.__eq__, Shard.__hash__
    __str__, __repr__ = Shard.__str__, Shard.__repr__

    def __reduce__(self) -> tuple[object, ...]:
        return Shard, (self.dim,)


class TensorStridedShard(TorchStridedShard, Shard):  # type: ignore[misc]  # a class of torch that is imported late
    """A Shard on an axis that splits chunks which later axes have made; equal to torch's `_StridedShard`."""

    is_shard, is_replicate, is_partial = Shard.is_shard, Shard.is_replicate, Shard.is_partial

    def __reduce__(self) -> tuple[object, ...]:
        return strided, (self.dim, self.split_factor)


class TensorBlockedShard(TensorStridedShard):
    """A Shard in blocks: what `Shard(dim, blocks=n)` makes; equal to torch's `_StridedShard(dim, split_factor=n)`."""

    def __new__(cls, dim: int, blocks: int) -> Self:
        placement: Self | None = _INTERNED.get((cls, dim, blocks))
        if placement is None:
            placement = super().__new__(cls)
            TorchStridedShard.__init__(placement, dim, split_factor=blocks)
            _INTERNED.add((cls, dim, blocks), placement)
        return placement

    __init__ = object.__init__

    @property
    def blocks(self) -> int:
        """The number of blocks, torch's split factor."""
        return int(self.split_factor)

    __eq__, __hash__ = Shard.__eq__, Shard.__hash__
    __str__, __repr__ = Shard.__str__, Shard.__repr__

    def __reduce__(self) -> tuple[object, ...]:
        return Shard, (self.dim, self.blocks)


class TensorReplicate(TorchReplicate, Replicate):
    """A Replicate of both libraries: what `Replicate()` makes."""

    def __new__(cls) -> Self:
        return _interned(cls)  # type: ignore[no-any-return]

    __init__ = object.__init__
    __eq__, __hash__, __str__ = Replicate.__eq__, Replicate.__hash__, Replicate.__str__

    def __repr__(self) -> str:
        return "Replicate()"

    def __reduce__(self) -> tuple[object, ...]:
        return Replicate, ()


class TensorPartial(TorchPartial, Partial):  # type: ignore[misc]
    """A Partial of both libraries: what `Partial(reduce_op)` makes."""

    def __new__(cls, reduce_op: ReduceOp = "sum") -> Self:
        return _interned(cls, checked_reduce_op(reduce_op))  # type: ignore[no-any-return]

    __init__ = object.__init__
    __eq__, __hash__, __str__ = Partial.__eq__, Partial.__hash__, Partial.__str__

    def __repr__(self) -> str:
        return f"Partial(reduce_op={self.reduce_op!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Partial, (self.reduce_op,)


TORCH_TWINS.update({Shard: TensorShard, Replicate: TensorReplicate, Partial: TensorPartial})
TORCH_TWINS.update({kind: kind for kind in TORCH_TWINS.values()})


def strided(dim: int, factor: int) -> Placement:
    """A Shard on an axis that splits `factor` chunks."""
    make: Any = TensorStridedShard  # dshard's Shard, from which it derives, has no factor
    return make(dim, split_factor=factor)  # type: ignore[no-any-return]


def torch_placements(layout: Layout) -> tuple[Placement, ...]:
    """The placements of `layout`, one for each mesh axis, in classes that are torch's, too.

    An axis that splits chunks which a later axis has made, by the layout's order, has a `TensorStridedShard`; so has
    one that splits blocks.
    """
    if not layout.order:
        return layout.placements
    return tuple(_torch_placement(layout, axis) for axis in range(layout.mesh.ndim))


def check_blocks_of_torch(layout: Layout, shape: Sequence[int]) -> None:
    """Refuse blocks that torch's `_StridedShard` does not mean: uneven ones, and those that several axes split.

    torch cuts a dim of uneven parts elsewhere than between blocks, and gathers wrong values over several axes.

    Raises:
        LayoutError: there are such blocks.
    """
    for dim, blocks in layout.blocks.items():
        sizes = [n for axis in layout.axes_of(dim) if (n := layout.mesh.shape[axis]) > 1]
        if len(sizes) < 2 and not shape[dim] % (blocks * prod(sizes)):
            continue
        each = f"of {shape[dim] / blocks:g} entries for {prod(sizes)} ranks"
        raise LayoutError(
            f"[{layout}] of shape {tuple(shape)}: blocks of dim {dim} {each} on {len(sizes)} mesh axes, where torch's "
            "_StridedShard takes even parts on one axis; redistribute it to one block, or pad the dim"
        )


def _torch_placement(layout: Layout, axis: int) -> Placement:
    placement = layout.placements[axis]
    if not isinstance(placement, Shard):
        return placement
    axes = layout.axes_of(placement.dim)
    factor = prod(layout.mesh.shape[other] for other in axes[: axes.index(axis)] if other > axis)
    return placement if factor == 1 else strided(placement.dim, placement.blocks * factor)
