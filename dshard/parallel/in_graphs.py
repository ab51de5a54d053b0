"""Blocks that a compiled graph can contain, as the calls that they change: those of a plan, and `loss_parallel`.

dynamo traces a program into a graph that runs later. A block that sets a variable would have set it back by then, and
dynamo cannot leave such a block half-way, where the graph breaks. Modes of torch functions it can: what a mode does
with a call is traced into the graph, and a graph that breaks leaves the mode in force for what runs in between.

`loss_parallel`: cross entropy of logits whose classes are sharded over the mesh never gathers them. A token costs three
all-reduced numbers forward, and none backward, for any number of classes: the vocab parallel cross entropy of Shoeybi
et al., Megatron-LM (2019), section 3, in `dshard.ops.losses`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from dshard.caches import cached
from dshard.compile.graph_functions import as_graph_function, as_graph_functions, call_in_graph
from dshard.compile.metadata import with_concrete_sizes
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_placements import torch_placements
from dshard.core.trees import GivenCopy, leaves, map_given, replace_leaves
from dshard.core.wrapper import Wrapper
from dshard.distribute import distribute_tensor
from dshard.errors import LayoutError
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.ops.losses import LOSS_ARGUMENTS, cross_entropy, log_softmax
from dshard.ops.matmul.options import use_strategy
from dshard.parallel.batch_rows import InputLayouts
from dshard.placements import Placement, Replicate, Shard
from dshard.rules.attention_loops import AttentionLoops
from dshard.rules.matmul_loops import Schedule
from dshard.tensor import DTensor
from dshard.torch_private import no_torch_function


class FunctionReplacement(TorchFunctionMode):
    """Replace the functions of torch in a table by functions of `FUNCTIONS`, given by name."""

    def __init__(self, names: Mapping[Function, str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        name = self.names.get(func)
        return _called(func, args, kwargs) if name is None else call_in_graph(name, *args, **kwargs)


class PlainReplicated(TorchFunctionMode):
    """Turn plain tensors among distributed ones into replicated ones in a graph (`implicit_replication`).

    The function of `FUNCTIONS` called `replicate` makes them.
    """

    def __init__(self, replicate: str) -> None:
        super().__init__()
        self.replicate = replicate

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_dynamo_compiling():  # where the graph breaks
            with implicit_replication():
                return func(*args, **kwargs)
        if any(isinstance(x, Wrapper) for x in leaves((args, kwargs))):  # dynamo leaves them out of `types`
            args, kwargs = replace_leaves((args, kwargs), self._replicated)
        return _called(func, args, kwargs)

    def _replicated(self, x: object) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Wrapper) or x.numel() == 1:
            return x
        return call_in_graph(self.replicate, x)


def _called(func: Function, args: Args, kwargs: Kwargs) -> Any:
    if func is Tensor.unflatten:  # which calls a method of its base class: dynamo cannot trace that
        func = torch.unflatten
    return func(*args, **kwargs)


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


def by_loops(loops: AttentionLoops | None) -> FunctionReplacement:
    """The mode in which attention has these loops, if gradients are recorded."""
    return FunctionReplacement({F.scaled_dot_product_attention: as_graph_function(_with_loops, loops)})


class InputsInGraph:
    """Lays out the inputs of a model as `apply_plan.lay_out` does, by calls in the graph that is traced."""

    def __init__(self, mesh: Mesh, layouts: InputLayouts) -> None:
        self.keys = layouts.keys
        self.distribute = {key: as_graph_function(_distributed, layout) for key, layout in layouts.layouts.items()}
        self.differentiable = as_graph_function(_as_replicated, mesh)

    def __call__(self, inputs: object, copies: list[GivenCopy]) -> Any:
        """`inputs` with distributed tensors for plain ones; the copies of containers are added to `copies`. Traced."""
        keys = self.keys(inputs)

        def distributed(leaf: Tensor) -> Any:
            key = keys.pop(0)
            if isinstance(leaf, DTensor):
                return leaf
            if leaf.requires_grad:
                return call_in_graph(self.differentiable, leaf)
            return call_in_graph(self.distribute[key], leaf)

        return map_given(inputs, distributed, copies)


def _as_replicated(mesh: Mesh, x: Tensor) -> DTensor:
    x = with_concrete_sizes(x)
    return DTensor.from_local(x, mesh, replicated(mesh).placements, shape=tuple(x.shape))


def _distributed(layout: Layout, x: Tensor) -> DTensor:
    return distribute_tensor(x, layout.mesh, torch_placements(layout), src_data_rank=None)


def _with_loops(loops: AttentionLoops | None, *args: object, **kwargs: object) -> Any:
    with use_strategy(attention=loops if torch.is_grad_enabled() else None):
        return F.scaled_dot_product_attention(*args, **kwargs)  # type: ignore[arg-type]


def _scheduled(schedule: Schedule, function: Function, *args: object, **kwargs: object) -> Any:
    with use_strategy(matmul=schedule):
        return function(*args, **kwargs)


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Within the block `cross_entropy`, `log_softmax` and `nll_loss` never gather the classes of distributed logits.

    The classes are dim 1 of the logits, or dim 0 if that is the only one. A plain target or class weight counts as
    replicated if the batch is replicated. The loss is that of one device: every reduction, `ignore_index`, class
    weights and label smoothing, on meshes of any rank, with batch dims sharded too. A cross entropy takes three
    all_reduces forward, of a number for each token, and none backward. Replicated classes, and targets that are
    probabilities, take the usual operators.

    Raises:
        LayoutError: a plain target for logits whose batch is sharded.
    """
    with _ALONG_CLASSES:
        yield


def _along_classes(func: Function, handler: Function, *args: object, **kwargs: object) -> Any:
    """Call `func` by `handler`, or as usual if that returns None, as for calls not along sharded classes."""
    if func in (F.cross_entropy, F.nll_loss):
        args, kwargs = (), _with_distributed_targets(dict(zip(LOSS_ARGUMENTS, args, strict=False)) | kwargs)
    with no_torch_function():
        out = handler(func, args, kwargs)
    return func(*args, **kwargs) if out is None else out


_LOSS = partial(cross_entropy, always=True)
_ALONG_CLASSES = FunctionReplacement(
    {
        **{func: as_graph_function(_along_classes, func, _LOSS) for func in (F.cross_entropy, F.nll_loss)},
        **{
            func: as_graph_function(_along_classes, func, log_softmax)
            for func in (F.log_softmax, torch.log_softmax, Tensor.log_softmax)
        },
    }
)
"""The mode in which losses of sharded classes never gather the classes."""


def _with_distributed_targets(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a loss, with plain targets and class weights of distributed logits as distributed tensors."""
    x, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
    if not isinstance(x, DTensor) or x.ndim == 0 or not x.layout.axes_of(min(1, x.ndim - 1)):
        return arguments
    mesh = x.layout.mesh
    if not isinstance(target, DTensor) and not target.is_floating_point():
        target = DTensor.from_local(target, mesh, _target_placements(x, target), shape=target.shape)
    if weight is not None and not isinstance(weight, DTensor):
        weight = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return arguments | {"target": target, "weight": weight}


def _target_placements(x: DTensor, target: Tensor) -> list[Placement]:
    dim = min(1, x.ndim - 1)
    placements: list[Placement] = [
        Shard(p.dim - (p.dim > dim)) if isinstance(p, Shard) and p.dim != dim else Replicate() for p in x.placements
    ]
    if any(isinstance(placement, Shard) for placement in placements):
        raise LayoutError(
            f"loss_parallel: a plain target of shape {tuple(target.shape)} for logits laid out [{x.layout}]: "
            f"lay it out with distribute_tensor(target, mesh, {placements})"
        )
    return placements
