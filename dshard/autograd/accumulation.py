"""Accumulate the gradients of several microbatches locally, and reduce the sum once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dshard.autograd.joined_gradients import GradientLeaf, join
from dshard.comm import Scoped, outside_graphs
from dshard.core.moves import joined_redistribution, local_redistribution, redistributed
from dshard.core.spec import spec_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout
from dshard.torch_private import current_autograd_node, no_torch_function

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


def accumulating() -> bool:
    """Whether `accumulate` is in force."""
    return bool(_BLOCKS.anywhere) and _BLOCKS.value()


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
