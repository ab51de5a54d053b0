"""The hook of a leaf that redistributes its gradients to its own layout."""

from __future__ import annotations

from sys import getrefcount

import torch
from torch import Tensor

from dshard.autograd.crossing import gradient_in_layout
from dshard.autograd.joined_gradients import Leaf
from dshard.autograd.sole_owner import is_shared, unshared
from dshard.core.wrapper import Wrapper
from dshard.torch_private import no_torch_function


def keep_gradient_layout(x: Wrapper) -> None:
    """Redistribute each gradient of the leaf `x` to the layout of `x` before it is accumulated."""
    if x._gradient_leaf is not None:
        return
    leaf = x._gradient_leaf = Leaf(x)
    cls = Wrapper.public

    def redistribute_gradient(grad: Tensor | None) -> Tensor | None:
        layout = leaf.layout
        if type(grad) is not cls:  # zeros that autograd makes
            return None if grad is None else gradient_in_layout(grad, leaf, 0)
        references = getrefcount(grad)
        copies = is_shared(grad) and not torch.is_grad_enabled()  # accumulation would write to what someone else holds
        if grad._spec.layout is layout:
            return unshared(grad) if copies else None
        out: Wrapper = gradient_in_layout(grad, leaf, references)
        return unshared(out) if copies and out.__dict__.get("_local_tensor") is grad._local_tensor else out

    with no_torch_function():
        x.register_hook(redistribute_gradient)  # type: ignore[no-untyped-call]
