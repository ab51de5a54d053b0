"""The backward pass of one stage and one microbatch: at once, or split, with the gradients of the inputs first.

The split backward keeps the gradients that enter each node of the graph from which both an input and a weight are
reached, and starts from there for the weights (after Zero Bubble, arXiv 2401.10241). torch.distributed.pipelining has a
similar one, which detaches the outputs in place and so refuses a stage that saved an output for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dshard.autograd.backward_graph import AutogradGraph
from dshard.rehearsal.region_backward import is_behind_first_node
from dshard.torch_private import no_torch_function

Outputs = Sequence[tuple[Tensor, Tensor | None]]
"""The outputs of a stage, each with its gradient; None for a loss."""
Grads = tuple[Tensor | None, ...]


def backward(outputs: Outputs) -> None:
    """Accumulate the gradients of inputs and weights."""
    differentiable = [(out, grad) for out, grad in outputs if out.requires_grad]
    if differentiable:
        torch.autograd.backward([out for out, _ in differentiable], [grad for _, grad in differentiable])


def backward_input(outputs: Outputs, inputs: Sequence[Tensor], weights: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Accumulate the gradients of the inputs, and return a function that accumulates those of the weights.

    That function also differentiates outputs that do not depend on an input that needs a gradient.
    """
    inputs = [x for x in inputs if x.requires_grad]
    graph = AutogradGraph([root for out, _ in outputs if (root := _node(out)) is not None])
    reaching = graph.leading_to({node for x in inputs if (node := _node(x)) is not None})
    leading = {node for node in reaching if not is_behind_first_node(node)}
    now = [pair for pair in outputs if _node(pair[0]) in leading]
    later = [pair for pair in outputs if _node(pair[0]) not in leading]
    if not now:
        return lambda: backward(later)
    owners = {node: weight for weight in weights if (node := _node(weight)) is not None}
    # In the order of the graph, the same on all ranks: weights may need collectives for their gradients.
    inner = [node for node in graph.edges if node in leading]
    borders = {node: leaves for node in inner if (leaves := graph.behind(node, leading) & owners.keys())}
    entered: dict[Node, Grads] = {}
    hooks = [node.register_prehook(partial(_remember, entered, node)) for node in borders]
    try:
        tensors, grads = [out for out, _ in now], [grad for _, grad in now]
        torch.autograd.backward(tensors, grads, retain_graph=True, inputs=inputs)
    finally:
        for hook in hooks:
            hook.remove()

    with no_torch_function():  # a node of a Python function belongs to the tensors it made until torch 2.13
        edges = [get_gradient_edge(out) for out in tensors]

    def backward_weight() -> None:
        for node, leaves in borders.items():
            if node in entered:
                reached = [weight for leaf, weight in owners.items() if leaf in leaves]
                _backward_from(node, entered[node], reached, _others(node, leaves, borders))
        edges.clear()
        backward(later)

    return backward_weight


def _backward_from(node: Node, grads: Grads, weights: list[nn.Parameter], others: Iterable[Node]) -> None:
    """Accumulate the weights' gradients that pass through one node, but not those through `others`."""
    hooks = [other.register_prehook(_nothing) for other in others]
    try:
        gradients = [(GradientEdge(node, i), grad) for i, grad in enumerate(grads) if grad is not None]
        edges: Any = [edge for edge, _ in gradients]
        torch.autograd.backward(edges, [grad for _, grad in gradients], retain_graph=True, inputs=weights)
    finally:
        for hook in hooks:
            hook.remove()


def _others(node: Node, own_weights: set[Node], borders: dict[Node, set[Node]]) -> list[Node]:
    """The other border nodes from which one of the same weights is reached."""
    return [other for other, weights in borders.items() if other is not node and weights & own_weights]


def _remember(entered: dict[Node, Grads], node: Node, grads: Grads) -> None:
    entered[node] = grads


def _nothing(grads: Grads) -> Grads:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


def _node(x: Tensor) -> Node | None:
    """The autograd node of a tensor, or the accumulating node of a leaf; None if it needs no gradient."""
    if not x.requires_grad or x.grad_fn is not None:
        return x.grad_fn
    viewed = x.view_as(x).grad_fn
    return None if viewed is None else viewed.next_functions[0][0]
