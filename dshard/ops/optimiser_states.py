"""Loaded states of optimisers: distributed like their parameters, whichever program saved them."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dshard.core.plain_tensors import from_torch, is_torchs
from dshard.core.signature import Function
from dshard.core.wrapper import Wrapper
from dshard.torch_dtensor import TorchDTensor
from dshard.torch_private import state_like_parameter


def support_states() -> None:
    """Let `Optimizer.load_state_dict` convert loaded values to the class of their parameter.

    torch's functions for state dicts pass it tensors of torch's class, checkpoints of one device plain ones. The
    function of torch that gives each value the dtype and the device of its parameter is replaced.
    """
    if state_like_parameter is not None:
        name = state_like_parameter.__name__
        setattr(Optimizer, name, staticmethod(_distributed_as_the_parameter(state_like_parameter)))


def _distributed_as_the_parameter(process: Function) -> Function:
    @wraps(process)
    def processed(param: Tensor, value: Tensor, *rest: object, **named: object) -> object:
        return _like(param, process(param, value, *rest, **named))

    return processed


def _like(param: object, value: object) -> object:
    """`value`, a state of `param`, as a tensor of the same class; a plain global tensor is sharded."""
    if not isinstance(value, Tensor):
        return value
    if is_torchs(param):
        to_torch: Any = Wrapper.public.to_torch  # type: ignore[attr-defined]  # of the class above this module
        return to_torch(value) if isinstance(value, Wrapper) else value
    if not isinstance(param, Wrapper) or isinstance(value, Wrapper):
        return value
    if isinstance(value, TorchDTensor):
        return from_torch(value)
    if not value.dim():
        return value
    if value.shape == param.shape:
        return torch.empty_like(param.detach(), dtype=value.dtype).copy_(value.detach())
    return Wrapper.public.from_local(value, param.device_mesh)
