"""Pieces of a local tensor and the flat buffer in which a collective sends or receives them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from math import prod
from operator import attrgetter, is_
from sys import getrefcount

import torch
from torch import Tensor

from dshard.comm.workspace import Session
from dshard.layout import Region, Shape
from dshard.redistribute.step import numel
from dshard.torch_private import chunk_cat, storage_references

_DTYPE = attrgetter("dtype")


class Pieces:
    """The pieces of a local tensor of `shape` that a flat buffer holds one after the other.

    Pieces that are consecutive in the memory of a contiguous tensor, in its range `span`, are not copied. Pieces of one
    size along one dim are copied by one operator, on the tensor reshaped as `cut`: a copy for each piece would cost the
    host more than the collective.
    """

    __slots__ = ("cut", "dim", "is_all", "regions", "rows", "shape", "shapes", "sizes", "span")

    def __init__(self, regions: Sequence[Region], shape: Shape) -> None:
        self.regions = [region for region in regions if numel(region)]
        self.sizes = [numel(region) for region in self.regions]
        self.shapes = [tuple(map(len, region)) for region in self.regions]
        self.shape, self.span = shape, span_of(self.regions, shape)
        self.is_all = self.span is not None and len(self.span) == prod(shape)
        self.dim = cut_dim(self.regions, shape)
        self.cut: Shape | None = None
        self.rows: Shape = ()
        if self.dim is not None and len(set(self.sizes)) == 1:
            n = len(self.sizes)
            self.rows = (n, *self.shapes[0])
            self.cut = (*shape[: self.dim], n, shape[self.dim] // n, *shape[self.dim + 1 :])

    def pack(self, x: Tensor, space: Session) -> Tensor:
        """The flat buffer of a local tensor: a view of it where possible, else a buffer of `space`."""
        if self.span is not None and (x.is_contiguous() or not space.lends):
            flat = x.reshape(-1)
            return flat if self.is_all else flat[self.span.start : self.span.stop]
        if self.cut is not None:
            return space.dense(self.block(x)).view(-1)
        return space.concatenated(self.views(x), self.sizes)

    def unpack(self, flat: Tensor, space: Session) -> Tensor:
        """The local tensor of a flat buffer: a view of it where possible, else a buffer of `space` that replaces it."""
        if self.span is not None:
            return flat.view(self.shape)
        if self.cut is not None and self.dim is not None:
            out = space.dense(flat.view(self.rows).movedim(0, self.dim)).view(self.shape)
        else:
            out = self._placed(flat, space)
        if space.lends:
            space.give(flat)
        return out

    def _placed(self, flat: Tensor, space: Session) -> Tensor:
        parts = [part.view(size) for part, size in zip(flat.split(self.sizes), self.shapes, strict=True)]
        if not space.lends:
            out = joined(parts, self.regions) if self.dim is None else torch.cat(parts, self.dim)
            if out is not None:
                return out
        out = space.take(self.shape, flat)
        for piece, part in zip(self.views(out), parts, strict=True):
            piece.copy_(part)
        return out

    def block(self, x: Tensor) -> Tensor:
        """The equal pieces of a local tensor as one view, whose first dim is their number."""
        assert self.cut is not None
        cut = x.view(self.cut)  # a dim is always cut by a view
        return cut.movedim(self.dim, 0) if self.dim else cut

    def views(self, x: Tensor) -> Sequence[Tensor]:
        """The pieces of a local tensor."""
        if self.dim is None:
            return [view_of(x, region) for region in self.regions]
        return torch.split_with_sizes(x, [size[self.dim] for size in self.shapes], self.dim)


def joined(pieces: Sequence[Tensor], regions: Sequence[Region]) -> Tensor | None:
    """The pieces concatenated along the one dim in which their regions differ; None if they differ in several.

    >>> a, b = torch.zeros(2, 1), torch.ones(2, 2)
    >>> joined([b, a], [(range(2), range(1, 3)), (range(2), range(1))]).tolist()
    [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
    """
    apart = [dim for dim, parts in enumerate(zip(*regions, strict=True)) if len(set(parts)) > 1]
    if len(apart) > 1:
        return None
    dim = apart[0] if apart else 0
    order = sorted(range(len(pieces)), key=lambda i: regions[i][dim].start)
    return torch.cat([pieces[i] for i in order], dim)


class JoinedPieces:
    """The pieces of several local tensors in one flat buffer: those of all tensors for a rank, then for the next rank.

    Each tensor has a region for each rank, or one for all; `sizes` are the elements of the pieces in the order of the
    buffer, which has elements of `dtype`. Where all tensors have equal pieces along a dim, the buffer is a matrix with
    a row for each rank, in which a tensor is one block, of `widths` elements in a row; `is_by_rows` if these are the
    rows of the tensors, too.
    """

    __slots__ = ("dtype", "is_by_rows", "members", "owners", "rows", "sizes", "widths")

    def __init__(self, regions: Sequence[Sequence[Region]], shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.members, self.rows, self.dtype = [*map(Pieces, regions, shapes)], len(regions[0]), dtype
        pieces = [(i, numel(region)) for of_rank in zip(*regions, strict=True) for i, region in enumerate(of_rank)]
        self.sizes, self.owners = [size for _, size in pieces], [i for i, size in pieces if size]
        is_even = all(member.cut is not None and len(member.sizes) == self.rows for member in self.members)
        self.widths = self.sizes[: len(shapes)] if is_even else []
        self.is_by_rows = is_even and not any(member.dim for member in self.members)

    def pack(self, tensors: list[Tensor], space: Session) -> Tensor:
        """A flat buffer of these tensors, new, or the memory in which they are all there is.

        The list is emptied, so that they are freed while the buffer is sent.
        """
        flat = lying_together(tensors, self.dtype) if space.packs_in_place and self.rows == 1 else None
        if flat is None:
            flat = self._packed(tensors)
        tensors.clear()
        return flat

    def _packed(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.is_by_rows and all(map(is_, map(_DTYPE, tensors), repeat(self.dtype))):
            if self.rows == 1 and all(x.dim() == 1 for x in tensors):
                return torch.cat(list(tensors))  # of any strides
            if all(map(Tensor.is_contiguous, tensors)):
                return chunk_cat(tensors, 0, self.rows).view(-1)
        flat = tensors[0].new_empty(sum(self.sizes), dtype=self.dtype)
        if self.owners:
            parts, pieces = zip(*self._pairs(flat, tensors), strict=True)
            torch._foreach_copy_(parts, pieces)
        return flat

    def unpack(self, flat: Tensor, space: Session) -> list[Tensor]:
        """New local tensors with the elements of a flat buffer."""
        out = [flat.new_empty(member.shape) for member in self.members]
        if self.is_by_rows:
            rows = [x.view(self.rows, -1) for x in out]
            torch.split_with_sizes_copy(flat.view(self.rows, -1), self.widths, 1, out=rows)
        elif self.owners:
            parts, pieces = zip(*self._pairs(flat, out), strict=True)
            torch._foreach_copy_(pieces, parts)
        return out

    def _pairs(self, flat: Tensor, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the buffer and of the tensors with the same elements."""
        if self.widths:
            parts = flat.view(self.rows, -1).split(self.widths, 1)
            blocks = [member.block(x) for member, x in zip(self.members, tensors, strict=True)]
            yield from ((part.view(block.shape), block) for part, block in zip(parts, blocks, strict=True))
            return
        pieces = [iter(_views(member, x)) for member, x in zip(self.members, tensors, strict=True)]
        for i, part in zip(self.owners, flat.split([size for size in self.sizes if size]), strict=True):
            piece = next(pieces[i])
            yield part if piece.dim() == 1 else part.view(piece.shape), piece


class JoinedViews:
    """Several local tensors, of these shapes, one after the other in a flat buffer, whose memory they share."""

    __slots__ = ("shapes", "sizes")

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes, self.sizes = shapes, [*map(prod, shapes)]

    def unpack(self, flat: Tensor, space: Session) -> list[Tensor]:
        """Tensors in the memory of the buffer, each with a version counter of its own.

        Views would share the counter: a write to one would count as a write to each.
        """
        parts = zip(flat.split(self.sizes), self.shapes, strict=True)
        return [part.view(shape).data for part, shape in parts]


def lying_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The memory of contiguous tensors that fill it one after the other; None if anything else holds it."""
    if _references_to_memory(tensors) != _ALONE:
        return None
    memory = tensors[0].untyped_storage()
    begin = end = memory.data_ptr()
    for x in tensors:
        if x.data_ptr() != end or x.dtype is not dtype or not x.is_contiguous():
            return None
        end += x.nbytes
    if end != begin + memory.nbytes():
        return None
    return torch.empty(0, dtype=dtype, device=memory.device).set_(memory)


def _references_to_memory(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """References to the memory of these tensors, beyond theirs in C++, and in Python."""
    memory = tensors[0].untyped_storage()
    return storage_references(memory._cdata) - len(tensors), getrefcount(memory)


_ALONE = _references_to_memory([torch.empty(1, device="cpu")])
"""The references to a memory that nothing else holds."""


def _views(pieces: Pieces, x: Tensor) -> Sequence[Tensor]:
    """The pieces of a local tensor, flat where they are all of it, in order of its memory."""
    if not pieces.is_all or not x.is_contiguous():
        return pieces.views(x)
    return torch.split_with_sizes(x.view(-1), pieces.sizes)


def cut_dim(pieces: Sequence[Region], shape: Shape) -> int | None:
    """The one dim along which the pieces divide a tensor of `shape`, in order; None if there is none.

    The full tensor is one piece along dim 0.

    >>> cut_dim([(range(3), range(0, 3)), (range(3), range(3, 4))], (3, 4))
    1
    """
    cut = [dim for dim, size in enumerate(shape) if pieces and len(pieces[0][dim]) != size] or [0]
    if len(cut) != 1 or not pieces or not shape:
        return None
    end = 0
    for piece in pieces:
        for dim, part in enumerate(piece):
            if dim != cut[0] and part != range(shape[dim]):
                return None
        if piece[cut[0]].start != end:
            return None
        end = piece[cut[0]].stop
    return cut[0] if end == shape[cut[0]] else None


def span_of(pieces: Sequence[Region], shape: Shape) -> range | None:
    """The range of a contiguous tensor's memory that the pieces fill in order; None if they are not consecutive.

    >>> span_of([(range(1, 2), range(3)), (range(2, 3), range(3))], (4, 3))
    range(3, 9)
    """
    span = range(0)
    for piece in pieces:
        first = next((dim for dim, part in enumerate(piece) if len(part) != 1), len(shape))
        if any(len(part) != size for part, size in zip(piece[first + 1 :], shape[first + 1 :], strict=True)):
            return None
        start = sum(part.start * prod(shape[dim + 1 :]) for dim, part in enumerate(piece))
        if span and start != span.stop:
            return None
        span = range(span.start if span else start, start + numel(piece))
    return span


def view_of(x: Tensor, region: Region) -> Tensor:
    """A view of the elements of `x` within `region`."""
    for dim, indices in enumerate(region):
        x = x.narrow(dim, indices.start if indices else 0, len(indices))
    return x
