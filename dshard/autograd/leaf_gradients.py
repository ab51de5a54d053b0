"""Gradients of a leaf: the hook that redistributes them to its own layout, and sums of several microbatches.

Those are accumulated locally, and the sum is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from sys import getrefcount
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dshard.autograd.crossing import Redistribute, as_distributed, redistribute, redistribute_unrecorded
from dshard.autograd.joined_gradients import GradientLeaf, join
from dshard.caches import cached
from dshard.comm import RECORDERS, Scoped, neutral_state, outside_graphs, recorder
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, joined_redistribution, local_redistribution, redistributed
from dshard.core.signature import Context
from dshard.core.spec import Spec, spec_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout
from dshard.torch_private import current_autograd_node, no_torch_function, storage_references, tensor_references

_BLOCKS: Scoped[None, bool] = Scoped("accumulate", bool)
ACCUMULATING: Sequence[object] = _BLOCKS.anywhere
"""Empty while no thread is in a block of `accumulate`."""


@contextmanager
def accumulate() -> Iterator[None]:
    """Within the block backward passes reduce no gradients of leaves: they stay partial sums, which are added locally.

    The next backward pass outside the block adds its own, and reduces the sum once. Until then `x.grad` is partial, and
    each rank holds a gradient of the global shape for parameters that are replicated, or gathered for use. An optimiser
    that steps before reduces it first.

        with dshard.accumulate():
            for batch in batches[:-1]:
                loss_of(batch).backward()
        loss_of(batches[-1]).backward()
        optimizer.step()
    """
    outside_graphs("accumulate")
    with _BLOCKS.entered(None):
        yield


accumulating = _BLOCKS.in_force
"""Whether `accumulate` is in force."""


def to_add_locally(grad: Wrapper, leaf: GradientLeaf) -> Wrapper | None:
    """A partial gradient of a leaf that torch now adds without a collective, to be reduced later; None: it is not.

    `x.grad` gets its layout. It lies in memory as the leaf does, for torch would copy another one, which reduces it.
    """
    x = getattr(current_autograd_node(), "variable", None)
    if x is None:  # nothing is accumulated: torch.autograd.grad wants the gradient itself
        return None
    spec = grad._spec
    with no_torch_function():
        if not leaf.has_partial_sum:
            if not (leaf.accumulates and accumulating() and _has_layout(x, spec.layout)):
                return None
            leaf.has_partial_sum = True
            once = _ReduceOnce(leaf)
            once.handle = x.register_post_accumulate_grad_hook(once)
        stride = x.stride()
        if stride == grad.stride():
            return grad
    order = sorted(range(len(stride)), key=stride.__getitem__, reverse=True)
    local = grad._local_tensor.permute(order).contiguous().permute(sorted(range(len(stride)), key=order.__getitem__))
    return wrap(local, spec_of(spec.layout, spec.shape, stride, spec.dtype, spec.device))


def _has_layout(x: Tensor, layout: Layout) -> bool:
    """Whether `x.grad` is None, or has a layout, which it gets if that sends nothing."""
    held = x.grad
    if isinstance(held, Wrapper) and held._spec.layout is not layout:
        if local_redistribution(held._spec, layout).plan.busiest():
            return False
        x.grad = redistributed(held, layout, "accumulate")
    return True


class _ReduceOnce:
    """Hook of a leaf: after the first backward pass outside `accumulate` reduce the sum of its gradients."""

    handle: RemovableHandle

    def __init__(self, leaf: GradientLeaf) -> None:
        self.leaf = leaf

    def __call__(self, x: Tensor) -> None:
        if accumulating():
            return
        self.handle.remove()
        self.leaf.has_partial_sum = False
        grad, layout = x.grad, self.leaf.layout
        if isinstance(grad, Wrapper) and grad._spec.layout is not layout:
            move = joined_redistribution(self.leaf.reduced(grad._spec), layout)
            joined = join(self.leaf, grad._local_tensor, move, False)
            with no_torch_function():
                x.grad = redistributed(grad, layout, "accumulate") if joined is None else joined


def keep_gradient_layout(x: Wrapper) -> None:
    """Redistribute each gradient of the leaf `x` to the layout of `x` before it is accumulated."""
    if x._gradient_leaf is not None:
        return
    leaf, cls = GradientLeaf(x), Wrapper.public
    x._gradient_leaf = leaf

    def redistribute_gradient(grad: Tensor | None) -> Tensor | None:
        leaf.has_gradient = grad is not None
        if RECORDERS and leaf.accumulates and (told := recorder()) is not None:
            told.add_leaf(leaf.of)
        if type(grad) is not cls:  # zeros that autograd makes
            return None if grad is None else gradient_in_layout(grad, leaf, 0)
        references = getrefcount(grad)
        out: Wrapper = grad if grad._spec.layout is leaf.layout else gradient_in_layout(grad, leaf, references)
        if out is not grad and out.__dict__.get("_local_tensor") is not grad.__dict__.get("_local_tensor"):
            return out
        holders = python_references(grad) - (out is not grad)
        if holders not in NOT_SHARED and not torch.is_grad_enabled():  # accumulation would write to what others hold
            out = unshared(out)
        return None if out is grad else out

    with no_torch_function():
        x.register_hook(redistribute_gradient)  # type: ignore[no-untyped-call]


def keep_hooks(x: Wrapper, new: Wrapper) -> None:
    """Let the hooks of `x` be called when it has got the content of `new`, by `torch.utils.swap_tensors(x, new)`.

    That is how `model.to(...)` converts parameters. Autograd's list of hooks goes with the content, and the dicts that
    users add to stay with the object: torch calls neither those hooks, nor any that are registered later.
    """
    with no_torch_function():
        hooks: Any = x._backward_hooks
        of_new = new._backward_hooks
        if hooks is not None and hooks is not of_new:  # the second call is (new, x), and has nothing to do
            for number in [number for number, hook in hooks.items() if hook.__module__ == __name__]:
                del hooks[number]
            for number, hook in (of_new or {}).items():
                hooks[number] = hook
                hooks.move_to_end(number, last=False)  # the one that lays out the gradient
            new._backward_hooks = hooks
        if x._post_accumulate_grad_hooks is not None:
            new._post_accumulate_grad_hooks = x._post_accumulate_grad_hooks


class _JoinedRedistribute(Redistribute):
    """The gradient of a leaf, reduced with others, in a backward pass that is differentiated again."""

    @staticmethod
    def forward(ctx: Context, grad: Wrapper, leaf: GradientLeaf, move: LocalRedistribution) -> Wrapper:  # type: ignore[override]
        ctx.move, ctx.asynchronous = move, True
        joined = join(leaf, grad._local_tensor, move, False)
        return redistribute_unrecorded(grad, move, None, True) if joined is None else joined

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return Redistribute.backward(ctx, grad)[0], None, None


def gradient_in_layout(grad: Tensor, leaf: GradientLeaf, references: int) -> Wrapper:
    """A gradient of a leaf, in the leaf's layout. A single collective runs beside the rest of the backward pass.

    That of a leaf is joined with others. `references` are those to `grad` in the hook that was called with it.
    """
    layout = leaf.layout
    if not isinstance(grad, Wrapper):
        grad = as_distributed(grad, layout)
    spec: Spec = grad._spec
    if spec.layout is layout:
        return grad
    if (ACCUMULATING or leaf.has_partial_sum) and not torch.is_grad_enabled():
        added = to_add_locally(grad, leaf)
        if added is not None:
            return added
    sent = spec if leaf.reduce_dtype is None else spec.with_dtype(leaf.reduce_dtype)
    era, planned = planning_context().moves.era, leaf.planned
    if planned is None or planned[0] is not sent or planned[1] is not layout or planned[2] is not era:
        planned = leaf.planned = sent, layout, era, joined_redistribution(sent, layout)
    move = planned[3]
    if move.keeps_data and sent is spec and not torch.is_grad_enabled():
        return wrap(grad._local_tensor, move.spec)
    asynchronous = len(move.plan.steps) == 1  # of several the first would hold its buffers until the end
    if torch.is_grad_enabled():
        if leaf.accumulates and sent is spec:
            return _JoinedRedistribute.apply(grad, leaf, move)  # type: ignore[no-untyped-call,no-any-return]
        return redistribute(grad.to(sent.dtype), layout, asynchronous=asynchronous).to(spec.dtype)
    is_packed = leaf.accumulates and leaf.is_packed  # then it is written only where it lies in a buffer with others
    own = asynchronous and is_sole_owner(grad, references, of_memory=not is_packed)
    if leaf.accumulates:
        joined = join(leaf, grad._local_tensor, move, own)
        if joined is not None:
            return joined
    if sent is not spec:
        return redistribute_unrecorded(grad.to(sent.dtype), move, None, False).to(spec.dtype)
    return redistribute_unrecorded(grad, move, None, asynchronous, own)


# -- whether the memory of a gradient may be written: only if nothing but the backward pass holds it
# torch decides this by C++ reference counts, which miss Python references, such as a hook's list of gradients or a
# numpy array. So the counts of both are compared with those of a new gradient, measured here with this torch and this
# Python. If these counts do not reveal each kind of second holder, gradients are copied instead.


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
        local = x.__dict__["_local_tensor"]
        return (tensor_references(local), getrefcount(local)) in _SOLE_TENSOR
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
