"""Records the operators of a pass without data as the calls of a `StepGraph`, with the rules of dshard's own tables.

A function of torch whose row in `dshard.dispatch.function_table` has a form is one call; of any other the operators
below it are, and of those without a rule the ones that they decompose into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dshard.comm import are_mixed, has_only_shape
from dshard.core.call import Call, LocalOp, Operator, views_first, writes_first
from dshard.core.checks import with_meta_form
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import specs_of
from dshard.core.trees import replace_tensors, tensors_in, with_tensors
from dshard.dispatch.function_table import FUNCTIONS
from dshard.dispatch.registry import find
from dshard.layout import Shape, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.decompositions import DECOMPOSITIONS, decomposition_of
from dshard.planning.step_graph import DraftCall, GraphCall, Kind, OperandSlot, StepGraph, Value, linked, signature_of
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import OpOverload, no_torch_function

ONE = replicated(Mesh((1,), ("one",)))
"""The layout of whole tensors, of which operators' rules are asked."""


class _Place(NamedTuple):
    """The module that runs, the number of its visit, and how many calls of each name it has made in it."""

    module: str
    visit: int
    calls: Counter[str]


class _Recorded(NamedTuple):
    """A call as it was recorded: `recorded` says whether autograd recorded operators at the time."""

    call: GraphCall
    operands: tuple[int, ...]
    results: tuple[int, ...]
    recorded: bool


class GraphRecorder:
    """Records calls of operators on tensors without data; `graph` gives them once the pass has ended.

    Tensors are known by their ids; one that no call made and that is not given as a leaf is a constant.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.tensors: list[Tensor] = []  # of each value
        self.kept: list[Tensor] = []  # others whose ids stay their own
        self.calls: list[_Recorded] = []
        self.numbers: dict[int, int] = {}  # of the value that a tensor has now, by the tensor's id
        self.sharing: defaultdict[int, list[Tensor]] = defaultdict(list)  # tensors by the memory that they share
        self.written: dict[int, int] = {}  # by a tensor's id the value that was written to its memory through another
        self.places = [_Place("", 0, Counter())]
        self.visits: Counter[str] = Counter()
        self.paused = False

    # -- values

    def leaf(self, x: Tensor, kind: Kind, name: str = "") -> None:
        """Note a tensor that no call makes; one that is noted already keeps its first name."""
        if id(x) not in self.numbers:
            self._add(x, kind, name)

    def _add(self, x: Tensor, kind: Kind, name: str = "") -> int:
        number = len(self.values)
        self.values.append(Value(number, tuple(x.shape), x.dtype, kind, name, False, None, ()))
        self.tensors.append(x)
        if id(x) not in self.numbers:
            self.sharing[x.untyped_storage()._cdata].append(x)
        self.numbers[id(x)] = number
        return number

    def number(self, x: Tensor) -> int:
        """The number of the value that a tensor has now."""
        source = self.written.pop(id(x), None)
        if source is not None:
            self._read_written(x, source)
        number = self.numbers.get(id(x))
        return self._add(x, "constant") if number is None else number

    def _read_written(self, x: Tensor, source: int) -> None:
        """Give `x` a new value after a write through another tensor of the same memory."""
        before = self.numbers[id(x)]
        if self.values[source].shape == self.values[before].shape:
            self.numbers[id(x)] = source
            return
        rule = whole_rule([self.values[before].shape, self.values[source].shape], [tuple(x.shape)])
        arguments: tuple[Args, Kwargs] = ((OperandSlot(0), OperandSlot(1)), {})
        self._call("write to a view", _written, (rule,), (before, source), [x], arguments)

    # -- calls

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator without data, and record it."""
        op, tensors = find(func), tensors_in((args, kwargs))
        if are_mixed(tensors):
            args, kwargs = replace_tensors((args, kwargs), self._abstract)  # constants of the model, too
            tensors = tensors_in((args, kwargs))
        if op is None and tensors:
            function = DECOMPOSITIONS.get(func) or decomposition_of(func)
            if function is not None:
                with OperatorMode(self.run):
                    out = function(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        numbers = [] if self.paused else [self.number(x) for x in tensors]
        out = with_meta_form(func)(*args, **kwargs)
        outs = tensors_in(out)
        if self.paused or not outs:
            return out
        if all(self.values[n].kind == "constant" for n in numbers):
            for x in outs:
                if id(x) not in self.numbers:
                    self._add(x, "constant")
        elif writes_first(func) or outs[0] is not tensors[0]:  # else it is the operand itself
            rules = _rules(op, func, (args, kwargs), tensors, outs)
            slots = map(OperandSlot, range(len(tensors)))
            name = func.overloadpacket.__name__
            self._call(name, func, rules, tuple(numbers), outs, with_tensors((args, kwargs), slots))
            if writes_first(func):
                self._note_write(outs[0])
        return out

    def _abstract(self, x: Tensor) -> Tensor:
        """The tensor itself, or one without data of the same value."""
        if has_only_shape(x):
            return x
        out = torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="meta")
        self.numbers[id(out)] = self.number(x)
        self.kept.append(out)
        return out

    def function(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Call a function of torch, and record it as one call if its row in the table has a form for it."""
        row = FUNCTIONS.get(func)
        if self.paused or row is None or row.form is None:
            return func(*args, **kwargs)
        with no_torch_function():
            form = row.form(args, kwargs)
        if form is None:
            return func(*args, **kwargs)
        numbers = tuple([self.number(x) for x in form.operands])
        with self.pause():
            out = func(*args, **kwargs)
        if all(self.values[n].kind == "constant" for n in numbers):
            self._add(out, "constant")
            return out
        slots = defaultdict[int, list[OperandSlot]](list)
        for i, x in reversed([*enumerate(form.operands)]):
            slots[id(x)].append(OperandSlot(i))
        arguments = replace_tensors((args, kwargs), lambda x: slots[id(x)].pop())
        name = getattr(func, "__name__", str(func)).strip("_")
        self._call(name, func, (form.rule, *form.alternatives), numbers, [out], arguments, form.kernel)
        return out

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block functions of torch, and operators on plain tensors, run without data and are recorded."""
        with OperatorMode(self.run), _Functions(self):
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Within the block operators run and are not recorded."""
        paused, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = paused

    def _call(
        self,
        name: str,
        function: Function,
        rules: tuple[Any, ...],
        operands: tuple[int, ...],
        outs: Sequence[Tensor],
        arguments: tuple[Args, Kwargs],
        kernel: Callable[[Strategy, Coordinate], LocalOp] | None = None,
    ) -> None:
        place = self.places[-1]
        rule, *alternatives = rules
        ordinal = place.calls[name]
        place.calls[name] += 1
        results = tuple([self._add(x, "made") for x in outs])
        at = place.module, place.visit, ordinal
        call = GraphCall(0, name, function, rule, tuple(alternatives), (), (), *at, arguments, (), kernel)
        self.calls.append(_Recorded(call, operands, results, torch.is_grad_enabled()))

    def _note_write(self, x: Tensor) -> None:
        """After a write to `x`, the other tensors of its memory have a value that follows from it."""
        source = self.numbers[id(x)]
        for other in self.sharing[x.untyped_storage()._cdata]:
            if other is not x:
                self.written[id(other)] = source

    # -- modules

    def enter(self, module: str) -> None:
        """Note that a module begins to run."""
        self.places.append(_Place(module, self.visits[module], Counter()))
        self.visits[module] += 1

    def leave(self) -> None:
        """Note that the module that ran last has ended."""
        self.places.pop()

    # -- the graph

    def graph(self, outputs: Sequence[Tensor]) -> StepGraph:
        """The calls and values of the pass; `outputs` are the tensors that it returned.

        Views that nobody reads, such as those that autograd saves, are left out.
        """
        returned = [self.number(x) for x in outputs]
        needs = self._needing_gradients()
        values = [
            Value(x.number, x.shape, x.dtype, x.kind, x.name, needs[n], None, ()) for n, x in enumerate(self.values)
        ]
        drafts: list[DraftCall] = []
        read = {*returned}
        for call, operands, results, _ in reversed(self.calls):
            function = call.function
            if isinstance(function, OpOverload) and views_first(function) and read.isdisjoint(results):
                continue
            read.update(operands)
            signature = signature_of(call.name, function, call.arguments, [values[n] for n in operands])
            drafts.append(DraftCall(replace(call, signature=signature), operands, results))
        return linked(values, drafts[::-1], returned)

    def _needing_gradients(self) -> list[bool]:
        """For each value whether a backward pass gives it a gradient.

        Autograd tells it of tensors. It records nothing within functions with a backward pass of their own, such as
        checkpoints: there values do that lead from ones that need a gradient to one that does.
        """
        needs = [x.requires_grad for x in self.tensors]
        leads = [x.requires_grad for x in self.tensors]
        for call in self.calls:
            if any(leads[n] for n in call.operands):
                for n in call.results:
                    leads[n] = leads[n] or (call.call.name != "detach" and self.values[n].dtype.is_floating_point)
        for call in reversed(self.calls):
            if not call.recorded and any(needs[n] for n in call.results):
                for n in call.operands:
                    needs[n] = needs[n] or leads[n]
        return needs


class _Functions(TorchFunctionMode):
    """Within the block functions of torch are called by a recorder."""

    def __init__(self, recorder: GraphRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return self.recorder.function(func, args, kwargs or {})


def _rules(
    op: Operator | None, func: OpOverload, operands: Any, tensors: Sequence[Tensor], outs: Sequence[Tensor]
) -> tuple[Any, ...]:
    """The rule of an operator on these operands, of whole tensors if it has none; then its alternatives by name."""
    whole = whole_rule([tuple(t.shape) for t in tensors], [tuple(t.shape) for t in outs])
    if op is None:
        return (whole,)
    specs = tuple(specs_of([ONE] * len(tensors), tensors, tensors[0].device))
    args, kwargs = with_tensors(operands, specs)
    rule = op.rule(Call(func, args, kwargs, specs, tuple(outs)))
    if len(rule.inputs) != len(tensors) or len(rule.outputs) != len(outs):
        return (whole,)
    alternatives = [] if writes_first(func) else [(each.name, each.rule(rule)) for each in op.alternatives]
    return (rule, *[each for each in alternatives if each[1] is not None])


def whole_rule(operands: Sequence[Shape], outputs: Sequence[Shape]) -> Rule:
    """The rule of an operator that needs all its operands whole, and makes whole results."""
    inputs, outs = ([((),) * len(shape) for shape in shapes] for shapes in (operands, outputs))
    return Rule(tuple(inputs), tuple(outs))


def _written(x: Tensor, part: Tensor) -> Tensor:
    """Stands for a tensor after a write to a view of it."""
    return x
