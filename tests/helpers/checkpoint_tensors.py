"""Meshes and tensors for tests of checkpoints."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from dshard import init_device_mesh


@functools.cache
def mesh_of(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("x", "y", "z")[: len(shape)])


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)
