"""Plans of functions of distributed tensors: the layouts of all that they compute are chosen together.

First the function is run once without data: its trace is the graph of its calls, and the functions of torch in it.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dshard.comm import as_mesh, has_only_shape, plain
from dshard.comm.events import unheard
from dshard.core.context import planning_context
from dshard.core.observe import OperatorMode
from dshard.core.operands import common_mesh
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.trees import map_tensors, nested_tensors, tensors_in
from dshard.dispatch.planned_calls import PLANNED, PlannedCalls, PlannedMove, redistributed
from dshard.distribute import distribute_tensor
from dshard.errors import ArgumentError, LayoutError, MixedError
from dshard.layout import Layout, Shape, replicated
from dshard.mesh import Mesh
from dshard.parallel.step_parts import SeenFunction, SeenTensor
from dshard.parallel.trace_step import without_data
from dshard.parallel.whole_plan import PlannedFunctions
from dshard.planning.move_prices import completion
from dshard.planning.plan_step import StepPlan, plan_step
from dshard.planning.step_graph import DraftCall, GraphCall, StepGraph, given_layout, is_copy
from dshard.planning.step_recorder import GraphRecorder, memory_of
from dshard.planning.step_tables import StepTables
from dshard.redistribute.plan import plan_price
from dshard.redistribute.space import space_of
from dshard.tables import text_table
from dshard.tensor import DTensor
from dshard.topology import Topology
from dshard.torch_private import disable_modes


class Argument(NamedTuple):
    """A tensor that a function was planned for; `layout` is None of a plain one, which is on all ranks."""

    shape: Shape
    dtype: torch.dtype
    layout: Layout | None

    def takes(self, x: Tensor) -> bool:
        """Whether a tensor is like it."""
        own = x._spec.layout if isinstance(x, DTensor) else None
        return (tuple(x.shape), x.dtype, own) == self

    def __str__(self) -> str:
        place = "plain" if self.layout is None else f"in [{self.layout}]"
        return f"a tensor of shape {self.shape} and {self.dtype}, {place}"


class FunctionTrace(NamedTuple):
    """The graph of a call, the functions of torch that it calls on its tensors, and the memory that was given to it.

    `tensors` are those without data that it was called with and made, by number, and `results` what each function
    returned.
    """

    graph: StepGraph
    functions: tuple[SeenFunction, ...]
    given: frozenset[int]
    tensors: tuple[Tensor, ...]
    results: tuple[Any, ...]


def argument_like(x: Tensor) -> Argument:
    return Argument(tuple(x.shape), x.dtype, x._spec.layout if isinstance(x, DTensor) else None)


@plain()
@disable_modes()
def traced_function(
    function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object], arguments: Sequence[Argument]
) -> FunctionTrace:
    """The trace of a call, without data."""
    recorder, numbers, given = GraphRecorder(), iter(range(len(arguments))), list[DraftCall]()
    functions = _Functions(recorder)

    def stand_in(x: Tensor) -> Tensor:
        number = next(numbers)
        layout = arguments[number].layout
        if layout is None and not x.dim():  # a number that the function may read
            return x.detach().clone()
        out = without_data(x).requires_grad_(x.requires_grad)
        if layout is None:
            recorder.leaves({"input": [(str(number), out)]})
        else:
            given.append(recorder.given(out, str(number), layout))
        return out

    own: Any = map_tensors((tuple(args), dict(kwargs)), stand_in)
    memory = frozenset([functions.seen(x).memory for x in nested_tensors(own) if has_only_shape(x)])
    name = getattr(function, "__qualname__", str(function))
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), OperatorMode(recorder.run), functions:
            out = function(*own[0], **own[1])
    except MixedError as error:
        raise LayoutError(
            f"{name} uses a distributed tensor that is no argument ({str(error).partition(';')[0]}): give it as one"
        ) from error
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error).lower():
            raise
        raise LayoutError(
            f"{name} does not run without data ({str(error).partition('. ')[0]}): plan a function that asks for no "
            "values, such as the part before or after"
        ) from error
    graph, seen = recorder.graph(nested_tensors(out), given), functions
    return FunctionTrace(graph, tuple(seen.called), memory, tuple(seen.tensors), tuple(seen.results))


class _Functions(TorchFunctionMode):
    """Within the block functions of torch are called by a recorder, and seen if a tensor without data is an operand."""

    def __init__(self, recorder: GraphRecorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.called: list[SeenFunction] = []
        self.results: list[Any] = []
        self.tensors: list[Tensor] = []  # whose ids stay their own
        self.numbers: dict[int, int] = {}
        self.memory = set[int]()

    def seen(self, x: Tensor) -> SeenTensor:
        """What is seen of a tensor."""
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.tensors)
            self.tensors.append(x)
        memory, value = memory_of(x), self.recorder.numbers.get(id(x))
        self.memory.add(memory)
        return SeenTensor(self.numbers[id(x)], memory, tuple(x.shape), x.itemsize, x.numel() * x.itemsize, value)

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        tensors, arguments = tensors_in((args, kwargs)), kwargs or {}
        operands = [x for x in tensors if has_only_shape(x)]
        if tensors and not operands:  # numbers that the function may read
            with disable_modes():
                return func(*args, **arguments)
        seen, versions = [self.seen(x) for x in operands], [x._version for x in operands]
        first, known = len(self.recorder.called), {*self.numbers} - {*map(id, operands)}
        out = self.recorder.function(func, args, arguments)
        if operands:
            written = frozenset([x.memory for x, y, n in zip(seen, operands, versions, strict=True) if y._version != n])
            before = frozenset(self.memory)
            new = [x for x in nested_tensors(out) if id(x) not in known]  # not a gradient that an attribute holds
            results = tuple([self.seen(x) for x in new if has_only_shape(x)])
            within = first if len(self.recorder.called) > first else None
            made = frozenset([x.memory for x in results]) - before
            self.called.append(SeenFunction(name_of(func), tuple(seen), results, made, written, within))
            self.results.append(out)
        return out


def name_of(func: Function) -> str:
    """The name of a function of torch."""
    return getattr(func, "__name__", str(func))


class PlannedLine(NamedTuple):
    """A call of a planned function: the layouts that it reads and makes, and milliseconds of its moves and work."""

    call: str
    reads: tuple[Layout, ...]
    makes: tuple[Layout, ...]
    moves: float
    work: float


@dataclass(frozen=True, slots=True, eq=False)
class FunctionPlan:
    """A function that runs in the layouts chosen for it, and what they cost; made by `plan_function`.

    Called with tensors like those that it was planned for, it gives the results, and autograd the gradients, of one
    device. `seconds` are those of a forward and a backward pass, each move and each call one after the other, and
    `bound` is at most those of any choice of layouts. `has_products` says whether it calls a matmul or attention.
    `print` shows the calls.
    """

    function: Callable[..., Any]
    mesh: Mesh
    arguments: tuple[Argument, ...]
    lines: tuple[PlannedLine, ...]
    seconds: float
    bound: float
    has_products: bool
    _moves: tuple[PlannedMove | None, ...] = field(repr=False)
    _calls: PlannedCalls = field(repr=False)

    @property
    def certificate(self) -> float:
        """How many times the least possible seconds it takes at most: 1 if no other choice of layouts takes fewer."""
        return self.seconds / self.bound if self.bound > 0 else 1.0

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The result of the function.

        Raises:
            LayoutError: tensors of another number, shape, dtype or layout than it was planned for.
        """
        tensors = nested_tensors((args, kwargs))
        if len(tensors) != len(self.arguments):
            raise LayoutError(
                f"planned for {len(self.arguments)} tensors, called with {len(tensors)}: plan the function for these"
            )
        for i, (x, argument) in enumerate(zip(tensors, self.arguments, strict=True)):
            if not argument.takes(x):
                raise LayoutError(
                    f"argument {i} was planned as {argument}, and is {argument_like(x)}: plan it for this"
                )
        moves = iter(self._moves)
        laid_out: Any = map_tensors((args, kwargs), lambda x: redistributed(_distributed(x, self.mesh), next(moves)))
        with self.followed(), implicit_replication():
            return self.function(*laid_out[0], **laid_out[1])

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Within the block calls follow the plan, one after the other."""
        before = PLANNED.position()
        PLANNED.put(self._calls, 0)
        try:
            yield
        finally:
            PLANNED.put(*before)

    def __str__(self) -> str:
        header = ("call", "reads", "makes", "moves, ms", "work, ms")
        rows = [
            (line.call, *[", ".join(map(str, own)) for own in (line.reads, line.makes)], *map(_number, line[3:]))
            for line in self.lines
        ]
        name = getattr(self.function, "__qualname__", str(self.function))
        total = f"{name}: {_number(1e3 * self.seconds)} ms, within {self.certificate:.3f} of any choice of layouts"
        return f"{text_table(header, rows)}\n{total}"


def plan_function(function: Callable[..., Any], /, *args: object, **kwargs: object) -> FunctionPlan:
    """Choose the layouts of all that a function of tensors computes together, forward and backward.

    `args` and `kwargs` are those of a call, tensors nested in them as they may be. Distributed tensors stay in their
    layouts, and what must be moved for a call is part of the price. Plain ones are on all ranks, alike, of the mesh of
    the others, or of the `with mesh:` block around. The function runs once, without data.

    By itself each operator takes the layouts that are cheapest for it, which may be dear for the next:

        >>> import torch
        >>> from dshard import Mesh, Replicate, Shard, distribute_tensor, plan_function
        >>> from dshard.testing import simulated
        >>> mesh = Mesh((4,), ("x",))
        >>> with simulated(mesh):
        ...     column, row = (distribute_tensor(torch.ones(64, 64), mesh, [Shard(dim)]) for dim in (1, 0))
        ...     plan = plan_function(lambda a, b, c, d: a @ b + c @ d, column, row, column.clone(), row.clone())
        >>> [(line.call, *map(str, line.makes)) for line in plan.lines[-4:]]
        [('matmul', 'x:P(sum)'), ('matmul', 'x:P(sum)'), ('add', 'x:P(sum)'), ('return', 'x:R')]

    Raises:
        ArgumentError: no tensor among the arguments.
        LayoutError: a function that asks for values, or that uses distributed tensors which are no arguments.
    """
    return planned(function, args, kwargs)[0]


class Planned(NamedTuple):
    """A plan of a function, and what it was made from."""

    plan: FunctionPlan
    trace: FunctionTrace
    graph: StepGraph
    chosen: StepPlan


def planned(function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> Planned:
    """The plan of a call of a function."""
    tensors = nested_tensors((args, kwargs))
    if not tensors:
        raise ArgumentError("plan_function plans for the tensors of a call: give them, such as plan_function(fn, x, w)")
    distributed: list[Tensor] = [x for x in tensors if isinstance(x, DTensor)]
    mesh = common_mesh("plan_function", distributed) if distributed else as_mesh(None)
    arguments = tuple(map(argument_like, tensors))
    trace, topology = traced_function(function, args, kwargs, arguments), planning_context().topology_of(mesh)
    graph = trace.graph.copies()
    with plain(), disable_modes(), unheard():
        chosen = plan_step(StepTables(graph, mesh, topology))
    functions = PlannedFunctions(graph, chosen)
    given = [] if any(call.writes for call in graph.calls) else [call for call in graph.calls if given_layout(call)]
    moves = {call.operands[0].name: functions.given(call.results[0]) for call in given}
    plan = FunctionPlan(
        function,
        mesh,
        arguments,
        tuple(_lines(graph, chosen, topology)),
        chosen.seconds,
        chosen.bound,
        any(call.rule.loops for call in graph.calls),
        tuple([moves.get(str(i)) for i in range(len(tensors))]),
        PlannedCalls(functions.calls()),
    )
    return Planned(plan, trace, graph, chosen)


def _distributed(x: Tensor, mesh: Mesh) -> Tensor:
    if isinstance(x, DTensor):
        return x
    return distribute_tensor(x, mesh, replicated(mesh).placements, src_data_rank=None)


def _lines(graph: StepGraph, chosen: StepPlan, topology: Topology) -> Iterator[PlannedLine]:
    for call, own in zip(graph.calls, chosen.calls, strict=True):
        moves = _moved(call, chosen, topology)
        if not is_copy(call) or moves:
            yield PlannedLine(call.name, own.inputs, own.outputs, 1e3 * (moves + own.exchanges), 1e3 * own.work)

    for value in graph.outputs:
        if value.producer is not None and not value.uses:
            made = chosen.calls[value.producer.call].outputs[value.producer.position]
            end, moves = completion(made, value.shape, value.itemsize, topology)
            if end != made:
                yield PlannedLine("return", (made,), (end,), 1e3 * moves, 0.0)


def _moved(call: GraphCall, chosen: StepPlan, topology: Topology) -> float:
    """Seconds of the moves of a call's operands, and of their gradients back."""
    own, total = chosen.calls[call.number], 0.0
    for value, used, gradient in zip(call.operands, own.inputs, own.gradients, strict=True):
        if value.producer is None:
            continue
        maker, result = value.producer
        moves = [(chosen.calls[maker].outputs[result], used)]
        if value.needs_grad:
            moves.append((gradient, chosen.calls[maker].cotangent(result)))
        space = space_of(used.mesh, topology, value.shape, value.itemsize)
        total += sum([plan_price(space.state_of(src), space.state_of(dst), space).seconds for src, dst in moves])
    return total


def _number(x: float) -> str:
    return f"{x:.3f}"
