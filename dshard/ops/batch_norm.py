"""Batch norm over sharded rows in one message forward and one backward: each rank's mean and variance, gathered.

Merged by distances from the mean of all, they lose no digits; counts follow from the layout, and need no message. The
gradient of the gathered statistics is a partial sum, which one collective gives back to the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.comm import sum_dtype, traced
from dshard.core.context import planning_context
from dshard.core.executable import Executable, wrap_as
from dshard.core.observe import Decision
from dshard.core.operands import operand_of, plans_to
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout
from dshard.ops.composite import Local, run_chosen
from dshard.ops.custom import accept_call
from dshard.ops.small_reductions import partial_along
from dshard.placements import Replicate, Shard

_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def batch_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Batch norm of batches with sharded rows, in training; any other call is left to torch's decomposition."""
    x, running_mean, running_var, weight, bias, training, momentum, eps = bind_arguments(_ARGUMENTS, args, kwargs)
    momentum, eps = 0.1 if momentum is None else momentum, 1e-5 if eps is None else eps
    tensors = [t for t in (weight, bias) if t is not None]
    if not training or not all(isinstance(t, Wrapper) for t in (x, *tensors)):
        return NotImplemented
    spec: Spec = x._spec
    axes = _axes_of_rows(spec)
    if not axes or spec.has_partial or spec.layout.order or 0 in spec.shape or traced(x._local_tensor):
        return NotImplemented
    ranks, n = prod(spec.layout.mesh.shape[axis] for axis in axes), prod(spec.shape) // spec.shape[1]
    everywhere = _of_channels(spec, (ranks, 3, spec.shape[1]), sum_dtype(spec.dtype))

    def choose_statistics() -> Executable:
        accept_call(func, args, kwargs)
        by_rank = everywhere.layout
        for axis in axes:
            by_rank = by_rank.replace(axis, Shard(0))
        out, gradients = everywhere.with_layout(by_rank), [spec.layout.cotangent()]
        return _executable("batch_norm statistics", [spec], [spec.layout], gradients, out, partial(_part, n))

    stats = run_chosen(("batch_norm statistics", n, *(t._spec for t in tensors)), choose_statistics, [x])
    stats = redistribute(stats, everywhere.layout, "batch_norm")
    affine = weight is not None, bias is not None

    def choose() -> Executable:
        by_channel = [_of_channels(spec, (spec.shape[1],), t.dtype) for t in tensors]
        layouts = [each.layout for each in (everywhere, *by_channel)]
        gradients = [spec.layout.cotangent(), *(partial_along(layout, axes, "sum") for layout in layouts)]
        operands, local = [t._spec for t in (x, stats, *tensors)], partial(_normalized, eps, *affine)
        return _executable("batch_norm", operands, [spec.layout, *layouts], gradients, spec, local)

    out = run_chosen(("batch_norm", n, eps, *affine), choose, [x, stats, *tensors])
    if running_mean is not None:
        with torch.no_grad():
            for running, new in zip((running_mean, running_var), _merged(stats.detach()), strict=True):
                unbiased = new if running is running_mean else new * (n / max(n - 1, 1))
                running.mul_(1 - momentum).add_(unbiased.to(running.dtype), alpha=momentum)
    return out


def _axes_of_rows(spec: Spec) -> tuple[int, ...]:
    """The mesh axes of several ranks that shard rows, or positions within them."""
    placements = zip(spec.layout.placements, spec.layout.mesh.shape, strict=True)
    return tuple(i for i, (p, n) in enumerate(placements) if n > 1 and isinstance(p, Shard) and p.dim != 1)


def _of_channels(x: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """The spec of numbers for each channel of `x`, the last dim, which are the same for all rows."""
    placements = [Shard(len(shape) - 1) if p == Shard(1) else Replicate() for p in x.layout.placements]
    return contiguous_spec(Layout(x.layout.mesh, tuple(placements)), shape, dtype, x.device)


def _executable(
    op: str, operands: Sequence[Spec], layouts: Sequence[Layout], gradients: Sequence[Layout], out: Spec, local: Local
) -> Executable:
    """The executable of a local operator on operands in `layouts`."""
    topology, plans = planning_context().topology_of(out.layout.mesh), plans_to(operands, layouts)
    decision = Decision(op, tuple(map(operand_of, operands)), topology, plans=plans)
    return Executable(decision, lambda at: local, [out], range(len(operands)), wrap_as(out), gradients=gradients)


def _part(n: int, x: Tensor) -> Tensor:
    """This rank's mean, its part of the variance around that, and its share of the `n` elements of each channel."""
    dims, wide = [d for d in range(x.dim()) if d != 1], x.to(sum_dtype(x.dtype))
    share = prod(x.shape[d] for d in dims) / n
    var, mean = torch.var_mean(wide, dims, correction=0) if share else (wide.sum(dims), wide.sum(dims))
    return torch.stack([mean, var * share, torch.full_like(mean, share)]).unsqueeze(0)


def _merged(stats: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of all ranks' elements."""
    mean, var, share = stats.unbind(1)
    total = (mean * share).sum(0)
    return total, (var + share * (mean - total).square()).sum(0)


def _normalized(eps: float, has_weight: bool, has_bias: bool, x: Tensor, stats: Tensor, *affine: Tensor) -> Tensor:
    mean, var = _merged(stats)
    shape, rest = [-1 if d == 1 else 1 for d in range(x.dim())], list(affine)
    scale = torch.rsqrt(var + eps)
    scale = scale * rest.pop(0) if has_weight else scale
    out = (x - mean.view(shape)) * scale.view(shape)
    return (out + rest[0].view(shape) if has_bias else out).to(x.dtype)
