"""Autograd functions between a user's empty local tensors and tensors without data, on ranks outside a mesh.

Such a rank runs the same program: its tensors on the mesh have no data, as on a mesh without processes, so operators,
backward passes and random draws are planned as on the ranks of the mesh, and send nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dshard.core.signature import Context
from dshard.layout import Shape


class Emptied(torch.autograd.Function):
    """A local tensor without data -> an empty one on `device`, or zero without dims; backward: no data."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, device: torch.device) -> Tensor:
        ctx.shape, ctx.dtype = tuple(local.shape), local.dtype
        return torch.zeros((0,) if local.ndim else (), dtype=local.dtype, device=device)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return torch.empty(ctx.shape, dtype=ctx.dtype, device="meta"), None


class WithoutData(torch.autograd.Function):
    """A user's local tensor -> one of `shape` without data; backward: zeros."""

    @staticmethod
    def forward(ctx: Context, local: Tensor, shape: Shape) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = tuple(local.shape), local.dtype, local.device
        return torch.empty(shape, dtype=local.dtype, device="meta")

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device), None
