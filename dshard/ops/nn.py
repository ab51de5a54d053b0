"""Operators of neural networks: softmax, norms, embedding, losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from dshard.core.call import Call, Composed, Kernel, LocalOp, Operator
from dshard.core.checks import check_dim, check_embedding, check_nll_loss
from dshard.core.joined_moves import reduced_together
from dshard.core.signature import Args, Kwargs
from dshard.mesh import Coordinate
from dshard.ops.lookup import look_up, rows_held
from dshard.ops.losses import MEAN, NONE, SUM
from dshard.ops.small_reductions import small_reductions
from dshard.rules.rule import Rule, linear
from dshard.rules.strategy import Strategy
from dshard.torch_private import OpOverload


def along(call: Call) -> Rule:
    """Any dim may be sharded except the one along which it works."""
    return call.rule("*... [d] ... -> *... [d] ...", at="dim")


def norm(call: Call) -> Rule:
    """Leading dims may be sharded; the normalised dims may not."""
    normalized, ones = _normalized(call)
    statistics = f", ... {ones}" * (len(call.func._schema.returns) - 1)
    return call.rule(f"... {normalized}, *{normalized} -> ... {normalized}{statistics}")


def _normalized(call: Call) -> tuple[str, str]:
    """The normalised dims of the operands, and of their mean and 1/std."""
    n = len(call.argument("normalized_shape"))
    return " ".join(f"[n{i}]" for i in range(n)), "1 " * n


def norm_backward(call: Call) -> Rule:
    """Leading dims may be sharded, and leave the gradients of the parameters partial; the normalised dims may not."""
    normalized, ones = _normalized(call)
    mask = call.argument("output_mask")  # of the input and the parameters, of which there are as many as statistics
    statistics = f"... {ones}, " * (len(mask) - 1)
    gradients = zip((f"... {normalized}", normalized, normalized), mask, strict=False)
    outputs = ", ".join(term for term, is_needed in gradients if is_needed)
    text = f"... {normalized}, ... {normalized}, {statistics}*{normalized} -> {outputs}"
    return call.rule(text, passes=linear(0))


def embedding(call: Call) -> Rule:
    """Indices and features may be sharded; a table sharded over its rows leaves a partial sum."""
    return call.rule(EMBEDDING, passes=linear(0))


EMBEDDING = "v h, ... -> ... h"
"""The rule of embedding: table, indices -> rows."""


def embedding_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel of embedding in which rows that another rank holds count as zero.

    Of a whole table it is torch's own operator, whose local gradient is then a term of the table's: not where rows are
    divided by how often all ranks look them up, or where torch's has no second derivative.
    """
    size = call.shapes[0][0]
    rows = strategy.inputs[0].dim_range(0, size, coordinate)
    if len(rows) < size:
        return rows_held(rows, size, look_up)
    local_shapes = [layout.local_shape(x, coordinate) for layout, x in zip(strategy.inputs, call.shapes, strict=True)]
    return call.func if all(map(prod, local_shapes)) and not call.argument("scale_grad_by_freq") else look_up


def embedding_backward(call: Call) -> Rule:
    """Features may be sharded; sharded indices leave the gradient of the table partial.

    Where rows are divided by how often they are looked up, each rank must count all indices.
    """
    lookups = "[...]" if call.argument("scale_grad_by_freq") else "..."
    return call.rule(f"{lookups} h, {lookups} -> [v] h", passes=linear(0))


def nll_loss(call: Call) -> Rule:
    """Batch and classes may be sharded; what the loss sums over leaves it, and the total weight, partial."""
    x, target, loss = _loss_terms(call, len(call.shapes[0]))
    return call.rule(f"{x}, {target}, *c -> {loss}, ")


def nll_loss_backward(call: Call) -> Rule:
    """Batch and classes may be sharded; the total weight is not read, for a mean is taken before."""
    x, target, loss = _loss_terms(call, len(call.shapes[1]))
    rule = call.rule(f"{loss}, {x}, {target}, *c, -> {x}", passes=linear(0))
    return replace(rule, unread=frozenset({len(call.shapes) - 1}))


def _loss_terms(call: Call, ndim: int) -> tuple[str, str, str]:
    """The terms of log-probabilities of `ndim` dims, of the target and of the loss."""
    x, target = ("c", "") if ndim == 1 else ("n c ...", "n ...")
    return x, target, target if call.argument("reduction") == NONE else ""


def nll_kernel(operand: int) -> Kernel:
    """A kernel that ignores targets with classes on other ranks; operand `operand` has the log-probabilities."""

    def kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
        shape, ignored = call.shapes[operand], call.argument("ignore_index")
        dim = 0 if len(shape) == 1 else 1
        if not strategy.inputs[operand].axes_of(dim):
            return call.func
        held = strategy.inputs[operand].dim_range(dim, shape[dim], coordinate)

        def run(*args: Any) -> Any:
            arguments = list(args)
            target = args[operand + 1]
            elsewhere = (target >= 0) & (target < shape[dim]) & ~((target >= held.start) & (target < held.stop))
            arguments[operand + 1] = torch.where(elsewhere | (target == ignored), ELSEWHERE, target - held.start)
            arguments[operand + 4] = ELSEWHERE
            if not held:
                return _no_class(call, arguments, operand)
            return call.func(*arguments)

        return run

    return kernel


def _no_class(call: Call, arguments: list[Any], operand: int) -> Any:
    """The result on a rank that holds no classes."""
    x, target = arguments[operand], arguments[operand + 1]
    if operand:
        return torch.zeros_like(x)
    losses = target.shape if call.argument("reduction") == NONE else ()
    return x.new_zeros(losses), x.new_zeros(())


ELSEWHERE = -(2**31)
"""The target that a loss over sharded classes ignores."""


def mean_nll_loss(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The mean loss: a sum over a total weight, each reduced over all ranks; uneven shards forbid a mean of means."""
    x, target, weight, _, ignored = args
    total, count = reduced_together(func(x, target, weight, SUM, ignored), str(func))
    return total / count, count


def mean_nll_loss_backward(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The backward form of the mean loss."""
    grad, x, target, weight, _, ignored, count = args
    return func(grad / count, x, target, weight, SUM, ignored, count)


def _is_mean(position: int) -> Callable[[tuple[Any, ...]], bool]:
    """Whether the argument at this position, the reduction of a loss, is the mean."""
    return lambda args: args[position] == MEAN


_ATEN = torch.ops.aten
_FORWARD = dict.fromkeys(
    (_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default), Composed(mean_nll_loss, _is_mean(3))
)
_BACKWARD = dict.fromkeys(
    (_ATEN.nll_loss_backward.default, _ATEN.nll_loss2d_backward.default), Composed(mean_nll_loss_backward, _is_mean(4))
)

RULES: dict[str, Operator] = {
    "aten::_softmax": Operator(along, alternatives=(small_reductions("max", "sum"),), check=check_dim),
    "aten::_log_softmax": Operator(along, alternatives=(small_reductions("max", "sum"),)),
    "aten::_softmax_backward_data": Operator(along, alternatives=(small_reductions("sum", operand=1),)),
    "aten::_log_softmax_backward_data": Operator(along, alternatives=(small_reductions("sum", operand=1),)),
    "aten::native_layer_norm": Operator(norm, alternatives=(small_reductions("sum", "sum"),)),
    "aten::native_layer_norm_backward": Operator(
        norm_backward, alternatives=(small_reductions("sum", "sum", operand=1),)
    ),
    "aten::_fused_rms_norm": Operator(norm, alternatives=(small_reductions("sum"),)),
    "aten::_fused_rms_norm_backward": Operator(norm_backward, alternatives=(small_reductions("sum", operand=1),)),
    "aten::embedding": Operator(embedding, embedding_kernel, check=check_embedding),
    "aten::embedding_dense_backward": Operator(embedding_backward),
    "aten::nll_loss_forward": Operator(nll_loss, nll_kernel(0), composed=_FORWARD, check=check_nll_loss),
    "aten::nll_loss2d_forward": Operator(nll_loss, nll_kernel(0), composed=_FORWARD, check=check_nll_loss),
    "aten::nll_loss_backward": Operator(nll_loss_backward, nll_kernel(1), composed=_BACKWARD),
    "aten::nll_loss2d_backward": Operator(nll_loss_backward, nll_kernel(1), composed=_BACKWARD),
}
