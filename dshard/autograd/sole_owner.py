"""Whether the memory of a gradient may be written: only if nothing but the backward pass holds it.

torch decides this by C++ reference counts, which miss Python references, such as a hook's list of gradients or a numpy
array. So the counts of both are compared with those of a new gradient, measured here with this torch and this Python.
If these counts do not reveal each kind of second holder, gradients are copied instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import neutral_state
from dshard.core.signature import Context
from dshard.core.wrapper import Wrapper, wrap
from dshard.torch_private import storage_references, tensor_references


def unshared(x: Wrapper) -> Any:
    """A copy of the gradient `x`, whose local tensor has another owner."""
    return wrap(x._local_tensor.clone(memory_format=torch.contiguous_format), x._spec)


def is_sole_owner(x: Wrapper, references: int, *, of_memory: bool = True) -> bool:
    """Whether nothing else holds the gradient `x`, its local tensor, its memory, or the tensor whose view it is.

    `references` are those to `x` in the hook of a leaf that was called with it. Without `of_memory` the memory may have
    other tensors in it, which `lie_together` looks for.
    """
    if references != _references_in_hook() or "_local_tensor" not in x.__dict__:  # in flight: its buffer may be in use
        return False
    if not of_memory:
        return _tensor_counts(x.__dict__) in _SOLE_TENSOR
    return _reference_counts(x.__dict__) in _SOLE_OWNER


def give_up_local(grads: Sequence[Wrapper]) -> list[Tensor]:
    """Take the local tensors from gradients in the backward pass of an `autograd.Function`; the list alone holds them.

    A gradient that a hook or the caller of the pass holds keeps its own. torch holds the arguments of a backward pass
    until it returns, so without this their memory would stay beside the buffer of a collective that has packed them.
    """
    alone, counts = _references_in_backward(), _references_to(grads)
    local = [grad._local_tensor for grad in grads]
    for grad, count in zip(grads, counts, strict=True):
        if count == alone and "_local_tensor" in grad.__dict__:
            del grad._local_tensor
    return local


def _references_to(grads: Sequence[Tensor]) -> list[tuple[int, int]]:
    """References to each gradient, in C++ and in Python."""
    return [(tensor_references(grad), getrefcount(grad)) for grad in grads]


class _Counting(torch.autograd.Function):
    """Counts the references to its gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, counts: list[tuple[int, int]]) -> Tensor:
        ctx.counts = counts
        return x.clone()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        held = [*grads]
        del grads
        ctx.counts += _references_to(held)
        return held[0].clone(), None


@cached("engine references", 1)
def _references_in_backward() -> tuple[int, int] | None:
    """The references to a gradient in a backward pass if nothing else holds it; None if they tell nothing."""
    counts: list[tuple[int, int]] = []
    kept: list[Tensor] = []
    with neutral_state():
        x = _plain().requires_grad_()
        alone, hooked, requested = (_Counting.apply(x, counts) for _ in range(3))  # type: ignore[no-untyped-call]
        hooked.register_hook(kept.append)
        for y in (alone, hooked):
            (2 * y).sum().backward()
        torch.autograd.grad((2 * requested).sum(), [requested, x])
    return counts[0] if counts[0] not in counts[1:] else None


def _reference_counts(attributes: dict[str, Any]) -> tuple[int, ...]:
    """References to the local tensor, its memory and its base, in C++ and Python each."""
    local = attributes["_local_tensor"]
    memory, base = local.untyped_storage(), local._base
    counts = (tensor_references(local), getrefcount(local), storage_references(memory._cdata), getrefcount(memory))
    return counts if base is None else (*counts, tensor_references(base), getrefcount(base))


def _tensor_counts(attributes: dict[str, Any]) -> tuple[int, int]:
    """References to the local tensor, in C++ and Python."""
    local = attributes["_local_tensor"]
    return tensor_references(local), getrefcount(local)


def python_references(x: object) -> int:
    """Python's references to the local tensor of `x`; 0 while it is in flight, when nothing else can hold it.

    C++ references are counted where a gradient becomes distributed, as torch counts them for its own.
    """
    local = x.__dict__.get("_local_tensor")
    return getrefcount(local) if type(local) is Tensor else 0


def _plain() -> Tensor:
    return torch.zeros(2, dtype=torch.float32, device="cpu")


def _view() -> Tensor:
    return _plain().view(2, 1)


def _numpy_array(x: Tensor) -> object:
    with suppress(RuntimeError):  # numpy is not installed, or too old for this torch: then nothing holds an array
        return x.numpy(force=True)
    return x


_HOLDERS: tuple[Callable[[Tensor], object], ...] = (
    lambda x: x,  # a variable
    _numpy_array,
    lambda x: x.detach(),
    lambda x: x.view(-1),
    lambda x: x.untyped_storage(),
    lambda x: x * _plain().requires_grad_(),  # saved by autograd, in C++ alone
    lambda x: x if x._base is None else x._base,
)
"""Ways to hold a tensor, its memory or its base."""


def _measured(make: Callable[[], Tensor]) -> tuple[int, ...] | None:
    """The counts of a tensor that nothing else holds, or None if they do not reveal each of `_HOLDERS`."""
    alone = {_reference_counts({"_local_tensor": make()}) for _ in range(8)}
    for hold in _HOLDERS:
        attributes = {"_local_tensor": make()}
        held = hold(attributes["_local_tensor"])
        if _reference_counts(attributes) in alone:
            return None
        del held
    return alone.pop() if len(alone) == 1 else None


@cached("engine references", 1)
def _references_in_hook() -> int:
    """The references to a gradient in the hook of a leaf if nothing else holds it; -1 if they tell nothing."""
    counts: list[int] = []
    kept: list[Tensor] = []
    with neutral_state():
        x = _plain().requires_grad_()
        hook = x.register_hook(lambda grad: counts.append(getrefcount(grad)))
        (2 * x).sum().backward()
        hook.remove()
        x.register_hook(kept.append)
        x.register_hook(lambda grad: counts.append(getrefcount(grad)))
        (2 * x).sum().backward()
    return counts[0] if counts[0] != counts[1] else -1


with neutral_state():
    _SOLE_OWNER = [counts for make in (_plain, _view) if (counts := _measured(make)) is not None]
"""The counts of a tensor that nothing else holds, and of such a view."""
_SOLE_TENSOR = {counts[:2] for counts in _SOLE_OWNER}
NOT_SHARED = {0} | ({python_references(SimpleNamespace(_local_tensor=_plain()))} if _SOLE_OWNER else set())
"""The `python_references` of a tensor whose local tensor has no other Python reference."""
