"""Operators decomposed into other operators on distributed tensors, without code for ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import sum_dtype
from dshard.core.moves import with_partials_reduced
from dshard.core.signature import Function
from dshard.torch_private import OpOverload, decomposition_table

aten = torch.ops.aten
Dims: TypeAlias = int | Sequence[int] | None


# -- variance, of distances from the mean rather than of squares: the mean may be large


def variance(*, root: bool = False, and_mean: bool = False) -> Function:
    """The function of the variance, or of its root, alone or with the mean."""

    def run(
        x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        result, mean = _moments(x, dim, correction, keepdim)
        result = (result.sqrt() if root else result).to(real_dtype(x.dtype))
        return (result, mean.to(x.dtype)) if and_mean else result

    return run


def _moments(x: Tensor, dim: Dims, correction: float | None, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean by two small reductions; half precision is summed in single."""
    dims, wide = _dims(x, dim), with_partials_reduced(widened(x), "aten.var.correction")
    mean = with_partials_reduced(wide.mean(dims, keepdim=True), "aten.mean.dim")
    distance = wide - mean
    squares = distance.real.square() + distance.imag.square() if x.is_complex() else distance.square()
    freedom = max(prod(x.shape[d] for d in dims) - (1 if correction is None else correction), 0)
    variance = squares.sum(dims, keepdim) / freedom
    return variance, mean if keepdim else mean.reshape(variance.shape)


# -- norms


def vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The norm of order `ord`: one small reduction, and the root of its result."""
    x = x if dtype is None else x.to(dtype)
    if ord in (inf, -inf):
        size, dims = x.abs(), _dims(x, dim)
        return size.amax(dims, keepdim) if ord == inf else size.amin(dims, keepdim)
    return root(power_sum(widened(x), ord, dim, keepdim), ord).to(real_dtype(x.dtype))


def power_sum(x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum of absolute values to the power of `ord`; of order 0, the number of elements that are not zero."""
    dims = _dims(x, dim)
    if ord == 0:
        return (x != 0).sum(dims, keepdim, dtype=real_dtype(x.dtype))
    size = x.abs()
    powers = size if ord == 1 else size.square() if ord == 2 else size.pow(ord)
    return powers.sum(dims, keepdim)


def root(sums: Tensor, ord: float) -> Tensor:
    """The norm of order `ord` from the sum of powers."""
    if ord in (0, 1):
        return sums
    return sums.sqrt() if ord == 2 else sums.pow(1 / ord)


def dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """`torch.dist`: the norm of the difference."""
    return vector_norm(x - other, p)


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) shifted by the largest element: a max and a sum."""
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    dims = _dims(x, dim)
    if x.numel() == 0:
        return x.exp().sum(dims, keepdim).log()
    largest: Tensor = with_partials_reduced(
        (x.real if x.is_complex() else x).amax(dims, keepdim=True), "aten.amax.default"
    )
    shift = largest.masked_fill(largest.abs() == inf, 0)
    result = (x - shift).exp().sum(dims, keepdim=True).log() + shift
    return result if keepdim else result.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *options: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients of group norm as torch decomposes them, which divides by the elements of a group.

    The `options` are the numbers of batch, channels, elements of a channel and groups, and the gradients that are asked
    for.
    """
    *sizes, mask = options
    has_elements = sizes[1] * sizes[2] > 0
    decomposition = decomposition_table[aten.native_group_norm_backward.default]
    of_x, *others = decomposition(grad, x, mean, rstd, weight, *sizes, [mask[0] and has_elements, *mask[1:]])
    return of_x if has_elements or not mask[0] else torch.zeros_like(x), *others


def weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradients of direction and length of a weight, `v * g / norms`, whose norms are of all dims but `dim`."""
    wide, dims = widened(v), [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (widened(grad) * wide).sum(dims, keepdim=True) / norms
    return ((widened(grad) - wide * along / norms) * (g / norms)).to(v.dtype), along.to(g.dtype)


# -- attention, where torch's functions call its kernel for CPUs below `__torch_function__`


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention, and the log-sum-exp of each query. The scores are held in memory; torch has no dropout here.

    torch's own decomposition returns the weights in place of that logarithm.
    """
    scores = _scores(q, k, is_causal, attn_mask, scale)
    logsumexp = scores.logsumexp(-1)
    return (_weights(scores, logsumexp) @ widened(v)).to(q.dtype), logsumexp


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *options: Any,
    **named: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, keys and values of attention; the options are those of `flash_attention`."""
    (_, is_causal), mask, scale = options, named.get("attn_mask"), named.get("scale")
    weights = _weights(_scores(q, k, is_causal, mask, scale), logsumexp)
    wide = widened(grad)
    of_weights = wide @ widened(v).transpose(-2, -1)
    of_scores = weights * (of_weights - (wide * widened(out)).sum(-1, keepdim=True)) * _scale(q, scale)
    gradients = of_scores @ widened(k), of_scores.transpose(-2, -1) @ widened(q), weights.transpose(-2, -1) @ wide
    return gradients[0].to(q.dtype), gradients[1].to(k.dtype), gradients[2].to(v.dtype)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = widened(q) @ widened(k).transpose(-2, -1) * _scale(q, scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -inf) if mask.dtype == torch.bool else scores + mask
    if causal:
        scores = scores.masked_fill(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1), -inf)
    return scores


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """The softmax of scores; 0 for a query that sees no key."""
    return (scores - logsumexp.masked_fill(logsumexp == -inf, 0).unsqueeze(-1)).exp()


def multi_margin(x: Tensor, target: Tensor, *options: Any, **named: Any) -> Tensor:
    """Torch's decomposition; the loss of one row with one target, without dims, has none, as the kernels give it."""
    loss: Tensor = decomposition_table[aten.multi_margin_loss.default](x, target, *options, **named)
    return loss if target.dim() else loss.reshape(())


# -- questions about global tensors: equal results on every rank


def equal(x: Tensor, other: Tensor) -> bool:
    """Whether shapes and all elements are equal."""
    # asked so, a rank outside the mesh, where all numbers are 0, finds no difference
    return x.shape == other.shape and not bool((x != other).any())


def allclose(x: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether all elements are close."""
    return not bool(torch.isclose(x, other, rtol, atol, equal_nan).logical_not().any())


def is_pinned(x: Any, device: object = None) -> bool:
    """Whether the local tensor of this rank lies in pinned memory."""
    return bool(x.to_local().is_pinned())


def record_stream(x: Any, stream: torch.Stream) -> None:
    """Tell the allocator that a stream uses the memory of this rank's local tensor."""
    x.to_local().record_stream(stream)


# -- helpers


def _dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.dim() for d in dims) if x.dim() else ()


def widened(x: Tensor) -> Tensor:
    """Half precision converted to single: sums of powers need the range."""
    return x.to(sum_dtype(x.dtype))


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of absolute values of numbers of `dtype`."""
    return dtype.to_real() if dtype.is_complex else dtype


DECOMPOSITIONS: dict[OpOverload, Function] = {
    aten.var.correction: variance(),
    aten.var_mean.correction: variance(and_mean=True),
    aten.std.correction: variance(root=True),
    aten.std_mean.correction: variance(root=True, and_mean=True),
    aten.linalg_vector_norm.default: vector_norm,
    aten.dist.default: dist,
    aten.logsumexp.default: logsumexp,
    aten._weight_norm_interface_backward.default: weight_norm_backward,
    aten.multi_margin_loss.default: multi_margin,
    aten._scaled_dot_product_flash_attention_for_cpu.default: flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: flash_attention_backward,
}
"""Operators that are decomposed into others; torch checks their arguments first."""


def multilabel_margin(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """The meta form of torch, but of a vector without dims, as its kernels have it."""
    loss, is_target = aten.multilabel_margin_loss_forward.default(x, target, reduction)
    return loss if x.dim() > 1 else loss.reshape(()), is_target


META: dict[OpOverload, Function] = {
    aten.multilabel_margin_loss_forward.default: multilabel_margin,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.multilabel_margin_loss_backward.default: lambda grad, x, *rest: x.new_empty(x.shape),
}
"""Meta forms of operators that have none in torch, or one that refuses arguments that their kernels take."""

QUESTIONS: dict[OpOverload, Function] = {
    aten.equal.default: equal,
    aten.allclose.default: allclose,
    aten.is_pinned.default: is_pinned,
    aten.record_stream.default: record_stream,
    aten._has_same_storage_numel.default: lambda x, other: (
        True
    ),  # asked of tangents: what memory is behind does not show
}
"""Operators whose result is no tensor."""


NOT_TAKEN_APART = frozenset({aten.as_strided_scatter.default, aten.narrow_copy.default})
"""Operators whose decomposition in torch recurses, or refuses other arguments than the operators."""


@cached("decompositions", 16384)
def decomposition_of(func: OpOverload) -> Function | None:
    """Torch's decomposition of `func` into other operators, or None if it has none."""
    if func in NOT_TAKEN_APART:
        return None
    if func._can_decompose():
        return func.decompose
    if func.namespace == "prims":
        return getattr(func, "impl_aten", None)
    return decomposition_table.get(func) or _functional(func)


def _functional(func: OpOverload) -> Function | None:
    """A decomposition of an in-place operator: the operator that returns a new tensor, and a copy."""
    schema = func._schema
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    if not schema.name.endswith("_") or sum(writes) != 1 or not writes[0] or len(schema.returns) != 1:
        return None
    if torch.Tag.inplace_view in func.tags:  # it changes the shape of the tensor, as resize_
        return None
    name = schema.name.removeprefix(f"{func.namespace}::").removesuffix("_")
    packet = getattr(getattr(torch.ops, func.namespace), name, None)
    if packet is None or func._overloadname not in packet.overloads():
        return None
    functional = getattr(packet, func._overloadname)
    if [a.name for a in functional._schema.arguments] != [a.name for a in schema.arguments]:
        return None
    return lambda x, *args, **kwargs: x.copy_(functional(x, *args, **kwargs))
