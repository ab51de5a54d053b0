"""Fused steps by default for optimisers of distributed parameters, unless the user has chosen otherwise.

One operator then updates all local tensors, while torch's default on a CPU calls several for each.
"""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dshard.comm import kernel_device
from dshard.core.wrapper import Wrapper

_FUSED: frozenset[type[Optimizer]] = frozenset({SGD, Adagrad, Adam, AdamW})
"""The optimisers for which torch has fused operators on a CPU."""


_BY_DEFAULT = 1
"""The true value of `fused` that the user has not set; it is removed after the step."""


def _leaves_open(group: dict[str, Any]) -> bool:
    """Whether the user has not said how to step, and all parameters are real distributed tensors on a CPU."""
    if group.get("fused") is not None or group.get("foreach") is not None:
        return False
    if group.get("differentiable") or group.get("capturable"):
        return False
    cls = Wrapper.public
    specs = [p._spec if type(p) is cls else None for p in group["params"]]  # torch would ask each tensor anew
    return all(s is not None and kernel_device(s.device) == "cpu" and s.dtype.is_floating_point for s in specs)


def _before(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if type(optimizer) in _FUSED:
        for group in optimizer.param_groups:
            if _leaves_open(group):
                group["fused"] = _BY_DEFAULT


def _after(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if type(optimizer) in _FUSED:
        for group in optimizer.param_groups:
            if group.get("fused") is _BY_DEFAULT:
                group["fused"] = None


def support_fused_steps() -> None:
    """Register the hook of all optimisers' steps."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
