"""Parameters that `parallelize` has replaced: an optimiser made before holds them still, and would train nothing."""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dshard.errors import ArgumentError


def mark_replaced(p: Tensor) -> None:
    """Mark a parameter that is no longer the model's."""
    p._dshard_replaced = True  # type: ignore[attr-defined]


def _refuse_replaced(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Refuse a step of replaced parameters alone; another model that has one of them, too, gives it a gradient.

    Raises:
        ArgumentError: none of the optimiser's parameters has a gradient, and some were replaced.
    """
    groups = optimizer.param_groups
    if any(p.grad is not None for group in groups for p in group["params"]):  # mostly the first has one
        return
    if any(hasattr(p, "_dshard_replaced") for group in groups for p in group["params"]):
        raise ArgumentError(
            f"{type(optimizer).__name__}.step() of parameters that parallelize has replaced by distributed ones, so "
            "that none has a gradient: make the optimiser after parallelize, of model.parameters()"
        )


register_optimizer_step_pre_hook(_refuse_replaced)
