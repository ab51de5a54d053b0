"""Autograd's graph behind some nodes, and the order in which a backward pass runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TypeAlias

from torch.autograd.graph import Node

Edge: TypeAlias = tuple[Node, int]
"""Leads to a node, and to which of its inputs."""


class AutogradGraph:
    """The nodes of autograd behind some `roots`, with the edges of each, which lead to the nodes that run later.

    Nodes that are `ends`, and those for which `is_beyond` holds, have no edges here.
    """

    def __init__(
        self,
        roots: Iterable[Node],
        ends: Container[Node] = (),
        is_beyond: Callable[[Node], bool] = lambda node: False,
    ) -> None:
        self.edges: dict[Node, list[Edge]] = {}
        waiting = [*roots]
        while waiting:
            node = waiting.pop()
            if node not in self.edges:
                is_end = node in ends or is_beyond(node)
                after = () if is_end else node.next_functions
                self.edges[node] = [(each, i) for each, i in after if each is not None]
                waiting += [each for each, _ in self.edges[node]]

    def leading_to(self, targets: Iterable[Node]) -> set[Node]:
        """The nodes from which one of the targets is reached, the targets included."""
        before: dict[Node, list[Node]] = {}
        for node, edges in self.edges.items():
            for after, _ in edges:
                before.setdefault(after, []).append(node)
        nodes = set[Node]()
        waiting = [target for target in targets if target in self.edges]
        while waiting:
            node = waiting.pop()
            if node not in nodes:
                nodes.add(node)
                waiting += before.get(node, [])
        return nodes

    def behind(self, node: Node, beyond: Container[Node] = ()) -> set[Node]:
        """The nodes to which a node leads without passing one of those `beyond`."""
        nodes, waiting = set[Node](), [after for after, _ in self.edges[node]]
        while waiting:
            after = waiting.pop()
            if after not in nodes and after not in beyond:
                nodes.add(after)
                waiting += [each for each, _ in self.edges[after]]
        return nodes

    def in_order(self, nodes: set[Node]) -> list[Node]:
        """Nodes, with all that lead to them, as a backward pass runs them: of those that are ready the newest first."""
        needs = Counter(after for node in nodes for after, _ in self.edges[node] if after in nodes)
        numbers = count()  # of those that are as old, the first that was ready
        ready = [(-node._sequence_nr(), next(numbers), node) for node in nodes if not needs[node]]
        heapify(ready)
        order = list[Node]()
        while ready:
            node = heappop(ready)[2]
            order.append(node)
            for after, _ in self.edges[node]:
                needs[after] -= 1
                if after in nodes and not needs[after]:
                    heappush(ready, (-after._sequence_nr(), next(numbers), after))
        return order
