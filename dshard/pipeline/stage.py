"""Stages: a module on a mesh of its own, with the names of its inputs and outputs; a module may be split into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from dshard.autograd.backward_graph import AutogradGraph
from dshard.comm import DeviceMesh, as_mesh, split_graph
from dshard.core.signature import Function
from dshard.errors import LayoutError, MeshError, MixedError, ScheduleError
from dshard.layout import Layout, layout_of, placements_on, replicated
from dshard.mesh import Mesh
from dshard.pipeline.program import names_of
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rehearsal.region_backward import is_behind_first_node
from dshard.tensor import DTensor
from dshard.torch_private import no_torch_function
from dshard.validate import as_tuple, check_callable, check_one_of, check_type, shown


@dataclass(frozen=True, eq=False)
class Stage:
    """A part of a model, on a mesh of some of the ranks.

    `module` is called with the inputs named in `takes`, as DTensors on `mesh`, and returns the outputs named in
    `gives`: one tensor, or a tensor for each name, in order. Its parameters are DTensors on `mesh`, in any layout. A
    `Part` of `split` in its place names these values itself.
    Ranks outside the mesh pass None, or a module that they do not use. `placements` are the placements of inputs by
    name, "target" being the loss's target; other inputs are replicated.
    """

    module: nn.Module | Function | None
    mesh: DeviceMesh
    takes: Sequence[str] = ("x",)
    gives: Sequence[str] = ("x",)
    placements: Mapping[str, Sequence[Placement]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.module, Part):
            for name in ("takes", "gives", "module"):
                object.__setattr__(self, name, getattr(self.module, name))
        if self.module is not None:
            check_callable(self.module, "the module of a stage", "give an nn.Module, or None on ranks outside")
        way_out = "give a DeviceMesh from init_device_mesh"
        check_type(self.mesh, DeviceMesh | Mesh, "the mesh of a stage", way_out, MeshError)
        for name in ("takes", "gives"):
            object.__setattr__(self, name, names_of(getattr(self, name), f"what a stage {name}"))
        if len(set(self.gives)) < len(self.gives):
            raise ScheduleError(f"a stage gives {', '.join(self.gives)}: name each value once")
        if not self.gives:
            raise ScheduleError("a stage gives nothing: name what its module returns, such as gives=('x',)")
        way_out = "give a sequence of placements for each name, as in {'x': [Shard(0)]}"
        check_type(self.placements, Mapping, "placements", way_out, ScheduleError)
        known = (*self.takes, "target")
        for name, placements in self.placements.items():
            check_one_of(name, known, "placements of what a stage takes", ScheduleError)
            if any(isinstance(placement, Partial) for placement in self._placements(placements)):
                raise LayoutError(f"placements of {name!r}: what crosses is whole; use Shard or Replicate")

    def _placements(self, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Check placements, one for each axis of the mesh, which may have no processes."""
        mesh = self.mesh if isinstance(self.mesh, Mesh) else Mesh(tuple(self.mesh.shape))
        checked = placements_on(mesh, placements)
        Layout(mesh, tuple(Replicate() if isinstance(p, Shard) else p for p in checked))
        return checked

    @property
    def layout_mesh(self) -> Mesh:
        """The stage's mesh as a pure value."""
        return as_mesh(self.mesh)

    def input_layout(self, name: str, ndim: int) -> Layout:
        """The layout, on the stage's mesh, of the input `name` with `ndim` dims."""
        if name in self.placements:
            return layout_of(self.layout_mesh, self.placements[name], ndim)
        return replicated(self.layout_mesh)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters by name; none where its module is a function, or on other ranks."""
        return dict(self.module.named_parameters()) if isinstance(self.module, nn.Module) else {}

    def parameters(self) -> list[nn.Parameter]:
        """The stage's parameters that require a gradient."""
        return [parameter for parameter in self.named_parameters().values() if parameter.requires_grad]

    def check(self, number: int) -> None:
        """Refuse a module that cannot run on the mesh; called by the ranks of the mesh only."""
        if self.module is None:
            raise ScheduleError(f"stage {number} has no module on a rank of its mesh: only ranks outside may pass None")
        for name, parameter in self.named_parameters().items():
            if not isinstance(parameter, DTensor):
                raise MixedError(
                    f"the parameter {name} of stage {number} is a plain tensor: lay the module out with "
                    "distribute_module(module, mesh) on the ranks of its mesh"
                )
            if parameter.layout.mesh != self.layout_mesh:
                raise MixedError(
                    f"the parameter {name} of stage {number} lies on the mesh ({parameter.layout.mesh}), not on that "
                    f"of its stage, ({self.layout_mesh})"
                )

    def outputs(self, returned: object, number: int) -> tuple[DTensor, ...]:
        """Check the values that the module returned: one DTensor for each name that the stage gives."""
        outputs = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        if len(outputs) != len(self.gives):
            raise ScheduleError(
                f"stage {number} returned {len(outputs)} values, but gives {len(self.gives)} ({', '.join(self.gives)})"
            )
        for name, value in zip(self.gives, outputs, strict=True):
            if not isinstance(value, DTensor) or value.layout.mesh != self.layout_mesh:
                where = f"on the mesh ({value.layout.mesh})" if isinstance(value, DTensor) else f"a {type(value)}"
                raise ScheduleError(
                    f"stage {number} returned {name} {where}: it must be a DTensor on ({self.layout_mesh})"
                )
        return outputs


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


# -- the backward pass of one microbatch: at once, or split, with the gradients of the inputs first
# The split backward keeps the gradients that enter each node of the graph from which both an input and a weight are
# reached, and starts from there for the weights (after Zero Bubble, arXiv 2401.10241). torch.distributed.pipelining has
# a similar one, which detaches the outputs in place and so refuses a stage that saved an output for its backward.

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
