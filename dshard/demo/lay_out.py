"""The model and its batches, laid out by a strategy: on the ranks of a process group, or on a mesh that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from dshard import DeviceMesh, DTensor, Mesh, distribute_tensor
from dshard.demo.layouts import Placements, Strategy

Place: TypeAlias = Callable[[Tensor], Tensor]


def lay_out(model: nn.Module, strategy: Strategy, mesh: DeviceMesh | Mesh) -> Place:
    """Turn the parameters of `model` into distributed ones; the function that puts a batch where the model wants it."""
    for name, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            placements = strategy.placements(f"{name}.{own}")
            module.register_parameter(own, nn.Parameter(_distribute(parameter.data, mesh, placements)))
    return lambda batch: _distribute(batch, mesh, strategy.inputs)


def _distribute(tensor: Tensor, mesh: DeviceMesh | Mesh, placements: Placements) -> DTensor:
    """Every rank has the same tensor already, so each keeps its part and nothing is sent."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
