"""Results of local operators in the first run of a call, reused while the call is specialised."""

from __future__ import annotations

from typing import Any

from torch import Tag, Tensor

from dshard.core.moves import is_same_memory
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Kwargs
from dshard.torch_private import OpOverload


class LocalResults:
    """Results of operators on local tensors, reused where the same operator meets the same memory.

    Views and random results are not kept; an operator that writes to memory clears what was kept before.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[OpOverload, Args, Kwargs, object]] = []

    def __bool__(self) -> bool:
        return bool(self._calls)

    def recording(self) -> OperatorMode:
        """A mode that keeps the results of operators on local tensors."""
        return OperatorMode(self._record)

    def replaying(self) -> OperatorMode:
        """A mode that returns kept results in place of running their operators, each once."""
        return OperatorMode(self._replay)

    def result_of(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """The result of a call of a local operator: a kept one, or computed."""
        at = self._find(func, args, kwargs)
        return func(*args, **kwargs) if at is None else self._calls[at][3]

    def _record(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._calls.clear()
        elif _computes(func):
            self._calls.append((func, args, kwargs, out))
        return out

    def _replay(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        at = self._find(func, args, kwargs)
        return func(*args, **kwargs) if at is None else self._calls.pop(at)[3]

    def _find(self, func: OpOverload, args: Args, kwargs: Kwargs) -> int | None:
        for i, (other, other_args, other_kwargs, _) in enumerate(self._calls):
            if other is func and _is_same((args, kwargs), (other_args, other_kwargs)):
                return i
        return None


def _computes(func: OpOverload) -> bool:
    """Whether the results of an operator are new tensors, and depend on its arguments alone."""
    is_view = any(result.alias_info is not None for result in func._schema.returns)
    return func.namespace == "aten" and not is_view and Tag.nondeterministic_seeded not in func.tags


def _is_same(a: Any, b: Any) -> bool:
    """Whether two arguments are equal; tensors are if they have the same memory, shape and strides."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return is_same_memory(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_is_same, a.values(), b.values()))
    return bool(a == b)
