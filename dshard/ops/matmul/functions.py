"""Entries of torch's functions that are matmuls: `@`, `matmul`, `mm`, `bmm`, `addmm`, `einsum` and `linear`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.core.torch_function import autocast, bind_arguments, call_torch
from dshard.core.wrapper import Wrapper
from dshard.ops.composite import Local
from dshard.ops.matmul.decision import choose_matmul, distributed_operands
from dshard.ops.matmul.matmul_autograd import multiply
from dshard.ops.matmul.options import MatmulOptions, current_options
from dshard.ops.matmul.rules import bmm_rule, einsum_rule, linear_rule, matmul_rule
from dshard.rules.rule import Rule


def matmul_of(
    name: str,
    rule: Callable[[], Rule],
    infer: Local,
    tensors: Sequence[Any],
    asked: MatmulOptions | None = None,
    key: Any = None,
) -> Any:
    """The matmul of two tensors, plus a bias if there is a third, by the cheapest strategy or the requested one."""
    cls = Wrapper.public
    tensors = autocast(tensors)
    for t in tensors:
        if type(t) is not cls and not isinstance(t, Wrapper):
            tensors = distributed_operands(name, tensors)
            break
    asked = current_options() if asked is None else asked
    return multiply(choose_matmul(name, rule, infer, tensors, asked, key), tensors)


def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: MatmulOptions | None = None) -> Any:
    """`torch.matmul`, `@`."""
    a, b, *out = (*args, *kwargs.values())
    infer = torch.mm if func in (torch.mm, Tensor.mm) else torch.matmul
    if out or not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dim() == 0 or b.dim() == 0:
        return call_torch(func, args, kwargs)
    return matmul_of(infer.__name__, lambda: matmul_rule(tuple(a.shape), tuple(b.shape)), infer, (a, b), asked=asked)


def rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.__rmatmul__`."""
    return matmul(torch.matmul, (args[1], args[0]), {})


def bmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.bmm`."""
    if len(args) != 2 or kwargs:
        return call_torch(func, args, kwargs)
    a, b = args
    return matmul_of("bmm", lambda: bmm_rule(tuple(a.shape), tuple(b.shape)), torch.bmm, (a, b))


def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.einsum`: a matmul if there are two operands; for any other number torch decomposes it."""
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if kwargs or not isinstance(equation, str) or len(operands) != 2:
        return call_torch(func, args, kwargs)
    a, b = operands
    rule = einsum_rule(equation, tuple(a.shape), tuple(b.shape))
    if rule is None:
        return call_torch(func, args, kwargs)

    def infer(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum(equation, a, b)

    return matmul_of("einsum", lambda: rule, infer, (a, b), key=equation)


def addmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.addmm` of a bias along the last dim: a matmul with a bias, as `linear` is."""
    if len(args) != 3 or kwargs or args[0].dim() != 1 or args[0].dtype != args[1].dtype:
        return call_torch(func, args, kwargs)
    bias, a, b = args
    if bias.shape[0] != b.shape[-1]:
        return call_torch(func, args, kwargs)

    def infer(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
        return torch.addmm(bias, a, b)

    return matmul_of("addmm", lambda: matmul_rule(tuple(a.shape), tuple(b.shape)), infer, (a, b, bias))


def linear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: MatmulOptions | None = None) -> Any:
    """`torch.nn.functional.linear`. If the result is partial, one rank adds the bias."""
    x, weight, bias = (
        args if len(args) == 3 and not kwargs else bind_arguments(("input", "weight", "bias"), args, kwargs)
    )
    tensors = (x, weight) if bias is None else (x, weight, bias)
    return matmul_of("linear", lambda: linear_rule(tuple(x.shape), tuple(weight.shape)), F.linear, tensors, asked=asked)
