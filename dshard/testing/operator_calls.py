"""The operators that a function calls, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.core.moves import replace_tensors, tensors_in
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.errors import NotationError
from dshard.torch_private import OpOverload, OpOverloadPacket
from dshard.validate import check_callable

Recorded: TypeAlias = tuple[OpOverload, Args, Kwargs]


def resolve(op: OpOverload | Function | str) -> Function:
    """Return the operator or function that `op` names or is.

    Raises:
        NotationError: no operator has this name, or several overloads do.
        ArgumentError: `op` cannot be called.
    """
    if isinstance(op, str):
        namespace, colons, name = op.partition("::")
        if not colons or not hasattr(getattr(torch.ops, namespace), name):
            raise NotationError(f"there is no operator {op!r}: write namespace::name, such as 'mylib::fused'")
        return _only_overload(getattr(getattr(torch.ops, namespace), name))
    check_callable(op, "check_rule", "give an operator of torch's, a function, or the name of an operator")
    return _only_overload(op) if isinstance(op, OpOverloadPacket) else op


def _only_overload(op: Any) -> OpOverload:
    overloads = op.overloads()
    if len(overloads) > 1:
        raise NotationError(f"{op} has the overloads {', '.join(overloads)}: give one, such as {op}.{overloads[0]}")
    overload: OpOverload = getattr(op, overloads[0])
    return overload


def recorded_calls(function: Function, args: Args, kwargs: Kwargs, gradients: Sequence[bool]) -> list[Recorded]:
    """List the distinct operators that `function` calls on these arguments, with the arguments of each.

    Its backward pass runs for the operands that `gradients` marks. Views and copies are left out, unless they are the
    function itself.
    """
    rest = iter(gradients)
    leaf_args, leaf_kwargs = replace_tensors((args, kwargs), lambda x: _copy(x).requires_grad_(next(rest)))
    first_calls: dict[object, Recorded] = {}

    def run(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        key = (func, str(replace_tensors((args, kwargs), lambda x: (x.shape, x.dtype))))
        if key not in first_calls:
            first_calls[key] = (func, *replace_tensors((args, kwargs), _copy))
        return func(*args, **kwargs)

    with OperatorMode(run):
        outputs = tensors_in(function(*leaf_args, **leaf_kwargs))
        with_grad = [out for out in outputs if out.requires_grad]
        if with_grad:
            torch.autograd.backward(with_grad, [torch.ones_like(out) for out in with_grad])
    calls = [call for call in first_calls.values() if call[0] == function or not _is_trivial(call[0])]
    if isinstance(function, OpOverload) and all(call[0] != function for call in calls):  # torch decomposes it
        calls.append((function, *replace_tensors((args, kwargs), _copy)))
    return calls


def _is_trivial(func: OpOverload) -> bool:
    name = func._schema.name
    return func.is_view or "empty" in name or name.endswith("_like") or name in _TRIVIAL


_TRIVIAL = ("aten::clone", "aten::detach", "aten::copy_", "aten::new_zeros", "aten::new_ones", "aten::lift_fresh")


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()
