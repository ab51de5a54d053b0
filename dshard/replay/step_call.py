"""A call of a step: its arguments, and what recordings of it have to have in common with this call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard.autograd.accumulation import accumulating
from dshard.core.context import settings_in_force
from dshard.core.wrapper import Wrapper
from dshard.replay.step_state import is_plain
from dshard.torch_private import is_autocasting, no_torch_function, pytree

_AUTOCASTS = ("cpu", "cuda")


class Call:
    """The arguments of a call: their structure, the tensors among them, and the key of recordings that may hold."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = [x for x in leaves if isinstance(x, Tensor)]
        self.values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.locals = [*map(local_of, self.tensors)]
        self.autocast = [each for each in _AUTOCASTS if torch.is_autocast_enabled(each)] if is_autocasting() else []
        with no_torch_function():
            described = [_described(x, local) for x, local in zip(self.tensors, self.locals, strict=True)]
        self.key = (
            structure,
            [(type(x), repr(x) if type(x) is float else x) for x in self.values],  # 2 is not 2.0, and 0.0 not -0.0
            described,
            [[x is y for y in self.tensors[:i]] for i, x in enumerate(self.tensors)],
            settings_in_force(),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), accumulating(), torch.get_default_dtype()),
            [(each, torch.get_autocast_dtype(each)) for each in self.autocast],
            torch.are_deterministic_algorithms_enabled(),
        )

    def why_not(self) -> str:
        """Why no step with these arguments can be replayed; empty if one may be."""
        if not all(map(is_plain, self.values)):
            return "an argument is neither a tensor nor a number or a text"
        if any(not x.is_leaf for x in self.tensors):
            return "a gradient passes through the step to the operators before it: give it x.detach()"
        if any(isinstance(x, Wrapper) and x._view_sync is not None for x in self.tensors):
            return "an argument is a view that shares its values with a copy"
        return ""


def _described(x: Tensor, local: Tensor) -> tuple[object, ...]:
    layout = x._spec if isinstance(x, Wrapper) else None
    how = (local.shape, local.stride(), local.dtype, local.device, x.is_conj())
    needs = (gradient_kind(x.grad), [*(x._backward_hooks or {}).values()]) if x.requires_grad and x.is_leaf else None
    return (type(x), layout, *how, x.requires_grad, needs)


def gradient_kind(grad: Tensor | None) -> object:
    """What of a gradient decides how the next one is added to it."""
    return None if grad is None else grad._spec if isinstance(grad, Wrapper) else (grad.shape, grad.dtype)


def local_of(x: Tensor) -> Tensor:
    """The local tensor of a distributed one; a plain tensor itself."""
    return x._local_tensor if isinstance(x, Wrapper) else x
