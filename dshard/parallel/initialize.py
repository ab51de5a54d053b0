"""Values for parameters and buffers without data; whatever has values keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dshard.comm import warn_user
from dshard.core.plain_tensors import implicit_replication
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.mesh import Mesh


def initialize(model: nn.Module, fresh: Mapping[str, Tensor], mesh: Mesh) -> None:
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
