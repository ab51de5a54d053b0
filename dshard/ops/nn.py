"""Operators of neural networks that have kernels of their own: softmax, norms, embedding, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from dshard.core.call import Call, Kernel, LocalOp, Operator, names
from dshard.mesh import Coordinate
from dshard.ops.lookup import refuse
from dshard.rules.rule import Rule, Term, linear
from dshard.rules.strategy import Strategy


def along(call: Call) -> Rule:
    """An operator along one dim, which stays whole."""
    term = names(len(call.shapes[0]))
    whole = frozenset({str(call.dim())}) if call.shapes[0] else frozenset()
    return Rule((term,) * len(call.specs), (term,) * len(call.outs), whole)


def layer_norm(call: Call) -> Rule:
    """x, weight and bias -> normalised x, mean, 1/std: the normalised dims stay whole."""
    ndim, normal = len(call.shapes[0]), len(call.argument("normalized_shape"))
    term = names(ndim)
    parameter, statistics = term[ndim - normal :], (*term[: ndim - normal], *((),) * normal)
    whole = frozenset(name for dim in parameter for name in dim)
    return Rule((term, *(parameter,) * (len(call.specs) - 1)), (term, statistics, statistics), whole)


def layer_norm_backward(call: Call) -> Rule:
    """Output gradient, x, mean, 1/std, weight, bias -> gradients: those of the parameters are sums over the batch."""
    ndim, normal = len(call.shapes[1]), len(call.argument("normalized_shape"))
    term = names(ndim)
    parameter, statistics = term[ndim - normal :], (*term[: ndim - normal], *((),) * normal)
    whole = frozenset(name for dim in parameter for name in dim)
    inputs = (term, term, statistics, statistics, *(parameter,) * (len(call.specs) - 4))
    wanted = zip((term, parameter, parameter), call.argument("output_mask"), strict=True)
    return Rule(inputs, tuple(out for out, is_wanted in wanted if is_wanted), whole, passes=linear(0))


def embedding(call: Call) -> Rule:
    """Table and indices -> rows. A table split over its rows looks up what it has and leaves the sum pending."""
    return embedding_rule(len(call.shapes[1]))


def embedding_rule(ndim: int) -> Rule:
    """The rule for indices of `ndim` dims.

    >>> print(embedding_rule(2))
    v h, i0 i1 -> i0 i1 h
    """
    indices = names(ndim, "i")
    return Rule(((("v",), ("h",)), indices), ((*indices, ("h",)),), passes=linear(0))


def embedding_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel of embedding in which rows that another rank holds count as zero."""
    rows = strategy.inputs[0].dim_range(0, call.shapes[0][0], coordinate)
    if len(rows) == call.shapes[0][0]:
        return call.func

    def lookup(weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        refuse(indices, (indices < 0) | (indices >= call.shapes[0][0]), call.shapes[0][0], 0)
        is_held = (indices >= rows.start) & (indices < rows.stop)
        if not rows:
            return weight.new_zeros((*indices.shape, weight.shape[1]))
        held_rows: Tensor = torch.ops.aten.embedding(weight, torch.where(is_held, indices - rows.start, 0))
        return held_rows.masked_fill_(~is_held.unsqueeze(-1), 0)

    return lookup


def embedding_backward(call: Call) -> Rule:
    """Gradient of the rows and their indices -> gradient of the table: a sum over the indices."""
    indices = names(len(call.shapes[1]), "i")
    return Rule(((*indices, ("h",)), indices), ((("v",), ("h",)),), frozenset({"v"}), passes=linear(0))


def nll_loss(call: Call) -> Rule:
    """Log-probabilities, target (and class weights) -> loss and total weight: split classes leave both pending."""
    x, target, weights = _loss_terms(call, len(call.shapes[0]), len(call.specs) - 2)
    loss = target if call.argument("reduction") == 0 else ()
    return Rule((x, target, *weights), (loss, ()))


def nll_loss_backward(call: Call) -> Rule:
    """Loss gradient, log-probabilities, target (class weights), total weight -> gradient of the log-probabilities."""
    x, target, weights = _loss_terms(call, len(call.shapes[1]), len(call.specs) - 4)
    loss = target if call.argument("reduction") == 0 else ()
    return Rule((loss, x, target, *weights, ()), (x,), passes=linear(0))


def _loss_terms(call: Call, ndim: int, weights: int) -> tuple[Term, Term, tuple[Term, ...]]:
    """The terms of log-probabilities, target and class weights, if there are any."""
    batch: Term = () if ndim == 1 else (("n",),)
    rest = names(ndim - 2, "d")
    return (*batch, ("c",), *rest), (*batch, *rest), ((("c",),),) * weights


def nll_kernel(operand: int) -> Kernel:
    """A kernel that ignores targets whose class another rank holds; operand `operand` has the log-probabilities."""

    def kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
        shape, ignored = call.shapes[operand], call.argument("ignore_index")
        dim = 0 if len(shape) == 1 else 1
        if not strategy.inputs[operand].axes_of(dim):
            return call.func
        held = strategy.inputs[operand].dim_range(dim, shape[dim], coordinate)

        def run(*args: Any) -> Any:
            given = list(args)
            target = args[operand + 1]
            elsewhere = (target >= 0) & (target < shape[dim]) & ~((target >= held.start) & (target < held.stop))
            given[operand + 1] = torch.where(elsewhere | (target == ignored), ELSEWHERE, target - held.start)
            given[operand + 4] = ELSEWHERE
            if not held:
                return _no_class(call, given, operand)
            return call.func(*given)

        return run

    return kernel


def _no_class(call: Call, given: list[Any], operand: int) -> Any:
    """The result on a rank that holds no classes."""
    x, target = given[operand], given[operand + 1]
    if operand:
        return torch.zeros_like(x)
    losses = target.shape if call.argument("reduction") == NONE else ()
    return x.new_zeros(losses), x.new_zeros(())


ELSEWHERE = -(2**31)
"""The target that a loss over sharded classes ignores."""


def mean_nll_loss(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mean loss: a sum over a total weight, each over all ranks; a mean of means would misweigh uneven shards."""
    x, target, weight, _, ignored = args
    total, count = func(x, target, weight, SUM, ignored)
    return total / count, count


def mean_nll_loss_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The backward form of the mean loss."""
    grad, x, target, weight, _, ignored, count = args
    return func(grad / count, x, target, weight, SUM, ignored, count)


NONE, MEAN, SUM = 0, 1, 2
"""Torch's numbers of a loss's reductions."""

MEANS: dict[OpOverload, Callable[..., Any]] = {
    torch.ops.aten.nll_loss_forward.default: mean_nll_loss,
    torch.ops.aten.nll_loss2d_forward.default: mean_nll_loss,
    torch.ops.aten.nll_loss_backward.default: mean_nll_loss_backward,
    torch.ops.aten.nll_loss2d_backward.default: mean_nll_loss_backward,
}
"""The operators that replace a loss whose reduction is the mean."""

RULES: dict[str, Operator] = {
    "aten::_softmax": Operator(along),
    "aten::_log_softmax": Operator(along),
    "aten::_softmax_backward_data": Operator(along),
    "aten::_log_softmax_backward_data": Operator(along),
    "aten::native_layer_norm": Operator(layer_norm),
    "aten::native_layer_norm_backward": Operator(layer_norm_backward),
    "aten::embedding": Operator(embedding, embedding_kernel),
    "aten::embedding_dense_backward": Operator(embedding_backward),
    "aten::nll_loss_forward": Operator(nll_loss, nll_kernel(0)),
    "aten::nll_loss2d_forward": Operator(nll_loss, nll_kernel(0)),
    "aten::nll_loss_backward": Operator(nll_loss_backward, nll_kernel(1)),
    "aten::nll_loss2d_backward": Operator(nll_loss_backward, nll_kernel(1)),
}
