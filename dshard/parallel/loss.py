"""`loss_parallel`: cross entropy of logits whose classes are sharded over the mesh never gathers them.

A token costs three all-reduced numbers forward, and none backward, for any number of classes: the vocab parallel cross
entropy of Shoeybi et al., Megatron-LM (2019), section 3, in `dshard.ops.losses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.compile.graph_functions import as_graph_function
from dshard.compile.modes import FunctionReplacement
from dshard.core.signature import Function
from dshard.distribute import distribute_tensor
from dshard.errors import LayoutError
from dshard.ops.losses import LOSS_ARGUMENTS, cross_entropy, log_softmax
from dshard.placements import Placement, Replicate, Shard
from dshard.tensor import DTensor
from dshard.torch_private import no_torch_function


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
