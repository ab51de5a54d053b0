"""Blocks whose activations are computed again in the backward pass: of each only its inputs are kept, as they lie.

What is computed again stops where the last tensor that the backward pass wants is at hand (Xu et al., Optimus, section
3.2.3, method 3): the last product of a block is not repeated, as its gradients want its operands and not its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from dshard.core.moves import leaves, replace_leaves
from dshard.errors import LayoutError
from dshard.ops.matmul.matmul_autograd import RECOMPUTE_HOOKS
from dshard.validate import check_callable


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, of which autograd keeps the inputs alone, in their layouts, and computes the rest again.

    Random numbers and the dtypes of autocast are those of the first time. `fn` must do the same again.

    Source: Optimus (Xu et al.), section 3.2.3: distributed checkpointing, and the last product left out.

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
    """All that was saved the first time is there."""


class _Block:
    """One call: how many tensors it saved, and after the second run the tensors."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.fn, self.given = fn, (args, kwargs)
        self.count, self.last = 0, (0, 0)
        self.found: dict[int, Tensor] = {}
        tensors = [x for x in leaves(self.given) if isinstance(x, Tensor)]
        self.random = torch.get_rng_state(), get_device_states(*tensors)
        self.device = next((x.device.type for x in tensors if x.device.type != "meta"), "cpu")
        self.cast = torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device)

    def pack(self, x: Tensor) -> int:
        """The place of what is saved among all."""
        self.count += 1
        return self.count - 1

    def unpack(self, i: int) -> Tensor:
        """What was saved, once; all is computed again where it is not there."""
        if i not in self.found:
            self._rerun()
        if i not in self.found:
            raise LayoutError(
                f"a checkpointed block saved {self.count} tensors, and {len(self.found)} when it was computed again: "
                "its function must do the same each time"
            )
        return self.found.pop(i)

    def product(self, saved: Callable[[], Sequence[Any]], n: int) -> None:
        """A product is about to run that saves `n` tensors: the last to save any, perhaps."""
        self.last = self.count, n

    def _rerun(self) -> None:
        self.found, made = {}, 0

        def keep(x: Tensor) -> Tensor:
            nonlocal made
            self.found[made] = x.detach()
            made += 1
            if made == self.count:
                raise _Enough
            return x

        def product(saved: Callable[[], Sequence[Any]], n: int) -> None:
            if (made, n) == self.last and made + n == self.count:
                with torch.no_grad():
                    for x in saved():
                        keep(x)

        def inputs(x: Any) -> Any:
            return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

        args, kwargs = replace_leaves(self.given, inputs)
        devices, states = self.random[1]
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.set_rng_state(self.random[0])
            set_device_states(devices, states)
            cast = torch.autocast(self.device, enabled=self.cast[0], dtype=self.cast[1])
            with cast, saved_tensors_hooks(keep, lambda x: x), RECOMPUTE_HOOKS.entered(product), suppress(_Enough):
                self.fn(*args, **kwargs)
