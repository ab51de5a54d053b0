"""The backward of one stage and one microbatch: whole, or the gradients of the inputs first.

What splits it is torch's own (torch.distributed.pipelining, after Zero Bubble, arXiv 2401.10241): it remembers the
gradients where the graph of the weights leaves that of the inputs, and starts from there for the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

Outputs = Sequence[tuple[Tensor, Tensor | None]]
"""What a stage gave, and the gradients of that; None for a loss."""


def backward(outputs: Outputs) -> None:
    """Accumulate the gradients of inputs and weights."""
    found = [(out, grad) for out, grad in outputs if out.requires_grad]
    if found:
        torch.autograd.backward([out for out, _ in found], [grad for _, grad in found])


def backward_input(outputs: Outputs, inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Accumulate the gradients of the inputs; what is returned accumulates those of the weights.

    Outputs that do not depend on an input that needs a gradient wait until then.
    """
    inputs = [x for x in inputs if x.requires_grad]
    reached = _dependent([out for out, _ in outputs], inputs)
    now = [pair for pair, reaches in zip(outputs, reached, strict=True) if reaches]
    later = [pair for pair, reaches in zip(outputs, reached, strict=True) if not reaches]
    if not now:
        return lambda: backward(later)
    grads: Any = [torch.ones_like(out) if grad is None else grad for out, grad in now]
    _, groups = stage_backward_input([out for out, _ in now], grads, list(inputs), iter(weights))

    def backward_weight() -> None:
        stage_backward_weight(iter(weights), groups, retain_graph=bool(later))
        backward(later)

    return backward_weight


def _dependent(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[bool]:
    """Of each output, whether it depends on an input."""
    targets = {_accumulator(x) for x in inputs}
    return [out.requires_grad and _reaches(out.grad_fn or _accumulator(out), targets) for out in outputs]


def _accumulator(leaf: Tensor) -> Node | None:
    viewed = leaf.view_as(leaf).grad_fn
    return None if viewed is None else viewed.next_functions[0][0]


def _reaches(start: Node | None, targets: set[Node | None]) -> bool:
    seen, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node in targets and node is not None:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
    return False
