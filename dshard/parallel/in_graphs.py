"""The hooks of a plan as torch.compile traces them: blocks as modes, and calls that become part of the graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.caches import cached
from dshard.compile.graph_functions import as_graph_function, as_graph_functions, call_in_graph
from dshard.compile.metadata import with_concrete_sizes
from dshard.compile.modes import FunctionReplacement, PlainReplicated
from dshard.core.signature import Function
from dshard.core.torch_placements import torch_placements
from dshard.core.trees import map_tensors
from dshard.distribute import distribute_tensor
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.ops.matmul.options import use_strategy
from dshard.parallel.batch_rows import InputLayouts
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.matmul_loops import Schedule
from dshard.tensor import DTensor

_PRODUCTS: tuple[Function, ...] = (
    *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum, torch.functional.einsum),
    *(Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm),
)


def plain_replicated(mesh: Mesh) -> PlainReplicated:
    """The mode in which plain tensors count as replicated on `mesh`."""
    return PlainReplicated(as_graph_function(_as_replicated, mesh))


def by_schedule(schedule: Schedule) -> FunctionReplacement:
    """The mode in which matmuls run by `schedule`."""
    return FunctionReplacement(_matmuls_by(schedule))


@cached("matmuls of graphs", 1024)
def _matmuls_by(schedule: Schedule) -> dict[Function, str]:
    return as_graph_functions(_scheduled, schedule, _PRODUCTS)


def by_loops(loops: AttentionLoops) -> FunctionReplacement:
    """The mode in which attention has these loops, if gradients are recorded."""
    return FunctionReplacement({F.scaled_dot_product_attention: as_graph_function(_with_loops, loops)})


def by_cost() -> FunctionReplacement:
    """The mode in which calls that a plan has are laid out by cost, as graphs are."""
    return FunctionReplacement({})


class InputsInGraph:
    """Lays out the inputs of a model as `distribute_inputs` does, by calls in the graph that is traced."""

    def __init__(self, mesh: Mesh, layouts: InputLayouts) -> None:
        self.keys = layouts.keys
        self.distribute = {key: as_graph_function(_distributed, layout) for key, layout in layouts.layouts.items()}
        self.differentiable = as_graph_function(_as_replicated, mesh)

    def __call__(self, inputs: object) -> Any:
        """`inputs` with distributed tensors for plain ones. Traced."""
        keys = self.keys(inputs)

        def distributed(leaf: Tensor) -> Any:
            key = keys.pop(0)
            if isinstance(leaf, DTensor):
                return leaf
            if leaf.requires_grad:
                return call_in_graph(self.differentiable, leaf)
            return call_in_graph(self.distribute[key], leaf)

        return map_tensors(inputs, distributed)


def _as_replicated(mesh: Mesh, x: Tensor) -> DTensor:
    x = with_concrete_sizes(x)
    return DTensor.from_local(x, mesh, replicated(mesh).placements, shape=tuple(x.shape))


def _distributed(layout: Layout, x: Tensor) -> DTensor:
    return distribute_tensor(x, layout.mesh, torch_placements(layout), src_data_rank=None)


def _with_loops(loops: AttentionLoops, *args: object, **kwargs: object) -> Any:
    with use_strategy(attention=loops if torch.is_grad_enabled() else None):
        return F.scaled_dot_product_attention(*args, **kwargs)  # type: ignore[arg-type]


def _scheduled(schedule: Schedule, function: Function, *args: object, **kwargs: object) -> Any:
    with use_strategy(matmul=schedule):
        return function(*args, **kwargs)
