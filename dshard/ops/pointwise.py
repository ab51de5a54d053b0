"""Elementwise operators: all that torch tags pointwise, copies and casts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dshard.core.call import Call, Operator
from dshard.core.signature import Args, Kwargs
from dshard.core.trees import leaves
from dshard.rules.rule import ANY, PassThrough, Rule, linear, together
from dshard.torch_private import OpOverload, OpOverloadPacket


def pointwise(call: Call) -> Rule:
    """Any dim may be sharded; operands are broadcast."""
    return call.rule("*... -> *...", passes=passing(call))


def passing(call: Call) -> tuple[PassThrough, ...]:
    """The pass-throughs of this call: the partial operands that leave the output partial."""
    name = call.func._schema.name.removeprefix("aten::").removesuffix("_")
    n = len(call.specs)
    if call.argument("rounding_mode") is not None or not adds_up_by_numbers(name, call.args, call.kwargs):
        return ()
    if name.endswith("_backward"):
        return linear(0)
    if name == "copy" and n == 1:  # a number: no operand is read, and the value becomes it, not each rank's term
        return ()
    if name in COPIES:
        return together(*range(n), ops=ANY) if _exact(call, n - 1) else ()
    return tuple(p for p in PASSING.get((name, n), ()) if all(_exact(call, operand) for operand in p.operands))


def adds_up_by_numbers(name: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether the terms of a sum add up times the call's numbers, or by them: inf times terms of both signs is nan."""
    numbers = [arg for arg in leaves((args, kwargs)) if isinstance(arg, int | float | complex)]
    return all(number - number == 0 for number in numbers) and not (name == "div" and 0 in numbers)


def _exact(call: Call, operand: int) -> bool:
    """Whether the output has the operand's dtype or a wider one; else the reduction must run first."""
    src, dst = call.specs[operand].dtype, call.outs[0].dtype
    return src == dst or (src.is_floating_point and dst.is_floating_point and dst.itemsize > src.itemsize)


def is_pointwise(func: OpOverload) -> bool:
    """Whether torch tags the operator pointwise."""
    return torch.Tag.pointwise in func.tags


def adds_up(name: str, n: int) -> bool:
    """Whether the operator of this name leaves the output a partial sum where all of its `n` operands are."""
    passes = PASSING.get((name, n), ())
    return name in COPIES or any(len(p.operands) == n and "sum" in p.ops for p in passes)


def nonlinear_names(names: Iterable[str]) -> list[str]:
    """Those of `names` that are elementwise operators of one tensor which leave no partial sum partial."""
    return [name for name in names if name not in COPIES and (name, 1) not in PASSING and _is_of_one_tensor(name)]


def _is_of_one_tensor(name: str) -> bool:
    packet = None if name.startswith("_") or name.endswith("_") else getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, OpOverloadPacket) else ()
    for func in (getattr(packet, overload) for overload in overloads):
        if not is_pointwise(func) or torch.Tag.nondeterministic_seeded in func.tags:
            continue
        arguments = func._schema.arguments
        has_other = any(argument.name == "other" for argument in arguments)
        if not has_other and sum("Tensor" in str(argument.type) for argument in arguments) == 1:
            return True
    return False


_BOTH = together(0, 1)

PASSING: dict[tuple[str, int], tuple[PassThrough, ...]] = {
    ("add", 2): _BOTH,
    ("sub", 2): _BOTH,
    ("rsub", 2): _BOTH,
    ("mul", 1): linear(0),
    ("mul", 2): linear(0, 1),
    ("div", 1): linear(0),
    ("div", 2): linear(0),
    ("neg", 1): linear(0),
    ("zero", 1): linear(0),
    ("real", 1): linear(0),
    ("imag", 1): linear(0),
    ("maximum", 2): together(0, 1, ops=("max",)),
    ("minimum", 2): together(0, 1, ops=("min",)),
    ("where", 3): together(1, 2),
    ("lerp", 2): _BOTH,
}

COPIES = ("copy", "_to_copy", "clone", "detach", "alias", "lift_fresh", "positive")

_POINTWISE = Operator(pointwise, values=False)

RULES: dict[str, Operator] = {
    **{f"aten::{name}": _POINTWISE for name in COPIES},
    "aten::detach": Operator(pointwise, lambda call: lambda x: x, values=False, blocks=True),
    "aten::fill": _POINTWISE,
    "aten::zero": _POINTWISE,
    "aten::masked_fill": _POINTWISE,
    "aten::nan_to_num": _POINTWISE,
    "aten::rsub": _POINTWISE,
    **{
        f"aten::{name}_backward": _POINTWISE
        for name in [
            "elu",
            "hardshrink",
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "leaky_relu",
            "mish",
            "softplus",
            "softshrink",
        ]
    },
    "aten::hardswish": _POINTWISE,
}
