"""Composite operators that leave a sharded dim sharded: cross entropy and log softmax over sharded classes, rms norm.

Below autograd torch calls several operators, which complete the same partial sum more than once, and once more in
backward. Written as one, each sum is completed once, and the gradients need no other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.caches import cached
from dshard.comm import on_each, sum_dtype
from dshard.core.context import planning_context
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.ops.custom import accept_call
from dshard.ops.lookup import refuse
from dshard.ops.small_reductions import along_dims, replicated_along, split_axes
from dshard.placements import ReduceOp
from dshard.redistribute import plan
from dshard.rules.strategy import completed_layout
from dshard.topology import Topology

LOSS_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
"""The parameters of `torch.nn.functional.cross_entropy`, in order; `nll_loss` has all but the last."""


def reduce_statistics(x: Any, op: str | None) -> Any:
    """`x` with its partial sums reduced, for operator `op` or at the user's request; recorded by autograd."""
    return redistribute(x, completed_layout(x._spec.layout), op) if x._spec.has_partial else x


def rms_norm(func: Function, args: Args, kwargs: Kwargs) -> Tensor | None:
    """`torch.nn.functional.rms_norm` by one sum of squares for each row; None where gathering costs less."""
    x, shape, weight, eps = bind_arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    if not isinstance(x, Wrapper):
        return None
    dims = tuple(range(-len(shape), 0))
    if len(shape) > x.dim() or not _split_stays(x._spec, tuple(dim + x.dim() for dim in dims), ("sum",)):
        return None
    accept_call(func, args, kwargs)
    wide = reduce_statistics(x, "rms_norm").to(sum_dtype(x.dtype))
    squares = reduce_statistics(wide.pow(2).mean(dims, keepdim=True), "rms_norm")
    out: Tensor = wide * torch.rsqrt(squares + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return (out if weight is None else out * weight).to(x.dtype)


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
    if not all(isinstance(t, Wrapper) for t in tensors) or target.is_floating_point() or target.dim() != x.dim() - 1:
        return None
    dim = min(1, x.dim() - 1)
    if average is not None or reduce is not None or not _split_stays(x._spec, (dim,), ("max", "sum", "sum"), always):
        return None
    accept_call(func, args, kwargs)
    op = None if always else "cross_entropy"
    ignored = -100 if ignored is None else ignored
    _refuse_targets(target, x.shape[dim], ignored)
    kept = target != ignored
    shifted, log_sum = (reduce_statistics(x, op), None) if func is F.nll_loss else _shifted(x, dim, op)
    terms = _terms(shifted, log_sum, target.where(kept, 0), weight, smoothing or 0.0, op)
    loss, each = (t.masked_fill(~kept, 0) for t in terms)
    if reduction == "none":
        return loss.to(x.dtype)
    total = loss.sum()
    return (total if reduction == "sum" else total / reduce_statistics(each.sum(), op)).to(x.dtype)


def log_softmax(func: Function, args: Args, kwargs: Kwargs) -> Tensor | None:
    """`torch.nn.functional.log_softmax` by two numbers for each row; None where `dim` is not sharded."""
    names = ("input", "dim", "_stacklevel", "dtype") if func is F.log_softmax else ("input", "dim", "dtype")
    x, dim, *_, dtype = bind_arguments(names, args, kwargs)
    if not isinstance(x, Wrapper) or dim is None or not _split_stays(x._spec, (dim % max(1, x.dim()),), (), True):
        return None
    accept_call(func, args, kwargs)
    shifted, log_sum = _shifted(x if dtype is None else x.to(dtype), dim, None)
    if log_sum.requires_grad:  # its gradient is a partial sum over the classes, best completed while it is small
        log_sum.register_hook(lambda grad: reduce_statistics(grad, None))
    return (shifted - log_sum.unsqueeze(dim)).to(x.dtype if dtype is None else dtype)


def _shifted(x: Tensor, dim: int, op: str | None) -> tuple[Tensor, Tensor]:
    """`x` minus the largest of each row, and log(sum exp) of that; half precision is widened to single."""
    wide = reduce_statistics(x, op).to(sum_dtype(x.dtype))
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


def _refuse_targets(target: Wrapper, classes: int, ignored: int) -> None:
    """Refuse targets that are no class, as torch does.

    Raises:
        IndexError: a target that is neither a class nor `ignored`.
    """
    on_each(
        lambda x: refuse(x, ((x < 0) | (x >= classes)) & (x != ignored), classes, 1),
        target._local_tensor,
    )


def _split_stays(spec: Spec, dims: tuple[int, ...], reductions: tuple[ReduceOp, ...], always: bool = False) -> bool:
    """Whether one of these dims is sharded, and reductions over them cost less than gathering it, or run `always`."""
    if not spec.layout.sharded_dims() or 0 in spec.shape:
        return False
    if always:
        return bool(split_axes(spec.layout, dims))
    return _reductions_are_cheaper(spec, dims, reductions, planning_context().topology_of(spec.layout.mesh))


@cached("reductions or gathers", 16384)
def _reductions_are_cheaper(
    spec: Spec, dims: tuple[int, ...], reductions: tuple[ReduceOp, ...], topology: Topology
) -> bool:
    """Whether `reductions` over `dims`, completed on all ranks, cost less than gathering these dims."""
    axes = split_axes(spec.layout, dims)
    if not axes:
        return False
    gathering = plan(spec.layout, replicated_along(spec.layout, axes), spec.shape, spec.itemsize, topology)
    sums = along_dims(completed_layout(spec.layout), spec.shape, dims, reductions)
    return sum(plan(*each, spec.itemsize, topology).seconds for each in sums) < gathering.seconds
