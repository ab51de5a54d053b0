"""Split a module into stages' modules, traced by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import Tensor, fx, nn

from dshard.comm import split_graph
from dshard.errors import ScheduleError
from dshard.pipeline.actions import names_of
from dshard.validate import as_tuple, check_type, shown


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a module, with the names of its inputs and outputs: a `Stage` without its mesh, which takes it."""

    module: nn.Module
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def __call__(self, *values: Any) -> Any:
        """Return the result of the module."""
        return self.module(*values)


def split(module: nn.Module, example: Sequence[Tensor], at: Sequence[str]) -> tuple[Part, ...]:
    """The parts of a module that begin at its submodules `at`, named by path, in the order in which they run.

    The module is traced with `example`, one microbatch; batches of other sizes need not fit. Each part returns all
    values that any later part needs. Values of the batch have the names of the forward's arguments.
    """
    check_type(module, nn.Module, "split", "give an nn.Module", ScheduleError)
    way_out = "give the tensors of one microbatch in a tuple, such as (x,)"
    if isinstance(example, Tensor):
        raise ScheduleError(f"example: a tensor of shape {tuple(example.shape)}: {way_out}")
    example = as_tuple(example, "example", way_out, ScheduleError)
    for x in example:
        check_type(x, Tensor, "example", way_out, ScheduleError)
    at = names_of(at, "at")
    if len(set(at)) < len(at) or "" in at:
        raise ScheduleError(f"at: {at}: name submodules by path, each once; the first part begins by itself")
    for name in at:
        if name not in dict(module.named_modules()):
            raise ScheduleError(f"the module has no submodule {name!r} to begin a stage at")
    try:
        graph_module = split_graph(module, example, at)
    except RuntimeError as error:
        cause = error.__cause__ or error
        raise ScheduleError(
            f"the module cannot be traced with the example {shown([tuple(x.shape) for x in example])}: "
            f"{type(cause).__name__}: {cause}"
        ) from error
    calls = [node for node in graph_module.graph.nodes if node.op == "call_module"]
    names = {call: _returned_names(graph_module, call) for call in calls}
    parts = []
    for call in calls:
        takes = tuple(_name(argument, names) for argument in call.args)
        parts.append(Part(graph_module.get_submodule(call.target), takes, names[call]))
    _check(module, parts)
    return tuple(parts)


def _returned_names(graph_module: Any, call: fx.Node) -> tuple[str, ...]:
    """Names of the values that a part returns."""
    nodes = graph_module.get_submodule(call.target).graph.nodes
    returned = next(node for node in nodes if node.op == "output").args[0]
    if isinstance(returned, fx.Node):
        return (call.name,)
    return tuple(f"{call.name}.{i}" for i in range(len(returned)))


def _name(node: Any, names: dict[fx.Node, tuple[str, ...]]) -> str:
    """The name of a value that a part takes."""
    if node in names:
        return names[node][0]
    if node.op == "call_function" and node.target is getitem:
        call, index = node.args
        name: str = names[call][index]
        return name
    return str(node.target)


def _check(module: nn.Module, parts: Sequence[Part]) -> None:
    """Refuse a parameter in several parts, under one name or two: each would train a copy of its own."""
    names = {name: id(parameter) for name, parameter in module.named_parameters(remove_duplicate=False)}
    seen: dict[int, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        for name, _ in part.module.named_parameters(remove_duplicate=False):
            other, there = seen.setdefault(names.get(name, -len(seen) - 1), (number, name))
            if other != number:
                raise ScheduleError(
                    f"the parameter {name} of part {number} is also {there} of part {other}: keep both uses in one "
                    "part, or untie them and name both in Pipeline(tied=...)"
                )
