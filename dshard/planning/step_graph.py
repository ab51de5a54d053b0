"""The graph of a traced step: values, and calls of operators with their rules.

`dshard.parallel.trace_step` makes it, without data, for one size of inputs; whoever plans the step reads it alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch

from dshard.core.call import LocalOp, views_first, writes_first
from dshard.core.checks import with_meta_form
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.trees import leaves, replace_leaves
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.planning.uncollected import uncollected
from dshard.rules.attention_loops import LOOPS, AttentionLoops
from dshard.rules.expand import Row
from dshard.rules.rule import Rule, linear
from dshard.rules.rule_notation import parse_rule
from dshard.rules.strategy import Strategy
from dshard.torch_private import OpOverload
from dshard.trace import common_module

Kind: TypeAlias = Literal["parameter", "buffer", "input", "constant", "made"]
"""Where a value comes from: a constant is made from none of the others, a made one by a call from some of them."""


@dataclass(frozen=True, slots=True)
class OperandSlot:
    """Stands for tensor operand `number` among the arguments of a call."""

    number: int


class End(NamedTuple):
    """One end of an edge: operand or result `position` of call number `call`."""

    call: int
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor of the step: its global `shape`, where it comes from, and which calls read it.

    `name` is that of a parameter or a buffer, its first one where it has several, or of the argument of the model.
    `producer` is the call that makes a "made" value. A tensor that is written in place is a new value from there on.
    """

    number: int
    shape: Shape
    dtype: torch.dtype
    kind: Kind
    name: str
    needs_grad: bool
    producer: End | None
    uses: tuple[End, ...]

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class GraphCall:
    """A call of an operator, or of a function of torch that is planned as one.

    `rule` is that of all operands and results, in their order; `alternatives` are other ways to run the call, each with
    its name and its rule. In "small reductions" a sharded factor that `rule` does not shard leaves results without it
    replicated, not partial. `module` is the path of the module that makes the call, `within` the number of the function
    in the graph's `functions`, -1 for none. `arguments` are those of `function` by position and by name, with an
    `OperandSlot` for each operand. `kernel` gives what a rank runs by a strategy of `rule` in place of a function;
    operators have theirs in their tables. Calls of equal `signature` have equal rules, candidates and prices. `packed`
    is the rule of tensors in blocks, where `rule` says nothing of blocks.
    """

    number: int
    name: str
    function: Function
    rule: Rule
    alternatives: tuple[tuple[str, Rule], ...]
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    module: str
    within: int
    arguments: tuple[Args, Kwargs]
    signature: Hashable
    kernel: Callable[[Strategy, Coordinate], LocalOp] | None = None
    packed: Rule | None = None

    @property
    def writes(self) -> bool:
        """Whether the first operand is written in place: it stays where it is."""
        return isinstance(self.function, OpOverload) and writes_first(self.function)

    @property
    def shares_memory(self) -> bool:
        """Whether results may have memory of an operand."""
        function = self.function
        return self.writes or function is _given or (isinstance(function, OpOverload) and views_first(function))

    def arguments_of(self, operands: Sequence[object]) -> tuple[Args, Kwargs]:
        """The arguments with these operands."""
        filled: tuple[Args, Kwargs] = replace_leaves(
            self.arguments, lambda x: operands[x.number] if isinstance(x, OperandSlot) else x
        )
        return filled

    def attention_loops(self, rows: Sequence[Row]) -> AttentionLoops | None:
        """The loops of attention that its executor is asked for, if these rows are such; None leaves them to cost."""
        is_attention = self.name == "scaled_dot_product_attention" and all(row is None or row in LOOPS for row in rows)
        return cast(AttentionLoops, tuple(rows)) if is_attention else None

    def run(self, *operands: object) -> Any:
        """The result of the function on these operands, of these or of other sizes, and the call's other arguments."""
        (args, kwargs), function = self.arguments_of(operands), self.function
        return (with_meta_form(function) if isinstance(function, OpOverload) else function)(*args, **kwargs)


class Dtypes(NamedTuple):
    """The dtypes in which parameters are stored and their gradients reduced; None: that in which they are used."""

    stored: torch.dtype | None = None
    reduced: torch.dtype | None = None


ALIKE = Dtypes()
"""Parameters are stored, and their gradients reduced, in the dtype in which they are used."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function of torch as the model called it, which one call of the graph stands for, or several.

    `module` is the path of the module that made it, `visit` the number of times that this ran before, and `ordinal`
    that of functions of this name that it called before in this visit; `begun` are the modules that began to run since
    the function before. `operands` and `results` are the numbers of the values that the tensors among its arguments and
    results had, in order, None of one that is no value. `is_view` says that a result has memory of an operand.
    """

    name: str
    module: str
    visit: int
    ordinal: int
    begun: tuple[str, ...]
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    is_view: bool


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The calls of a step, in order, all values that they read or make, and those that the model returns.

    `functions` are those that the model called to make these calls, in order. `kept` are the parameters that stay
    gathered from their use in the forward pass to the backward pass, if they are gathered.
    """

    calls: tuple[GraphCall, ...]
    values: tuple[Value, ...]
    outputs: tuple[Value, ...] = ()
    dtypes: Dtypes = ALIKE
    functions: tuple[FunctionCall, ...] = ()
    kept: frozenset[str] = frozenset()

    @uncollected()
    def copies(self) -> StepGraph:
        """The graph with a call "copy" between a tensor and several calls that read it.

        So the tensor is moved once for all of them, and their gradients are summed before they are reduced. The copy
        stands before the first of them, in the innermost module that has them all.
        """
        shared = {value.number: uses for value in self.values if (uses := self._shared_uses(value))}
        if not shared:
            return self
        before: defaultdict[int, list[int]] = defaultdict(list)
        for number, uses in shared.items():
            before[uses[0].call].append(number)
        drafts: list[DraftCall] = []
        copied, number = dict[End, int](), len(self.values)
        added: list[Value] = []
        for call in self.calls:
            for original in before[call.number]:
                value = self.values[original]
                copy = replace(value, number=number, kind="made", producer=None, uses=())
                module = common_module([self.calls[end.call].module for end in shared[original]])
                drafts.append(DraftCall(copy_call(value, module), (original,), (number,)))
                added.append(copy)
                copied |= dict.fromkeys(shared[original], number)
                number += 1
            operands = [copied.get(End(call.number, i), value.number) for i, value in enumerate(call.operands)]
            drafts.append(DraftCall(call, tuple(operands), tuple([value.number for value in call.results])))
        graph = linked((*self.values, *added), drafts, [value.number for value in self.outputs])
        return replace(self, calls=graph.calls, values=graph.values, outputs=graph.outputs)

    def _shared_uses(self, value: Value) -> tuple[End, ...]:
        """The uses of a tensor before which it is copied; of an input, which is on all ranks, those in matmuls.

        What a call writes to is copied only where it is made, with all of its uses.
        """
        maker = None if value.producer is None else self.calls[value.producer.call]
        if value.kind not in ("made", "input") or not value.shape or (maker is not None and is_copy(maker)):
            return ()
        written = any(self._writes(end) for end in value.uses)
        if written and maker is not None and not maker.shares_memory:
            return value.uses
        uses = [end for end in value.uses if not self._writes(end)]
        uses = [end for end in uses if value.kind == "made" or self.calls[end.call].rule.loops]
        return tuple(uses) if len(uses) > 1 else ()

    def _writes(self, use: End) -> bool:
        return use.position == 0 and self.calls[use.call].writes

    def is_view(self, call: GraphCall) -> bool:
        """Whether a call is the view that a function of the model is, or a part of one."""
        return call.within >= 0 and self.functions[call.within].is_view

    def parameters(self) -> tuple[Value, ...]:
        """The parameters that some call reads; one that has several names once."""
        return tuple([value for value in self.values if value.kind == "parameter" and value.uses])


class DraftCall(NamedTuple):
    """A call whose operands and results are not yet linked, by their numbers."""

    call: GraphCall
    operands: tuple[int, ...]
    results: tuple[int, ...]


def linked(values: Sequence[Value], drafts: Sequence[DraftCall], outputs: Sequence[int] = ()) -> StepGraph:
    """The graph of these calls, in order, with the producers and uses of all values set anew.

    `outputs` are the numbers of the values that the model returns.
    """
    uses: defaultdict[int, list[End]] = defaultdict(list)
    producers: dict[int, End] = {}
    for n, draft in enumerate(drafts):
        for i, number in enumerate(draft.operands):
            uses[number].append(End(n, i))
        producers |= {number: End(n, i) for i, number in enumerate(draft.results)}
    final = tuple(
        [  # dataclasses.replace takes five times as long
            Value(n, x.shape, x.dtype, x.kind, x.name, x.needs_grad, producers.get(n), tuple(uses[n]))
            for n, x in enumerate(values)
        ]
    )
    calls = [
        replace(
            draft.call,
            number=n,
            operands=tuple([final[i] for i in draft.operands]),
            results=tuple([final[i] for i in draft.results]),
        )
        for n, draft in enumerate(drafts)
    ]
    return StepGraph(tuple(calls), final, tuple([final[n] for n in outputs]))


def _same(x: Any) -> Any:
    return x


def is_copy(call: GraphCall) -> bool:
    """Whether a call is a "copy", which `StepGraph.copies` has made."""
    return call.function is _same


def copy_call(x: Value, module: str) -> GraphCall:
    """The call "copy" of a value in a module: any layout passes through, and the result is the value itself."""
    rule = parse_rule("... -> ...", [x.shape], [x.shape], passes=linear(0))
    arguments: tuple[Args, Kwargs] = ((OperandSlot(0),), {})
    signature = signature_of("copy", _same, arguments, [x])
    return GraphCall(0, "copy", _same, rule, (), (), (), module, -1, arguments, signature)


def given_call(x: Value, layout: Layout) -> GraphCall:
    """The call "given" of an input that lies in a layout, of which the result is the value itself."""
    rule = parse_rule("... -> ...", [x.shape], [x.shape])
    arguments: tuple[Args, Kwargs] = ((OperandSlot(0), layout), {})
    return GraphCall(
        0, "given", _given, rule, (), (), (), "", -1, arguments, signature_of("given", _given, arguments, [x])
    )


def given_layout(call: GraphCall) -> Layout | None:
    """The layout that the operand of a call "given" has, None of any other call."""
    layout: Layout | None = call.arguments[0][1] if call.function is _given else None
    return layout


def _given(x: Any, layout: Layout) -> Any:
    return x


def signature_of(name: str, function: Function, arguments: tuple[Args, Kwargs], operands: Sequence[Value]) -> Hashable:
    """The key of calls that have equal rules, candidates and prices: function, static arguments, forms of operands."""
    static = tuple([_hashable(x) for x in leaves(arguments)])
    return name, function, static, tuple(arguments[1]), tuple([(x.shape, x.dtype, x.needs_grad) for x in operands])


def _hashable(x: object) -> Hashable:
    """A leaf of the arguments as a part of a key: with its class, as 1, 1.0 and True are equal."""
    try:
        hash(x)
    except TypeError:
        return type(x), repr(x)
    return type(x), x
