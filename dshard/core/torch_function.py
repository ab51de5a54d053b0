"""Calls of torch's functions: arguments by name, without `__torch_function__`, in autocast's dtype, by bindings."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from dshard.comm import plain
from dshard.core.signature import Args, Function, Kwargs
from dshard.torch_private import SEEN, OpOverload, is_autocasting, no_torch_function

aten = torch.ops.aten


def call_torch(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Call `func` with `__torch_function__` disabled."""
    with no_torch_function():
        return func(*args, **kwargs)


def without_asking(function: Function, **names: object) -> Function:
    """A copy of one of torch's Python functions that does not ask `__torch_function__`; what it calls does.

    `names` replace the globals that it uses. Torch's own function is unchanged.

    Raises:
        ImportError: torch's function does not use the names that the copy replaces: it would ask without end.
    """
    if not {"has_torch_function", *names} <= set(function.__code__.co_names):
        raise ImportError(
            f"{function.__module__}.{function.__name__} of torch {torch.__version__} is not the function that dshard "
            f"knows: install torch {SEEN}, or a dshard for your torch"
        )
    own = dict(function.__globals__) | names
    own |= dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda operands: False)
    copy = FunctionType(function.__code__, own, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def bind_arguments(names: Sequence[str], args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments in the order of `names`, None where one is missing.

    Raises:
        TypeError: an argument whose name is not among `names`.
    """
    if not kwargs and len(args) <= len(names):
        return [*args, *[None] * (len(names) - len(args))]
    by_name = dict(zip(names, args, strict=False)) | kwargs
    unknown = set(by_name) - set(names)
    if unknown or len(args) > len(names):
        raise TypeError(
            f"unexpected arguments {sorted(unknown) or args[len(names) :]}; the parameters are {', '.join(names)}"
        )
    return [by_name.get(name) for name in names]


def autocast(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The floating-point operands in the dtype of autocast, where it is on."""
    if not is_autocasting():
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    wide = (torch.float32, torch.float16, torch.bfloat16)
    return [t.to(dtype) if t.dtype in wide else t for t in tensors]


def autocast_dtype(function: Function, x: Tensor) -> torch.dtype:
    """The dtype of what one of torch's functions makes of `x`: of some, autocast makes single precision.

    `function` is called with no rows of one element. Which functions these are depends on the type of device.
    """
    if not is_autocasting() or not torch.is_autocast_enabled(x.device.type):
        return x.dtype
    with plain(), torch.no_grad():
        out: Tensor = function(torch.empty(0, 1, dtype=x.dtype, device=x.device))
    return out.dtype


_BINDINGS = {
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.mul.Scalar: torch.mul,
    aten.div.Tensor: torch.div,
    aten.neg.default: torch.neg,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.mm.default: torch.mm,
    aten.mm.out: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.select.int: torch.select,
    aten.detach.default: torch.detach,
    aten.view.default: Tensor.view,
    aten.expand.default: Tensor.expand,
    aten.squeeze.dim: torch.squeeze,
    aten.permute.default: torch.permute,
    aten.mean.dim: torch.mean,
    aten.rsqrt.default: torch.rsqrt,
    aten.add_.Tensor: Tensor.add_,
    aten.gather.default: torch.gather,
    aten.scatter.src: torch.scatter,
    aten.masked_fill.Scalar: torch.masked_fill,
    aten.masked_fill.Tensor: torch.masked_fill,
    aten._softmax.default: torch._softmax,
    aten._log_softmax.default: torch._log_softmax,
    aten._softmax_backward_data.default: torch._softmax_backward_data,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    aten.embedding.default: torch.embedding,
    aten.native_layer_norm.default: torch.native_layer_norm,
}
"""torch's own functions of some operators: they parse their arguments faster than the operators in `torch.ops`."""


def binding_of(op: OpOverload) -> Function:
    """The fastest function that runs an operator: torch's own for it, or the operator without its Python wrapper."""
    binding: Any = _BINDINGS.get(op, op._op)
    return binding  # type: ignore[no-any-return]
