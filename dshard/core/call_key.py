"""The key under which a call is cached: what is called, the specs of its operands, and its other arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.core.signature import Kwargs
from dshard.core.trees import replace_leaves
from dshard.core.wrapper import Wrapper
from dshard.validate import is_symbolic

_NUMBERS = frozenset({int, float, bool, complex})
_VALUES = frozenset({type(None), str, torch.dtype})
_INT = frozenset({int})
_NO_KWARGS: dict[str, Any] = {}
_NAMED = object()
"""Stands before the names of the last arguments: no argument is equal to it."""


def call_key(
    called: object,
    args: Sequence[Any],
    kwargs: Kwargs = _NO_KWARGS,
    values: bool = True,
    recording: bool = False,
) -> tuple[object, ...]:
    """The cache key of a call of `called`.

    A distributed tensor counts by its spec, which is interned. With `recording`, one that autograd records is followed
    by whether it is a leaf. Without `values` of a number only its type counts, and whether it is
    zero or not finite: times such a number, or by it, terms of a sum do not add up.
    """
    cls = Wrapper.public
    parts: list[object] = [called]
    for arg in (*args, *kwargs.values()) if kwargs else args:
        kind = type(arg)
        if kind is cls:
            parts.append(arg._spec)
            if arg._matmul is not None:
                parts.append(id(arg._matmul))  # equal options are one object, which is kept
            if recording and arg.requires_grad:
                leaf = arg._leaf  # of the tensor that it stands for in a trace
                try:
                    parts.append(arg.is_leaf if leaf is None else leaf)
                except RuntimeError:  # one of several views, of which another was written to: it may be detached still
                    parts.append(False)
        elif kind in _NUMBERS:
            parts.append((kind, arg) if values else _kind_of_number(arg))  # 1, 1.0 and True are equal
        elif kind in _VALUES:
            parts.append(arg)
        elif (kind is tuple or kind is list) and _INT.issuperset(map(type, arg)):
            parts.append(tuple(arg))
        else:
            parts.append(_nested_key(arg, values))
    if kwargs:
        parts += (_NAMED, *kwargs)
    return tuple(parts)


def _kind_of_number(number: complex) -> object:
    return (type(number), bool(number)) if not number or number - number else type(number)


def _nested_key(arg: Any, values: bool) -> object:
    """The entry of an argument that may hold tensors."""
    kind = type(arg)
    if kind in _NUMBERS:
        return (kind, arg) if values else _kind_of_number(arg)
    if kind is list or kind is tuple:
        cls = Wrapper.public
        return tuple([item._spec if type(item) is cls else _nested_key(item, values) for item in arg])
    if isinstance(arg, Wrapper):
        return arg._spec
    if isinstance(arg, Tensor):
        return Tensor, arg.dtype, tuple(map(int, arg.shape))  # a graph is for the sizes that it is traced with
    if kind is torch.SymFloat:  # a graph that is traced for any value of it has its value only where it matters
        return (float, float(arg)) if values else float
    return int(arg) if is_symbolic(arg) else arg


def with_numbers(tree: Any, values: bool) -> Any:
    """`tree` with plain floats for those that a traced graph leaves open: without `values` any will do."""

    def number(leaf: Any) -> Any:
        return (float(leaf) if values else 1.0) if type(leaf) is torch.SymFloat else leaf

    return replace_leaves(tree, number)
