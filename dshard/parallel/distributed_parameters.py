"""Parameters and buffers of a model as distributed tensors; those without data get values, all others keep theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from dshard.comm import compare_calls, comparing, runtime_of, simulated_ranks, warn_user
from dshard.core.plain_tensors import implicit_replication
from dshard.core.replaced_parameters import successor
from dshard.core.wrapper import Wrapper
from dshard.distribute import distribute_tensor, replace_parameter
from dshard.errors import LayoutError
from dshard.factories import full
from dshard.mesh import Mesh
from dshard.parallel.plan_values import ModelPlan, Placements
from dshard.placements import Replicate
from dshard.tensor import DTensor


def distribute_parameters(model: nn.Module, plan: ModelPlan) -> None:
    """Replace parameters and buffers of `model` by distributed ones; tied parameters stay one.

    Those without data get only their local tensor, and values from the functions that initialise the modules which own
    them: the same values on every mesh under `dshard.manual_seed`. All others keep theirs.
    """
    replicated = (Replicate(),) * plan.mesh.ndim
    fresh: dict[str, DTensor] = {}
    compare = comparing()

    def distributed(name: str, p: Any) -> Tensor:
        if isinstance(p, DTensor):
            return p
        placements = plan.parameters.get(name, replicated)
        out: DTensor = _distribute(p, plan, placements, fresh, name, compare)
        replace_parameter(name, p, out)
        return out

    replace_parameters(model, distributed)
    for path, module in model.named_modules():
        for own, buffer in list(module._buffers.items()):
            if buffer is not None and not isinstance(buffer, DTensor):
                out = _distribute(buffer, plan, replicated, fresh, f"{path}.{own}".lstrip("."), compare)
                module._buffers[own] = _in_memory_of(buffer, out)
    if fresh:
        _initialize(model, fresh, plan.mesh)


def _in_memory_of(buffer: Tensor, out: DTensor) -> DTensor:
    """`out`, the distributed `buffer`, in the memory of `buffer`: references to it, and views, see what is written."""
    local = out._local_tensor
    if type(local) is type(buffer) is Tensor and local.stride() == buffer.stride() and local.device == buffer.device:
        out._local_tensor = buffer.detach()
    return out


def replace_parameters(model: nn.Module, replace: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each parameter by `replace(name, p)`; tied ones stay tied."""
    replaced: dict[int, Any] = {}
    names = {id(p): name for name, p in model.named_parameters()}
    for module in model.modules():
        for own, p in module._parameters.items():
            if p is not None:
                if id(p) not in replaced:
                    replaced[id(p)] = replace(names[id(p)], successor(p))
                module._parameters[own] = replaced[id(p)]


def _distribute(
    x: Tensor, plan: ModelPlan, placements: Placements, fresh: dict[str, DTensor], name: str, compare: bool
) -> Any:
    if compare:
        compare_calls(f"parallelize with {name}: {tuple(x.shape)}, {x.dtype}, {placements}", plan.mesh, contents=x)
    if not x.is_meta or (runtime_of(plan.mesh) is None and simulated_ranks() is None):
        return distribute_tensor(x, plan.mesh, placements, src_data_rank=None)
    unset = nan if x.is_floating_point() else 0
    out: Any = full(tuple(x.shape), unset, device_mesh=plan.mesh, placements=placements, dtype=x.dtype)
    if isinstance(x, nn.Parameter):
        out = nn.Parameter(out, x.requires_grad)
    fresh[name] = out
    return out


def _initialize(model: nn.Module, fresh: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Set the tensors of `fresh`, which are NaN, by the function of the model or those of the modules that own them.

    A warning says how many, and by which functions.
    """
    ids = {id(x) for x in fresh.values()}
    functions = list(_initializers(model, ids))
    with torch.no_grad(), implicit_replication(), _others_kept(model, ids):
        for _, function in functions:
            function()
        unset = [name for name, x in fresh.items() if x.is_floating_point() and x.isnan().any()]
    if unset:
        raise LayoutError(
            f"parameters without data that no module set: {', '.join(unset[:4])}; give the module that has them a "
            "reset_parameters(), or build the model with values"
        )
    names = ", ".join(dict.fromkeys(name for name, _ in functions))
    warn_user(
        f"{len(fresh)} parameters and buffers of {type(model).__name__} had no data, and were initialised by {names}",
        mesh,
    )


def _initializers(model: nn.Module, ids: set[int]) -> Iterator[tuple[str, Callable[[], object]]]:
    """The model's function that initialises it, or else those of the modules that own tensors of `ids`, by names."""
    for name in ("initialize_weights", "init_weights"):
        function = getattr(model, name, None)
        if callable(function):
            yield f"{type(model).__name__}.{name}", function
            return
    for module in model.modules():
        function = getattr(module, "reset_parameters", None)
        owns = any(id(x) in ids for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)))
        if callable(function) and (owns or all(id(p) in ids for p in module.parameters())):
            yield f"{type(module).__name__}.reset_parameters", function


@contextmanager
def _others_kept(model: nn.Module, ids: set[int]) -> Iterator[None]:
    """Put back all parameters and buffers but those of `ids` at the end of the block, with the values they had."""
    holders: list[dict[str, Any]] = [own for m in model.modules() for own in (m._parameters, m._buffers)]
    kept = [(own, name, x) for own in holders for name, x in own.items() if x is not None and id(x) not in ids]
    values = {id(x): (_local(x), _local(x).clone()) for _, _, x in kept}
    yield
    for own, name, x in kept:
        own[name] = x
    for local, before in values.values():
        local.copy_(before)


def _local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, Wrapper) else x.detach()
