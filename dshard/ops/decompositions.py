"""Operators as other operators, which run on distributed tensors and know nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
Dims: TypeAlias = int | Sequence[int] | None
HALF = frozenset({torch.float16, torch.bfloat16})


# -- variance, of distances from the mean rather than of squares: the mean may be large


def var_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean: two small reductions."""
    dims, wide = _dims(x, dim), _widened(x)
    mean = wide.mean(dims, keepdim=True)
    distance = wide - mean
    squares = distance.real.square() + distance.imag.square() if x.is_complex() else distance.square()
    freedom = max(prod(x.shape[d] for d in dims) - (1 if correction is None else correction), 0)
    var = squares.sum(dims, keepdim) / freedom
    kept = mean if keepdim else mean.reshape(var.shape)
    return var.to(_real_dtype(x.dtype)), kept.to(x.dtype)


def var(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    """Variance."""
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def std_mean(
    x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
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
    """The norm of order `ord`: one small reduction, and the root of its result."""
    x = x if dtype is None else x.to(dtype)
    return _norm(_widened(x), ord, _dims(x, dim), keepdim).to(_real_dtype(x.dtype))


def _norm(x: Tensor, ord: float, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    if ord == 0:
        return (x != 0).sum(dims, keepdim)
    size = x.abs()
    if ord == inf:
        return size.amax(dims, keepdim)
    if ord == -inf:
        return size.amin(dims, keepdim)
    if ord == 1:
        return size.sum(dims, keepdim)
    if ord == 2:
        return size.square().sum(dims, keepdim).sqrt()
    return size.pow(ord).sum(dims, keepdim).pow(1 / ord)


def norm(
    x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """torch.norm."""
    return vector_norm(x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def dist(x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    """The norm of the difference."""
    return vector_norm(x - other, p)


def logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """log(sum(exp(x))) shifted by the largest element: a max and a sum."""
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    dims = _dims(x, dim)
    if x.numel() == 0:
        return x.exp().sum(dims, keepdim).log()
    largest = (x.real if x.is_complex() else x).amax(dims, keepdim=True)
    shift = largest.masked_fill(largest.abs() == inf, 0)
    found = (x - shift).exp().sum(dims, keepdim=True).log() + shift
    return found if keepdim else found.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def trace(x: Tensor) -> Tensor:
    """The sum of the diagonal."""
    return x.diagonal().sum()


# -- questions about whole tensors: the same answer on every rank


def equal(x: Tensor, other: Tensor) -> bool:
    """Whether shapes and all elements are equal."""
    return x.shape == other.shape and bool((x == other).all())


def allclose(x: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> bool:
    """Whether all elements are close."""
    return bool(torch.isclose(x, other, rtol, atol, equal_nan).all())


def is_same_size(x: Tensor, other: Tensor) -> bool:
    """Whether the shapes are equal."""
    return x.shape == other.shape


# -- helpers


def _dims(x: Tensor, dim: Dims) -> tuple[int, ...]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.dim()))
    given = (dim,) if isinstance(dim, int) else dim
    return tuple(d % x.dim() for d in given) if x.dim() else ()


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _real_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten.std.correction: std,
    aten.std_mean.correction: std_mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.norm.Scalar: norm,
    aten.norm.ScalarOpt_dim: norm,
    aten.norm.ScalarOpt_dtype: lambda x, p, *, dtype: norm(x, p, dtype=dtype),
    aten.norm.ScalarOpt_dim_dtype: norm,
    aten.dist.default: dist,
    aten.logsumexp.default: logsumexp,
    aten.trace.default: trace,
}
"""Operators that become others; their arguments are checked by torch itself first."""

QUESTIONS: dict[OpOverload, Callable[..., Any]] = {
    aten.equal.default: equal,
    aten.allclose.default: allclose,
    aten.is_same_size.default: is_same_size,
}
"""Operators whose answer is no tensor."""
