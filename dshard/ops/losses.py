"""Losses: elementwise ones, of class indices, and cross entropy, whose sharded classes are not gathered.

A mean is the sum of the local elements over the global count, or over the weights of the targets. Below autograd torch
calls several operators for a cross entropy, which complete the same partial sum more than once, and once more in
backward. Written as one function, each sum is completed once, and the gradients need no other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import HALF, has_only_shape, numbers_of, of_first_rank, on_each, sum_dtype
from dshard.core.call import Call, Composed, Kernel, LocalOp, Operator, OperatorForm, RankCall
from dshard.core.checks import check_nll_loss
from dshard.core.moves import reduced_together
from dshard.core.operands import common_mesh
from dshard.core.plain_tensors import replicated_tensor
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import autocast_dtype, bind_arguments
from dshard.core.trees import tensors_in
from dshard.core.wrapper import Wrapper
from dshard.errors import ArgumentError, ShapeError
from dshard.mesh import Coordinate
from dshard.ops.batched import or_nothing
from dshard.ops.composite import run_composite
from dshard.ops.custom import accept_call
from dshard.ops.lookup import refuse_targets
from dshard.ops.small_reductions import SMALL_REDUCTIONS, all_sharded, reduce_statistics, stays_sharded
from dshard.rules.rule import Rule, linear
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import OpOverload
from dshard.validate import shown

NONE, MEAN, SUM = 0, 1, 2
"""Torch's numbers of a loss's reductions."""


# -- elementwise losses, with a reduction


def loss(call: Call) -> Rule:
    """Any dim may be sharded; the sum or mean of the losses is then partial."""
    return call.rule("*... -> ..." if call.argument("reduction") == NONE else "*... ->")


def loss_backward(call: Call) -> Rule:
    """Any dim may be sharded."""
    return call.rule("*... -> ...", passes=linear(0))


def mean_kernel(call: RankCall) -> LocalOp:
    """A kernel of the mean: the sum of the local elements over the global count; half precision is summed in single."""
    if not _is_split_mean(call):
        return call.func
    count = prod(torch.broadcast_shapes(*call.shapes))
    if call.outs[0].dtype in HALF:
        each = call.with_argument("reduction", NONE)
        return lambda *args, **kwargs: _mean(each(*args, **kwargs), count)
    summed = call.with_argument("reduction", SUM)
    return lambda *args, **kwargs: summed(*args, **kwargs) / count


def mean_backward_kernel(call: RankCall) -> LocalOp:
    """A kernel of the backward form of a mean loss."""
    if not _is_split_mean(call):
        return call.func
    count = prod(torch.broadcast_shapes(*call.shapes))
    summed = call.with_argument("reduction", SUM)
    return lambda grad, *args, **kwargs: summed(grad / count, *args, **kwargs)


def _is_split_mean(call: RankCall) -> bool:
    return call.argument("reduction") == MEAN and any(layout.sharded_dims() for layout in call.strategy.inputs)


def _mean(losses: Tensor, count: int) -> Tensor:
    return (losses.sum(dtype=torch.float32) / count).to(losses.dtype)


# -- of rows, by the classes that each lists


def multilabel_margin_loss(call: Call) -> Rule:
    """Rows may be sharded, not the classes that each is compared with.

    Torch's decomposition counts the first class once for each place that a row of targets leaves unused.
    """
    row, loss = _row_terms(call, len(call.shapes[0]))
    return call.rule(f"{row} [c], {row} [c] -> {loss}, {row} [c]")


def multilabel_margin_loss_backward(call: Call) -> Rule:
    """Rows may be sharded."""
    row, loss = _row_terms(call, len(call.shapes[1]))
    return call.rule(f"{loss}, {row} [c], {row} [c], {row} [c] -> {row} [c]", passes=linear(0))


def _row_terms(call: Call, ndim: int) -> tuple[str, str]:
    """The terms of a row's dim, of tensors of `ndim` dims, and of the loss."""
    row = "r" if ndim > 1 else ""
    return row, row if call.argument("reduction") == NONE else ""


def mean_of_rows_kernel(call: RankCall) -> LocalOp:
    """A kernel of the mean over rows: the sum of the local ones over the global count."""
    if not _is_split_mean(call):
        return call.func
    rows, summed = call.shapes[0][0], call.with_argument("reduction", SUM)

    def run(*args: Any) -> tuple[Tensor, Tensor]:
        total, is_target = summed(*args)
        return total / rows, is_target

    return run


def mean_of_rows_backward_kernel(call: RankCall) -> LocalOp:
    """A kernel of the backward form of a mean over rows."""
    if not _is_split_mean(call):
        return call.func
    rows, summed = call.shapes[1][0], call.with_argument("reduction", SUM)
    return lambda grad, *args: summed(grad / rows, *args)


# -- of class indices


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

    def kernel(call: RankCall) -> LocalOp:
        shape, ignored = call.shapes[operand], call.argument("ignore_index")
        dim = 0 if len(shape) == 1 else 1
        if not call.strategy.inputs[operand].axes_of(dim):
            return call.func
        held = call.held(dim, operand)

        def run(*args: Any) -> Any:
            arguments = list(args)
            target = args[operand + 1]
            elsewhere = (target >= 0) & (target < shape[dim]) & ~((target >= held.start) & (target < held.stop))
            arguments[operand + 1] = torch.where(elsewhere | (target == ignored), ELSEWHERE, target - held.start)
            arguments[operand + 4] = ELSEWHERE
            return call.func(*arguments)

        return run

    return or_nothing(kernel)


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


# -- of torch's functions


LOSS_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
"""The parameters of `torch.nn.functional.cross_entropy`, in order; `nll_loss` has all but the last."""


CTC = "[t] n [c], n [s], n, n -> n"
"""The rule of the losses of rows: log probabilities, targets, lengths of both -> a loss each."""


def ctc_loss(func: Function, args: Args, kwargs: Kwargs) -> Tensor:
    """`torch.nn.functional.ctc_loss`: each rank aligns the rows that it has, whose lengths it reads."""
    bound = signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    x, targets, *lengths, blank, reduction, zero_infinity = bound.arguments.values()
    if reduction not in ("none", "mean", "sum"):
        raise ArgumentError(f"ctc_loss: reduction={shown(reduction)}; use 'none', 'mean' or 'sum'")
    mesh = common_mesh("ctc_loss", list(tensors_in((x, targets, lengths))))
    rows = x.unsqueeze(1) if x.dim() == 2 else x
    given = (t if isinstance(t, Tensor) else torch.tensor(t, device=rows.device) for t in (targets, *lengths))
    targets, *lengths = (t if isinstance(t, Wrapper) else replicated_tensor(t, mesh) for t in given)
    lengths = [t.reshape(-1) for t in lengths]
    if targets.dim() == 1:
        targets = _targets_of_rows(targets, lengths[1])
    tensors, key = (rows, targets, *lengths), ("ctc_loss", blank, zero_infinity)
    shapes = [tuple(t.shape) for t in tensors]
    losses = run_composite(lambda: parse_rule(CTC, shapes), partial(_ctc_losses, blank, zero_infinity), tensors, key)
    if reduction == "mean":
        return (losses / lengths[1].clamp_min(1)).mean()  # type: ignore[no-any-return]
    return losses.sum() if reduction == "sum" else losses.reshape(x.shape[1:-1])  # type: ignore[no-any-return]


def _targets_of_rows(targets: Tensor, lengths: Any) -> Tensor:
    """A row of targets for each length, of targets one after the other; what is beyond a length is not read."""
    numbers = [1] if has_only_shape(lengths) else numbers_of(of_first_rank(lengths.full_tensor()))
    if not has_only_shape(lengths) and sum(numbers) != targets.numel():
        raise ShapeError(
            f"ctc_loss: {targets.numel()} targets one after the other, but their lengths add up to {sum(numbers)}: "
            "give as many, or a row of targets for each input"
        )
    first = lengths.cumsum(0) - lengths
    at = first.unsqueeze(1) + torch.arange(max(numbers, default=0), device=targets.device)
    return targets[at.clamp_max(targets.numel() - 1)]


def _ctc_losses(
    blank: int, zero_infinity: bool, x: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    if has_only_shape(x) or not x.shape[1]:
        return x.sum((0, 2))
    losses, _ = torch._ctc_loss(x, targets, input_lengths, target_lengths, blank, zero_infinity)
    return losses.where(losses != inf, 0.0) if zero_infinity else losses


def has_bytes(args: Args, kwargs: Kwargs) -> bool:
    """Whether a loss is of class indices that are bytes: torch's kernels take them, its forms without data do not."""
    x, target = bind_arguments(LOSS_ARGUMENTS, args, kwargs)[:2]
    return isinstance(target, Tensor) and target.dtype == torch.uint8 and x.dim() <= 2


def of_bytes(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A loss of class indices that are bytes as that of integers of 64 bits."""
    if not has_bytes(args, kwargs):
        return NotImplemented
    x, target, *rest = bind_arguments(LOSS_ARGUMENTS, args, kwargs)[: max(2, len(args))]
    return func(x, target.long(), *rest, **{name: kwargs[name] for name in kwargs if name not in LOSS_ARGUMENTS[:2]})


def cross_entropy(func: Function, args: Args, kwargs: Kwargs, *, always: bool = False) -> Tensor | None:
    """`torch.nn.functional.cross_entropy` of class indices by three numbers for each row; None for any other call.

    The largest logit, the sum of exponentials, and the target's logit with what label smoothing adds to it
    (Megatron-LM, vocab-parallel cross entropy); the gradient needs no communication. None if gathering the classes
    costs less, unless `always`: then the reductions count as requested by the user. `nll_loss`, of log probabilities,
    needs only the last number.
    """
    bound = bind_arguments(LOSS_ARGUMENTS, args, kwargs)
    x, target, weight, average, ignored, reduce, reduction, smoothing = bound
    tensors = (x, target) if weight is None else (x, target, weight)
    if False in [isinstance(t, Wrapper) for t in tensors] or target.is_floating_point() or target.dim() != x.dim() - 1:
        return None
    if target._spec.dtype is torch.uint8 and has_bytes(args, kwargs):
        return of_bytes(func, args, kwargs)  # type: ignore[no-any-return]
    dim = min(1, x.dim() - 1)
    if average is not None or reduce is not None or not stays_sharded(x._spec, (dim,), ("max", "sum", "sum"), always):
        return None
    accept_call(func, args, kwargs)
    op = None if always else "cross_entropy"
    ignored = -100 if ignored is None else ignored
    on_each(partial(refuse_targets, x.shape[dim], ignored), target._local_tensor)
    kept = target != ignored
    shifted, log_sum = (_wide(x, op), None) if func is F.nll_loss else _shifted(x, dim, op)
    terms = _terms(shifted, log_sum, target.where(kept, 0), weight, smoothing or 0.0, op)
    loss, each = (t.masked_fill(~kept, 0) for t in terms)
    dtype = autocast_dtype(lambda rows: func(rows, rows[:, 0].long()), x)
    if reduction == "none":
        return loss.to(dtype)
    total = loss.sum()
    return (total if reduction == "sum" else total / reduce_statistics(each.sum(), op)).to(dtype)


def cross_entropy_form(args: Args, kwargs: Kwargs) -> OperatorForm | None:
    """`torch.nn.functional.cross_entropy` of class indices as one operator, with whole or with sharded classes."""
    x, target, weight, average, ignored, reduce, reduction, smoothing = bind_arguments(LOSS_ARGUMENTS, args, kwargs)
    if weight is not None or average is not None or reduce is not None or target.is_floating_point():
        return None
    lead, rest = ("r", "...") if x.dim() > 1 else ("", "")
    out = f"{lead} {rest}" if reduction == "none" else ""
    rule = parse_rule(f"{lead} [v] {rest}, {lead} {rest} -> {out}", [tuple(x.shape), tuple(target.shape)])
    summed = partial(F.cross_entropy, ignore_index=-100 if ignored is None else ignored, label_smoothing=smoothing or 0)
    kernel = partial(_mean_loss, summed, target.numel()) if reduction in (None, "mean") else None
    return OperatorForm((x, target), rule, ((SMALL_REDUCTIONS, all_sharded(rule)),), kernel)


def _mean_loss(loss: Function, count: int, strategy: Strategy, at: Coordinate) -> LocalOp:
    """The kernel of a mean of losses: the sum of the local ones over the global count."""
    return lambda x, target: loss(x, target, reduction="sum") / count


def log_softmax(func: Function, args: Args, kwargs: Kwargs) -> Tensor | None:
    """`torch.nn.functional.log_softmax` by two numbers for each row; None where `dim` is not sharded."""
    names = ("input", "dim", "_stacklevel", "dtype") if func is F.log_softmax else ("input", "dim", "dtype")
    x, dim, *_, dtype = bind_arguments(names, args, kwargs)
    if not isinstance(x, Wrapper) or dim is None or not stays_sharded(x._spec, (dim % max(1, x.dim()),), (), True):
        return None
    accept_call(func, args, kwargs)
    shifted, log_sum = _shifted(x if dtype is None else x.to(dtype), dim, None)
    if log_sum.requires_grad:  # its gradient is a partial sum over the classes, best completed while it is small
        log_sum.register_hook(lambda grad: reduce_statistics(grad, None))
    dtype = autocast_dtype(lambda rows: func(rows, 1), x) if dtype is None else dtype
    return (shifted - log_sum.unsqueeze(dim)).to(dtype)


def _wide(x: Tensor, op: str | None) -> Tensor:
    """`x` with its partial sums reduced; half precision is widened to single."""
    return reduce_statistics(x, op).to(sum_dtype(x.dtype))  # type: ignore[no-any-return]


def _shifted(x: Tensor, dim: int, op: str | None) -> tuple[Tensor, Tensor]:
    """`x`, widened, minus the largest of each row, and log(sum exp) of that."""
    wide = _wide(x, op)
    shifted = wide - reduce_statistics(wide.detach().amax(dim, keepdim=True), op)
    return shifted, reduce_statistics(shifted.exp().sum(dim), op).log()


def _terms(
    shifted: Tensor, log_sum: Tensor | None, target: Tensor, weight: Tensor | None, smoothing: float, op: str | None
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its weight in the mean; no `log_sum` where `shifted` are log probabilities."""
    dim = min(1, shifted.dim() - 1)
    picked = shifted.gather(dim, target.unsqueeze(dim)).squeeze(dim)
    each = (
        torch.ones_like(target if log_sum is None else log_sum, dtype=shifted.dtype)
        if weight is None
        else reduce_statistics(weight[target.reshape(-1)], op).view(target.shape)
    )
    own = (1 - smoothing) * each
    target_logit, share = own * picked, own
    if smoothing:
        rest = [-1 if d == dim else 1 for d in range(shifted.dim())]
        spread = shifted if weight is None else shifted * weight.view(rest)
        classes = shifted.shape[dim]
        target_logit = target_logit + spread.sum(dim) * (smoothing / classes)
        share = share + smoothing * (1.0 if weight is None else reduce_statistics(weight.sum(), op) / classes)
    target_logit = reduce_statistics(target_logit, op)
    return (-target_logit if log_sum is None else share * log_sum - target_logit), each


_ATEN = torch.ops.aten
_FORWARD = dict.fromkeys(
    (_ATEN.nll_loss_forward.default, _ATEN.nll_loss2d_forward.default), Composed(mean_nll_loss, _is_mean(3))
)
_BACKWARD = dict.fromkeys(
    (_ATEN.nll_loss_backward.default, _ATEN.nll_loss2d_backward.default), Composed(mean_nll_loss_backward, _is_mean(4))
)
_WITH_BACKWARD = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")

RULES: dict[str, Operator] = {
    **{f"aten::{name}": Operator(loss, mean_kernel) for name in (*_WITH_BACKWARD, "binary_cross_entropy_with_logits")},
    **{f"aten::{name}_backward": Operator(loss_backward, mean_backward_kernel) for name in _WITH_BACKWARD},
    "aten::multilabel_margin_loss_forward": Operator(multilabel_margin_loss, mean_of_rows_kernel),
    "aten::multilabel_margin_loss_backward": Operator(multilabel_margin_loss_backward, mean_of_rows_backward_kernel),
    "aten::nll_loss_forward": Operator(nll_loss, nll_kernel(0), composed=_FORWARD, check=check_nll_loss),
    "aten::nll_loss2d_forward": Operator(nll_loss, nll_kernel(0), composed=_FORWARD, check=check_nll_loss),
    "aten::nll_loss_backward": Operator(nll_loss_backward, nll_kernel(1), composed=_BACKWARD),
    "aten::nll_loss2d_backward": Operator(nll_loss_backward, nll_kernel(1), composed=_BACKWARD),
}

META: dict[OpOverload, Function] = {
    getattr(_ATEN, f"{name}_backward").default: lambda grad, x, target, *options: x - target
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss")
}
"""Meta forms of operators of which torch's refuse a batch of no entries, as they divide by their number."""
