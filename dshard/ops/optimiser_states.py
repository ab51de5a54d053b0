"""States of optimisers that are loaded: distributed as their parameters are, whoever made the values."""

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
    """Let `Optimizer.load_state_dict` make what it loads of the class of the parameter.

    torch's functions for state dicts give it tensors of torch's class, checkpoints of one device plain ones. One
    function of torch gives each value the dtype and the device of its parameter; it is replaced by one that does more.
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
    """`value`, a state of `param`: of the same class, and cut where it is whole."""
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
