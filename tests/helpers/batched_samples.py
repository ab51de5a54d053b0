"""Arguments for convolutions and for operators that treat each entry of the leading dims separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Sample: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
aten: Any = torch.ops.aten
_GENERATOR = torch.Generator().manual_seed(1)


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_GENERATOR)


line, image, solid = reals(3, 5, 6), reals(3, 5, 6, 6), reals(3, 2, 5, 5, 5)
pixels = torch.randint(9, (2, 3, 4, 4), dtype=torch.uint8, generator=_GENERATOR)
matrices = reals(5, 3, 3)
positive = matrices @ matrices.mT + 3 * torch.eye(3, dtype=torch.float64)
lower = torch.linalg.cholesky(positive)
sides = reals(5, 3, 2)
factors, pivots = torch.linalg.lu_factor(matrices)
ldl, ldl_pivots = torch.linalg.ldl_factor(positive)
reflectors, taus = torch.geqrf(matrices)


def resized(mode: str, x: Tensor, **options: Any) -> Sample:
    return (lambda x: F.interpolate(x, scale_factor=2, mode=mode, **options), (x,))


def padded(mode: str, x: Tensor) -> Sample:
    return (lambda x: F.pad(x, (1, 1) * (x.dim() - 2), mode=mode), (x,))


def chances(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_GENERATOR)


CONVOLUTIONS: dict[str, Sample] = {
    "conv1d": (F.conv1d, (line, reals(4, 5, 3), reals(4))),
    "conv2d": (F.conv2d, (image, reals(3, 5, 3, 3), reals(3))),
    "conv2d strided": (F.conv2d, (image, reals(3, 5, 2, 2), None, 2, 1)),
    "conv2d in groups": (F.conv2d, (reals(3, 6, 5, 5), reals(9, 2, 3, 3), reals(9), 1, 1, 1, 3)),
    "conv2d by channel": (F.conv2d, (image, reals(5, 1, 3, 3), reals(5), 1, 1, 1, 5)),
    "conv3d": (F.conv3d, (solid, reals(3, 2, 3, 3, 3), reals(3))),
    "transposed": (F.conv_transpose2d, (image, reals(5, 3, 2, 2), reals(3), 2)),
    "transposed in groups": (F.conv_transpose2d, (reals(3, 6, 4, 4), reals(6, 2, 2, 2), reals(6), 1, 0, 0, 3)),
}

POOLING: dict[str, Sample] = {
    "avg_pool2d": (F.avg_pool2d, (image, 2)),
    "avg_pool2d of whole numbers": (F.avg_pool2d, (pixels.long(), 2)),
    "avg_pool3d": (F.avg_pool3d, (solid, 2)),
    "max_pool2d": (F.max_pool2d, (image, 2)),
    "max_pool3d": (F.max_pool3d, (solid, 2)),
    "adaptive_avg_pool2d": (F.adaptive_avg_pool2d, (image, 4)),
    "adaptive_avg_pool3d": (F.adaptive_avg_pool3d, (solid, 2)),
    "adaptive_max_pool2d": (F.adaptive_max_pool2d, (image, 4)),
    "adaptive_max_pool3d": (F.adaptive_max_pool3d, (solid, 2)),
    "fractional 2d": (lambda x, at: F.fractional_max_pool2d(x, 2, 3, _random_samples=at), (image, chances(3, 5, 2))),
    **{f"reflect {x.dim()}": padded("reflect", x) for x in (line, image, solid)},
    **{f"replicate {x.dim()}": padded("replicate", x) for x in (line, image, solid)},
    **{f"nearest {x.dim()}": resized("nearest", x) for x in (line, image, solid)},
    **{f"nearest-exact {x.dim()}": resized("nearest-exact", x) for x in (line, image, solid)},
    "linear": resized("linear", line),
    "bilinear": resized("bilinear", image),
    "bilinear of whole numbers": resized("bilinear", pixels),
    "bicubic": resized("bicubic", image),
    "trilinear": resized("trilinear", solid),
    "bilinear antialias": resized("bilinear", image, antialias=True),
    "bicubic antialias": resized("bicubic", image, antialias=True),
    "grid_sample 2d": (F.grid_sample, (image, reals(3, 4, 4, 2).tanh(), {"align_corners": False})),
    "grid_sample 3d": (F.grid_sample, (solid, reals(3, 2, 2, 2, 3).tanh(), {"align_corners": False})),
}

MATRICES: dict[str, Sample] = {
    **{f"cdist {p}": (torch.cdist, (sides, reals(5, 4, 2), p)) for p in (0.0, 1.0, 1.5, 2.0, float("inf"))},
    "cdist of vectors": (torch.cdist, (reals(5, 3), reals(4, 3), 3.0)),
    "cdist broadcast": (torch.cdist, (reals(5, 3), reals(2, 4, 3))),
    "det": (torch.linalg.det, (matrices,)),
    "slogdet": (torch.linalg.slogdet, (matrices,)),
    "eigh": (lambda x: torch.linalg.eigvalsh(x), (positive,)),
    "eig": (lambda x: torch.linalg.eig(x)[0].abs(), (positive,)),
    "eigvals": (aten._linalg_eigvals.default, (positive,)),
    "solve": (torch.linalg.solve, (matrices, sides)),
    "solve of a vector": (torch.linalg.solve, (matrices, sides[..., 0])),
    "svd": (torch.linalg.svdvals, (matrices,)),
    "cholesky": (torch.linalg.cholesky, (positive,)),
    **({"cholesky old": (torch.cholesky, (positive,))} if hasattr(torch.ops.aten, "cholesky") else {}),
    "cholesky_inverse": (torch.cholesky_inverse, (lower,)),
    "cholesky_solve": (torch.cholesky_solve, (sides, lower)),
    "householder": (torch.linalg.householder_product, (reflectors, taus)),
    "ormqr": (torch.ormqr, (reflectors, taus, sides)),
    "inv": (torch.linalg.inv, (matrices,)),
    "ldl_factor": (torch.linalg.ldl_factor_ex, (positive,)),
    "ldl_solve": (torch.linalg.ldl_solve, (ldl, ldl_pivots, sides)),
    "lu": (torch.linalg.lu, (matrices,)),
    "lu_factor": (torch.linalg.lu_factor, (matrices,)),
    "lu_solve": (torch.linalg.lu_solve, (factors, pivots, sides)),
    "lu_unpack": (torch.lu_unpack, (factors, pivots)),
    "matrix_exp": (torch.linalg.matrix_exp, (matrices,)),
    "qr": (torch.linalg.qr, (matrices,)),
    "solve_triangular": (lambda a, b: torch.linalg.solve_triangular(a, b, upper=False), (lower, sides)),
    "triangular_solve": (torch.triangular_solve, (sides, lower, False)),
}

TRANSFORMS: dict[str, Sample] = {
    "fft": (lambda x: torch.fft.fft(x, dim=1).abs(), (sides,)),
    "rfft": (lambda x: torch.fft.rfft(x, dim=1).abs(), (sides,)),
    "irfft": (lambda x: torch.fft.irfft(x, dim=1), (sides,)),
    "fft of complex": (lambda x, y: torch.fft.fftn(torch.complex(x, y)).abs(), (sides, sides * 2)),
}

BATCHED: dict[str, Sample] = {**CONVOLUTIONS, **POOLING, **MATRICES, **TRANSFORMS}
