"""Everything that an object is and leads to, as plain values that can be compared; it knows nothing of dshard."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Picture = Any


def picture(x: Any, as_plain: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Picture]:
    """What is at each path from `x` on: values of tensors and numbers, classes of objects, sizes of containers.

    An object that is met again is the path at which it was met first. Tensors are compared `as_plain`.
    """
    seen: dict[int, str] = {}
    out: dict[str, Picture] = {}
    stack = [("", x)]
    kept = []  # so that no id is used twice
    while stack:
        at, x = stack.pop()
        if isinstance(x, int | float | str | bytes | complex | type | torch.dtype | torch.device | None):
            out[at] = x
            continue
        if id(x) in seen:
            out[at] = f"as {seen[id(x)]}"
            continue
        seen[id(x)] = at
        kept.append(x)
        x = as_plain(x) if isinstance(x, Tensor) else x
        out[at], inner = described(x)
        stack += [(f"{at}.{name}", value) for name, value in inner]
    return out


def described(x: Any) -> tuple[Picture, list[tuple[Any, Any]]]:
    """The value of an object itself, and the named objects that it holds."""
    if isinstance(x, Tensor):
        inner = [("grad", x.grad)] if x.is_leaf else []
        return value_of(x), [*inner, *vars(x).items()]
    if isinstance(x, dict):
        pairs = [(f"[{key if isinstance(key, str | int) else type(key).__name__}]", value) for key, value in x.items()]
        return (type(x).__name__, [name for name, _ in pairs]), [*pairs, *vars_of(x)]
    if isinstance(x, list | tuple | deque):
        return (type(x).__name__, len(x)), [*enumerate(x), *vars_of(x)]
    if isinstance(x, set | frozenset):
        return (type(x).__name__, sorted(map(repr, x))), []
    if isinstance(x, np.ndarray):
        return x.tolist(), []
    if isinstance(x, torch.Generator):
        return x.get_state().tolist(), []
    if isinstance(x, random.Random):
        return x.getstate(), []
    if isinstance(x, np.random.Generator):
        return repr(x.bit_generator.state), []
    if isinstance(x, np.random.RandomState):
        return repr(x.get_state()), []
    if isinstance(x, FunctionType):
        cells = [
            (name, cell_value(cell)) for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        ]
        return x.__qualname__, [*cells, ("defaults", x.__defaults__), *vars(x).items()]
    if isinstance(x, MethodType):
        return "method", [("self", x.__self__), ("function", x.__func__)]
    if isinstance(x, partial):
        return "partial", [("function", x.func), ("args", x.args), ("keywords", x.keywords)]
    inner = vars_of(x)
    inner += [(name, getattr(x, name)) for name in getattr(type(x), "__slots__", ()) if hasattr(x, name)]
    if isinstance(x, nn.Module) and not type(x).__module__.startswith("torch."):
        inner += [(f"class.{name}", value) for name, value in vars(type(x)).items() if not name.startswith("__")]
        inner += [("forward()", type(x).forward)]
    return repr(x) if type(x).__module__ == "itertools" else type(x).__name__, inner


def value_of(x: Tensor) -> Picture:
    """Shape, dtype and elements of a tensor, and whether it is a parameter that takes gradients."""
    elements = None if x.is_meta else x.detach().flatten().tolist()
    return isinstance(x, nn.Parameter), tuple(x.shape), str(x.dtype), x.requires_grad, x.is_meta, repr(elements)


def vars_of(x: Any) -> list[tuple[str, Any]]:
    """The attributes of an object."""
    return list(vars(x).items()) if hasattr(x, "__dict__") else []


def cell_value(cell: Any) -> Any:
    """The value of a variable of a closure."""
    try:
        return cell.cell_contents
    except ValueError:
        return "no value yet"


def generators() -> list[Picture]:
    """The states of the program's generators."""
    return [torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())]


def module_variables(name: str) -> dict[str, Picture]:
    """The variables of a module of Python that are data, with what they lead to."""
    own = {key: value for key, value in vars(sys.modules[name]).items() if key.isupper()}
    return picture(own)


def difference(before: dict[str, Picture], after: dict[str, Picture]) -> list[str]:
    """The paths at which two pictures differ, with both values."""
    return [
        f"{path}: {str(before.get(path, 'nothing'))[:60]} -> {str(after.get(path, 'nothing'))[:60]}"
        for path in sorted(before.keys() | after.keys())
        if before.get(path, "nothing") != after.get(path, "nothing")
    ]
