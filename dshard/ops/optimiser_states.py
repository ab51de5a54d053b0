"""States of optimisers: distributed like their parameters, whichever program made or saved them."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dshard.autograd.crossing import redistribute
from dshard.core.operands import plain_value
from dshard.core.plain_tensors import from_torch, is_torchs
from dshard.core.replaced_parameters import Replaced, successor
from dshard.core.signature import Function
from dshard.core.trees import replace_leaves
from dshard.core.wrapper import DISTRIBUTED, Wrapper
from dshard.layout import replicated
from dshard.torch_private import state_like_parameter


def support_states() -> None:
    """Let `Optimizer.load_state_dict` convert loaded values to the class of their parameter.

    torch's functions for state dicts pass it tensors of torch's class, checkpoints of one device plain ones. The
    function of torch that gives each value the dtype and the device of its parameter is replaced.
    """
    if state_like_parameter is not None:
        name = state_like_parameter.__name__
        setattr(Optimizer, name, staticmethod(_distributed_as_the_parameter(state_like_parameter)))
    register_optimizer_step_pre_hook(_follow_parameters)


def _follow_parameters(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Put the successors of parameters that were replaced into an optimiser made before, with their states laid out."""
    if getattr(optimizer, "_dshard_followed", 0) == Replaced.number:
        return
    optimizer._dshard_followed = Replaced.number  # type: ignore[attr-defined]
    taken: dict[int, Tensor] = {}  # of two objects that are one parameter the first counts
    for group in optimizer.param_groups:
        parameters = {id(p): p for p in map(successor, group["params"]) if id(p) not in taken}
        group["params"][:] = parameters.values()
        taken |= parameters
    for old in [p for p in optimizer.state if successor(p) is not p]:
        new = successor(old)
        optimizer.state[new] = replace_leaves(optimizer.state.pop(old), partial(_like, new))


def _distributed_as_the_parameter(process: Function) -> Function:
    @wraps(process)
    def processed(param: Tensor, value: Tensor, *rest: object, **named: object) -> object:
        return _like(param, process(param, value, *rest, **named))

    return processed


def _like(param: object, value: object) -> object:
    """`value`, a state of `param`, as a tensor of the same class, laid out as `param` where it has its shape."""
    if not isinstance(value, Tensor):
        return value
    if is_torchs(param):
        to_torch: Any = Wrapper.public.to_torch  # type: ignore[attr-defined]  # of the class above this module
        return to_torch(value) if isinstance(value, Wrapper) else value
    if not isinstance(param, Wrapper):
        return plain_value("load_state_dict", value) if isinstance(value, Wrapper) else value
    if isinstance(value, DISTRIBUTED):
        x: Wrapper = from_torch(value) if is_torchs(value) else value  # type: ignore[assignment]
        layout, own = param._spec.layout, x._spec.layout
        target = layout if x.shape == param.shape else own if own.mesh == layout.mesh else replicated(layout.mesh)
        return x if own == target else redistribute(x.detach(), target)
    if not value.dim():
        return value
    if value.shape == param.shape:
        return torch.empty_like(param.detach(), dtype=value.dtype).copy_(value.detach())
    return Wrapper.public.from_local(value, param.device_mesh)
