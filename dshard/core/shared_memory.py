"""Operands that share memory with what an operator writes: refused where one device refuses them, else copied.

One device compares addresses. Here a view may have memory of its own, on some ranks alone, and a local tensor may have
no elements. So shapes, strides and offsets of the global tensors decide, on all ranks alike; those of local tensors do
where each rank has all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.comm import of_first_rank
from dshard.core.call import arguments_by_name, writes_first
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import for_shapes
from dshard.core.trees import leaves, replace_leaves
from dshard.core.view_sync import COMPUTED
from dshard.core.wrapper import Wrapper
from dshard.layout import replicated
from dshard.torch_private import OpOverload, has_internal_overlap, is_alias_of, no_torch_function

_SHARED = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory "
    "location. Please clone() the tensor before performing the operation."
)
_MOVES = ("cat", "gather", "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "index_select", "put")
APART = frozenset(f"aten::{name}" for name in (*_MOVES, "scatter", "scatter_add", "scatter_reduce", "stack", "take"))
"""Operators that refuse to write to memory of an operand even if it is all of it."""
_COPIES = frozenset(f"aten::{name}" for name in ("addbmm", "addmm", "addmv", "baddbmm", "bernoulli", "masked_scatter"))
"""Operators that take operands which share memory in any way with the one that they write."""


def reads_more(func: OpOverload) -> bool:
    """Whether an in-place operator on one tensor has other operands, too."""
    first, *rest = (str(argument.type) for argument in func._schema.arguments)
    return writes_first(func) and first == "Tensor" and any("Tensor" in kind for kind in rest)


def without_shared(func: OpOverload, args: Args, kwargs: Kwargs) -> Args:
    """The arguments of an in-place call, with copies of operands that share memory with the first one.

    An operand of the same elements is replaced by the first one itself.

    Raises:
        RuntimeError: one device refuses to write to memory that they share.
    """
    target, cls = args[0], Wrapper.public
    if type(target) is not cls:
        return args
    local = target._local_tensor
    has_own = type(local) is not Tensor or target._view_sync is not None
    for x in args[1:]:
        if type(x) is list or (
            type(x) is cls and (has_own or x._view_sync is not None or is_alias_of(x._local_tensor, local))
        ):
            return _without_shared(func, args, kwargs)
    return args


def _without_shared(func: OpOverload, args: Args, kwargs: Kwargs) -> Args:
    """`without_shared` where local tensors share memory, or may stand for others that do."""
    target, name = args[0], _name(func)
    if any(_is_in(x, target) and (x is not target or name in APART | _COPIES) for x in leaves(args[1:])):
        operands = arguments_by_name(func, args, kwargs)
        del operands[func._schema.arguments[0].name]
        refuse_shared(func, target, operands)
        return (target, *replace_leaves(args[1:], partial(_apart, target, name in _COPIES)))
    return args


def share_memory(x: Wrapper, y: Wrapper) -> bool:
    """Whether two distributed tensors are views of one memory."""
    return type(y) is Wrapper.public and is_alias_of(_memory(x), _memory(y))


def _is_in(x: object, target: Wrapper) -> bool:
    return type(x) is Wrapper.public and share_memory(x, target)


def _memory(x: Wrapper) -> Tensor:
    """A local tensor in the memory of `x`, or of what it is a view of although its own memory is another."""
    origin = x._view_sync
    while origin is not None and getattr(origin, "func", None) not in COMPUTED:
        x = origin.base
        origin = x._view_sync
    return of_first_rank(x._local_tensor)


def refuse_shared(func: OpOverload, written: Wrapper, operands: Kwargs) -> None:
    """Raise torch's error if an operand shares memory with what is written in a way that torch refuses.

    Raises:
        RuntimeError: it does.
    """
    name = _name(func)
    if name in _COPIES:
        return
    for argument, value in operands.items():
        if argument == "value":  # torch reads it before it writes
            continue
        for x in leaves(value):
            if _is_in(x, written):
                with for_shapes():
                    _refuse(x, written, whole=name in APART)


def _refuse(x: Wrapper, written: Wrapper, whole: bool) -> None:
    """Refuse the overlap of two tensors as torch does, which ignores tensors that are not dense."""
    one, other = _in_memory(x, written)
    if x is written or (_is_dense(one) and _is_dense(other)):
        (start, end), (start_written, end_written) = _bytes(one), _bytes(other)
        is_same = x is written or ((start, end) == (start_written, end_written) and one.stride() == other.stride())
        if whole if is_same else start < end_written and start_written < end:
            raise RuntimeError(_SHARED)


def _in_memory(x: Wrapper, y: Wrapper) -> tuple[Tensor, Tensor]:
    """Two tensors that share memory by their places in it: in that of one device, or in their own if each has all.

    A plain tensor that counts as replicated has no other place than its own.
    """
    is_own = x._view_sync is None and y._view_sync is None and _are_replicated(x, y)
    return (of_first_rank(x._local_tensor), of_first_rank(y._local_tensor)) if is_own else (x, y)


def _are_replicated(x: Wrapper, y: Wrapper) -> bool:
    return x._spec.layout == y._spec.layout == replicated(x._spec.layout.mesh)


def _is_dense(x: Tensor) -> bool:
    return x.numel() > 0 and has_internal_overlap(x._spec.meta() if isinstance(x, Wrapper) else x) == 0


def _bytes(x: Tensor) -> tuple[int, int]:
    """The first and the last byte of a dense tensor, counted from the start of its memory."""
    start = _offset(x)
    return start * x.itemsize, (start + x.numel()) * x.itemsize


def _offset(x: Tensor) -> Any:
    with no_torch_function():
        return x.storage_offset()


def _apart(target: Wrapper, copies: bool, x: object) -> object:
    """`x`; if it shares memory with `target`, a copy, or the target itself if it has the same elements.

    Replicated tensors share memory as on one device, where an operator may read what it has just written. With `copies`
    all is copied.
    """
    if type(x) is not Wrapper.public or not share_memory(x, target):
        return x
    one, other = _in_memory(x, target)
    is_same = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    if is_same and _offset(one) == _offset(other) and not copies:
        return target
    return x if _are_replicated(x, target) and not copies else torch.ops.aten.clone.default(x)


def _name(func: OpOverload) -> str:
    name: str = func._schema.name
    return name.removesuffix("_")
