"""Hooks with equal numbers in equal modules, so that torch.compile compiles repeated blocks once.

Those of several plans nest: a module may be in two models, or be a model and part of another one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def before(module: nn.Module, hook: Callable[..., Any], *, with_kwargs: bool = False) -> RemovableHandle:
    """Register a hook that runs before the forward pass of `module`; a script module takes none."""
    if isinstance(module, torch.jit.ScriptModule):
        return RemovableHandle(OrderedDict())
    return _renumbered(module.register_forward_pre_hook(hook, with_kwargs=with_kwargs))


def after(module: nn.Module, hook: Callable[..., Any], *, always: bool = False) -> RemovableHandle:
    """Register a hook that runs after the forward pass of `module`; `always`: however it ended."""
    if isinstance(module, torch.jit.ScriptModule):
        return RemovableHandle(OrderedDict())
    return _renumbered(module.register_forward_hook(hook, always_call=always))


@contextmanager
def within_earlier_hooks(model: nn.Module) -> Iterator[None]:
    """Let the hooks that are registered in the block run within those there were: after a pass, before them."""
    tables: list[Any] = [module._forward_hooks for module in model.modules()]
    numbered = [(hooks, {n for n in hooks if n < 0}) for hooks in tables]
    yield
    for hooks, earlier in numbered:
        if earlier:
            numbers = [n for n in hooks if n >= 0 or n in earlier]
            at = next(i for i, n in enumerate(numbers) if n in earlier)
            for n in (*numbers[:at], *(n for n in hooks if n not in numbers), *numbers[at:]):
                hooks.move_to_end(n)


@contextmanager
def without_earlier_hooks(model: nn.Module) -> Iterator[None]:
    """Run modules within the block as they were made: a part of `model` may have a plan of its own."""
    tables: list[Any] = [module.__dict__.get(name, {}) for module in model.modules() for name in _TABLES]
    earlier = [(hooks, {**hooks}) for hooks in tables if any(n < 0 for n in hooks)]
    for hooks, numbered in earlier:
        for n in numbered:
            if n < 0:
                del hooks[n]
    try:
        yield
    finally:
        for hooks, numbered in earlier:
            since = {n: hook for n, hook in hooks.items() if n not in numbered}
            hooks.clear()
            hooks.update(numbered | since)


_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
"""torch's tables of the hooks of a module, and of their options, by their numbers."""


def _renumbered(handle: RemovableHandle) -> RemovableHandle:
    """Renumber a hook to the next free number below zero of its module, the same in each block of a model.

    torch numbers hooks by a counter of the whole program, and compiles a block anew for each other number.
    """
    hooks: Any = [handle.hooks_dict_ref(), *(ref() for ref in handle.extra_dict_ref)]
    number = min(0, *hooks[0]) - 1
    for numbered in hooks:
        if handle.id in numbered:
            numbered[number] = numbered.pop(handle.id)
    handle.id = number
    return handle
