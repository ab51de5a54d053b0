"""Operators as other operators, which run on distributed tensors and know nothing of ranks.

What torch decomposes well is torch's own decomposition; written here is what torch has none for, or one that does not
reach the operators a tensor subclass sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload

aten = torch.ops.aten
Dims = int | Sequence[int] | None
HALF = frozenset({torch.float16, torch.bfloat16})


# -- variance: two passes, for the mean may be large


def var_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Variance and mean, of the distances from the mean rather than of squares."""
    dims, wide = _dims(x, dim), _widened(x)
    mean = wide.mean(dims, keepdim=True)
    distance = wide - mean
    squares = distance.real.square() + distance.imag.square() if x.is_complex() else distance.square()
    freedom = max(prod(x.shape[d] for d in dims) - (1 if correction is None else correction), 0)
    var = squares.sum(dims, keepdim) / freedom
    kept = mean if keepdim else mean.reshape(var.shape)
    return var.to(var.dtype if x.is_complex() else x.dtype), kept.to(x.dtype)


def var(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Variance."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean."""
    found, mean = var_mean(x, dim, correction=correction, keepdim=keepdim)
    return found.sqrt(), mean


def std(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Standard deviation."""
    return var(x, dim, correction=correction, keepdim=keepdim).sqrt()


# -- norms


def vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The norm of order `ord`: one small reduction, and roots of its result."""
    wide = _widened(x if dtype is None else x.to(dtype))
    dims = _dims(x, dim)
    found = _norm(wide, ord, dims, keepdim)
    return found.to(real_dtype(x.dtype if dtype is None else dtype))


def _norm(x: Tensor, ord: float, dims: Sequence[int], keepdim: bool) -> Tensor:
    if ord == 0:
        return (x != 0).sum(dims, keepdim)
    size = x.abs()
    if ord in (inf, -inf):
        return size.amax(dims, keepdim) if ord > 0 else size.amin(dims, keepdim)
    if ord == 1:
        return size.sum(dims, keepdim)
    if ord == 2:
        return size.square().sum(dims, keepdim).sqrt()
    return size.pow(ord).sum(dims, keepdim).pow(1 / ord)


def norm(x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.norm."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """The norm of the difference."""
    return vector_norm(x - other, p)


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))), shifted by the largest element: a max and a sum."""
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    if x.numel() == 0:
        return x.exp().sum(dim, keepdim).log()
    dims = _dims(x, dim)
    largest = (x.real if x.is_complex() else x).amax(dims, keepdim=True)
    shift = largest.masked_fill(largest.abs() == inf, 0)
    total = (x - shift).exp().sum(dims, keepdim=True).log() + shift
    return total if keepdim else total.reshape([n for d, n in enumerate(x.shape) if d not in dims])


# -- products with something added: once, whatever is split


def added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """beta * bias + alpha * product(a, b)."""

    def run(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if not (bias.is_floating_point() or bias.is_complex()):
            beta, alpha = int(beta), int(alpha)
        out = product(a, b)
        out = out if alpha == 1 else out * alpha
        if beta == 0:
            return out
        return out + (bias if beta == 1 else bias * beta)

    return run


def _batched_sum(a: Tensor, b: Tensor) -> Tensor:
    out: Tensor = aten.bmm.default(a, b).sum(0)
    return out


def addr(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """beta * bias + alpha * outer(a, b), of truth values too."""
    if bias.dtype != torch.bool:
        return added(aten.outer.default)(bias, a, b, beta=beta, alpha=alpha)
    out = aten.outer.default(a, b) & bool(alpha)
    return out | bias if beta else out  # type: ignore[no-any-return]


# -- losses


def huber_loss(x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    """Squares near zero, lines beyond `delta`."""
    distance = (x - target).abs()
    loss = torch.where(distance < delta, 0.5 * distance.square(), delta * (distance - 0.5 * delta))
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def trace(x: Tensor) -> Tensor:
    """The sum of the diagonal."""
    return x.diagonal().sum()


def allclose(x: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether all elements are close: the same answer on every rank."""
    return bool(torch.isclose(x, other, rtol, atol, equal_nan).all())


def equal(x: Tensor, other: Tensor) -> bool:
    """Whether shapes and all elements are equal: the same answer on every rank."""
    return x.shape == other.shape and bool((x == other).all())


def is_same_size(x: Tensor, other: Tensor) -> bool:
    """Whether the shapes are equal."""
    return x.shape == other.shape


# -- helpers


def _dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None or dim == [] or dim == ():
        return tuple(range(x.dim()))
    given = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.dim() for d in given) if x.dim() else ()


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sizes of numbers of `dtype`."""
    return dtype.to_real() if dtype.is_complex else dtype


def torchs(*names: str) -> dict[OpOverload, Callable[..., Any]]:
    """torch's own decompositions of these operators."""
    return {overload: decomposition_table[overload] for name in names for overload in [getattr(aten, name).default]}


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten.std.correction: std,
    aten.std_mean.correction: std_mean,
    aten.linalg_vector_norm.default: vector_norm,
    **{getattr(aten.norm, name): norm for name in ("Scalar", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype")},
    aten.dist.default: dist,
    aten.logsumexp.default: logsumexp,
    aten.addmm.default: added(aten.mm.default),
    aten.addmv.default: added(aten.mv.default),
    aten.baddbmm.default: added(aten.bmm.default),
    aten.addbmm.default: added(_batched_sum),
    aten.addr.default: addr,
    aten.huber_loss.default: huber_loss,
    aten.trace.default: trace,
    aten.allclose.default: allclose,
    aten.equal.default: equal,
    aten.is_same_size.default: is_same_size,
    **torchs(
        "mse_loss",
        "mse_loss_backward",
        "smooth_l1_loss",
        "smooth_l1_loss_backward",
        "huber_loss_backward",
        "binary_cross_entropy",
        "binary_cross_entropy_backward",
        "binary_cross_entropy_with_logits",
        "soft_margin_loss",
        "soft_margin_loss_backward",
    ),
}
"""What runs instead of these operators."""
