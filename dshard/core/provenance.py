"""The line and the module of the user's program that are running."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import Module, register_module_forward_hook, register_module_forward_pre_hook

from dshard.comm import user_line
from dshard.torch_private import current_autograd_node, sequence_number

__all__ = ["Modules", "user_line"]


class Modules:
    """The module that runs, in the forward pass or in its part of the backward pass.

    Autograd numbers its nodes as the forward pass makes them, so the number of the node that runs backward tells the
    module that made it, if its forward pass was followed. A parameter's gradient belongs to the module that has it.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[Module, str] = WeakKeyDictionary()
        self._owners: dict[int, str] = {}
        self._stack: list[str] = []
        self._starts: list[int] = []
        self._running: list[str] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow all modules that run within the block."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def current(self) -> str:
        """The path of the innermost module, from the class of the outermost: "Net.layers.0.fc"; "" outside all."""
        if self._stack:
            return self._stack[-1]
        node = current_autograd_node()
        if node is None:
            return ""
        if hasattr(node, "variable"):  # it accumulates the gradient of a leaf
            return self._owners.get(id(node.variable), "")
        index = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._running[index] if index >= 0 else ""

    def shares(self, members: Sequence[tuple[int, int]], nbytes: int) -> tuple[tuple[str, int], ...]:
        """The paths of the modules that have parameters, each with its share of `nbytes`.

        `members` are the ids of the parameters, and the bytes by which they share.
        """
        weights: dict[str, int] = {}
        for parameter, weight in members:
            path = self._owners.get(parameter)
            if path is not None:
                weights[path] = weights.get(path, 0) + weight
        total, done, cumulative, out = sum(weights.values()), 0, 0, []
        for path, weight in weights.items():
            done += weight
            share = nbytes * done // total - cumulative if total else 0
            cumulative += share
            out.append((path, share))
        return tuple(out)

    def _enter(self, module: Module, args: object) -> None:
        if is_dynamo_compiling():  # which traces hooks, too; a graph has no modules
            return
        if module not in self._names:
            name = ".".join([*self._stack[-1:], type(module).__name__])
            for path, child in module.named_modules(prefix=name):
                self._names[child] = path
                self._owners |= {id(parameter): path for parameter in child.parameters(recurse=False)}
        self._move([*self._stack, self._names[module]])

    def _leave(self, module: Module, args: object, output: object) -> None:
        if is_dynamo_compiling():
            return
        self._move(self._stack[:-1])

    def _move(self, stack: list[str]) -> None:
        self._stack = stack
        self._starts.append(sequence_number())
        self._running.append(stack[-1] if stack else "")
