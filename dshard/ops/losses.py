"""Elementwise losses with a reduction; a mean is the sum of the local elements over the global count."""

from __future__ import annotations

from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.comm import HALF, numbers_of
from dshard.core.call import Call, LocalOp, Operator
from dshard.core.signature import Args, Function, Kwargs
from dshard.mesh import Coordinate
from dshard.rules.rule import Rule, linear
from dshard.rules.strategy import Strategy

NONE, MEAN, SUM = 0, 1, 2
"""Torch's numbers of a loss's reductions."""


def ctc_loss(func: Function, args: Args, kwargs: Kwargs) -> Tensor:
    """`F.ctc_loss` with lengths as numbers, which the shape of what its backward form reads depends on."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    given, reduction = bound.arguments, bound.arguments["reduction"]
    for name in ("input_lengths", "target_lengths"):
        given[name] = numbers_of(given[name]) if isinstance(given[name], Tensor) else given[name]
    losses: Tensor = torch.ctc_loss(*(given | {"reduction": NONE}).values())
    if reduction == "mean":
        lengths = given["target_lengths"]
        return (losses / losses.new_tensor(lengths).clamp_min(1).view(losses.shape)).mean()
    return losses.sum() if reduction == "sum" else losses


def loss(call: Call) -> Rule:
    """Any dim may be sharded; the sum or mean of the losses is then partial."""
    return call.rule("*... -> ..." if call.argument("reduction") == NONE else "*... ->")


def loss_backward(call: Call) -> Rule:
    """Any dim may be sharded."""
    return call.rule("*... -> ...", passes=linear(0))


def mean_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel of the mean: the sum of the local elements over the global count; half precision is summed in single."""
    if not _is_split_mean(call, strategy):
        return call.func
    count = prod(torch.broadcast_shapes(*call.shapes))
    if call.outs[0].dtype in HALF:
        each = _with_reduction(call, NONE)
        return lambda *args, **kwargs: _mean(each(*args, **kwargs), count)
    summed = _with_reduction(call, SUM)
    return lambda *args, **kwargs: summed(*args, **kwargs) / count


def mean_backward_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel of the backward form of a mean loss."""
    if not _is_split_mean(call, strategy):
        return call.func
    count = prod(torch.broadcast_shapes(*call.shapes))
    summed = _with_reduction(call, SUM)
    return lambda grad, *args, **kwargs: summed(grad / count, *args, **kwargs)


def _is_split_mean(call: Call, strategy: Strategy) -> bool:
    return call.argument("reduction") == MEAN and any(layout.sharded_dims() for layout in strategy.inputs)


def _mean(losses: Tensor, count: int) -> Tensor:
    return (losses.sum(dtype=torch.float32) / count).to(losses.dtype)


def _with_reduction(call: Call, reduction: int) -> LocalOp:
    """The operator with another reduction."""
    position = [argument.name for argument in call.func._schema.arguments].index("reduction")

    def run(*args: object, **kwargs: object) -> Any:
        if position < len(args):
            return call.func(*args[:position], reduction, *args[position + 1 :], **kwargs)
        return call.func(*args, **{**kwargs, "reduction": reduction})

    return run


_WITH_BACKWARD = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")

RULES: dict[str, Operator] = {
    **{f"aten::{name}": Operator(loss, mean_kernel) for name in (*_WITH_BACKWARD, "binary_cross_entropy_with_logits")},
    **{f"aten::{name}_backward": Operator(loss_backward, mean_backward_kernel) for name in _WITH_BACKWARD},
}
