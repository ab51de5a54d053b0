"""Parameters that distributed ones have replaced: who holds an old one goes on with its successor.

References to a parameter are in lists, closures, optimisers and averages that nobody can enumerate. So the old object
stays, without its memory, and gets a class whose every use is one of the distributed parameter in its place.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from math import nan
from typing import Any, ClassVar
from weakref import getweakrefcount

import torch
from torch import Tensor, nn

from dshard.comm import plain, traced
from dshard.core.saved_files import torch_save_caller
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.trees import replace_leaves
from dshard.core.wrapper import Wrapper
from dshard.errors import ArgumentError
from dshard.torch_private import SIZE_CACHES, increment_version, no_torch_function

_OWN = frozenset({"__torch_function__", "__reduce_ex__", "__tensor_flatten__"})


class Replaced:
    """The class, before its own, of a parameter that was replaced: a distributed one answers for it."""

    __slots__ = ()
    number: ClassVar[int] = 0  # how many there have been

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name in _OWN else getattr(successor(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(successor(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(successor(self), name)

    def __repr__(self) -> str:
        return repr(successor(self))

    def __reduce_ex__(self, protocol: object) -> Any:
        new = successor(self)
        if torch_save_caller() is not None and new._spec.layout.is_replicated():
            return new.__reduce_ex__(protocol)  # plain, and of the same memory
        return successor, (new,)  # so that both are one object when they are loaded

    @classmethod
    def __torch_dispatch__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """As `__torch_function__`; torch.compile takes no class with one of its own for a plain tensor."""
        return cls.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        args, kwargs = replace_leaves((args, kwargs or {}), successor)
        return func(*args, **kwargs)


def successor(x: Any) -> Any:
    """The distributed parameter that has replaced `x`; `x` itself if none has."""
    while issubclass(type(x), Replaced):  # its `__class__` is that of the successor
        x = object.__getattribute__(x, "__dict__")["successor"]
    return x


_CLASSES: dict[type, Any] = {}
"""The classes of parameters that were replaced, by the classes that they had."""


def succeed(name: str, old: nn.Parameter, new: Wrapper, grad: Wrapper | None) -> None:
    """Let the distributed parameter `new` take the place of `old`, whose gradient, laid out, is `grad`.

    It gets the attributes and hooks of `old`; the hooks get global gradients. The memory of `old` is freed.
    """
    if traced(old):  # a fake tensor keeps in its attributes what it is
        return
    if getweakrefcount(old):  # somebody expects `old` to live as long as the parameter
        new._replaced = old
    vars(new).update({name: value for name, value in vars(old).items() if name not in SIZE_CACHES})
    vars(old).clear()
    with no_torch_function(), plain():
        if grad is not None:
            new.grad = grad
        _move_hooks(old, new)
        old.grad = None
        if old.requires_grad:
            old.register_hook(partial(_refuse_gradient, name))
        # One element of no number: code that does not ask the class finds no value that it could take for right.
        has_nan = old.is_floating_point() or old.is_complex()
        unset = torch.full((), nan if has_nan else 0, dtype=old.dtype, device=old.device)
        old.data = unset.expand(old.shape)
        if not old.is_inference():
            increment_version([old])  # so that a graph which has saved `old` is refused by autograd
        old.requires_grad_(False)
    vars(old)["successor"] = new
    Replaced.number += 1
    kind: Any = type(old)
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind)(f"Replaced{kind.__name__}", (Replaced, kind), {})
    old.__class__ = _CLASSES[kind]


def _move_hooks(old: Any, new: Any) -> None:
    """Move hooks, in the dicts by which their handles remove them; what knows `old` is called with it as before."""
    hooks: OrderedDict[int, Any] | None = old._backward_hooks
    if hooks:
        needs_gradient = new.requires_grad
        new.requires_grad_()
        for number, hook in new._backward_hooks.items():  # the one that lays out the gradient comes first
            hooks[number] = hook
            hooks.move_to_end(number, last=False)
        new._backward_hooks, old._backward_hooks = hooks, None
        new.requires_grad_(needs_gradient)
    after = old._post_accumulate_grad_hooks
    if after:
        for number, hook in after.items():
            after[number] = partial(_with_old, hook, old)
        new._post_accumulate_grad_hooks, old._post_accumulate_grad_hooks = after, None


def _with_old(hook: Function, old: Tensor, parameter: Tensor) -> None:
    """Call a hook that was registered with `old`, by which it may look something up."""
    hook(old)


def _refuse_gradient(name: str, grad: Tensor) -> None:
    """Refuse a gradient of a graph that was recorded before its parameter was replaced."""
    raise ArgumentError(
        f"backward of a graph recorded before {name} was laid out, of which its gradient would be lost: run forward "
        "and backward on one side of parallelize"
    )
