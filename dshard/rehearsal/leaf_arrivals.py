"""Gradients of leaves in the backward pass of a rehearsed module: reduced when they arise, as in an eager one."""

from __future__ import annotations

import torch
from torch import Tensor

from dshard.autograd.accumulation import accumulating
from dshard.autograd.leaf_gradients import gradient_in_layout
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.torch_private import no_torch_function, will_execute_node


class Arrival:
    """The gradient of the leaf `x`, a partial one of spec `spec`: called with its local tensor, it is being reduced.

    It is given on as it is where it stays partial, and is None where the pass wants no gradient of the leaf.
    """

    def __init__(self, x: Wrapper, spec: Spec) -> None:
        self.leaf, self.spec = x._gradient_leaf, spec
        with no_torch_function(), torch.enable_grad():
            node = x.view_as(x).grad_fn
            assert node is not None
            self.node = node.next_functions[0][0]

    def __call__(self, local: Tensor) -> Wrapper | None:
        try:
            is_wanted = will_execute_node(self.node)
        except RuntimeError:  # torch says nothing of a leaf whose gradient `torch.autograd.grad` returns
            is_wanted = True
        return self.reduced(local) if is_wanted else None

    def reduced(self, local: Tensor) -> Wrapper:
        """The gradient, in flight; or partial, where gradients are accumulated."""
        grad = wrap(local, self.spec)
        if accumulating() or self.leaf.has_partial_sum:
            return grad
        return gradient_in_layout(grad, self.leaf, 0)
