"""Views with memory of their own, kept equal to their base: a write to either is copied to the other."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from dshard.comm import mapped, on_each
from dshard.core.moves import expanded_as, redistribute_local, write_local
from dshard.core.signature import Function
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap, wrap_inference_view
from dshard.errors import LayoutError
from dshard.torch_private import OpOverload, no_torch_function, swap_tensors


@dataclass(eq=False)
class CopiedView:
    """The origin of a view of a redistributed copy: the base, and the copy's local tensor and spec."""

    base: Wrapper
    local: Tensor
    spec: Spec

    def write_back(self, op: object) -> None:
        """Write the copy, which `op` wrote through the view, to the base."""
        write_local(self.base._local_tensor, redistribute_local(self.local, self.spec, self.base._spec.layout, op))

    def refresh(self, op: object) -> None:
        """Write the base, which `op` wrote, to the copy."""
        write_local(self.local, redistribute_local(self.base._local_tensor, self.base._spec, self.spec.layout, op))

    def __deepcopy__(self, memo: dict[int, object]) -> CopiedView:
        origin = replace(self, base=copy_memory(self.base, memo), local=_copy_local(self.local, memo))
        shown_of(origin.base._local_tensor).append(ref(origin))
        return origin


@dataclass(eq=False)
class PartialView(CopiedView):
    """The origin of a view with memory of its own: of a sharded dim, exchanged or partial, or computed."""

    func: OpOverload
    rest: tuple[Any, ...]

    def write_back(self, op: object) -> None:
        """Scatter the view, which `op` wrote, into the base."""
        view = wrap(self.local, self.spec)
        scattered = SCATTERS[self.func](self.base, view, *self.rest)
        write_local(
            self.base._local_tensor,
            redistribute_local(scattered._local_tensor, scattered._spec, self.base._spec.layout, op),
        )

    def refresh(self, op: object) -> None:
        """Compute the view again from the base, which `op` wrote."""
        view = self.func(self.base, *self.rest)
        write_local(self.local, redistribute_local(view._local_tensor, view._spec, self.spec.layout, op))


@dataclass(eq=False)
class StridesBeyond(CopiedView):
    """The origin of strides that reach beyond the recorded view on which they were asked for.

    No recorded write may follow: torch's gradient has the elements beyond only then, and autograd, which makes the view
    again by its function, has them never.
    """

    def refresh(self, op: object) -> None:
        """Refuse a recorded write by `op`."""
        if torch.is_grad_enabled() and self.base.requires_grad:
            raise LayoutError(
                f"{op} writes, recorded, to memory of which as_strided gave elements beyond the view it was called on: "
                "call as_strided on the tensor itself, x.as_strided(...) where its view was x[1:].as_strided(...)"
            )


def register_if_copy(view: Wrapper | None, local: Tensor, base: Wrapper) -> None:
    """Attach its origin to a view of other dims if its local tensor is a copy, as strides may allow no view.

    It copies what is local, in the layout of the base, so that ranks need not agree whether theirs is a copy.
    """
    if view is not None and any(on_each(_is_apart, local, base._local_tensor)):
        register_view(view, CopiedView(base, local, base._spec))


def _is_apart(local: Tensor, base: Tensor) -> bool:
    return type(local) is type(base) is Tensor and local.data_ptr() != base.data_ptr() and local.numel() > 0


SCATTERS: dict[OpOverload, Function] = {
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten._conj.default: lambda base, view: torch.ops.aten.conj_physical.default(view),
    torch.ops.aten._neg_view.default: lambda base, view: torch.ops.aten.neg.default(view),
}
"""Operators of views that may have memory of their own, each with the operator that scatters it into its base."""

COMPUTED = frozenset({torch.ops.aten._conj.default, torch.ops.aten._neg_view.default})
"""Those whose views always have memory of their own: torch's lazy bits are resolved."""

RESHAPED_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._reshape_alias.default})
"""Operators of views whose local tensor is a copy where the local strides allow no view."""


def propagate_write(written: object, op: object) -> None:
    """Copy a write by `op` from views with memory of their own to their bases, and on to other views of these."""
    for t in written if isinstance(written, list | tuple) else (written,):
        origin: CopiedView | None = getattr(t, "_view_sync", None)
        while origin is not None:
            origin.write_back(op)
            origin = getattr(origin.base, "_view_sync", None)
        origins: Origins | None = getattr(getattr(root_of(t), "_local_tensor", None), "_view_syncs", None)
        if origins is not None:
            origins.writes += 1
            for reference in tuple(origins):  # a copy: a view that is computed again is registered, too
                view_origin = reference()
                if view_origin is not None:
                    view_origin.refresh(op)


def root_of(t: object) -> Any:
    """The tensor that `t` is a view of, or `t` itself."""
    return t._base if isinstance(t, Tensor) and t._is_view() else t


def register_view(outputs: object, origin: CopiedView) -> None:
    """Attach their origin to views, and refresh it whenever the base is written."""
    attach_view(outputs, origin)
    origins = shown_of(root_of(origin.base)._local_tensor)
    origins[:] = [*(reference for reference in origins if reference() is not None), ref(origin)]


class Origins(list[Callable[[], Any]]):
    """The origins of views of some memory, by weak references, and how often it was written since there are any."""

    writes = 0

    def __deepcopy__(self, memo: dict[int, object]) -> Origins:
        return Origins()  # to which each view that is copied adds its own


def copy_memory(x: Wrapper, memo: dict[int, object]) -> Wrapper:
    """A copy of `x` without a graph, which shares memory with other copies of `memo` as `x` does with their sources."""
    with no_torch_function():
        copy = wrap(_copy_local(x._local_tensor, memo), x._spec, x.storage_offset())
    origins: Origins | None = getattr(root_of(x)._local_tensor, "_view_syncs", None)
    if origins is not None:
        copy._local_tensor._view_syncs = deepcopy(origins, memo)  # type: ignore[attr-defined]
    copy._view_sync = deepcopy(x._view_sync, memo)
    return copy


def _copy_local(local: Tensor, memo: dict[int, object]) -> Tensor:
    """The one copy of a local tensor by `memo`, of which the storages are copied once."""
    copy: Any = memo.get(id(local))
    if copy is None:
        memo[id(local)] = copy = mapped(partial(deepcopy, memo=memo), local)
    return copy  # type: ignore[no-any-return]


def shown_of(local: Any) -> Origins:
    """The origins of views of the memory of `local`, which detached tensors share."""
    if not hasattr(local, "_view_syncs"):
        local._view_syncs = Origins()
    return local._view_syncs  # type: ignore[no-any-return]


def refuse_recorded_writes(view: Wrapper) -> None:
    """Refuse later recorded writes to memory of which strides beyond `view` are a view."""
    origin = StridesBeyond(view, view._local_tensor, view._spec)
    shown_of(root_of(view)._local_tensor).append(lambda: origin)


def part_of(base: Wrapper, part: Tensor, spec: Spec, start: int, func: OpOverload, rest: tuple[object, ...]) -> Wrapper:
    """The view `func(base, *rest)`, which begins at `start` in memory, of local tensors with memory of their own."""
    local = expanded_as(spec, part)
    wrap_one = partial(wrap_inference_view, base) if torch.is_inference_mode_enabled() else wrap
    view = wrap_one(local, spec, start)
    register_view(view, PartialView(base, local, spec, func, rest))
    return view


def keep_views(base: Wrapper, local: Tensor) -> None:
    """Let views of `base`, which gets the dims of `local` of the same memory, be views of the tensor that it was."""
    before = wrap(base._local_tensor, base._spec)
    attach_view(before, base._view_sync)
    origins = _give_views(base, before)
    if origins is not None and base is root_of(base):
        local._view_syncs = origins  # type: ignore[attr-defined]


def swap_content(x: Wrapper, view: Wrapper) -> None:
    """Let `x` be the tensor that its `view` is, and `view` the one that `x` was, of which others are views."""
    swap_tensors(x, view)
    for name in ("_local_tensor", "_spec", "_view_sync"):
        of_x = getattr(x, name)
        setattr(x, name, getattr(view, name))
        setattr(view, name, of_x)
    _give_views(x, view)


def _give_views(base: Wrapper, other: Wrapper) -> Origins | None:
    """Let views of `base` with memory of their own be views of `other`: the origins of all of the same memory."""
    origins: Origins | None = getattr(root_of(base)._local_tensor, "_view_syncs", None)
    for reference in origins or ():
        origin = reference()
        if origin is not None and origin.base is base:
            origin.base = other
    return origins


def attach_view(outputs: object, origin: CopiedView | None) -> None:
    """Attach their origin to views."""
    for t in outputs if isinstance(outputs, list | tuple) else (outputs,):
        t._view_sync = origin
