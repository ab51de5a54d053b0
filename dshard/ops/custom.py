"""Operators that are not one local operator: decomposed ones, numbers taken out of tensors, lists of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.comm import LocalTensor, plain, unstack
from dshard.layout import replicated
from dshard.ops.decompositions import DECOMPOSITIONS, QUESTIONS
from dshard.ops.foreach import FOREACH
from dshard.ops.moving import move, replace_leaves

Custom: TypeAlias = Callable[[Any, OpOverload, tuple[Any, ...], dict[str, Any]], Any]
MAX_CHECKED = 16384
_CHECKED: set[tuple[Any, ...]] = set()


def decomposed(function: Callable[..., Any]) -> Custom:
    """Run `function`, made of operators on distributed tensors, once torch has accepted the arguments."""

    def run(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check(cls, func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


def answered(function: Callable[..., Any]) -> Custom:
    """Run `function`, whose answer is the same on every rank."""

    def run(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return run


def check(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let torch refuse what it would refuse on one device: once for each kind of arguments, without data."""
    key = (func, _key(cls, args), _key(cls, tuple(kwargs.items())))
    if key in _CHECKED:
        return
    meta_args, meta_kwargs = replace_leaves((args, kwargs), lambda leaf: _meta(cls, leaf))
    with plain():
        func(*meta_args, **meta_kwargs)
    if len(_CHECKED) >= MAX_CHECKED:
        _CHECKED.clear()
    _CHECKED.add(key)


def _key(cls: Any, tree: Any) -> Any:
    if isinstance(tree, list | tuple):
        return tuple(_key(cls, item) for item in tree)
    if isinstance(tree, cls):
        return tree._spec
    return (tree.dtype, tree.shape) if isinstance(tree, Tensor) else (type(tree), tree)


def _meta(cls: Any, leaf: Any) -> Any:
    if isinstance(leaf, cls):
        return leaf._spec.meta()
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def number(cls: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """item(): the number of the whole tensor, the same on every rank."""
    spec = args[0]._spec
    local = move(args[0]._local, spec, replicated(spec.layout.mesh))
    one = next(iter(unstack(local).values())) if type(local) is LocalTensor else local
    return one.item()


CUSTOM: dict[OpOverload, Custom] = {
    **{func: decomposed(function) for func, function in DECOMPOSITIONS.items()},
    **{func: answered(function) for func, function in QUESTIONS.items()},
    **FOREACH,
    torch.ops.aten._local_scalar_dense.default: number,
}
"""What runs instead of these operators."""
