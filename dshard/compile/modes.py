"""Context managers that a compiled graph can contain, as the calls that they change.

dynamo traces a program into a graph that runs later. A block that sets a variable would have set it back by then, and
dynamo cannot leave such a block half-way, where the graph breaks. Modes of torch functions it can: what a mode does
with a call is traced into the graph, and a graph that breaks leaves the mode in force for what runs in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from dshard.compile.graph_functions import call_in_graph
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.trees import leaves, replace_leaves
from dshard.core.wrapper import Wrapper


class FunctionReplacement(TorchFunctionMode):
    """Replace the functions of torch in a table by functions of `FUNCTIONS`, given by name."""

    def __init__(self, names: Mapping[Function, str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        name = self.names.get(func)
        return _called(func, args, kwargs) if name is None else call_in_graph(name, *args, **kwargs)


class PlainReplicated(TorchFunctionMode):
    """Turn plain tensors among distributed ones into replicated ones in a graph (`implicit_replication`).

    The function of `FUNCTIONS` called `replicate` makes them.
    """

    def __init__(self, replicate: str) -> None:
        super().__init__()
        self.replicate = replicate

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if not is_dynamo_compiling():  # where the graph breaks
            with implicit_replication():
                return func(*args, **kwargs)
        if any(isinstance(x, Wrapper) for x in leaves((args, kwargs))):  # dynamo leaves them out of `types`
            args, kwargs = replace_leaves((args, kwargs), self._replicated)
        return _called(func, args, kwargs)

    def _replicated(self, x: object) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, Wrapper) or x.numel() == 1:
            return x
        return call_in_graph(self.replicate, x)


def _called(func: Function, args: Args, kwargs: Kwargs) -> Any:
    if func is Tensor.unflatten:  # which calls a method of its base class: dynamo cannot trace that
        func = torch.unflatten
    return func(*args, **kwargs)
