"""Records the operators of a pass without data as the calls of a `StepGraph`, with the rules of dshard's own tables.

A function of torch whose row in `dshard.dispatch.function_table` has a form is one call; of any other the operators
below it are, and of those without a rule the ones that they decompose into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.comm import WAITED_FOR, are_mixed, has_only_shape
from dshard.core.alike_operators import AlikeOperators
from dshard.core.call import Call, LocalOp, Operator, OperatorForm, views_first, writes_first
from dshard.core.checks import with_meta_form
from dshard.core.observe import OperatorMode
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec, specs_of
from dshard.core.subclasses import refuse_own_rules
from dshard.core.transforms import unwrapped
from dshard.core.trees import replace_leaves, replace_tensors, tensors_in, with_tensors
from dshard.dispatch.function_table import FUNCTIONS
from dshard.dispatch.registry import find
from dshard.errors import DShardError, MeshError
from dshard.layout import Layout, Shape, replicated
from dshard.mesh import Coordinate, Mesh
from dshard.ops.custom import has_out, written_to_out
from dshard.ops.decompositions import DECOMPOSITIONS, decomposition_of
from dshard.ops.experts.experts_call import PlainExperts
from dshard.planning.step_graph import (
    DraftCall,
    FunctionCall,
    GraphCall,
    Kind,
    OperandSlot,
    StepGraph,
    Value,
    given_call,
    linked,
    signature_of,
)
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import OpOverload, is_functorch_wrapped, is_transforming, no_functions, no_torch_function

ONE = replicated(Mesh((1,), ("one",)))
"""The layout of whole tensors, of which operators' rules are asked."""


_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""The namespaces of torch's collectives."""


class _Place(NamedTuple):
    """The module that runs, and the number of its visit."""

    module: str
    visit: int


class ModulesRun(NamedTuple):
    """The visits of modules, in the order in which they began, and the values of their first arguments and results.

    `begun` are those that have begun since the last function was called.
    """

    visits: Counter[str]
    first_inputs: dict[str, int]
    outputs: dict[str, int]
    begun: list[str]


class OperatorCall(NamedTuple):
    """A call of an operator as it was recorded: its operands and results are numbers of values.

    `arguments` have an `OperandSlot` or a `Spec` for each operand. `row` is the operator's own, None of one without a
    rule that fits. `is_seen` says whether autograd recorded operators at the time.
    """

    name: str
    function: Function
    rule: Rule
    row: Operator | None
    arguments: tuple[Args, Kwargs]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    place: _Place
    is_seen: bool
    alternatives: tuple[tuple[str, Rule], ...] = ()
    kernel: Callable[[Strategy, Coordinate], LocalOp] | None = None

    def as_call(self, within: int, values: Sequence[Value]) -> GraphCall:
        """The call of a graph with these values, whose operands and results are not linked, within a function."""
        alternatives, function, slots = self.alternatives, self.function, map(OperandSlot, range(len(self.operands)))
        if self.row is not None and isinstance(function, OpOverload) and not writes_first(function):
            rules = [(each.name, each.rule(self.rule)) for each in self.row.alternatives]
            alternatives = tuple([(name, rule) for name, rule in rules if rule is not None])
        arguments = replace_leaves(self.arguments, lambda x: next(slots) if isinstance(x, Spec) else x)
        signature = signature_of(self.name, function, arguments, [values[n] for n in self.operands])
        at = self.place.module, within
        return GraphCall(
            0, self.name, function, self.rule, alternatives, (), (), *at, arguments, signature, self.kernel
        )


class _FunctionCall(NamedTuple):
    """A call of a function that may be one call of the graph, in place of the operators from `first` to `end`."""

    function: Function
    form: Callable[[Args, Kwargs], OperatorForm | None]
    arguments: tuple[Args, Kwargs]
    numbers: dict[int, int]
    result: int
    first: int
    end: int

    def recorded(self, place: _Place, is_seen: bool) -> OperatorCall | None:
        """The call, if the function's row has a form for it."""
        try:
            with no_torch_function():
                form = self.form(*self.arguments)
        except (TypeError, DShardError):  # torch refuses such arguments in its own words
            form = None
        if form is None or form is NotImplemented:
            return None
        slots = defaultdict[int, list[OperandSlot]](list)
        for i, x in reversed([*enumerate(form.operands)]):
            slots[id(x)].append(OperandSlot(i))
        arguments = with_tensors(self.arguments, [slots[id(x)].pop() for x in tensors_in(self.arguments)])
        name = getattr(self.function, "__name__", str(self.function)).strip("_")
        operands = tuple([self.numbers[id(x)] for x in form.operands])
        made, rest = (operands, (self.result,), place, is_seen), (form.alternatives, form.kernel)
        return OperatorCall(name, self.function, form.rule, None, arguments, *made, *rest)


class _Called(NamedTuple):
    """A function as the model called it, and the first operator that it ran, and the one after its last."""

    call: FunctionCall
    first: int
    end: int


class GraphRecorder:
    """Records calls of operators on tensors without data; `graph` gives them once the pass has ended.

    Tensors are known by their ids; one that no call made and that is not given as a leaf is a constant, and so is what
    is made of constants alone. Calls that make these are recorded, too, and left out of the graph.
    """

    def __init__(self) -> None:
        self.alike: AlikeOperators[tuple[Rule, Operator | None, tuple[Args, Kwargs]]] = AlikeOperators()
        self.values: list[Value] = []
        self.tensors: list[Tensor] = []  # of each value
        self.kept: list[Tensor] = []  # others whose ids stay their own
        self.operators: list[OperatorCall] = []
        self.functions: list[_FunctionCall] = []
        self.called: list[_Called] = []
        self.within_function = False
        self.numbers: dict[int, int] = {}  # of the value that a tensor has now, by the tensor's id
        self.sharing: defaultdict[int, list[Tensor]] = defaultdict(list)  # tensors by the memory that they share
        self.written: dict[int, int] = {}  # by a tensor's id the value that was written to its memory through another
        self.places = [_Place("", 0)]
        self.modules = ModulesRun(Counter(), {}, {}, [])
        self.heads: list[tuple[int, int]] = []  # of each attention, as `_heads_of` has them
        self.paused = False

    # -- values

    def leaves(self, named: Mapping[Kind, Sequence[tuple[str, Tensor]]]) -> None:
        """Note tensors that no call makes, by kind and name; one that is noted already keeps its first name."""
        for kind, tensors in named.items():
            for name, x in tensors:
                if id(x) not in self.numbers:
                    self._add(x, kind, name)

    def given(self, x: Tensor, name: str, layout: Layout) -> DraftCall:
        """Note an input that lies in a layout already, and return the call for `graph` by which it does."""
        number = self._add(x, "input", name)
        return DraftCall(given_call(self.values[number], layout), (number,), (self._add(x, "made"),))

    def _add(self, x: Tensor, kind: Kind, name: str = "") -> int:
        number = len(self.values)
        self.values.append(Value(number, tuple(x.shape), x.dtype, kind, name, False, None, ()))
        self.tensors.append(x)
        if id(x) not in self.numbers and x.layout == torch.strided:
            self.sharing[memory_of(x)].append(x)
        self.numbers[id(x)] = number
        return number

    def number(self, x: Tensor) -> int:
        """The number of the value that a tensor has now, or that has what torch.func wraps as this tensor."""
        if is_functorch_wrapped(x):
            x = unwrapped(x)
        source = self.written.pop(id(x), None)
        if source is not None:
            self._read_written(x, source)
        number = self.numbers.get(id(x))
        return self._add(x, "constant") if number is None else number

    def _read_written(self, x: Tensor, source: int) -> None:
        """Give `x` a new value after a write through another tensor of the same memory."""
        before = self.numbers[id(x)]
        if self.values[source].shape == self.values[before].shape and self.values[source].dtype == x.dtype:
            self.numbers[id(x)] = source
            return
        rule = whole_rule([self.values[before].shape, self.values[source].shape], [tuple(x.shape)])
        self._record("write to a view", _written, rule, None, _slots(2), (before, source), [x])

    # -- calls

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator without data, and record it."""
        tensors = tensors_in((args, kwargs))
        op = find(func) if all(x.layout == torch.strided for x in tensors) else None  # of sparse ones no rule is asked
        if func.namespace in _COLLECTIVES and WAITED_FOR.in_force() and not all(map(has_only_shape, tensors)):
            raise MeshError(
                f"{func}: a collective in the forward pass of a model that the first rank plans while the others wait: "
                'leave it out, as dshard sends what the ranks need of each other, or name a strategy, such as "data"'
            )
        if op is not None and func._schema.is_mutable and has_out(func):
            with torch.no_grad(), OperatorMode(self.run):
                return written_to_out(func, args, kwargs)
        if len(tensors) > 1 and are_mixed(tensors):
            args, kwargs = replace_tensors((args, kwargs), self._abstract)  # constants of the model, too
            tensors = tensors_in((args, kwargs))
        if op is None and tensors:
            function = DECOMPOSITIONS.get(func) or decomposition_of(func)
            if function is not None:
                with torch.no_grad(), OperatorMode(self.run):  # autograd sees the whole operator alone
                    out = function(*args, **kwargs)
                if out is not NotImplemented:
                    return out
        numbers = [] if self.paused else [self.number(x) for x in tensors]
        # before it runs, as it may write shapes
        specs = _specs(op, numbers, tensors) if func._schema.is_mutable else ()
        alike, run = None, with_meta_form(func)
        if self.alike.is_functional.get(func, True):
            alike, out = self.alike.run(func, run, args, kwargs)
        else:
            out = run(*args, **kwargs)
        ruled = None if alike is None else alike.note
        outs = [out] if isinstance(out, Tensor) else tensors_in(out)
        writes = bool(numbers and outs) and outs[0] is tensors[0] and writes_first(func)  # or it is the operand itself
        if numbers and outs and (writes or outs[0] is not tensors[0]):
            if ruled is None:
                specs = specs or _specs(op, numbers, tensors)
                arguments = with_tensors((args, kwargs), specs or map(OperandSlot, range(len(tensors))))
                ruled = self._ruled(op, Call(func, arguments[0], arguments[1], tuple(specs), tuple(outs)), numbers)
                if alike is not None:
                    alike.note = ruled
            self._record(func.overloadpacket.__name__, func, *ruled, tuple(numbers), outs)
            if writes:
                self._note_write(outs[0])
        return out

    def _ruled(
        self, op: Operator | None, call: Call, numbers: Sequence[int]
    ) -> tuple[Rule, Operator | None, tuple[Args, Kwargs]]:
        """The rule of a call, the row that has it, if one fits, and the call's arguments."""
        rule = None if op is None else op.rule(call)
        if rule is None or len(rule.inputs) != len(numbers) or len(rule.outputs) != len(call.outs):
            op, rule = None, whole_rule([self.values[n].shape for n in numbers], [tuple(x.shape) for x in call.outs])
        return rule, op, (call.args, call.kwargs)

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
        operands = tensors_in((args, kwargs))
        for x in operands:
            if x.is_nested:
                refuse_own_rules(getattr(func, "__name__", str(func)), [type(x)])
        if self.within_function or self.paused or is_transforming():
            return self._function(func, args, kwargs, operands)
        self.within_function, first = True, len(self.operators)
        numbers = tuple([self.numbers.get(id(x)) for x in operands])
        try:
            out = self._function(func, args, kwargs, operands)
        finally:
            self.within_function = False
        if any(self._kind(each.operands) == "made" for each in self.operators[first:]):
            results, memory = [out] if isinstance(out, Tensor) else tensors_in(out), {*map(memory_of, operands)}
            made = tuple([self.numbers.get(id(x)) for x in results])
            is_view = any(memory_of(x) in memory for x in results)
            name, place = getattr(func, "__name__", str(func)), self.places[-1]
            call = FunctionCall(name, *place, 0, tuple(self.modules.begun), numbers, made, is_view)
            self.called.append(_Called(call, first, len(self.operators)))
            self.modules.begun.clear()
        return out

    def _function(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Any:
        self.heads.extend(_heads_of(func, args, kwargs))
        row = FUNCTIONS.get(func)
        if self.paused or row is None or row.form is None or is_transforming():
            return func(*args, **kwargs)
        arguments: tuple[Args, Kwargs] = args, kwargs
        if any(isinstance(x, list | tuple | dict) for x in (*args, *kwargs.values())):
            arguments = with_tensors(arguments, tensors)  # whose lists may change
        numbers, first = {id(x): self.number(x) for x in tensors}, len(self.operators)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and (result := self.number(out)) not in numbers.values():
            self.functions.append(_FunctionCall(func, row.form, arguments, numbers, result, first, len(self.operators)))
        return out

    def _record(
        self,
        name: str,
        function: Function,
        rule: Rule,
        row: Operator | None,
        arguments: tuple[Args, Kwargs],
        operands: tuple[int, ...],
        outs: Sequence[Tensor],
    ) -> None:
        """Record a call that makes these tensors."""
        kind = self._kind(operands)
        results = tuple([self._add(x, kind) for x in outs])
        at = self.places[-1], torch.is_grad_enabled()
        self.operators.append(OperatorCall(name, function, rule, row, arguments, operands, results, *at))

    def _kind(self, operands: Sequence[int]) -> Kind:
        """The kind of what a call of these operands makes."""
        return "constant" if {self.values[n].kind for n in operands} <= {"constant"} else "made"

    def found(self, call: object) -> None:
        """Record a layer of experts that runs on data, of which observers are told, as one call without its body."""
        if isinstance(call, PlainExperts):
            self.paused = call.out is None
            if call.out is not None:
                numbers = tuple([self.number(x) for x in call.operands])
                slots, function = _slots(len(numbers)), torch.ops.dshard.experts
                self._record("experts", function, call.rule, None, slots, numbers, [call.out])

    def _note_write(self, x: Tensor) -> None:
        """After a write to `x`, the other tensors of its memory have a value that follows from it."""
        source = self.numbers[id(x)]
        for other in () if x.layout != torch.strided else self.sharing[memory_of(x)]:
            if other is not x:
                self.written[id(other)] = source

    # -- modules

    def record(self, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Run a model, and record its calls; hooks tell the module that runs, its first argument and its result."""
        for name, module in model.named_modules():
            self._follow(name, module)
        with OperatorMode(self.run):
            return model(*args, **kwargs)

    def _follow(self, name: str, module: nn.Module) -> None:

        def enter(module: nn.Module, args: Any) -> None:
            self.places.append(_Place(name, self.modules.visits[name]))
            self.modules.visits[name] += 1
            self.modules.begun.append(name)
            if args and isinstance(args[0], Tensor):
                with no_functions():  # the model has not asked for its shape
                    self.modules.first_inputs[name] = self.number(args[0])

        def leave(module: nn.Module, args: object, out: object) -> None:
            if isinstance(out, Tensor):
                with no_functions():
                    self.modules.outputs[name] = self.number(out)
            self.places.pop()

        if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave, always_call=True)

    # -- the graph

    def graph(self, outputs: Sequence[Tensor], given: Sequence[DraftCall] = ()) -> StepGraph:
        """The calls and values of the pass; `outputs` are the tensors that it returned, `given` what was given to it.

        Views that nobody reads, such as those that autograd saves, are left out.
        """
        returned, numbered = [self.number(x) for x in outputs], self._calls()
        needs = self._needing_gradients([*numbered.values()])
        values = [
            Value(x.number, x.shape, x.dtype, x.kind, x.name, needs[n], None, ()) for n, x in enumerate(self.values)
        ]
        read, drafts = {*returned}, list[DraftCall]()
        within = {i: n for n, called in enumerate(self.called) for i in range(called.first, called.end)}
        for i, each in reversed(numbered.items()):
            function = each.function
            if isinstance(function, OpOverload) and views_first(function) and read.isdisjoint(each.results):
                continue
            read.update(each.operands)
            drafts.append(DraftCall(each.as_call(within.get(i, -1), values), each.operands, each.results))
        return replace(linked(values, [*given, *drafts[::-1]], returned), functions=self._functions())

    def _functions(self) -> tuple[FunctionCall, ...]:
        """The functions that the model called, with the number of each among those of its name in the same visit."""
        functions, ordinals = list[FunctionCall](), Counter[tuple[str, int, str]]()
        for call in (called.call for called in self.called):
            place = call.module, call.visit, call.name
            functions.append(replace(call, ordinal=ordinals[place]))
            ordinals[place] += 1
        return tuple(functions)

    def _calls(self) -> dict[int, OperatorCall]:
        """The calls of the graph: functions that have a form for it, and other operators; none of constants alone.

        They are in order, by the number of their operator, or of a function's first. A function of which something
        within is read later stays apart: a backward pass within the model reads what autograd saved.
        """
        calls, done = dict[int, OperatorCall](), 0
        last_read = {n: i for i, each in enumerate(self.operators) for n in each.operands}
        for function in sorted(self.functions, key=lambda each: (each.first, -each.end)):  # the outermost first
            inside = self.operators[function.first : function.end]
            made = {n for each in inside for n in each.results} - {function.result}
            if any(last_read.get(n, 0) >= function.end for n in made):
                continue
            if inside and function.first >= done and (whole := function.recorded(inside[0].place, inside[0].is_seen)):
                calls |= dict(enumerate(self.operators[done : function.first], done)) | {function.first: whole}
                done = function.end
        calls |= dict(enumerate(self.operators[done:], done))
        return {i: each for i, each in calls.items() if self._kind(each.operands) == "made"}

    def _needing_gradients(self, calls: Sequence[OperatorCall]) -> list[bool]:
        """For each value whether a backward pass gives it a gradient.

        Autograd tells it of tensors. It records nothing within functions with a backward pass of their own, such as
        checkpoints: there values do that lead from ones that need a gradient to one that does.
        """
        needs = [x.requires_grad for x in self.tensors]
        leads = [x.requires_grad for x in self.tensors]
        for call in calls:
            if any(leads[n] for n in call.operands):
                for n in call.results:
                    leads[n] = leads[n] or (call.name != "detach" and self.values[n].dtype.is_floating_point)
        for call in reversed(calls):
            if not call.is_seen and any(needs[n] for n in call.results):
                for n in call.operands:
                    needs[n] = needs[n] or leads[n]
        return needs


def _specs(op: Operator | None, numbers: Sequence[int], tensors: Sequence[Tensor]) -> Sequence[Spec]:
    """The specs of whole operands, of which the rule of an operator is asked; none without a row or operands."""
    return specs_of([ONE] * len(numbers), tensors, tensors[0].device) if numbers and op is not None else ()


def memory_of(x: Tensor) -> int:
    """What tensors of one memory have in common, within transforms of torch.func, too."""
    if is_functorch_wrapped(x):
        x = unwrapped(x)
    return x.untyped_storage()._cdata if x.layout == torch.strided else -id(x)


def _slots(operands: int) -> tuple[Args, Kwargs]:
    """The arguments of a call of so many operands and nothing else."""
    return tuple(map(OperandSlot, range(operands))), {}


_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


def _heads_of(func: Function, args: Args, kwargs: Kwargs) -> Sequence[tuple[int, int]]:
    """The number of heads of an attention, or of a matmul that may be attention written as matmuls; of others none.

    Before it stands the number of dims: of matmuls with more than others, as of chunks of a sequence, it tells less.
    """
    if func is F.scaled_dot_product_attention:
        query = args[0] if args else kwargs["query"]
        return [(4, query.shape[-3] if query.dim() > 2 else 1)]
    if func in _PRODUCTS and all(isinstance(x, Tensor) and x.dim() > 3 for x in args):
        return [(x.dim(), x.shape[-3]) for x in args[:1] if x.shape[-3] == args[1].shape[-3]]
    return ()


def whole_rule(operands: Sequence[Shape], outputs: Sequence[Shape]) -> Rule:
    """The rule of an operator that needs all its operands whole, and makes whole results."""
    inputs, outs = ([((),) * len(shape) for shape in shapes] for shapes in (operands, outputs))
    return Rule(tuple(inputs), tuple(outs))


def _written(x: Tensor, part: Tensor) -> Tensor:
    """Stands for a tensor after a write to a view of it."""
    return x
