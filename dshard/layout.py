"""Layouts: a mesh, a placement for each of its axes, and the order of the axes that shard one tensor dim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from dshard.caches import cached
from dshard.errors import LayoutError, NotationError
from dshard.interned import Interned
from dshard.mesh import Coordinate, Mesh
from dshard.notebook import Drawn
from dshard.placements import (
    Partial,
    Placement,
    Replicate,
    Shard,
    chunk_sizes,
    cotangent,
    format_placements,
    from_torch,
    nested_chunk,
    parse_placements,
)
from dshard.placements.types import TORCH_TWINS
from dshard.validate import check_type, of_wrong_type, shown

_set = object.__setattr__
Region = tuple[range, ...]
Shape = tuple[int, ...]
DimOrder = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Layout(Interned, Drawn):
    """The layout of a tensor of any shape: a mesh, and a placement for each of its axes.

    Where several axes shard one tensor dim, the first of them splits it, the next splits each chunk, and so on: left to
    right as in torch, unless `order` says otherwise with pairs (tensor dim, axis indices from major to minor). Orders
    that are the default are dropped, so equal layouts are equal values. All axes of a dim split the same blocks of it.

    >>> layout = Layout(Mesh((2, 2), ("dp", "tp")), (Shard(0), Shard(0)))
    >>> str(layout), layout.local_shape((5, 3), (0, 1))
    ('dp:S(0) tp:S(0)', (1, 3))
    >>> layout.region((5, 3), (0, 1))
    (range(2, 3), range(0, 3))
    >>> packed = Layout(Mesh((2,), ("tp",)), (Shard(0, blocks=2),))
    >>> packed.local_shape((8, 3), (1,)), packed.block_range(0, 8, (1,))
    ((4, 3), range(2, 4))

    Raises:
        LayoutError: not one placement for each mesh axis, or an order that is no permutation.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[DimOrder, ...] = ()
    _axes: dict[int, tuple[int, ...]] = field(init=False, repr=False)
    _partial: tuple[int, ...] = field(init=False, repr=False)
    blocks: Mapping[int, int] = field(init=False, repr=False)
    """The tensor dims that are sharded in several blocks, with the number of these."""

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mesh):
            raise of_wrong_type(LayoutError)(
                f"a layout on {shown(self.mesh)}: give a dshard.Mesh, such as Mesh((2, 4), ('dp', 'tp'))"
            )
        placements, order = placements_on(self.mesh, self.placements), self.order
        if not {*map(type, placements)} <= TORCH_TWINS.keys():
            placements, strided = from_torch(placements, self.mesh.shape)
            order = order or strided
        _check_placements(self.mesh, placements)
        axes: dict[int, tuple[int, ...]] = {}
        blocks: dict[int, int] = {}
        partial = tuple([i for i, placement in enumerate(placements) if isinstance(placement, Partial)])
        for i, placement in enumerate(placements):
            if isinstance(placement, Shard):
                dim = placement.dim
                if dim < 0:
                    raise LayoutError(f"{placement} in a layout, which is of tensors of any shape: count dims from 0")
                if placement.blocks != blocks.get(dim, 1):
                    if dim in axes:
                        raise LayoutError(f"[{format_of(placements)}] shards dim {dim} in other blocks on each axis")
                    blocks[dim] = placement.blocks
                axes[dim] = (*axes[dim], i) if dim in axes else (i,)
        order = _canonical_order(axes, _pairs(order)) if order else ()
        axes.update(order)
        for name, value in (("placements", placements), ("order", order), ("_axes", axes), ("_partial", partial)):
            _set(self, name, value)
        _set(self, "blocks", blocks)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The indices of the mesh axes that shard tensor dim `dim`, from major to minor."""
        return self._axes.get(dim, ())

    def sharded_dims(self) -> tuple[int, ...]:
        """The tensor dims that some mesh axis shards, in increasing order."""
        return tuple(sorted(self._axes))

    def is_replicated(self) -> bool:
        """Whether each rank holds the global tensor: it is replicated on every mesh axis of more than one rank."""
        return all(isinstance(p, Replicate) or n == 1 for p, n in zip(self.placements, self.mesh.shape, strict=True))

    def differs_on_one_rank(self, other: Layout) -> bool:
        """Whether the layouts differ on mesh axes of one rank alone, so that each rank holds the same under both.

        >>> mesh = Mesh((1, 2), ("dp", "tp"))
        >>> Layout(mesh, (Shard(0), Shard(0))).differs_on_one_rank(Layout(mesh, (Replicate(), Shard(0))))
        True
        """
        axes = [axis for axis, n in enumerate(self.mesh.shape) if n > 1]
        dims = {*self.sharded_dims(), *other.sharded_dims()}
        in_order = [[[axis for axis in each.axes_of(dim) if axis in axes] for dim in dims] for each in (self, other)]
        return in_order[0] == in_order[1] and all(self.placements[axis] == other.placements[axis] for axis in axes)

    def partial_axes(self) -> tuple[int, ...]:
        """The indices of the mesh axes on which the tensor is partial."""
        return self._partial

    def dim_range(self, dim: int, size: int, coordinate: Coordinate) -> range:
        """The indices of tensor dim `dim`, of global size `size`, that the rank at `coordinate` holds.

        Raises:
            LayoutError: the dim is sharded in several blocks, so that the indices are no range.
        """
        if dim in self.blocks:
            raise LayoutError(
                f"dim {dim} of [{self}] is sharded in blocks: redistribute it to [{self.unblocked()}] first"
            )
        return nested_chunk(size, self.axes_of(dim), self.mesh.shape, coordinate)

    def block_range(self, dim: int, size: int, coordinate: Coordinate) -> range:
        """The indices within each block of tensor dim `dim`, of global size `size`, that a rank holds.

        Raises:
            LayoutError: the blocks do not divide the size.
        """
        blocks = self.blocks.get(dim, 1)
        if size % blocks:
            raise LayoutError(_no_blocks(dim, size, blocks))
        return nested_chunk(size // blocks, self.axes_of(dim), self.mesh.shape, coordinate)

    def region(self, shape: Sequence[int], coordinate: Coordinate) -> Region:
        """The region of a tensor of global shape `shape` that the rank at `coordinate` holds.

        Raises:
            LayoutError: a dim is sharded in several blocks: `regions` has the region of each.
        """
        return tuple([self.dim_range(dim, size, coordinate) for dim, size in enumerate(shape)])

    def regions(self, shape: Sequence[int], coordinate: Coordinate) -> tuple[Region, ...]:
        """The regions that the rank at `coordinate` holds: one for each block, major dims first."""
        if not self.blocks:
            return (self.region(shape, coordinate),)
        return tuple(product(*[self.ranges(dim, size, coordinate) for dim, size in enumerate(shape)]))

    def local_regions(self, shape: Sequence[int], coordinate: Coordinate) -> tuple[Region, ...]:
        """The regions of the rank's local tensor in which it holds those of `regions`, in the same order."""
        if not self.blocks:
            return (tuple(map(range, self.local_shape(shape, coordinate))),)
        ranges = []
        for dim, size in enumerate(shape):
            n = len(self.block_range(dim, size, coordinate))
            ranges.append([range(i * n, (i + 1) * n) for i in range(self.blocks.get(dim, 1))])
        return tuple(product(*ranges))

    def ranges(self, dim: int, size: int, coordinate: Coordinate) -> list[range]:
        """The indices of a dim that a rank holds, block by block."""
        held, blocks = self.block_range(dim, size, coordinate), self.blocks.get(dim, 1)
        starts = [i * (size // blocks) for i in range(blocks)]
        return [range(start + held.start, start + held.stop) for start in starts]

    def unblocked(self) -> Layout:
        """This layout with each dim sharded in one block."""
        if not self.blocks:
            return self
        placements = [Shard(p.dim) if isinstance(p, Shard) else p for p in self.placements]
        return Layout(self.mesh, tuple(placements), self.order)

    def unflattened(self, cuts: Mapping[int, int]) -> Layout:
        """The layout of the tensor with each dim of `cuts` unflattened into so many blocks and the rest.

        Each of these dims is sharded in that many blocks, or by no axis. Then the blocks are not sharded: this is how
        redistributions take blocks.

        >>> print(Layout(Mesh((2,), ("tp",)), (Shard(0, blocks=2),)).unflattened({0: 2}))
        tp:S(1)
        """

        def moved(dim: int) -> int:
            return dim + sum(cut < dim for cut in cuts) + (dim in cuts)

        blocks = {dim: n for dim, n in self.blocks.items() if dim not in cuts}
        placements = [
            Shard(moved(p.dim), blocks=blocks.get(p.dim, 1)) if isinstance(p, Shard) else p for p in self.placements
        ]
        return Layout(self.mesh, tuple(placements), tuple([(moved(dim), axes) for dim, axes in self.order]))

    def local_shape(self, shape: Sequence[int], coordinate: Coordinate) -> Shape:
        """The local shape, on the rank at `coordinate`, of a tensor of global shape `shape`."""
        if self.blocks:
            of_block = [len(self.block_range(dim, size, coordinate)) for dim, size in enumerate(shape)]
            return tuple([n * self.blocks.get(dim, 1) for dim, n in enumerate(of_block)])
        return tuple([len(self.dim_range(dim, size, coordinate)) for dim, size in enumerate(shape)])

    def local_numel(self, shape: Sequence[int]) -> int:
        """The number of elements of the largest local tensor."""
        return prod(self.largest_shape(shape))

    def leaves_empty(self, shape: Sequence[int]) -> bool:
        """Whether some rank holds no elements of a tensor of this shape, though it has elements."""
        for dim in self.sharded_dims():
            counts = [self.mesh.shape[axis] for axis in self.axes_of(dim)]
            if (0,) in chunk_sizes((shape[dim] // self.blocks.get(dim, 1),), counts) and 0 not in shape:
                return True
        return False

    def largest_shape(self, shape: Sequence[int]) -> Shape:
        """The largest local shape: that of the rank at coordinate 0, 0, ..."""
        sizes, local = self.mesh.shape, list(shape)
        for dim, axes in self._axes.items():
            if dim < len(local):
                blocks = self.blocks.get(dim, 1)
                local[dim] = blocks * -(-local[dim] // (blocks * prod(map(sizes.__getitem__, axes))))
        return tuple(local)

    def names_of(self, dim: int) -> tuple[str, ...]:
        """The names of the mesh axes that shard tensor dim `dim`, from major to minor."""
        return tuple([self.mesh.names[axis] for axis in self.axes_of(dim)])

    def replace(self, axis: int, placement: Placement) -> Layout:
        """This layout with another placement on the mesh axis of index `axis`, which comes last in its tensor dim.

        Where others shard that dim, it splits their blocks.

        Raises:
            LayoutError: no such axis.
        """
        _check_axis(self.mesh, axis)
        axes, before = dict(self._axes), self.placements[axis]
        if isinstance(placement, Shard) and placement.blocks != (blocks := self.blocks.get(placement.dim, 1)):
            shared = any(other != axis for other in self.axes_of(placement.dim))
            placement = Shard(placement.dim, blocks=blocks) if shared else placement
        placements = (*self.placements[:axis], placement, *self.placements[axis + 1 :])
        if isinstance(before, Shard):
            axes[before.dim] = tuple([a for a in axes[before.dim] if a != axis])
        if isinstance(placement, Shard):
            axes[placement.dim] = (*axes.get(placement.dim, ()), axis)
        return Layout(self.mesh, placements, _orders(axes))

    def split(self, dim: int, axes: Sequence[int]) -> Layout:
        """This layout with these mesh axes, which shard nothing, as the last ones that shard tensor dim `dim`.

        Raises:
            LayoutError: no such axis, or one that shards a dim.
        """
        placements = list(self.placements)
        for axis in axes:
            _check_axis(self.mesh, axis)
            if isinstance(placements[axis], Shard):
                raise LayoutError(f"mesh axis {axis} of [{self}] shards a dim: give axes that shard none, each once")
            placements[axis] = Shard(dim, blocks=self.blocks[dim]) if dim in self.blocks else Shard(dim)
        order = {dim: self.axes_of(dim) for dim in self.sharded_dims()}
        order[dim] = (*order.get(dim, ()), *axes)
        return Layout(self.mesh, tuple(placements), _orders(order))

    @cached("layouts", 65536)
    def cotangent(self) -> Layout:
        """The layout of the gradient of a tensor with this layout."""
        placements = tuple(map(cotangent, self.placements))
        return self if placements == self.placements else Layout(self.mesh, placements, self.order)

    def check(self, shape: Sequence[int]) -> None:
        """Refuse a tensor that has fewer dims than this layout shards.

        Raises:
            LayoutError: a Shard of a dim that the tensor does not have, or of blocks that do not divide its size.
        """
        for placement in self.placements:
            if isinstance(placement, Shard) and not 0 <= placement.dim < len(shape):
                raise LayoutError(_no_dim(placement.dim, shape))
        for dim, blocks in self.blocks.items():
            if shape[dim] % blocks:
                raise LayoutError(_no_blocks(dim, shape[dim], blocks))

    def __str__(self) -> str:
        text = format_placements(self.placements, self.mesh.names)
        orders = " ".join(f"{dim}:{','.join(self.mesh.names[a] for a in axes)}" for dim, axes in self.order)
        return f"{text}; {orders}" if orders else text


def overlap(a: Region, b: Region) -> Region | None:
    """The intersection of two regions, or None if it is empty."""
    both = tuple([range(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)])
    return both if all(both) else None


def layout_of(mesh: Mesh, placements: Iterable[object], ndim: int) -> Layout:
    """The layout of a tensor of `ndim` dims with these placements; negative dims count from the end.

    Placements of torch's classes are taken, too.
    """
    own: Any = tuple(placements) if type(placements) in (tuple, list) else placements_on(mesh, placements)
    try:
        return _layout_of(mesh, own, ndim)
    except TypeError:  # no placements, but something that has no hash
        _check_placements(mesh, own)
        raise


def placements_on(mesh: Mesh, placements: Iterable[object]) -> tuple[Any, ...]:
    """Check a sequence of placements, one for each axis of `mesh`, and return it as a tuple."""
    if type(placements) in (tuple, list):
        return tuple(placements)
    if isinstance(placements, Iterable) and not isinstance(placements, str | bytes | Mapping):
        return tuple(placements)
    if isinstance(placements, Shard | Replicate | Partial):
        mistake = f"{placements!r} is one placement"
    elif isinstance(placements, Layout):
        mistake = f"[{placements}] is a layout, which has a mesh: give its .placements"
    elif isinstance(placements, str):
        mistake = f"{placements!r} is text, which dshard.placements.parse_placements reads"
    else:
        mistake = f"{shown(placements)} is no sequence of placements"
    raise of_wrong_type(LayoutError)(
        f"{mistake}; for the mesh ({mesh}) give {mesh.ndim}, one for each mesh axis, as in {_example(mesh)}"
    )


def _example(mesh: Mesh) -> str:
    return f"[{', '.join(['Shard(0)', *['Replicate()'] * (mesh.ndim - 1)])}]"


def _check_axis(mesh: Mesh, axis: object) -> None:
    if not isinstance(axis, int) or not 0 <= axis < mesh.ndim:
        raise LayoutError(
            f"{axis!r} is no index of an axis of the mesh ({mesh}): use 0 to {mesh.ndim - 1}, "
            "as mesh.axis(name) gives it"
        )


def _orders(axes: Mapping[int, tuple[int, ...]]) -> tuple[DimOrder, ...]:
    """The pairs of those dims that several axes shard."""
    return tuple([pair for pair in axes.items() if len(pair[1]) > 1])


def _pairs(order: Iterable[object]) -> tuple[DimOrder, ...]:
    """An order as pairs of a tensor dim and the indices of mesh axes."""
    pairs = order.items() if isinstance(order, Mapping) else () if isinstance(order, str) else order
    checked: list[DimOrder] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], tuple | list):
            break
        checked.append((pair[0], tuple(pair[1])))
    else:
        if pairs and len(dict(checked)) == len(checked):
            return tuple(checked)
    raise LayoutError(
        f"the order {shown(order)}: give pairs of a tensor dim, each once, and the indices of the mesh axes that shard "
        "it from major to minor, as in ((0, (1, 0)),)"
    )


@cached("layouts", 4096)
def _layout_of(mesh: Mesh, placements: tuple[object, ...], ndim: int) -> Layout:
    own, strided = from_torch(placements, mesh.shape)
    _check_placements(mesh, own)
    resolved = tuple([_resolve(placement, ndim) for placement in own])
    return Layout(mesh, resolved, tuple([(dim % ndim, axes) for dim, axes in strided if ndim]))


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """The layout on `mesh` that `text` writes; `parse_layout(str(layout), layout.mesh) == layout`.

    >>> mesh = Mesh((2, 2), ("dp", "tp"))
    >>> parse_layout("dp:S(0) tp:S(0); 0:tp,dp", mesh).axes_of(0)
    (1, 0)
    """
    check_type(text, str, "a layout", "write one, as in 'dp:S(0) tp:R'", NotationError)
    check_type(mesh, Mesh, "the mesh of a layout", "give a dshard.Mesh", NotationError)
    placements, _, orders = text.partition(";")
    pairs: list[DimOrder] = []
    for word in orders.split():
        dim, colon, names = word.partition(":")
        if not colon or not dim.isdecimal():
            raise NotationError(f"{word!r} is no order of mesh axes: write 'dim:major,minor', as in '0:tp,dp'")
        pairs.append((int(dim), tuple([mesh.axis(name) for name in names.split(",")])))
    return Layout(mesh, parse_placements(placements, mesh.names), tuple(pairs))


def placed(layout: Layout, axes: Iterable[int], placement: Placement) -> Layout:
    """The layout with another placement on each of these mesh axes: see `Layout.replace`."""
    for axis in axes:
        layout = layout.replace(axis, placement)
    return layout


@cached("layouts", 4096)
def replicated(mesh: Mesh) -> Layout:
    """The layout in which each rank holds the whole tensor."""
    return Layout(mesh, (Replicate(),) * mesh.ndim)


_WHOLE_OR_SPLIT = (Shard, Replicate)


def _check_placements(mesh: Mesh, placements: tuple[Placement, ...]) -> None:
    if len(placements) != mesh.ndim:
        raise LayoutError(
            f"{len(placements)} placements [{format_of(placements)}] for the mesh ({mesh}): "
            f"give {mesh.ndim}, one for each mesh axis"
        )
    ops = set()
    for placement in placements:
        if isinstance(placement, _WHOLE_OR_SPLIT):
            continue
        if isinstance(placement, Partial):
            ops.add(placement.reduce_op)
        else:
            raise of_wrong_type(LayoutError)(
                f"{shown(placement)} is no placement: use Shard(dim), Replicate() or Partial(op){_of_torch(placement)}"
            )
    if len(ops) > 1 and ops != {"sum", "avg"}:
        raise LayoutError(
            f"[{format_of(placements)}] has partial placements of different reductions, whose order would matter: "
            "use one op, or sum and avg, which commute"
        )


def _of_torch(placement: object) -> str:
    kind = placement if isinstance(placement, type) else type(placement)
    if kind.__module__.startswith("torch."):
        return f" of dshard, not {kind.__module__}'s"
    return ", a value and not its class" if isinstance(placement, type) else ""


def format_of(placements: Iterable[object]) -> str:
    """Placements of any type as text, for messages about a user's arguments."""
    return " ".join(map(str, placements))


def _resolve(placement: Placement, ndim: int) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim + ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < ndim:
        raise LayoutError(f"{placement} is out of range: the tensor has {ndim} dims; use {_legal_dims(ndim)}")
    return Shard(dim) if placement.blocks == 1 else Shard(dim, blocks=placement.blocks)


def _no_blocks(dim: int, size: int, blocks: int) -> str:
    return (
        f"Shard({dim}, blocks={blocks}) of a dim of size {size}: blocks are of one size, so their number must divide "
        f"that of the dim; use Shard({dim})"
    )


def _no_dim(dim: int, shape: Sequence[int]) -> str:
    legal = _legal_dims(len(shape))
    return f"S({dim}) is out of range for shape {tuple(shape)}: the tensor has {len(shape)} dims; use {legal}"


def _legal_dims(ndim: int) -> str:
    return f"S({-ndim}) to S({ndim - 1}) or R" if ndim else "R"


def _canonical_order(axes: Mapping[int, tuple[int, ...]], order: tuple[DimOrder, ...]) -> tuple[DimOrder, ...]:
    kept = []
    for dim, ordered in sorted(order):
        default = axes.get(dim, ())
        if sorted(ordered) != list(default):
            raise LayoutError(
                f"the order {ordered} of tensor dim {dim} must name the mesh axes that shard it, {default}, once each"
            )
        if tuple(ordered) != default:
            kept.append((dim, tuple(ordered)))
    return tuple(kept)
