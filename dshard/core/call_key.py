"""The key under which a call is cached: what is called, the specs of its operands, and its other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.core.signature import Kwargs
from dshard.core.wrapper import Wrapper
from dshard.validate import is_symbolic

_NUMBERS = frozenset({int, float, bool, complex})
_VALUES = frozenset({type(None), str, torch.dtype})
_INT = frozenset({int})
_NO_KWARGS: dict[str, Any] = {}
_NAMED = object()
"""Stands before the names of the last arguments: no argument is equal to it."""
_SAME = object()
"""Stands for a distributed argument that is one object with the distributed argument before it."""


def call_key(
    called: object,
    args: Sequence[Any],
    kwargs: Kwargs = _NO_KWARGS,
    values: bool = True,
    recording: bool = False,
    nested: bool = True,
) -> tuple[object, ...] | None:
    """The cache key of a call of `called`; its second entry says whether autograd records an operand.

    A distributed tensor counts by its spec, which is interned. With `recording`, one that autograd records is followed
    by whether it is a leaf. Without `values` of a number only its type counts. Without `nested` there is no key where
    an argument is a plain tensor, holds tensors, or is none of torch's usual values, and an argument that is one object
    with the one before it, as in `x + x`, counts as that (see `repeats_apart`).
    """
    cls = Wrapper.public
    before: object = None
    parts: list[object] = [called, False]
    for arg in (*args, *kwargs.values()) if kwargs else args:
        kind = type(arg)
        if kind is cls:
            if arg is before:
                parts.append(_SAME)
                continue
            parts.append(arg._spec)
            if not nested:
                before = arg
            if arg._matmul is not None:
                parts.append(id(arg._matmul))  # equal options are one object, which is kept
            if recording and arg.requires_grad:
                parts[1] = True
                leaf = arg._leaf  # of the tensor that it stands for in a trace
                try:
                    parts.append(arg.is_leaf if leaf is None else leaf)
                except RuntimeError:  # one of several views, of which another was written to: it may be detached still
                    parts.append(False)
        elif kind in _NUMBERS:
            parts.append((kind, arg) if values else kind)  # 1, 1.0 and True are equal
        elif kind in _VALUES:
            parts.append(arg)
        elif (kind is tuple or kind is list) and _INT.issuperset(map(type, arg)):
            parts.append(tuple(arg))
        elif nested:
            parts.append(_nested_key(arg, values))
        else:
            return None
    if kwargs:
        parts += (_NAMED, *kwargs)
    return tuple(parts)


def repeats_apart(args: Sequence[Any], kwargs: Kwargs) -> tuple[int, ...]:
    """For each distributed argument the first place of its object; empty if only neighbours are one object.

    A log tells operands by identity, so that of `f(x, y, x)` does not say which one is which for `f(a, b, c)`.
    """
    cls = Wrapper.public
    operands = [id(x) for x in (*args, *kwargs.values()) if type(x) is cls]
    runs = [each for each, before in zip(operands, (0, *operands), strict=False) if each != before]
    return tuple([operands.index(each) for each in operands]) if len({*runs}) < len(runs) else ()


def _nested_key(arg: Any, values: bool) -> object:
    """The entry of an argument that may hold tensors."""
    kind = type(arg)
    if kind in _NUMBERS:
        return (kind, arg) if values else kind
    if kind is list or kind is tuple:
        cls = Wrapper.public
        return tuple([item._spec if type(item) is cls else _nested_key(item, values) for item in arg])
    if isinstance(arg, Wrapper):
        return arg._spec
    if isinstance(arg, Tensor):
        return Tensor, arg.dtype, tuple(map(int, arg.shape))  # a graph is for the sizes that it is traced with
    return int(arg) if is_symbolic(arg) else arg
