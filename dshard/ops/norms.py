"""Softmax and norms: the dims that they work along are whole, or one or two small reductions are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.backends import cudnn

from dshard.autograd.crossing import redistribute
from dshard.autograd.gradients import data
from dshard.comm import has_only_shape, sum_dtype, traced
from dshard.core.call import Call, Composed, LocalOp, Operator, OperatorForm, RankCall, arguments_by_name
from dshard.core.checks import check_dim
from dshard.core.context import planning_context
from dshard.core.executable import Executable, wrap_as
from dshard.core.observe import Decision
from dshard.core.operands import operand_of, plans_to
from dshard.core.signature import Args, Context, Function, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.torch_function import autocast_dtype, bind_arguments
from dshard.core.transforms import is_differentiating_forward
from dshard.core.wrapper import Wrapper
from dshard.layout import Layout, placed
from dshard.ops.composite import Local, recorded_gradients, run_chosen
from dshard.ops.custom import accept_call, decomposed
from dshard.ops.decompositions import group_norm_backward as decomposed_group_norm_backward
from dshard.ops.small_reductions import (
    SMALL_REDUCTIONS,
    all_sharded,
    reduce_statistics,
    small_reductions,
    stays_sharded,
)
from dshard.placements import Partial, Replicate, Shard
from dshard.rules.rule import Rule, linear
from dshard.rules.rule_notation import parse_rule
from dshard.torch_private import OpOverload, decomposition_table, is_transforming


def along(call: Call) -> Rule:
    """Any dim may be sharded except the one along which it works."""
    return call.rule("*... [d] ... -> *... [d] ...", at="dim")


def norm(call: Call) -> Rule:
    """Leading dims may be sharded; the normalised dims may not."""
    normalized, ones = _normalized_dims(call)
    statistics = f", ... {ones}" * (len(call.func._schema.returns) - 1)
    return call.rule(f"... {normalized}, *{normalized} -> ... {normalized}{statistics}")


def _normalized_dims(call: Call) -> tuple[str, str]:
    """The normalised dims of the operands, and of their mean and 1/std."""
    n = len(call.argument("normalized_shape"))
    return " ".join(f"[n{i}]" for i in range(n)), "1 " * n


def norm_backward(call: Call) -> Rule:
    """Leading dims may be sharded, and leave the gradients of the parameters partial; the normalised dims may not."""
    normalized, ones = _normalized_dims(call)
    mask = call.argument("output_mask")  # of the input and the parameters, of which there are as many as statistics
    statistics = f"... {ones}, " * (len(mask) - 1)
    gradients = zip((f"... {normalized}", normalized, normalized), mask, strict=False)
    outputs = ", ".join(term for term, is_needed in gradients if is_needed)
    text = f"... {normalized}, ... {normalized}, {statistics}*{normalized} -> {outputs}"
    return call.rule(text, passes=linear(0))


def rms_norm(func: Function, args: Args, kwargs: Kwargs) -> Tensor | None:
    """`torch.nn.functional.rms_norm` by one sum of squares for each row; None where gathering costs less."""
    x, shape, weight, eps = bind_arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    if not isinstance(x, Wrapper):
        return None
    dims = tuple(range(-len(shape), 0))
    if len(shape) > x.dim() or not stays_sharded(x._spec, tuple(dim + x.dim() for dim in dims), ("sum",)):
        return None
    accept_call(func, args, kwargs)
    wide = reduce_statistics(x, "rms_norm").to(sum_dtype(x.dtype))
    squares = reduce_statistics(wide.pow(2).mean(dims, keepdim=True), "rms_norm")
    out: Tensor = wide * torch.rsqrt(squares + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return (out if weight is None else out * weight).to(autocast_dtype(lambda rows: func(rows, (1,)), x))


def rms_norm_form(args: Args, kwargs: Kwargs) -> OperatorForm:
    """`torch.nn.functional.rms_norm` as one operator, by the rule of norms or by small reductions."""
    x, shape, weight, _ = bind_arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    tensors = (x,) if weight is None else (x, weight)
    normalized = " ".join(f"[n{i}]" for i in range(len(shape)))
    rule = parse_rule(f"... {normalized}, *{normalized} -> ... {normalized}", [tuple(t.shape) for t in tensors])
    return OperatorForm(tensors, rule, ((SMALL_REDUCTIONS, all_sharded(rule)),))


# -- group norm: rows and groups of channels may be sharded; sharded within a group, it is made of other operators


_GROUP_NORM = torch.ops.aten.native_group_norm.default, torch.ops.aten.native_group_norm_backward.default
_GROUPS = {_GROUP_NORM[0]: (0, 6), _GROUP_NORM[1]: (1, 8)}
"""The places of the input and of the number of groups among the arguments."""


def group_norm(call: Call) -> Rule:
    """Rows and groups may be sharded; the channels and positions of a group may not."""
    return _in_groups(call, "{x}, *{channels} -> {x}, {groups}, {groups}")


def group_norm_backward(call: Call) -> Rule:
    """Rows and groups may be sharded; sharded rows leave the gradients of the parameters partial."""
    outputs = zip(("{x}", "{channels}", "{channels}"), call.argument("output_mask"), strict=True)
    gradients = ", ".join(term for term, is_needed in outputs if is_needed)
    return _in_groups(call, f"{{x}}, {{x}}, {{groups}}, {{groups}}, *{{channels}} -> {gradients}", passes=linear(0))


def _in_groups(call: Call, text: str, **options: Any) -> Rule:
    groups, channels = call.argument("group"), call.argument("C")
    rule = call.rule(text.format(x="n (g [c]) [...]", channels="(g [c])", groups="n g"), **options)
    return replace(rule, sizes=(("g", groups), ("c", channels // groups)))


def _of_local_groups(call: RankCall) -> LocalOp:
    """The operator with the sizes of the rank's part."""
    n, channels, *positions = call.local_shape()
    groups = call.argument("group") * channels // call.argument("C")
    sizes = {"N": n, "C": channels, "HxW": prod(positions), "group": groups}
    return lambda *args, **kwargs: call.func(**arguments_by_name(call.func, args, kwargs) | sizes)


def _is_cut_within_groups(func: OpOverload, args: Args) -> bool:
    """Whether a mesh axis shards positions, or channels within a group; without elements torch takes it apart, too."""
    x, groups = (args[place] for place in _GROUPS[func])
    if not isinstance(x, Wrapper):
        return False
    mesh, ranks = x._spec.layout.mesh, 1
    for axis, placement in enumerate(x._spec.layout.placements):
        if isinstance(placement, Shard) and placement.dim and mesh.shape[axis] > 1:
            ranks *= mesh.shape[axis] if placement.dim == 1 else groups + 1
    return bool(groups % ranks) or 0 in x._spec.shape


_TAKEN_APART = {
    func: Composed(decomposed(function), partial(_is_cut_within_groups, func))
    for func, function in zip(
        _GROUP_NORM, (decomposition_table[_GROUP_NORM[0]], decomposed_group_norm_backward), strict=True
    )
}


# -- batch norm over sharded rows in one message forward and one backward: each rank's mean and variance, gathered
# Merged by distances from the mean of all, they lose no digits; counts follow from the layout, and need no message. The
# gradient of the gathered statistics is a partial sum, which one collective gives back to the ranks.


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_OF_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def batch_norm(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Batch norm of batches with sharded rows, in training; any other call is taken apart by torch, as on CPUs."""
    x, running_mean, running_var, weight, bias, training, momentum, eps = bind_arguments(_OF_BATCH_NORM, args, kwargs)
    momentum, eps = 0.1 if momentum is None else momentum, 1e-5 if eps is None else eps
    tensors = [t for t in (weight, bias) if t is not None]
    if not isinstance(x, Wrapper) or traced(x._local_tensor):
        return NotImplemented
    if not training or not all(isinstance(t, Wrapper) for t in tensors):
        return _without_cudnn(func, *args, **kwargs)
    spec: Spec = x._spec
    axes = _axes_of_rows(spec)
    # torch counts no writes to the statistics, which it saves before, also for evaluation
    running_mean, running_var = (x if x is None else data(_DATA, (x,), {}) for x in (running_mean, running_var))
    if not axes or spec.has_partial or spec.layout.order or 0 in spec.shape:
        return _without_cudnn(func, x, running_mean, running_var, weight, bias, training, momentum, eps)
    ranks, n = prod(spec.layout.mesh.shape[axis] for axis in axes), prod(spec.shape) // spec.shape[1]
    everywhere = _of_channels(spec, (ranks, 3, spec.shape[1]), sum_dtype(spec.dtype))

    def choose_statistics() -> Executable:
        accept_call(func, args, kwargs)
        by_rank = placed(everywhere.layout, axes, Shard(0))
        out, gradients = everywhere.with_layout(by_rank), [spec.layout.cotangent()]
        return _executable("batch_norm statistics", [spec], [spec.layout], gradients, out, partial(_statistics, n))

    stats = run_chosen(("batch_norm statistics", n, *(t._spec for t in tensors)), choose_statistics, [x])
    stats = redistribute(stats, everywhere.layout, "batch_norm")
    if running_mean is not None:  # before the output: checkpoints recompute no further than the last saved tensor
        with torch.no_grad():
            for running, new in zip((running_mean, running_var), _merged(stats.detach()), strict=True):
                unbiased = new if running is running_mean else new * (n / max(n - 1, 1))
                running.mul_(1 - momentum).add_(unbiased.to(running.dtype), alpha=momentum)
    affine = weight is not None, bias is not None

    def choose() -> Executable:
        by_channel = [_of_channels(spec, (spec.shape[1],), t.dtype) for t in tensors]
        layouts = [each.layout for each in (everywhere, *by_channel)]
        gradients = [spec.layout.cotangent(), *(placed(layout, axes, Partial()) for layout in layouts)]
        operands, local = [t._spec for t in (x, stats, *tensors)], partial(_normalized, eps, *affine)
        return _executable("batch_norm", operands, [spec.layout, *layouts], gradients, spec, local)

    return run_chosen(("batch_norm", n, eps, *affine), choose, [x, stats, *tensors])


def support_synchronised_batch_norms() -> None:
    """Let `nn.SyncBatchNorm` of distributed tensors, and of those without data, be the batch norm of all their rows.

    torch's own asks for plain tensors on GPUs, whose statistics it gathers.
    """
    module: Any = torch.nn.SyncBatchNorm
    forward = module.forward

    @wraps(forward)
    def batch_norm_of_all(self: Any, input: Tensor) -> Any:  # the name that torch gives it
        is_plain = not isinstance(input, Wrapper) and not has_only_shape(input)
        return forward(self, input) if is_plain else torch.nn.BatchNorm1d.forward(self, input)

    module.forward = batch_norm_of_all


def _without_cudnn(func: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a function that on GPUs would run one operator of cuDNN, which cannot be split, as on other devices."""
    enabled, *_ = cudnn.set_flags(False, _fp32_precision=None)
    try:
        return func(*args, **kwargs)
    finally:
        cudnn.set_flags(enabled, _fp32_precision=None)


def _axes_of_rows(spec: Spec) -> tuple[int, ...]:
    """The mesh axes of several ranks that shard rows, or positions within them."""
    placements = zip(spec.layout.placements, spec.layout.mesh.shape, strict=True)
    return tuple(i for i, (p, n) in enumerate(placements) if n > 1 and isinstance(p, Shard) and p.dim != 1)


def _of_channels(x: Spec, shape: tuple[int, ...], dtype: torch.dtype) -> Spec:
    """The spec of numbers for each channel of `x`, the last dim, which are the same for all rows."""
    last = len(shape) - 1
    placements = [
        Shard(last, blocks=p.blocks) if isinstance(p, Shard) and p.dim == 1 else Replicate()
        for p in x.layout.placements
    ]
    return contiguous_spec(Layout(x.layout.mesh, tuple(placements)), shape, dtype, x.device)


def _executable(
    op: str, operands: Sequence[Spec], layouts: Sequence[Layout], gradients: Sequence[Layout], out: Spec, local: Local
) -> Executable:
    """The executable of a local operator on operands in `layouts`."""
    topology = planning_context().topology_of(out.layout.mesh)
    plans = plans_to(operands, layouts, topology)
    decision = Decision(op, tuple(map(operand_of, operands)), topology, plans=plans)
    return Executable(decision, lambda at: local, [out], range(len(operands)), wrap_as(out), gradients=gradients)


def _statistics(n: int, x: Tensor) -> Tensor:
    """This rank's mean, its part of the variance around that, and its share of the `n` elements of each channel."""
    dims, wide = [d for d in range(x.dim()) if d != 1], sum_dtype(x.dtype)
    share = prod(x.shape[d] for d in dims) / n
    if not share:
        var, mean = x.sum(dims, dtype=wide), x.sum(dims, dtype=wide)
    elif _is_plain():
        var, mean = _Moments.apply(x, dims, wide)  # type: ignore[no-untyped-call]
    else:
        var, mean = torch.var_mean(x.to(wide), dims, correction=0)
    return torch.stack([mean, var * share, torch.full_like(mean, share)]).unsqueeze(0)


def _is_plain() -> bool:
    """Whether neither a transform of torch.func nor a forward-mode derivative is at work: they want operators."""
    return not (is_transforming() or is_differentiating_forward())


class _Moments(torch.autograd.Function):
    """Variance and mean along dims, in a wider dtype; the gradient of both is read and written once.

    The operand is kept as it is, for that is kept for the norm in any case.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, dims: list[int], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(x.to(wide), dims, correction=0)
        ctx.save_for_backward(x, mean)
        return var, mean

    @staticmethod
    def backward(ctx: Context, of_var: Tensor, of_mean: Tensor) -> tuple[Tensor, None, None]:
        x, mean = ctx.saved_tensors
        n = prod(size for d, size in enumerate(x.shape) if d != 1)
        slope = of_var * (2 / n)
        grad = torch.addcmul(_beside(of_mean / n - slope * mean, x), x.to(mean.dtype), _beside(slope, x))
        return grad.to(x.dtype), None, None


def _beside(numbers: Tensor, x: Tensor) -> Tensor:
    """Numbers for each channel of `x`, with its dims."""
    return numbers.view([-1 if d == 1 else 1 for d in range(x.dim())])


def _merged(stats: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and the variance of all ranks' elements."""
    mean, var, share = stats.unbind(1)
    total = (mean * share).sum(0)
    return total, (var + share * (mean - total).square()).sum(0)


def _normalized(eps: float, has_weight: bool, has_bias: bool, x: Tensor, stats: Tensor, *affine: Tensor) -> Tensor:
    mean, var = _merged(stats)
    rest = iter(affine)
    weight, bias = (next(rest) if has else None for has in (has_weight, has_bias))
    if not x.numel() or not _is_plain():  # torch's kernels divide by the number of elements
        return _by_operators(eps, x, mean, var, weight, bias)
    wide = [None if t is None else t.to(mean.dtype) for t in (weight, bias)]
    return _Normalized.apply(eps, x, mean, var, *wide)  # type: ignore[no-untyped-call, no-any-return]


def _by_operators(
    eps: float, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    scale = torch.rsqrt(var + eps)
    scale = scale if weight is None else scale * weight
    out = (x - _beside(mean, x)) * _beside(scale, x)
    return (out if bias is None else out + _beside(bias, x)).to(x.dtype)


class _Normalized(torch.autograd.Function):
    """Batch norm with statistics that have a gradient, by the kernels of evaluation, for which these are constant."""

    @staticmethod
    def forward(ctx: Context, eps: float, x: Tensor, mean: Tensor, var: Tensor, *affine: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, mean, var, *affine)
        ctx.eps = eps
        weight, bias = affine
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            given = [x, mean, var, weight, bias]
            has = [t is not None for t in given]

            def recorded(operands: Sequence[Any]) -> Tensor:
                rest = iter(operands)
                return _by_operators(ctx.eps, *[next(rest) if each else None for each in has])  # type: ignore[arg-type]

            tensors = [t for t in given if t is not None]
            found = iter(recorded_gradients(recorded, tensors, grad, [t.requires_grad for t in tensors]))
            return None, *[next(found) if each else None for each in has]
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        scale = torch.rsqrt(var + ctx.eps)
        of_scale = of_weight if weight is None else of_weight * weight
        of_mean = -of_bias * (scale if weight is None else scale * weight)
        of_var = -0.5 * of_scale * scale.square()
        return None, of_x, of_mean, of_var, None if weight is None else of_weight, None if bias is None else of_bias


RULES: dict[str, Operator] = {
    "aten::_softmax": Operator(along, alternatives=(small_reductions("max", "sum"),), check=check_dim),
    "aten::_log_softmax": Operator(along, alternatives=(small_reductions("max", "sum"),)),
    "aten::_softmax_backward_data": Operator(along, alternatives=(small_reductions("sum", operand=1),)),
    "aten::_log_softmax_backward_data": Operator(along, alternatives=(small_reductions("sum", operand=1),)),
    "aten::native_layer_norm": Operator(norm, alternatives=(small_reductions("sum", "sum"),)),
    "aten::native_layer_norm_backward": Operator(
        norm_backward, alternatives=(small_reductions("sum", "sum", operand=1),)
    ),
    "aten::native_group_norm": Operator(group_norm, _of_local_groups, composed=_TAKEN_APART),
    "aten::native_group_norm_backward": Operator(group_norm_backward, _of_local_groups, composed=_TAKEN_APART),
    "aten::_fused_rms_norm": Operator(norm, alternatives=(small_reductions("sum"),)),
    "aten::_fused_rms_norm_backward": Operator(norm_backward, alternatives=(small_reductions("sum", operand=1),)),
}
