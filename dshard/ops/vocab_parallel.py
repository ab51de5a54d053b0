"""Composite operators that leave a sharded dim sharded: cross entropy over sharded classes, rms norm.

Below autograd torch calls several operators, which complete the same partial sum more than once, and once more in
backward. Written as one, each sum is completed once, and the gradients need no other.
"""

from __future__ import annotations

from typing import Any

import torch

from dshard.autograd.crossing import redistribute
from dshard.core.context import planning_context
from dshard.core.spec import Spec
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.ops.custom import accept_call
from dshard.ops.reduced_norms import pays
from dshard.ops.reductions import HALF
from dshard.placements import ReduceOp
from dshard.rules.strategy import completed_layout


def reduce_statistics(x: Any, op: str) -> Any:
    """`x` with its partial sums reduced, recorded by autograd."""
    return redistribute(x, completed_layout(x._spec.layout), op) if x._spec.pending else x


def rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.rms_norm` by one sum of squares for each row; None where gathering costs less."""
    x, shape, weight, eps = bind_arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    if not isinstance(x, Wrapper):
        return None
    dims = tuple(range(-len(shape), 0))
    if len(shape) > x.dim() or not _split_stays(x._spec, tuple(dim + x.dim() for dim in dims), ("sum",)):
        return None
    accept_call(func, args, kwargs)
    wide = reduce_statistics(x, "rms_norm").to(torch.float32 if x.dtype in HALF else x.dtype)
    squares = reduce_statistics(wide.pow(2).mean(dims, keepdim=True), "rms_norm")
    out = wide * torch.rsqrt(squares + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return (out if weight is None else out * weight).to(x.dtype)


def cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.nn.functional.cross_entropy` of class indices by three numbers for each row; None for any other call.

    The largest logit, the sum of exponentials, and the target's logit with what label smoothing adds to it
    (Megatron-LM, vocab-parallel cross entropy); the gradient is computed from what each rank holds.
    """
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    x, target, weight, average, ignored, reduce, reduction, smoothing = bind_arguments(names, args, kwargs)
    given = (x, target) if weight is None else (x, target, weight)
    if not all(isinstance(t, Wrapper) for t in given) or target.is_floating_point() or target.dim() != x.dim() - 1:
        return None
    dim = min(1, x.dim() - 1)
    if average is not None or reduce is not None or not _split_stays(x._spec, (dim,), ("max", "sum", "sum")):
        return None
    accept_call(func, args, kwargs)
    ignored, smoothing = -100 if ignored is None else ignored, smoothing or 0.0
    kept = target != ignored
    terms = _terms(x, target.where(kept, 0), weight, dim, smoothing)
    loss, each = (t.masked_fill(~kept, 0) for t in terms)
    if reduction == "none":
        return loss.to(x.dtype)
    total = loss.sum()
    return (total if reduction == "sum" else total / reduce_statistics(each.sum(), "cross_entropy")).to(x.dtype)


def _terms(x: Any, target: Any, weight: Any, dim: int, smoothing: float) -> tuple[Any, Any]:
    """The loss of each row, and its weight in the mean."""
    op = "cross_entropy"
    wide = reduce_statistics(x, op).to(torch.float32 if x.dtype in HALF else x.dtype)
    shifted = wide - reduce_statistics(wide.detach().amax(dim, keepdim=True), op)
    log_sum = reduce_statistics(shifted.exp().sum(dim), op).log()
    each = (
        torch.ones_like(log_sum)
        if weight is None
        else reduce_statistics(weight[target.reshape(-1)], op).view(target.shape)
    )
    own = (1 - smoothing) * each
    pending, share = own * shifted.gather(dim, target.unsqueeze(dim)).squeeze(dim), own
    if smoothing:
        rest = [-1 if d == dim else 1 for d in range(x.dim())]
        spread = shifted if weight is None else shifted * weight.view(rest)
        pending = pending + spread.sum(dim) * (smoothing / x.shape[dim])
        share = share + smoothing * (1.0 if weight is None else reduce_statistics(weight.sum(), op) / x.shape[dim])
    return share * log_sum - reduce_statistics(pending, op), each


def _split_stays(spec: Spec, dims: tuple[int, ...], reductions: tuple[ReduceOp, ...]) -> bool:
    """Whether one of these dims is sharded, and reductions over them cost less than gathering it."""
    if not spec.layout.sharded_dims() or 0 in spec.shape:
        return False
    return pays(spec, dims, reductions, planning_context().topology_of(spec.layout.mesh))
