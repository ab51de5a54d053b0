"""A matmul as chosen for given operand specs: its executable, its panels, and the matmuls of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dshard.autograd.crossing import keep_partial_sums
from dshard.core.context import planning_context
from dshard.core.executable import Executable, wrap_as
from dshard.core.observe import Decision
from dshard.core.operands import operand_of, plan_to, plans_to
from dshard.core.signature import Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.mesh import Coordinate
from dshard.ops.matmul.local import LocalProduct, local_product
from dshard.ops.matmul.panel_executor import PanelExecutor, PlannedMatmul
from dshard.ops.matmul.panel_price import cheapest, in_panels
from dshard.ops.matmul.ring import executor
from dshard.placements import Partial
from dshard.redistribute import MakePartial, Plan, Slice
from dshard.rules.expand import Expansion, Order, Row, expand, sizes_of
from dshard.rules.panel_stream import AutoPanels, Panels, Stream
from dshard.rules.rule import PassThrough, Rule
from dshard.rules.split_contraction import SplitContraction
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice

NEITHER = (False, False)


class Matmul:
    """A matmul as chosen for given operand specs: its executable, its panels, and the matmuls of its gradients.

    `specs` are the specs of the operands, a bias last, and `out` that of the result. `kept` says for each operand
    whether its redistributed copy is saved for the backward pass, `cut` how the operands are unflattened first.
    `streamed` runs the matmul in panels, or is None for one in bulk; `stream` is the requested option. If `overlaps`,
    the reduction runs beside the next matmul.
    """

    __slots__ = ("_in_bulk", "cut", "executable", "gradients", "kept", "out", "overlaps", "specs", "stream", "streamed")

    def __init__(
        self,
        executable: Executable,
        specs: Sequence[Spec],
        constraints: Constraints,
        cut: SplitContraction | None,
        stream: Stream | AutoPanels | None,
        streamed: PanelExecutor | None,
    ) -> None:
        self.executable, self.specs, self.cut, self.stream, self.streamed = executable, specs, cut, stream, streamed
        self.out = executable.specs[0]
        sent = enumerate(zip(constraints.kept, executable.plans, strict=False))
        self.kept = tuple(keep and sends(p) and self.leaves_whole(i) for i, (keep, p) in sent)
        first, _, end = self.plans()
        self.overlaps = sends(end) and (streamed is not None or not first.steps)
        self.gradients: dict[tuple[object, ...], Matmul] = {}
        self._in_bulk: PanelExecutor | None = None

    @property
    def has_bias(self) -> bool:
        """Whether a bias along the last dim of the result is added."""
        return len(self.specs) > 2

    def plans(self) -> tuple[Plan, Plan, Plan]:
        """The plans of both operands and of the result."""
        return _three(self.executable.decision)

    def executor(self) -> PanelExecutor:
        """The executor that runs the matmul in panels, or in bulk overlapped with another matmul."""
        if self.streamed is not None:
            return self.streamed
        if self._in_bulk is None:
            self._in_bulk = PanelExecutor(_planned(self.executable.decision, self.out), Stream(1))
        return self._in_bulk

    def leaves_whole(self, i: int) -> bool:
        """Whether a run can leave operand `i` as it was multiplied: in panels, only what a kernel has gathered."""
        return self.streamed is None or self.streamed.whole == i

    def run_streamed(self, local: list[Any], *, whole: bool) -> Tensor:
        """The local result in panels; with `whole` a local tensor that is left is replaced by the redistributed one."""
        assert self.streamed is not None
        out, *operands = self.streamed(local, whole=whole)
        for x in operands:
            local[self.streamed.whole or 0] = x
        return out

    def wrap_moved(self, i: int, local: Sequence[Tensor]) -> Wrapper:
        """The redistributed local operand `i` as a distributed tensor."""
        return wrap(local[i], self.specs[i].with_layout(self.executable.plans[i].dst))

    def gradient(self, i: int, grad: Spec, other: Spec) -> Matmul:
        """The matmul that computes operand `i`'s gradient from the result's gradient and the other operand."""
        key = (i, grad, other)
        if key not in self.gradients:
            self.gradients[key] = self._gradient(i, grad, other)
        return self.gradients[key]

    def _gradient(self, i: int, grad: Spec, other: Spec) -> Matmul:
        decision = self.executable.decision
        choice = _choice(decision)
        rule, strategy = choice.question.rule, choice.strategy
        (a, b), (out,) = rule.inputs, rule.outputs
        terms, specs = ((out, b), (grad, other)) if i == 0 else ((a, out), (other, grad))
        of_gradient = Rule(terms, (rule.inputs[i],), passes=rule.passes, loops=True)
        rows = tuple(_gradient_row(row, i) for row in strategy.rows)
        complete = not i and (isinstance(self.stream, Stream) or self.streamed is not None)
        return gradient_matmul(
            f"{decision.op} backward", of_gradient, specs, self.specs[i], rows, strategy.order, self.stream, complete
        )


class StreamedExecutable(Executable):
    """The executable of a matmul in panels, which redistributes them itself."""

    __slots__ = ("streamed",)

    def __init__(self, streamed: PanelExecutor, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.streamed = streamed

    def run(self, local: list[Any], kwargs: Kwargs | None = None) -> Any:
        """The local result, of local operands that are redistributed panel by panel."""
        return self.streamed(local)[0]


def matmul_of_choice(
    name: str,
    choice: StrategyChoice,
    specs: Sequence[Spec],
    out: Spec,
    cut: SplitContraction | None = None,
    stream: Stream | AutoPanels | None = None,
) -> Matmul:
    """The matmul by the strategy chosen for operands of these specs, and a bias if there is a third."""
    rule, operands, _, topology, constraints = choice.question
    strategy = choice.strategy
    plans = plans_to(specs[:2], strategy.inputs)
    end = plan_to(out.with_layout(strategy.outputs[0]), out.layout)
    gradients = strategy.gradients[:2]
    if len(specs) > 2:
        with_bias = _with_bias(rule, specs, out, strategy)
        plans = (*plans, plan_to(specs[2], with_bias.inputs[2]))
        gradients = (*gradients, with_bias.gradients[2])
    decision = Decision(name, operands, topology, choice, plans, (end,))
    decision = replace(decision, panels=Panels(partial(in_panels, _planned(decision, out)._replace(bias=None))))
    streamed = _streamed(decision, out, stream)
    make: Callable[..., Executable] = Executable
    if streamed is not None:
        make = partial(StreamedExecutable, streamed)
        panels, transport = streamed.stream.panels, streamed.stream.transport
        decision = replace(decision, panels=replace(decision.panels, run_in=panels, transport=transport))
    kernel = partial(_local, local_product(*rule.inputs, *rule.outputs), len(specs) > 2, strategy)
    executable = make(decision, kernel, [out], range(len(specs)), wrap_as(out), gradients=gradients)
    return Matmul(executable, specs, constraints, cut, stream, streamed)


def _choice(decision: Decision) -> StrategyChoice:
    assert decision.choice is not None
    return decision.choice


def _three(decision: Decision) -> tuple[Plan, Plan, Plan]:
    """The plans of both operands and of the result."""
    return decision.plans[0], decision.plans[1], decision.ends[0]


def _planned(decision: Decision, out: Spec) -> PlannedMatmul:
    rule = _choice(decision).question.rule
    return PlannedMatmul(rule, _three(decision), out.dtype, decision.topology, decision.bias)


def _streamed(decision: Decision, out: Spec, stream: Stream | AutoPanels | None) -> PanelExecutor | None:
    """The executor in panels, if panels are requested and something is communicated; else None."""
    if stream is None or not any(map(sends, _three(decision))):
        return None
    if isinstance(stream, AutoPanels):
        best = cheapest(decision.panels.costs(), stream.limit)
        stream = Stream(best.panels, transport=best.transport)
    return executor(_planned(decision, out), stream)


def _with_bias(rule: Rule, specs: Sequence[Spec], out: Spec, strategy: Strategy) -> Expansion:
    """The expansion of the matmul with a bias along the last dim of the result, added to the local result."""
    last = (rule.outputs[0][-1],)
    rule = Rule((*rule.inputs, last), rule.outputs, passes=rule.passes)
    operands = list(map(operand_of, specs))
    expansion = expand(
        rule, operands, strategy.rows, strategy.order, sizes_of(rule, operands, [(out.shape, out.itemsize)])
    )
    assert expansion is not None
    return expansion


def _local(kernel: LocalProduct, has_bias: bool, strategy: Strategy, at: Coordinate) -> Callable[..., Tensor]:
    """The local matmul of the rank at `at`; if the result is partial, one rank adds the bias."""
    if not has_bias:
        return kernel
    if any(p == Partial() and at[axis] for axis, p in enumerate(strategy.outputs[0].placements)):
        return lambda a, b, bias: kernel(a, b)
    return F.linear if kernel is F.linear else lambda a, b, bias: kernel(a, b) + bias


def gradient_matmul(
    name: str,
    rule: Rule,
    specs: tuple[Spec, Spec],
    like: Spec,
    rows: tuple[Row, ...],
    order: Order,
    stream: Stream | AutoPanels | None = None,
    complete: bool = False,
) -> Matmul:
    """The matmul that computes a gradient by these rows; its result has `like`'s layout, except for partial sums.

    With `complete` a partial sum is reduced at once, overlapped with the next matmul.
    """
    operands, outputs = tuple(map(operand_of, specs)), ((like.shape, like.itemsize),)
    expansion = expand(rule, operands, rows, order, sizes_of(rule, operands, outputs))
    assert expansion is not None, "the gradient's factors are those of the matmul"
    target = like.layout.cotangent()
    end = target if complete else keep_partial_sums(expansion.outputs[0], target)
    out = contiguous_spec(end, like.shape, like.dtype, like.device)
    strategy = Strategy(expansion.inputs, expansion.outputs, rows, expansion.gradients, (end,), order)
    if isinstance(stream, Stream):
        stream = replace(stream, axis=None)  # which loop moves most differs
    topology = planning_context().topology_of(end.mesh)
    question = Question(rule, operands, outputs, topology, Constraints(result=end, kept=NEITHER))
    return matmul_of_choice(name, StrategyChoice(question, strategy), specs, out, stream=stream)


def _gradient_row(row: Row, i: int) -> Row:
    """The row of a mesh axis in the matmul of operand `i`'s gradient: a partial operand stays partial there."""
    if not isinstance(row, PassThrough):
        return row
    other = 1 - i
    return row if row.operands == frozenset({other}) else None


def sends(moves: Plan) -> bool:
    """Whether a plan communicates anything."""
    return any(not isinstance(step, Slice | MakePartial) for step in moves.steps)
