"""The spec of a distributed tensor, all but its data: interned, so that caches compare specs by identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

from dshard.comm import Scoped, mark_raised_by_all, plain
from dshard.layout import Layout, Shape, interned


class Spec:
    """Layout, global shape and strides, dtype and device type of a distributed tensor.

    Made by `spec_of`: equal specs are the same object. `has_partial` says whether some placement is partial.
    """

    __slots__ = ("__weakref__", "device", "dtype", "has_partial", "layout", "shape", "stride")

    layout: Layout
    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    has_partial: bool

    def __init__(
        self, layout: Layout, shape: Shape, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.shape, self.stride, self.dtype, self.device = layout, shape, stride, dtype, device
        self.has_partial = bool(layout.partial_axes())

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def with_layout(self, layout: Layout) -> Spec:
        """The spec of this tensor under `layout`."""
        return spec_of(layout, self.shape, self.stride, self.dtype, self.device)

    def meta(self) -> torch.Tensor:
        """A meta tensor of the global shape, strides and dtype."""
        with plain(), for_shapes():  # one tensor for all ranks where they are simulated
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")

    def __reduce__(self) -> tuple[object, ...]:
        return spec_of, (self.layout, self.shape, self.stride, self.dtype, self.device)

    def __repr__(self) -> str:
        return f"Spec([{self.layout}], {self.shape}, {self.dtype})"


_FOR_SHAPES: Scoped[None, bool] = Scoped("for shapes", bool)


@contextmanager
def for_shapes() -> Iterator[None]:
    """Mark the operators within the block as run on meta tensors to infer shapes, not by the user's program.

    All ranks refuse alike what they refuse.
    """
    with _FOR_SHAPES.entered(None):
        try:
            yield
        except Exception as error:
            mark_raised_by_all(error)
            raise


def is_for_shapes() -> bool:
    """Whether operators now run only to infer shapes."""
    return bool(_FOR_SHAPES.anywhere) and _FOR_SHAPES.value()


_SPECS: WeakValueDictionary[tuple[object, ...], Spec] = WeakValueDictionary()


def spec_of(layout: Layout, shape: Shape, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Spec:
    """The one spec with these values."""
    key = (layout, shape, stride, dtype, device)
    spec = _SPECS.get(key)
    if spec is None:
        spec = _SPECS[key] = Spec(interned(layout), shape, stride, dtype, device)
    return spec


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
