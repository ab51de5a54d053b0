"""The order in which a backward pass has gradients whole, and passes that stop where some are.

Autograd runs of the nodes that are ready the one that was made last. A pass can stop between two nodes where of the
edges that are left none leads to another: autograd runs a node whose gradient it gives if that leads to another such.
Between two calls that is so, as each call has aliases of its own; within a call mostly.

Design: docs/design/0025-rehearsed-modules.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dshard.autograd.backward_graph import AutogradGraph, Edge
from dshard.torch_private import no_torch_function, run_backward

Hook: TypeAlias = Callable[[Tensor], Any]


def edge_to(x: Tensor) -> Edge | None:
    """The edge that leads to a tensor; None for a leaf of autograd, or one that needs no gradient."""
    with no_torch_function():
        return None if x.grad_fn is None else (x.grad_fn, x.output_nr)


class GraphPart:
    """The part of autograd's graph from some `roots` to the tensors `operands`, by number, that are asked for.

    Attributes:
        graph: Its nodes, of which none is taken for which `is_beyond` holds.
        ends: The edges to operands, with their numbers.
        order: The nodes that run to have the gradients of operands, in the order of a backward pass.
        last: The last edge to each operand that a pass runs along: the place of its node in `order`, and which there.
    """

    def __init__(
        self,
        roots: Iterable[Edge | None],
        operands: Mapping[int, Tensor],
        is_beyond: Callable[[Node], bool] = lambda node: False,
    ) -> None:
        edges = {n: edge_to(x) for n, x in operands.items()}
        self.ends = {edge: n for n, edge in edges.items() if edge is not None}
        beyond = {node for node, _ in self.ends}
        self.graph = AutogradGraph([edge[0] for edge in roots if edge is not None], beyond, is_beyond)
        leaves = {id(x): n for n, x in operands.items() if edges[n] is None}
        for node, after in self.graph.edges.items():
            n = None if after else leaves.get(id(getattr(node, "variable", None)))
            if n is not None:
                self.ends[node, 0] = n
        leading = self.graph.leading_to(node for node, _ in self.ends)
        self.order = [node for node in self.graph.in_order(leading) if self.graph.edges[node]]
        self.last = {
            self.ends[edge]: (i, j)
            for i, node in enumerate(self.order)
            for j, edge in enumerate(self.graph.edges[node])
            if edge in self.ends
        }


def gradient_order(outs: Iterable[Tensor], operands: Mapping[int, Tensor], since: int) -> list[int]:
    """The operands, by number, that get a gradient of `outs`, in the order in which a backward pass has them whole.

    All that leads from one to the other was made from node number `since` on.
    """
    last = GraphPart(map(edge_to, outs), operands, lambda node: node._sequence_nr() < since).last
    return sorted(last, key=last.__getitem__)


class CallGraph:
    """The part of autograd's graph that one call made, from its `results` back to its `operands`, both by number.

    It runs in stretches of nodes, with the gradients that have come for its edges.
    """

    def __init__(self, results: Mapping[int, Tensor], operands: Mapping[int, Tensor]) -> None:
        edges = {n: edge_to(x) for n, x in results.items()}
        self.results = {n: edge for n, edge in edges.items() if edge is not None}
        with no_torch_function():  # a node of a Python function belongs to the tensors it made until torch 2.13
            self._owners = [get_gradient_edge(results[n]).ownership_token for n in self.results]
        self._part = GraphPart(edges.values(), operands)
        self.last = {n: i + 1 for n, (i, _) in self._part.last.items()}
        self.length = len(self._part.order)
        self._at, self._came = 0, dict[Edge, Tensor]()

    def begin(self, came: dict[int, Tensor]) -> None:
        """Take the gradients of the results, which are whole."""
        self._came |= {edge: came.pop(n) for n, edge in self.results.items() if n in came}

    def run(self, end: int, came: dict[int, Tensor]) -> None:
        """Run at least the nodes before number `end`; gradients of operands are added to those that `came`."""
        if self._at >= end:
            return
        end = self._without_path(end)
        ends, nodes, leaving = self._part.ends, {*self._part.order[self._at : end]}, self._leaving(end)
        # what came for an edge before is the first term of the sum that leaves by it, as in a single pass
        begins = {edge: came.pop(ends[edge]) for edge in leaving if edge in ends and ends[edge] in came}
        begins |= {edge: self._came.pop(edge) for edge in [*self._came] if edge[0] in nodes or edge in leaving}
        self._at = end
        grads: Sequence[Tensor | None] = [begins.get(edge) for edge in leaving]
        if any(edge[0] in nodes for edge in begins):
            grads = run_backward(
                tuple([GradientEdge(*edge) for edge in begins]),
                tuple([begins.pop(edge) for edge in [*begins]]),
                False,
                False,
                tuple([GradientEdge(*edge) for edge in leaving]),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        for edge, grad in zip(leaving, grads, strict=True):
            if grad is not None and edge in ends:
                came[ends[edge]] = grad
            elif grad is not None:
                self._came[edge] = grad

    def _leaving(self, end: int) -> list[Edge]:
        """The edges that lead out of the nodes before number `end`, to such as have not run."""
        rest = {*self._part.order[end:]}
        return [
            *dict.fromkeys(
                edge
                for node in self._part.order[self._at : end]
                for edge in self._part.graph.edges[node]
                if edge in self._part.ends or edge[0] in rest
            )
        ]

    def _without_path(self, end: int) -> int:
        """The first number from `end` on where none of the leaving edges leads to another: a pass stops at all."""
        while True:
            nodes = {node for node, _ in self._leaving(end)}
            if all(not nodes.intersection(self._part.graph.behind(node)) for node in nodes):
                return end
            end += 1


class StagedBackward:
    """A backward pass through calls to the operands that are `asked` for, which stops where some are whole.

    The hooks of `hooked` results are called with their whole gradients.
    """

    def __init__(self, asked: Iterable[int], hooked: Iterable[tuple[int, Hook]]) -> None:
        self._hooks = [*hooked]
        self._hooked = {n for n, _ in self._hooks}
        self._needed = {*asked, *self._hooked}
        self._calls: list[CallGraph] = []  # the next last
        self._came: dict[int, Tensor] = {}
        self._last: dict[int, tuple[int, int]] = {}

    def add_call(self, results: Mapping[int, Tensor], operands: Mapping[int, Tensor]) -> None:
        """Add a call that has run again, behind those before; nothing but operands leads from one to another.

        Hooks that it has put on operands see whole gradients, too.
        """
        for n, x in operands.items():
            with no_torch_function():
                hooks = x._backward_hooks or {}
            self._hooks += [(n, hook) for hook in hooks.values()]
            hooks.clear()
        asked = {n: x for n, x in operands.items() if n in self._needed}
        if asked:
            self._needed.update(results)
        if not self._needed.isdisjoint(results):
            self._calls.append(CallGraph(results, asked))

    def begin(self, grads: Mapping[int, Tensor]) -> None:
        """Begin with these gradients of results."""
        self._came |= grads
        calls = reversed([*enumerate(self._calls)])
        self._last = {n: (-i, end) for i, call in calls for n, end in call.last.items()}

    def until(self, numbers: Iterable[int]) -> dict[int, Tensor | None]:
        """Run until the gradients of these operands are whole, and give them; None: the operand has none."""
        i, end = max((self._last[n] for n in numbers if n in self._last), default=(-len(self._calls), 0))
        self._finish(-i + 1)
        if end and len(self._calls) == -i + 1:
            self._begin(self._calls[-i])
            self._calls[-i].run(end, self._came)
        return {n: self._came.pop(n, None) for n in numbers}

    def end(self) -> None:
        """Run until the hooks that were there at first have been called."""
        hooked = [i for i, call in enumerate(self._calls) if not self._hooked.isdisjoint(call.results)]
        self._finish(min(hooked, default=len(self._calls)))

    def _finish(self, n_left: int) -> None:
        """Run all calls but the first, and let go of them."""
        while len(self._calls) > n_left:
            self._begin(self._calls[-1])
            call = self._calls.pop()
            call.run(call.length, self._came)

    def _begin(self, call: CallGraph) -> None:
        called = [each for each in self._hooks if each[0] in call.results and each[0] in self._came]
        for n, hook in called:
            changed = hook(self._came[n])
            self._came[n] = self._came[n] if changed is None else changed
        self._hooks = [each for each in self._hooks if each not in called]  # of what it was before it was overwritten
        call.begin(self._came)
