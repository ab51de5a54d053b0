"""Bytes that operators allocate on local tensors."""

from __future__ import annotations

from torch import Tensor

from dshard.core.observe import Allocations, OperatorMode


def allocated(memory: Allocations) -> OperatorMode:
    """A mode that counts what operators allocate in it."""

    def counted(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = func(*args, **kwargs)  # type: ignore[operator]
        memory.add([x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)])
        memory.most = max(memory.most, memory.alive())
        return out

    return OperatorMode(counted)
