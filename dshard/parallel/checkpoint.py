"""Activation checkpoints: blocks are recomputed in backward; only their inputs are kept, in their layouts.

The second run stops when it has saved the last tensor that the backward pass needs (Xu et al., Optimus, section
3.2.3, method 3): the last matmul of a block is not repeated, as its gradients want its operands and not its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from dshard.core.signature import Function
from dshard.core.trees import map_tensors, nested_tensors
from dshard.errors import LayoutError
from dshard.ops.matmul.functions import RECOMPUTE_HOOKS
from dshard.torch_private import saved_tensor_hooks
from dshard.validate import check_callable


def checkpoint(fn: Function, *args: object, **kwargs: object) -> Any:
    """Run `fn(*args, **kwargs)`; autograd keeps only its inputs, in their layouts, and recomputes the rest.

    Random numbers and the dtypes of autocast are those of the first run. `fn` must be deterministic otherwise.

    Source: Optimus (Xu et al.), section 3.2.3: distributed checkpointing, and the last matmul left out.

    Raises:
        LayoutError: in the backward pass, a `fn` that saves fewer tensors the second time.
        ArgumentError: nothing that can be called.
    """
    check_callable(fn, "checkpoint", "give a function and its arguments, as in checkpoint(block, x)")
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    block = _Block(fn, args, kwargs)
    with saved_tensors_hooks(block.pack, block.unpack), RECOMPUTE_HOOKS.entered(block.product):
        return fn(*args, **kwargs)


class _Enough(Exception):
    """Stops the second run, once every tensor saved in the first run has been saved again."""


class _Block:
    """One checkpointed call: the number of tensors that it saved, and after the second run the tensors."""

    def __init__(self, fn: Function, args: object, kwargs: object) -> None:
        self.fn, self.arguments = fn, (args, kwargs)
        self.count, self.last = 0, (0, 0)
        self.saved: dict[int, Tensor] = {}
        tensors = nested_tensors(self.arguments)
        self.random = torch.get_rng_state(), get_device_states(*tensors)
        self.device = next((x.device.type for x in tensors if x.device.type != "meta"), "cpu")
        self.cast = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def pack(self, x: Tensor) -> int:
        """Count a saved tensor and return its index in place of it."""
        self.count += 1
        return self.count - 1

    def unpack(self, i: int) -> Tensor:
        """Return saved tensor `i`, once; run the function again if it is not there."""
        if i not in self.saved:
            self._rerun()
        if i not in self.saved:
            raise LayoutError(
                f"a checkpointed block saved {self.count} tensors, and {len(self.saved)} when it was computed again: "
                "its function must do the same each time"
            )
        return self.saved.pop(i)

    def product(self, saved: Callable[[], Sequence[Any]], n: int) -> None:
        """Note that a matmul is about to run that saves `n` tensors; it may be the last to save any."""
        hooks = saved_tensor_hooks(True)  # others, such as those of gathered weights, keep some of the tensors
        self.last = (self.count, n) if hooks is not None and hooks[0] == self.pack else (0, 0)

    def _rerun(self) -> None:
        self.saved, index = {}, 0

        def keep(x: Tensor) -> Tensor:
            nonlocal index
            self.saved[index] = x.detach()
            index += 1
            if index == self.count:
                raise _Enough
            return x

        def product(saved: Callable[[], Sequence[Any]], n: int) -> None:
            if (index, n) == self.last and index + n == self.count:
                with torch.no_grad():
                    for x in saved():
                        keep(x)

        def inputs(x: Tensor) -> Tensor:
            again = x.detach().requires_grad_(x.requires_grad)
            return again if x.is_leaf else again.view_as(again)  # a matmul saves other copies of leaves

        devices, states = self.random[1]
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.set_rng_state(self.random[0])
            set_device_states(devices, states)
            args, kwargs = map_tensors(self.arguments, inputs)
            cast = torch.autocast(self.device, enabled=self.cast[0], dtype=self.cast[1])
            with cast, saved_tensors_hooks(keep, lambda x: x), RECOMPUTE_HOOKS.entered(product), suppress(_Enough):
                self.fn(*args, **kwargs)
