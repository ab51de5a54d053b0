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
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in parameters) and any(hasattr(p, "_dshard_replaced") for p in parameters):
        raise ArgumentError(
            f"{type(optimizer).__name__}.step() of parameters that parallelize has replaced by distributed ones, so "
            "that none has a gradient: make the optimiser after parallelize, of model.parameters()"
        )


register_optimizer_step_pre_hook(_refuse_replaced)
