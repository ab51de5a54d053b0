"""Views that do not share the memory of their base: a write to either reaches the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.core.moves import redistribute_local, write_local
from dshard.core.spec import Spec
from dshard.core.wrapper import wrap


@dataclass(eq=False)
class CopiedView:
    """Where a view that does not share the memory of its base comes from: a moved copy of the base that it shows."""

    base: Any
    local: Tensor
    spec: Spec

    def write_back(self, op: object) -> None:
        """Bring the copy, which `op` wrote through the view, back to the base."""
        write_local(self.base._local, redistribute_local(self.local, self.spec, self.base._spec.layout, op))

    def refresh(self, op: object) -> None:
        """Bring the base, which `op` wrote, to the copy."""
        write_local(self.local, redistribute_local(self.base._local, self.base._spec, self.spec.layout, op))


@dataclass(eq=False)
class PartialView(CopiedView):
    """Where a view comes from whose memory is its own: of a split dim, sent or pending."""

    func: OpOverload
    rest: tuple[Any, ...]

    def write_back(self, op: object) -> None:
        """Put the view, which `op` wrote, into the base."""
        view = wrap(self.local, self.spec)
        whole = SCATTERS[self.func](self.base, view, *self.rest)
        write_local(self.base._local, redistribute_local(whole._local, whole._spec, self.base._spec.layout, op))

    def refresh(self, op: object) -> None:
        """Take the view anew."""
        again = self.func(self.base, *self.rest)
        write_local(self.local, redistribute_local(again._local, again._spec, self.spec.layout, op))


SCATTERS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
}
"""Views that may have memory of their own, and what puts them back."""


def propagate_write(written: Any, op: object) -> None:
    """After a write by `op`: where it went through views with memory of their own it reaches bases and other views."""
    for t in written if isinstance(written, list | tuple) else (written,):
        origin: CopiedView | None = getattr(t, "_view_sync", None)
        while origin is not None:
            origin.write_back(op)
            origin = getattr(origin.base, "_view_sync", None)
        shown = getattr(getattr(_root(t), "_local", None), "_view_syncs", None)
        if shown is not None:
            for each in tuple(shown):  # a view that is taken anew is noted, too
                view_origin = each()
                if view_origin is not None:
                    view_origin.refresh(op)


def _root(t: Any) -> Any:
    return t._base if isinstance(t, Tensor) and t._is_view() else t


def register_view(outputs: Any, origin: CopiedView) -> None:
    """Mark views with their origin, which is refreshed when what they show is written."""
    attach_view(outputs, origin)
    shown = shown_of(_root(origin.base)._local)
    shown[:] = [*(each for each in shown if each() is not None), ref(origin)]


def shown_of(local: Any) -> list[Any]:
    """The origins of views of the memory of `local`, which what is detached shares, whichever was first."""
    if not hasattr(local, "_view_syncs"):
        local._view_syncs = []
    return local._view_syncs  # type: ignore[no-any-return]


def attach_view(outputs: Any, origin: CopiedView) -> None:
    """Note where views come from."""
    for t in outputs if isinstance(outputs, list | tuple) else (outputs,):
        t._view_sync = origin
