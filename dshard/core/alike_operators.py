"""Operators on tensors without data that are alike run once: their results have the same shapes each time.

A pass that is traced runs the operators of blocks that repeat each other again and again, and plans that are priced
those of the same blocks. What torch finds out of one, in Python that takes longer than the rest of a trace, is a
function of what its arguments are without data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from dshard.caches import Cache
from dshard.core.signature import Args, Function, Kwargs
from dshard.torch_private import OpOverload

T = TypeVar("T")
Form: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""The shape, the strides and the dtype of a tensor without data."""
_KINDS = (Tensor, nn.Parameter)
_DEVICE = torch.device("meta")
"""Where tensors without data are."""


class _Several(NamedTuple):
    """The results of an operator that has several, in a list or a tuple; None are those that it does not give."""

    kind: type
    forms: tuple[Form | None, ...]


@dataclass(slots=True, eq=False)
class AlikeCalls(Generic[T]):
    """Calls that are alike: what their results are without data, and what the caller notes of them.

    `result` is None where results share memory with operands, or are no tensors.
    """

    result: Form | _Several | None
    note: T | None = None


class AlikeOperators(Generic[T]):
    """Runs operators; of those that are alike on tensors without data the first, and makes tensors like its results.

    It answers operators whose results have memory of their own, and no others: no views, no writes.
    """

    def __init__(self) -> None:
        self.known = Cache("operators", 65536)
        self.is_functional: dict[Function, bool] = {}

    def run(
        self, func: Function, run: Callable[..., Any], args: Args, kwargs: Kwargs
    ) -> tuple[AlikeCalls[T] | None, Any]:
        """The calls that are alike, and the result of `func`, of which `run` is the fastest form.

        None for a view, a write, or a call of tensors with data.
        """
        key = self._key(func, args, kwargs)
        if key is None:
            return None, run(*_without_data(args), **kwargs)
        alike: AlikeCalls[T] | None = self.known.get(key)
        if alike is None:
            out = run(*args, **kwargs)
            return self.known.add(key, AlikeCalls(_forms(out, args, kwargs))), out
        self.known.hits += 1
        known = alike.result
        if known is None:
            return alike, run(*args, **kwargs)
        if isinstance(known, _Several):
            return alike, known.kind([None if form is None else _tensor(form) for form in known.forms])
        return alike, _tensor(known)

    def _key(self, func: Function, args: Args, kwargs: Kwargs) -> Hashable | None:
        is_functional = self.is_functional.get(func)
        if is_functional is None:
            is_functional = self.is_functional[func] = _is_functional(func)
        parts: list[Hashable] = [func, torch.get_default_dtype()]
        if not (is_functional and _add(parts, args) and (not kwargs or _add_named(parts, kwargs))):
            return None
        key = tuple(parts)
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _without_data(args: Args) -> Args:
    """The arguments, all tensors without data if some are: beside those torch takes only some numbers as they are."""
    devices = {x.device for x in args if isinstance(x, Tensor)}
    if len(devices) < 2 or _DEVICE not in devices:
        return args
    return tuple([x.to(_DEVICE) if isinstance(x, Tensor) else x for x in args])


def _is_functional(func: Function) -> bool:
    """Whether an operator is one of torch's that writes to nothing, and whose results have memory of their own."""
    if not isinstance(func, OpOverload):
        return False
    ends = (*func._schema.arguments, *func._schema.returns)
    return all(each.alias_info is None for each in ends)


def _add(parts: list[Hashable], args: Sequence[Any]) -> bool:
    """Add what is known of arguments without data; whether there is nothing else."""
    for x in args:
        kind = type(x)
        if kind in _KINDS:
            dtype = x.dtype
            if x.device != _DEVICE or x.layout != torch.strided or dtype.is_complex:
                return False
            parts.append((x.shape, x.stride(), dtype))
        elif isinstance(x, Tensor):
            return False
        elif isinstance(x, list | tuple):
            parts.append((kind, len(x)))
            if not _add(parts, x):
                return False
        elif isinstance(x, dict):
            if not _add_named(parts, x):
                return False
        else:
            parts.append((kind, x))
    return True


def _add_named(parts: list[Hashable], args: Mapping[str, Any]) -> bool:
    parts.append((dict, *args))
    return _add(parts, [*args.values()])


def _forms(out: Any, args: Args, kwargs: Kwargs) -> Form | _Several | None:
    """What results are without data; None if any shares memory, or is no tensor."""
    known = {x.untyped_storage()._cdata for x in _tensors((*args, *kwargs.values()))}
    if isinstance(out, Tensor):
        return _form(out, known)
    if type(out) not in (list, tuple):
        return None
    forms = tuple([None if each is None else _form(each, known) for each in out])
    is_known = all(form is not None or each is None for form, each in zip(forms, out, strict=True))
    return _Several(type(out), forms) if is_known else None


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [each for inner in x for each in _tensors(inner)] if isinstance(x, Sequence) and type(x) is not str else []


def _form(x: Any, known: set[int]) -> Form | None:
    """The form of a tensor that fills memory of its own, which is then known."""
    if type(x) is not Tensor or x.device != _DEVICE or x.layout != torch.strided or x.is_complex() or x.is_inference():
        return None
    memory = x.untyped_storage()
    if memory._cdata in known or x.storage_offset() or memory.nbytes() != _nbytes(x):
        return None
    known.add(memory._cdata)
    return x.shape, x.stride(), x.dtype


def _nbytes(x: Tensor) -> int:
    """The bytes that a tensor of this shape and these strides spans."""
    span = 1 + sum([(n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)]) if x.numel() else 0
    return span * x.itemsize


def _tensor(form: Form) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device=_DEVICE)
