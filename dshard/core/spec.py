"""The spec of a distributed tensor, all but its data: interned, so that caches compare specs by identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from weakref import WeakValueDictionary

import torch
from torch.utils.checkpoint import checkpoint

from dshard.callers import callers
from dshard.comm import DeviceMesh, Scoped, device_mesh_of, mark_raised_by_all, plain
from dshard.core.context import settings_in_force
from dshard.core.torch_placements import torch_placements
from dshard.core.torch_wrappers import refuse_fully_shard
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Placement
from dshard.torch_dtensor import DTensorSpec, ShardOrderEntry, TensorMeta
from dshard.torch_private import dispatch_mode, n_dispatch_modes, without_dispatch_mode


class Spec(DTensorSpec):  # type: ignore[misc]  # a class of torch that is imported late
    """Layout, global shape and strides, dtype and device type of a distributed tensor.

    Made by `spec_of`: equal specs are the same object. `has_partial` says whether some placement is partial. The class
    derives from torch's spec: `mesh`, `placements`, `tensor_meta` and `shard_order` are of torch's classes.
    """

    __slots__ = ("device", "dtype", "layout", "shape", "stride")

    layout: Layout
    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __setattr__ = object.__setattr__  # torch's forgets a hash that is not kept here

    def __init__(
        self, layout: Layout, shape: Shape, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.shape, self.stride, self.dtype, self.device = layout, shape, stride, dtype, device

    @cached_property
    def has_partial(self) -> bool:
        """Whether the tensor is partial on some mesh axis."""
        return bool(self.layout.partial_axes())

    @property
    def mesh(self) -> DeviceMesh | Mesh:
        """torch's mesh, or the pure mesh if there are no processes."""
        refuse_fully_shard(next(callers()), self.layout.mesh)
        return device_mesh_of(self.layout.mesh)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The placements in torch's classes, strided ones where the order of the axes is not torch's."""
        return torch_placements(self.layout)

    @cached_property
    def shard_order(self) -> tuple[object, ...]:
        """torch's tuple of the mesh axes that shard each dim, from major to minor."""
        dims = self.layout.sharded_dims()
        return tuple(ShardOrderEntry(tensor_dim=dim, mesh_dims=self.layout.axes_of(dim)) for dim in dims)

    @cached_property
    def tensor_meta(self) -> object:
        """torch's record of shape, strides and dtype."""
        return TensorMeta(torch.Size(self.shape), self.stride, self.dtype)

    @property
    def use_strided_shard_as_shard_order(self) -> bool:
        """Whether strided placements stand for an order of the mesh axes."""
        return bool(self.layout.order)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @cached_property
    def expanded_dims(self) -> tuple[int, ...]:
        """The dims of which all entries have one memory."""
        return tuple(dim for dim, n in enumerate(self.shape) if n > 1 and self.stride[dim] == 0)

    def with_layout(self, layout: Layout) -> Spec:
        """The spec of this tensor under `layout`."""
        return spec_of(layout, self.shape, self.stride, self.dtype, self.device)

    def with_dtype(self, dtype: torch.dtype) -> Spec:
        """The spec of this tensor cast to `dtype`."""
        return self if dtype is self.dtype else spec_of(self.layout, self.shape, self.stride, dtype, self.device)

    def meta(self) -> torch.Tensor:
        """A meta tensor of the global shape, strides and dtype."""
        return meta_tensors([self])[0]

    def __reduce__(self) -> tuple[object, ...]:
        return spec_of, (self.layout, self.shape, self.stride, self.dtype, self.device)

    def __deepcopy__(self, memo: dict[int, object]) -> SpecUnderSettings:
        return SpecUnderSettings(self)

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        if type(other) is SpecUnderSettings:
            return self is other.origin and settings_in_force() == other.settings
        return bool(super()._check_equals(other, skip_shapes))

    def __repr__(self) -> str:
        return f"Spec([{self.layout}], {self.shape}, {self.dtype})"


class SpecUnderSettings(Spec):
    """A copy of a spec with the settings in force, as torch.compile's guard of a distributed tensor keeps it.

    torch copies the spec of an operand when it compiles a graph, and compares the spec of a later operand with the
    copy. Choices in the graph depend on sizes and settings, too, so the copy holds all of them: a graph serves no other
    spec, and no other settings.
    """

    __slots__ = ("origin", "settings")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec.layout, spec.shape, spec.stride, spec.dtype, spec.device)
        self.origin, self.settings = spec, settings_in_force()


_FOR_SHAPES: Scoped[None, bool] = Scoped("for shapes", bool)
is_for_shapes = _FOR_SHAPES.in_force
"""Whether operators now run only to infer shapes."""


@contextmanager
def for_shapes() -> Iterator[None]:
    """Mark the operators within the block as run on meta tensors to infer shapes, not by the user's program.

    Their errors are the same on all ranks.
    """
    if is_for_shapes():
        yield
        return
    with _FOR_SHAPES.entered(None), outside_checkpoint():
        try:
            yield
        except Exception as error:
            mark_raised_by_all(error)
            raise


def outside_checkpoint() -> AbstractContextManager[object]:
    """Out of torch's mode of selective checkpoints, which counts operators of the block: it runs no others when again.

    Shapes are inferred once, and a forward pass gathers weights that a recomputed one has.
    """
    is_selective = n_dispatch_modes() and type(dispatch_mode()).__module__ == checkpoint.__module__
    return without_dispatch_mode() if is_selective else nullcontext()


def meta_tensors(specs: Sequence[Spec]) -> list[torch.Tensor]:
    """For each spec a meta tensor of the global shape, strides and dtype."""
    with plain(), for_shapes():  # one tensor for all ranks where they are simulated
        return [torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device="meta") for x in specs]


_SPECS: WeakValueDictionary[tuple[object, ...], Spec] = WeakValueDictionary()


def spec_of(layout: Layout, shape: Shape, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Spec:
    """The one spec with these values."""
    key = (layout, shape, stride, dtype, device)
    spec = _SPECS.get(key)
    if spec is None:
        spec = _SPECS[key] = Spec(layout, shape, stride, dtype, device)
    return spec


def device_of_operands(specs: Sequence[Spec], asked: torch.device | str | None = None) -> torch.device:
    """The device of what an operator makes of tensors of these specs: the one asked for, whose index may be left out.

    Numbers of the CPU may stand beside tensors of another device.
    """
    if asked is None:
        return next((spec.device for spec in specs if spec.shape or spec.device.type != "cpu"), specs[0].device)
    device = torch.device(asked)
    return next((spec.device for spec in specs if spec.device.type == device.type and device.index is None), device)


def specs_of(layouts: Iterable[Layout], tensors: Iterable[torch.Tensor], device: torch.device) -> list[Spec]:
    """For each layout the spec of a tensor on `device` with the shape, strides and dtype of its tensor."""
    pairs = zip(layouts, tensors, strict=True)
    return [spec_of(layout, tuple(x.shape), x.stride(), x.dtype, device) for layout, x in pairs]


def contiguous_spec(layout: Layout, shape: Shape, dtype: torch.dtype, device: torch.device) -> Spec:
    """The spec of a contiguous tensor of `shape`."""
    return spec_of(layout, shape, contiguous_stride(shape), dtype, device)


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


def dense_stride(shape: Shape, like: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a dense tensor of `shape` whose dims have the memory order of the strides `like`.

    >>> dense_stride((2, 3), (1, 10))
    (1, 2)
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)
