"""Ranks outside a mesh run the same lines: their tensors on it have no data, as on a mesh without processes.

So operators, backward passes and random draws plan what the ranks of the mesh do, and send nothing. Users give and get
local tensors that hold nothing: these functions record what stands between them and the tensors without data.
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
