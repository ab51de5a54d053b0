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
from dshard.rules.cut_factors import SplitContraction
from dshard.rules.expand import Expansion, Row, expand, sizes_of
from dshard.rules.panel_stream import AutoPanels, Panels, Stream
from dshard.rules.rule import PassThrough, Rule
from dshard.rules.strategy import Constraints, Question, Strategy, StrategyChoice

NEITHER = (False, False)


class Matmul:
    """A matmul as chosen for given operand specs: its executable, its panels, and the matmuls of its gradients.

    `specs` are the specs of the operands, a bias last, and `out` that of the result; `planned` has the plans. `kept`
    says for each operand whether its redistributed copy is saved for the backward pass, `cut` how the operands are
    unflattened first. `streamed` runs the matmul in panels, or is None for one in bulk; `stream` is the requested
    option. If `overlaps`, the reduction runs beside the next matmul.
    """

    __slots__ = (
        *("_in_bulk", "choice", "cut", "executable", "gradients", "kept", "out", "overlaps", "planned", "specs"),
        *("stream", "streamed"),
    )

    def __init__(
        self,
        executable: Executable,
        planned: PlannedMatmul,
        choice: StrategyChoice,
        specs: Sequence[Spec],
        cut: SplitContraction | None,
        stream: Stream | AutoPanels | None,
        streamed: PanelExecutor | None,
    ) -> None:
        self.executable, self.planned, self.choice, self.specs, self.cut = executable, planned, choice, specs, cut
        self.stream, self.streamed, self.out = stream, streamed, executable.specs[0]
        sent = enumerate(zip(choice.question.constraints.kept, executable.plans, strict=False))
        self.kept = tuple([keep and sends(p) and self.leaves_whole(i) for i, (keep, p) in sent])
        first, _, end = planned.plans
        self.overlaps = sends(end) and (streamed is not None or not first.steps)
        self.gradients: dict[tuple[object, ...], Matmul] = {}
        self._in_bulk: PanelExecutor | None = None

    def executor(self) -> PanelExecutor:
        """The executor that runs the matmul in panels, or in bulk overlapped with another matmul."""
        if self.streamed is not None:
            return self.streamed
        if self._in_bulk is None:
            self._in_bulk = PanelExecutor(self.planned, Stream(1))
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
            self.gradients[key] = _gradient_matmul(self, i, grad, other)
        return self.gradients[key]


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
    rule, operands, _, topology, _ = choice.question
    strategy = choice.strategy
    plans = plans_to(specs[:2], strategy.inputs, topology)
    end = plan_to(out.with_layout(strategy.outputs[0]), out.layout, topology)
    gradients = strategy.gradients[:2]
    if len(specs) > 2:
        with_bias = _with_bias(rule, specs, out, strategy)
        plans = (*plans, plan_to(specs[2], with_bias.inputs[2], topology))
        gradients = (*gradients, with_bias.gradients[2])
    planned = PlannedMatmul(rule, (plans[0], plans[1], end), out.dtype, topology, plans[2] if len(plans) > 2 else None)
    panels = Panels(partial(in_panels, planned._replace(bias=None)))
    streamed = _streamed(planned, panels, stream)
    make: Callable[..., Executable] = Executable
    if streamed is not None:
        make = partial(StreamedExecutable, streamed)
        panels = replace(panels, run_in=streamed.stream.panels, transport=streamed.stream.transport)
    decision = Decision(name, operands, topology, choice, plans, (end,), panels=panels)
    kernel = partial(_local, local_product(*planned.terms), len(specs) > 2, strategy)
    executable = make(decision, kernel, [out], range(len(specs)), wrap_as(out), gradients=gradients)
    return Matmul(executable, planned, choice, specs, cut, stream, streamed)


def _streamed(planned: PlannedMatmul, panels: Panels, stream: Stream | AutoPanels | None) -> PanelExecutor | None:
    """The executor in panels, if panels are requested and something is communicated; else None."""
    if stream is None or not any(map(sends, planned.plans)):
        return None
    if isinstance(stream, AutoPanels):
        best = cheapest(panels.costs(), stream.limit)
        stream = Stream(best.panels, transport=best.transport)
    return executor(planned, stream)


def rule_with_bias(rule: Rule) -> Rule:
    """The rule of a matmul with a bias along the last dim of the result: one rank adds it to a partial result."""
    return replace(rule, inputs=(*rule.inputs, (rule.outputs[0][-1],)))


def _with_bias(rule: Rule, specs: Sequence[Spec], out: Spec, strategy: Strategy) -> Expansion:
    """The expansion of the matmul with a bias along the last dim of the result, added to the local result."""
    rule = replace(rule_with_bias(rule), loops=False)
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


def _gradient_matmul(matmul: Matmul, i: int, grad: Spec, other: Spec) -> Matmul:
    """The matmul of operand `i`'s gradient by the rows of `matmul`; it has the operand's layout but for partial sums.

    In panels a partial sum is reduced at once, overlapped with the next matmul.
    """
    rule, strategy, like, stream = matmul.planned.rule, matmul.choice.strategy, matmul.specs[i], matmul.stream
    (a, b), (out,) = rule.inputs, rule.outputs
    terms, specs = ((out, b), (grad, other)) if i == 0 else ((a, out), (other, grad))
    rule = replace(rule, inputs=terms, outputs=(rule.inputs[i],), loops=True)
    rows, order = tuple(_gradient_row(row, i) for row in strategy.rows), strategy.order
    operands, outputs = tuple(map(operand_of, specs)), ((like.shape, like.itemsize),)
    expansion = expand(rule, operands, rows, order, sizes_of(rule, operands, outputs))
    assert expansion is not None, "the gradient's factors are those of the matmul"
    target = like.layout.cotangent()
    complete = not i and (isinstance(stream, Stream) or matmul.streamed is not None)
    end = target if complete else keep_partial_sums(expansion.outputs[0], target)
    result = contiguous_spec(end, like.shape, like.dtype, like.device)
    strategy = Strategy(expansion.inputs, expansion.outputs, rows, expansion.gradients, (end,), order)
    if isinstance(stream, Stream):
        stream = replace(stream, axis=None)  # which loop moves most differs
    topology = planning_context().topology_of(end.mesh)
    question = Question(rule, operands, outputs, topology, Constraints(result=end, kept=NEITHER))
    name = f"{matmul.executable.decision.op} backward"
    return matmul_of_choice(name, StrategyChoice(question, strategy), specs, result, stream=stream)


def _gradient_row(row: Row, i: int) -> Row:
    """The row of a mesh axis in the matmul of operand `i`'s gradient: a partial operand stays partial there."""
    if not isinstance(row, PassThrough):
        return row
    other = 1 - i
    return row if row.operands == frozenset({other}) else None


def sends(moves: Plan) -> bool:
    """Whether a plan communicates anything."""
    return any(not isinstance(step, Slice | MakePartial) for step in moves.steps)
