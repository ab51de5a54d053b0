"""Gradients of leaves in the backward pass of a rehearsed module: reduced when they arise, as in an eager one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dshard.autograd.accumulation import accumulating
from dshard.autograd.joined_gradients import join
from dshard.autograd.leaf_gradients import gradient_in_layout
from dshard.comm import RECORDERS
from dshard.core.moves import local_redistribution
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.torch_private import no_torch_function, will_execute_node

_GRAD: Any = Tensor.grad


class LeafGradient:
    """The gradient of the leaf `x`, of its own spec, made of the local tensor with which this is called.

    Where autograd would do nothing but set `x.grad`, as its `node` does, that is set here, and the result is None.
    """

    def __init__(self, x: Wrapper, node: Any) -> None:
        self.x, self.leaf, self.node = x, x._gradient_leaf, node
        self.hooks = [_hooks_of(self.node.register_prehook), _hooks_of(self.node.register_hook)]

    def __call__(self, local: Tensor) -> Wrapper | None:
        grad = self.reduced(local)
        try:
            is_accumulated = will_execute_node(self.node)
        except RuntimeError:  # torch says nothing of a leaf whose gradient `torch.autograd.grad` returns
            return grad
        return self.given(grad) if is_accumulated else grad

    def reduced(self, local: Tensor) -> Wrapper:
        """The gradient of this local tensor."""
        return wrap(local, self.x._spec)

    def given(self, grad: Wrapper) -> Wrapper | None:
        """The gradient for autograd, or None if `x.grad` is that now."""
        x = self.x
        with no_torch_function():
            is_seen = len(x._backward_hooks or ()) != 1 or x._post_accumulate_grad_hooks or any(self.hooks) or RECORDERS
            keeps = is_seen or not self.leaf.accumulates or _GRAD.__get__(x) is not None
            # torch clones a gradient with other strides
            if keeps or grad._spec is not x._spec:
                return grad
            _GRAD.__set__(x, grad)
        return None


class Arrival(LeafGradient):
    """A partial gradient of the leaf `x`, of spec `spec`, that is being reduced once this is called.

    It is given on as it is where it stays partial.
    """

    def __init__(self, x: Wrapper, node: Any, spec: Spec) -> None:
        super().__init__(x, node)
        self.spec = spec
        self.move = local_redistribution(self.leaf.reduced(spec), self.leaf.layout)

    def reduced(self, local: Tensor) -> Wrapper:
        """The gradient, in flight; or partial, where gradients are accumulated."""
        leaf = self.leaf
        if accumulating() or leaf.has_partial_sum:
            return wrap(local, self.spec)
        joined = join(leaf, local, self.move, False) if leaf.accumulates else None
        return gradient_in_layout(wrap(local, self.spec), leaf, 0) if joined is None else joined


def _hooks_of(register: Callable[[Any], Any]) -> Mapping[int, object]:
    """The hooks of a node that a function registers, now and later."""
    handle = register(lambda *_: None)
    hooks: Mapping[int, object] = handle.hooks_dict_ref()
    handle.remove()
    return hooks
