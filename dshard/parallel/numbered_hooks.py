"""Hooks with equal numbers in equal modules, so that torch.compile compiles repeated blocks once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
