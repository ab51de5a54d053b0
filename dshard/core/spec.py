"""What a distributed tensor is, apart from its data: one interned value for each, so caches compare by identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

from dshard.comm import Scoped, mark_raised_by_all
from dshard.layout import Layout, Shape, interned


class Spec:
    """Layout, global shape and strides, dtype and device type of a distributed tensor.

    Made by `spec_of`: equal specs are the same object. `pending` says whether a reduction is.
    """

    __slots__ = ("__weakref__", "device", "dtype", "layout", "pending", "shape", "stride")

    layout: Layout
    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pending: bool

    def __init__(
        self, layout: Layout, shape: Shape, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.shape, self.stride, self.dtype, self.device = layout, shape, stride, dtype, device
        self.pending = bool(layout.partial_axes())

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def with_layout(self, layout: Layout) -> Spec:
        """The same tensor laid out by `layout`."""
        return spec_of(layout, self.shape, self.stride, self.dtype, self.device)

    def meta(self) -> torch.Tensor:
        """A tensor without data of the same global shape, strides and dtype."""
        with for_shapes():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __reduce__(self) -> tuple[object, ...]:
        return spec_of, (self.layout, self.shape, self.stride, self.dtype, self.device)

    def __repr__(self) -> str:
        return f"Spec([{self.layout}], {self.shape}, {self.dtype})"


_FOR_SHAPES: Scoped[None, bool] = Scoped("for shapes", bool)


@contextmanager
def for_shapes() -> Iterator[None]:
    """Within the block operators run on tensors without data to tell what comes out, and are no part of any step.

    What they refuse, they refuse on all ranks.
    """
    with _FOR_SHAPES.entered(None):
        try:
            yield
        except Exception as error:
            mark_raised_by_all(error)
            raise


def is_for_shapes() -> bool:
    """Whether what runs now only tells what would come out."""
    return bool(_FOR_SHAPES.anywhere) and _FOR_SHAPES.value()


_SPECS: WeakValueDictionary[tuple[object, ...], Spec] = WeakValueDictionary()


def spec_of(layout: Layout, shape: Shape, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Spec:
    """The spec with these values, the same object each time."""
    key = (layout, shape, stride, dtype, device)
    found = _SPECS.get(key)
    if found is None:
        found = _SPECS[key] = Spec(interned(layout), shape, stride, dtype, device)
    return found


def contiguous_stride(shape: Shape) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`, as torch counts them.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
