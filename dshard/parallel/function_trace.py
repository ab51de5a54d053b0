"""Functions of tensors, run once without data: the graph of their calls, and the functions of torch that they call.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dshard.comm import has_only_shape, plain
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.trees import map_tensors, nested_tensors, tensors_in
from dshard.errors import LayoutError, MixedError
from dshard.layout import Layout, Shape
from dshard.parallel.step_parts import SeenFunction, SeenTensor
from dshard.parallel.trace_step import without_data
from dshard.planning.step_graph import DraftCall, StepGraph
from dshard.planning.step_recorder import GraphRecorder, memory_of
from dshard.tensor import DTensor
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
