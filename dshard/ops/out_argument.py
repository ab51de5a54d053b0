"""Operators with `out=`: run the form without `out`, and write the result to `out`, which keeps its layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.core.call import arguments_by_name
from dshard.core.shared_memory import APART, refuse_shared
from dshard.core.signature import Args, Kwargs
from dshard.core.trees import leaves
from dshard.errors import LayoutError, ShapeError
from dshard.ops.custom import check
from dshard.ops.pointwise import is_pointwise
from dshard.torch_private import OpOverload, no_torch_function


def has_out(func: OpOverload) -> bool:
    """Whether `func` is the form of an operator that takes `out`."""
    return any(argument.is_out for argument in func._schema.arguments)


def into_out(func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Run the operator's form without `out`, and copy the result into `out`."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    arguments = arguments_by_name(func, args, kwargs)
    check(func, args, kwargs)
    if is_pointwise(func) or func._schema.name in APART:
        for name in names:
            refuse_shared(func, arguments[name], {n: value for n, value in arguments.items() if n not in names})
    with no_torch_function():
        form, out = without_out(func), arguments[names[0]]
        inputs = {name: value for name, value in arguments.items() if name not in names}
        if not _is_alike(form, func):  # one that makes a tensor, and takes its options
            inputs |= {"dtype": out.dtype, "device": out.device}
        result = form(**inputs)
        for name, value in zip(names, leaves(result), strict=True):
            _check(func, arguments[name], value)
            arguments[name].copy_(value)
    outs = tuple(arguments[name] for name in names)
    return outs[0] if len(outs) == 1 else outs


@cached("forms without out", 4096)
def without_out(func: OpOverload) -> OpOverload:
    """The form of the operator that takes no `out`."""
    for name in func.overloadpacket.overloads():
        overload: OpOverload = getattr(func.overloadpacket, name)
        if not overload._schema.is_mutable and (_is_alike(overload, func) or _is_alike(overload, func, _OPTIONS)):
            return overload
    raise LayoutError(f"{func} cannot write into a distributed tensor: call it without out= and use its result")


_OPTIONS = ("dtype", "layout", "device", "pin_memory")
"""The further arguments of an operator that makes a tensor, in its form without `out`."""


def _is_alike(form: OpOverload, func: OpOverload, options: Sequence[str] = ()) -> bool:
    """Whether `form` takes the arguments of `func` other than `out`, and then `options`."""
    taken = [(a.name, str(a.type)) for a in form._schema.arguments]
    names = [name for name, _ in taken[len(taken) - len(options) :]]
    required = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    return names == list(options) and taken[: len(taken) - len(options)] == required


def _check(func: OpOverload, out: Tensor, value: Tensor) -> None:
    if out.shape != value.shape:
        raise ShapeError(
            f"{func}: out has shape {tuple(out.shape)}, the result {tuple(value.shape)}; a distributed tensor is not "
            "resized: give out that shape"
        )
    if not torch.can_cast(value.dtype, out.dtype):
        raise ShapeError(f"{func}: a result of {value.dtype} cannot be cast to out, of {out.dtype}: give a wider one")
