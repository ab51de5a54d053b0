"""Pieces of a local tensor and the flat buffer in which a collective sends or receives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from math import prod
from operator import attrgetter, is_

import torch
from torch import Tensor

from dshard.comm.traced_collectives import joined, traced
from dshard.comm.workspace import Session
from dshard.layout import Region, Shape
from dshard.redistribute import numel
from dshard.torch_private import chunk_cat

Local = Callable[[Tensor], Tensor]
_DTYPE = attrgetter("dtype")


class Pieces:
    """The pieces of a local tensor of `shape` that a flat buffer holds one after the other.

    Pieces that are consecutive in the memory of a contiguous tensor, in its range `span`, are not copied. Pieces of one
    size along one dim are copied by one operator, on the tensor reshaped as `cut`: a copy for each piece would cost the
    host more than the collective. `packer` and `unpacker` make functions that allocate; `pack` and `unpack` use buffers
    of a workspace.
    """

    __slots__ = ("cut", "dim", "regions", "shape", "shapes", "sizes", "span")

    def __init__(self, regions: Sequence[Region], shape: Shape) -> None:
        self.regions = [region for region in regions if numel(region)]
        self.sizes = [numel(region) for region in self.regions]
        self.shapes = [tuple(map(len, region)) for region in self.regions]
        self.shape, self.span = shape, span_of(self.regions, shape)
        self.dim = cut_dim(self.regions, shape)
        self.cut: Shape | None = None
        if self.dim is not None and len(set(self.sizes)) == 1:
            n = len(self.sizes)
            self.cut = (*shape[: self.dim], n, shape[self.dim] // n, *shape[self.dim + 1 :])

    def packer(self) -> Local:
        """A function that makes the flat buffer of a local tensor; a view where possible."""
        if self.span is not None:
            start, stop = self.span.start, self.span.stop
            return Tensor.flatten if stop - start == prod(self.shape) else lambda x: x.reshape(-1)[start:stop]
        if self.cut is not None:
            return lambda x: self.block(x).flatten()
        return self._gathered

    def unpacker(self) -> Local:
        """A function that makes the local tensor of a flat buffer; a view where possible."""
        shape, dim = self.shape, self.dim
        if self.span is not None:
            return lambda flat: flat.view(shape)
        if self.cut is not None and dim is not None:
            rows = (len(self.shapes), *self.shapes[0])
            return lambda flat: flat.view(rows).movedim(0, dim).contiguous().view(shape)
        return self._placed

    def pack(self, x: Tensor, space: Session) -> Tensor:
        """The flat buffer of a local tensor: a view of it where possible, else a buffer of `space`."""
        if self.span is not None and x.is_contiguous():
            return x.view(-1)[self.span.start : self.span.stop]
        flat = space.take((sum(self.sizes),), x)
        self._fill(flat, x)
        return flat

    def unpack(self, flat: Tensor, space: Session) -> Tensor:
        """The local tensor of a flat buffer: a view of it where possible, else a buffer of `space` that replaces it."""
        if self.span is not None:
            return flat.view(self.shape)
        out = space.take(self.shape, flat)
        for piece, part in self._pairs(out, flat):
            piece.copy_(part)
        space.give(flat)
        return out

    def _fill(self, flat: Tensor, x: Tensor) -> None:
        for piece, part in self._pairs(x, flat):
            part.copy_(piece)

    def _pairs(self, x: Tensor, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a local tensor and of its flat buffer with the same elements."""
        if self.cut is not None:
            yield self.block(x), flat.view(len(self.shapes), *self.shapes[0])
            return
        for piece, part in zip(self.views(x), flat.split(self.sizes), strict=True):
            yield piece, part.view(piece.shape)

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

    def _gathered(self, x: Tensor) -> Tensor:
        if traced(x):
            return torch.cat([view_of(x, region).reshape(-1) for region in self.regions])
        flat = x.new_empty(sum(self.sizes))
        self._fill(flat, x)
        return flat

    def _placed(self, flat: Tensor) -> Tensor:
        parts = [part.view(size) for part, size in zip(flat.split(self.sizes), self.shapes, strict=True)]
        if self.dim is not None:
            return torch.cat(parts, self.dim)
        if traced(flat):
            concatenated = joined(parts, self.regions)
            if concatenated is not None:
                return concatenated
        out = flat.new_empty(self.shape)
        for part, region in zip(parts, self.regions, strict=True):
            view_of(out, region).copy_(part)
        return out


class JoinedPieces:
    """The pieces of several local tensors in one flat buffer: those of all tensors for a rank, then for the next rank.

    Each tensor has a region for each rank, or one for all; `sizes` are the elements of the pieces in the order of the
    buffer. Where all tensors have equal pieces along a dim, the buffer is a matrix with a row for each rank, in which a
    tensor is one block, of `widths` elements in a row; `is_by_rows` if these are the rows of the tensors, too.
    """

    __slots__ = ("is_by_rows", "members", "owners", "rows", "shapes", "sizes", "widths")

    def __init__(self, regions: Sequence[Sequence[Region]], shapes: Sequence[Shape]) -> None:
        self.members, self.rows = [*map(Pieces, regions, shapes)], len(regions[0])
        pieces = [(i, numel(region)) for of_rank in zip(*regions, strict=True) for i, region in enumerate(of_rank)]
        self.sizes, self.owners = [size for _, size in pieces], [i for i, size in pieces if size]
        is_even = all(member.cut is not None and len(member.sizes) == self.rows for member in self.members)
        self.widths = self.sizes[: len(shapes)] if is_even else []
        self.is_by_rows = is_even and not any(member.dim for member in self.members)

    def pack(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The flat buffer of these tensors, cast to `dtype`."""
        if self.is_by_rows and all(map(is_, map(_DTYPE, tensors), repeat(dtype))):
            if self.rows == 1 and all(x.dim() == 1 for x in tensors):
                return torch.cat(list(tensors))  # of any strides
            if all(map(Tensor.is_contiguous, tensors)):
                return chunk_cat(tensors, 0, self.rows).view(-1)
        flat = tensors[0].new_empty(sum(self.sizes), dtype=dtype)
        if self.owners:
            parts, pieces = zip(*self._pairs(flat, tensors), strict=True)
            torch._foreach_copy_(parts, pieces)
        return flat

    def unpack(self, flat: Tensor) -> list[Tensor]:
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


def _views(pieces: Pieces, x: Tensor) -> Sequence[Tensor]:
    """The pieces of a local tensor, flat where they are all of it, in order of its memory."""
    if pieces.span is None or len(pieces.span) != x.numel() or not x.is_contiguous():
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
