"""Accumulate the gradients of several microbatches locally, and reduce the sum once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from dshard.autograd.joined_gradients import GradientLeaf, join
from dshard.comm import Scoped, outside_graphs
from dshard.core.moves import local_redistribution, redistributed
from dshard.core.wrapper import Wrapper
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


def stays_partial(leaf: GradientLeaf) -> bool:
    """Whether a gradient of the leaf that arises now is accumulated partial, to be reduced later."""
    if not leaf.accumulates:
        return False
    if not accumulating():
        return leaf.has_partial_sum
    if not leaf.has_partial_sum:
        x = getattr(current_autograd_node(), "variable", None)
        if x is None:  # nothing is accumulated: torch.autograd.grad wants the gradient itself
            return False
        leaf.has_partial_sum = True
        once = _ReduceOnce(leaf)
        with no_torch_function():
            once.handle = x.register_post_accumulate_grad_hook(once)
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
            move = local_redistribution(self.leaf.reduced(grad._spec), layout)
            joined = join(self.leaf, grad._local_tensor, move, False)
            with no_torch_function():
                x.grad = redistributed(grad, layout, "accumulate") if joined is None else joined
