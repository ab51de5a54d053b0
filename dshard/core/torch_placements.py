"""Placements whose classes derive from torch's and from dshard's, for the code of either library."""

from __future__ import annotations

from math import prod
from typing import Any

from dshard.layout import Layout
from dshard.placements import Partial, Placement, Replicate, Shard, own_placement
from dshard.torch_dtensor import TorchPartial, TorchReplicate, TorchShard, TorchStridedShard


class _Both:
    """The base of the classes below, whose methods are those of the equal placement of dshard."""

    def own(self) -> Placement:
        """The placement in dshard's class alone."""
        return own_placement(self)  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        return self.own() == other

    def __hash__(self) -> int:
        return hash(self.own())

    def __repr__(self) -> str:
        return repr(self.own())

    def __str__(self) -> str:
        return str(self.own())

    def is_shard(self, dim: int | None = None) -> bool:
        return self.own().is_shard(dim)

    def is_replicate(self) -> bool:
        return self.own().is_replicate()

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return self.own().is_partial(reduce_op)

    def __reduce__(self) -> tuple[object, ...]:
        return in_both_classes, (self.own(),)


class TensorShard(_Both, TorchShard, Shard):
    """A Shard of both libraries."""


class TensorStridedShard(_Both, TorchStridedShard, Shard):  # type: ignore[misc]  # a class of torch that is imported late
    """A Shard on an axis that splits chunks which later axes have made; equal to torch's `_StridedShard`."""

    __eq__, __hash__, __repr__ = TorchStridedShard.__eq__, TorchStridedShard.__hash__, TorchStridedShard.__repr__

    def __reduce__(self) -> tuple[object, ...]:
        return strided, (self.dim, self.split_factor)


def strided(dim: int, factor: int) -> Placement:
    """A Shard on an axis that splits `factor` chunks."""
    make: Any = TensorStridedShard  # dshard's Shard, from which it derives, has no factor
    return make(dim, split_factor=factor)  # type: ignore[no-any-return]


class TensorReplicate(_Both, TorchReplicate, Replicate):
    """A Replicate of both libraries."""


class TensorPartial(_Both, TorchPartial, Partial):  # type: ignore[misc]
    """A Partial of both libraries."""


def torch_placements(layout: Layout) -> tuple[Placement, ...]:
    """The placements of `layout`, one for each mesh axis, in classes that are torch's, too.

    An axis that splits chunks which a later axis has made, by the layout's order, has a `TensorStridedShard`.
    """
    return tuple(_torch_placement(layout, axis) for axis in range(layout.mesh.ndim))


def _torch_placement(layout: Layout, axis: int) -> Placement:
    placement = layout.placements[axis]
    if not isinstance(placement, Shard):
        return in_both_classes(placement)
    axes = layout.axes_of(placement.dim)
    factor = prod(layout.mesh.shape[other] for other in axes[: axes.index(axis)] if other > axis)
    return in_both_classes(placement) if factor == 1 else strided(placement.dim, factor)


def in_both_classes(placement: Placement) -> Placement:
    """`placement`, of dshard's class alone, in the class that derives from torch's, too."""
    match placement:
        case Partial(reduce_op):
            return TensorPartial(reduce_op)
        case Shard(dim):
            return TensorShard(dim)
        case _:
            return TensorReplicate()
