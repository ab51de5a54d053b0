"""The base class of distributed tensors, a local tensor and a spec: the type used by code below `dshard.DTensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dshard.core.spec import Spec
from dshard.core.torch_wrappers import FlattenedByFSDP
from dshard.torch_dtensor import Base, TorchDTensor
from dshard.torch_private import make_wrapper_subclass as make
from dshard.torch_private import no_torch_function


class _LazyLocal:
    """Descriptor of a local tensor that is in flight: waits at the first access, and keeps the result.

    As it is no data descriptor, an instance's own `_local_tensor` takes precedence.
    """

    def __get__(self, x: Any, owner: Any = None) -> Any:
        if x is None:
            return self
        if "_lazy_local" not in x.__dict__:
            raise AttributeError(
                "a DTensor without a local part: it is made by DTensor.from_local or distribute_tensor"
            )
        x._local_tensor = local = x._lazy_local()
        del x._lazy_local
        return local


def _direct_attribute(name: str) -> property:
    """An attribute of tensors, read without a call of `__torch_function__`, with which it takes four times as long."""
    attribute: Any = getattr(Tensor, name)
    get, set_ = attribute.__get__, attribute.__set__

    def read(x: Wrapper) -> Any:
        with no_torch_function():
            return get(x)

    def write(x: Wrapper, value: object) -> None:
        with no_torch_function():
            set_(x, value)

    setter, deleter = (write, attribute.__delete__) if name == "grad" else (None, None)
    return property(read, setter, deleter, attribute.__doc__)


class UnlessAssigned(staticmethod):  # type: ignore[type-arg]
    """A static method that instances do not have while they are to be assigned: torch looks for it before it swaps."""

    def __get__(self, instance: Any, owner: type | None = None, /) -> Any:
        if instance is not None and instance._is_assigned:
            raise AttributeError(self.__name__)
        return super().__get__(instance, owner)


class Wrapper(Base):
    """A tensor without memory of its own: this rank's local tensor, and the spec of the global tensor.

    `public` is its only subclass, `dshard.DTensor`, of which every instance is made.
    """

    public: ClassVar[type[Wrapper]]
    _local_tensor: Tensor = _LazyLocal()  # type: ignore[assignment]
    _spec: Spec = None  # type: ignore[assignment]  # torch's class has slots: this one's values are in the instance
    _lazy_local: Callable[[], Tensor]
    # Stands in cache keys: whether the tensor that this one stands for in a trace is a leaf, or the mesh axes on which
    # its gradient is to stay partial.
    _leaf: bool | tuple[int, ...] | None = None
    keeps_terms: ClassVar[bool] = False  # whether the program ever wanted partial gradients, for which `_leaf` has axes
    # Their types are defined above this module: the origin of a copied view, the layout that gradients get, the options
    # of matmuls of which it is the weight, its copies in other layouts by placements, and the parameter that it has
    # replaced, if something holds that weakly.
    _view_sync: Any = None
    _gradient_leaf: Any = None
    _matmul: Any = None
    _moved: Any = None
    _replaced: Any = None
    _is_assigned = False  # whether `module.to` is to assign this tensor to `data` of a parameter, and not to swap both
    _fsdp_flattened = FlattenedByFSDP()

    if TYPE_CHECKING:  # torch says only that they give a tensor

        def detach(self) -> Wrapper: ...
        def to(self, *args: object, **kwargs: object) -> Wrapper: ...

    else:
        grad, shape, ndim, dtype, device = map(_direct_attribute, ("grad", "shape", "ndim", "dtype", "device"))
        is_cpu, is_cuda, is_meta, is_sparse = map(_direct_attribute, ("is_cpu", "is_cuda", "is_meta", "is_sparse"))

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        Wrapper.public = cls


DISTRIBUTED = (Wrapper, TorchDTensor)
"""The classes of distributed tensors: with torch 2.11, dshard's does not derive from torch's."""


def is_leaf(x: Wrapper) -> bool:
    """Whether `x`, or the tensor that it stands for in a trace, is a leaf of autograd."""
    return x._leaf if isinstance(x._leaf, bool) else x.is_leaf


def is_recorded(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd records an operator on `tensors`."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return False


def each_apart(tensors: Sequence[Any]) -> list[Any]:
    """Aliases of tensors, each with a node of its own in autograd's graph.

    The gradient for one then has no part that another, the same tensor or made of it, passes on.
    """
    return [x.view_as(x) if x.requires_grad else x for x in tensors]


def wrap(local: Tensor, spec: Spec, storage_offset: int | torch.SymInt | None = None) -> Wrapper:
    """The distributed tensor of spec `spec` of which this rank holds `local`.

    Views have the `storage_offset` that they would have on one device.
    """
    shape, stride, dtype, device = spec.shape, spec.stride, spec.dtype, spec.device
    out: Wrapper = make(Wrapper.public, shape, stride, storage_offset, None, dtype, torch.strided, device)
    out._local_tensor = local
    out._spec = spec
    return out


def wrap_inference_view(
    base: Tensor, local: Tensor, spec: Spec, storage_offset: int | torch.SymInt | None = None
) -> Wrapper:
    """`wrap` for a view of `base` in inference mode, which shares the version counter of a `base` made outside it."""
    with no_torch_function():
        is_inference = base.is_inference()
    with torch.inference_mode(is_inference):
        return wrap(local, spec, storage_offset)


def wrap_in_flight(local: Callable[[], Tensor], spec: Spec) -> Wrapper:
    """The distributed tensor of spec `spec` whose local tensor is in flight: its first use waits."""
    out: Wrapper = make(Wrapper.public, spec.shape, spec.stride, None, None, spec.dtype, torch.strided, spec.device)
    out._lazy_local = local
    out._spec = spec
    return out
