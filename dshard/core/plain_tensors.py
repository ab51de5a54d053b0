"""Plain tensors among distributed ones: what a user mixes is refused, what torch makes on the way is replicated.

So is what a module makes on its way, where `alike` says so: its inputs are distributed, and every rank runs the same
program, so positions and masks made of nothing but shapes are the same on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import local
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dshard.comm import LocalTensor
from dshard.core.moves import leaves, on_all_ranks, replace_leaves
from dshard.core.spec import contiguous_stride, spec_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.errors import MixedError
from dshard.layout import replicated

PLAIN = frozenset({Tensor, Parameter, LocalTensor, list, tuple})
"""The types of arguments that are, or may hold, plain tensors."""

_INT = frozenset({int})


def may_hold_plain(values: Iterable[Any]) -> bool:
    """Whether there may be a plain tensor among these arguments."""
    for value in values:
        if type(value) in PLAIN and not (type(value) is tuple and _INT.issuperset(map(type, value))):
            return True
    return False


PLAIN_RESULTS = frozenset({Tensor, LocalTensor})
"""The types of what a composite operator may return though it was given distributed tensors."""

_HARMLESS = frozenset(
    {
        "backward",
        "grad",
        "__set__",
        "_has_compatible_shallow_copy_type",
        "to",
        "type_as",
        "view_as",
        "reshape_as",
        "expand_as",
    }
)
"""Functions that take a plain tensor for its shape or dtype, or as a gradient that is the same on all ranks."""


class _AssumedReplicated(local):
    depth = 0


_ASSUMED_REPLICATED = _AssumedReplicated()


@contextmanager
def assume_replicated() -> Iterator[None]:
    """Within the block plain tensors among distributed ones are the same on all ranks of the mesh: replicated ones."""
    _ASSUMED_REPLICATED.depth += 1
    try:
        yield
    finally:
        _ASSUMED_REPLICATED.depth -= 1


def wrap_or_refuse_plain(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, plain tensors among them replicated where they are known to be `alike`, and else refused.

    Raises:
        MixedError: a plain tensor with dims is among the arguments.
    """
    if not _ASSUMED_REPLICATED.depth:
        refuse_plain(func, args, kwargs)
        return args, kwargs
    found = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
    meshes = [t._spec.layout.mesh for t in found if isinstance(t, Wrapper)]
    if not meshes or len(meshes) == len(found):
        return args, kwargs
    layout = replicated(meshes[0])
    meta = any(t._local.is_meta for t in found if isinstance(t, Wrapper))

    def as_replicated(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, Wrapper) or leaf.dim() == 0 or leaf.requires_grad:
            return leaf
        shape = tuple(leaf.shape)
        leaf = leaf.to("meta") if meta else leaf
        spec = spec_of(layout, shape, contiguous_stride(shape), leaf.dtype, leaf.device)
        return wrap(on_all_ranks(leaf, layout.mesh), spec)

    given: tuple[tuple[Any, ...], dict[str, Any]] = replace_leaves((args, kwargs), as_replicated)
    return given


def refuse_plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Refuse what a user mixes: which part of the whole a plain tensor is, only they know.

    Plain tensors that composite operators and backward passes make are alike on all ranks: these count as replicated.

    Raises:
        MixedError: a plain tensor with dims is among the arguments.
    """
    for t in leaves((args, kwargs)):
        if isinstance(t, Tensor) and not isinstance(t, Wrapper) and t.dim() > 0:
            name = getattr(func, "__name__", str(func))
            if name in _HARMLESS or _asker().startswith("torch.masked.") or torch._C._current_graph_task_id() != -1:
                return
            raise MixedError(
                f"{name}: a plain torch.Tensor of shape {tuple(t.shape)} among distributed tensors; wrap it with "
                "distribute_tensor(x, mesh, placements), or DTensor.from_local if each rank has a part; "
                "0-d tensors are taken as they are"
            )


def _asker() -> str:
    """The module, not of dshard, that called the operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("dshard."):
        frame = frame.f_back
    return "" if frame is None else frame.f_globals.get("__name__", "")
