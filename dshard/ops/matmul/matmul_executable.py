"""The executable of a matmul: redistributions of its operands, the local kernel, and the matmuls of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dshard.autograd.crossing import keep_partial_sums
from dshard.comm import LocalTensor, compare_calls, run, runner, runtime_of
from dshard.comm.rank_checks import enabled as comparing
from dshard.core.context import planning_context
from dshard.core.moves import coordinate_of, run_on_ranks
from dshard.core.observe import Decision
from dshard.core.panel_cost import PanelCost
from dshard.core.spec import Spec, contiguous_stride, spec_of
from dshard.core.wrapper import wrap
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.ops.matmul.local import LocalProduct, local_product
from dshard.ops.matmul.panel_executor import PanelExecutor
from dshard.ops.matmul.panel_price import cheapest, in_panels
from dshard.ops.matmul.ring import executor
from dshard.placements import Partial
from dshard.redistribute import Pend, Plan, Slice, plan
from dshard.rules.expand import Expansion, Operand, Order, Row, expand, sizes_of
from dshard.rules.panel_stream import Auto, Stream
from dshard.rules.rule import PassThrough, Rule
from dshard.rules.split_contraction import SplitContraction
from dshard.rules.strategy import Constraints, Strategy

NEITHER = (False, False)


class MatmulExecutable:
    """The executable of a matmul for given operand specs: redistributions, local kernel, spec of the result."""

    def __init__(
        self,
        name: str,
        rule: Rule,
        specs: tuple[Spec, Spec],
        bias: Spec | None,
        out: Spec,
        strategy: Strategy,
        wanted: Constraints,
        cut: SplitContraction | None = None,
        stream: Stream | Auto | None = None,
    ) -> None:
        self.name, self.rule, self.specs, self.bias, self.out = name, rule, specs, bias, out
        self.strategy, self.wanted, self.cut, self.stream = strategy, wanted, cut, stream
        self.mesh = specs[0].layout.mesh
        self.plans = tuple(_plan(spec, layout) for spec, layout in zip(specs, strategy.inputs, strict=True))
        computed = out.with_layout(strategy.outputs[0])
        self.end = _plan(computed, out.layout)
        self.kernel: LocalProduct = local_product(*rule.inputs, *rule.outputs)
        self.kept = tuple(keep and sends(p) for keep, p in zip(wanted.kept, self.plans, strict=True))
        self.bias_plan = None if bias is None else _plan(bias, self.bias_layout())
        self.cotangent = out.layout.cotangent()
        self.priced: tuple[PanelCost, ...] | None = None
        self.streamed = self._streamed()
        if self.streamed is not None:
            self.kept = NEITHER
        self.beside: PanelExecutor | None = None
        self.warm: Callable[..., Tensor] | None = None
        self.gradients: dict[tuple[Any, ...], MatmulExecutable] = {}
        self.backs: dict[tuple[Any, ...], GradientPair | None] = {}

    def _streamed(self) -> PanelExecutor | None:
        """The executor in panels, if panels are requested and something is communicated; else None."""
        if self.stream is None or not any(sends(p) for p in (*self.plans, self.end)):
            return None
        plans = self.plans[0], self.plans[1], self.end
        stream = self.stream
        if isinstance(stream, Auto):
            panels = cheapest(self.in_panels(), stream.limit).panels
            if panels == 1:
                return None
            stream = Stream(panels)
        return executor(self.rule, plans, self.out.dtype, stream, self.bias_plan)

    def in_panels(self) -> tuple[PanelCost, ...]:
        """The prices of the matmul in each number of panels worth trying; computed once."""
        if self.priced is None:
            plans = self.plans[0], self.plans[1], self.end
            self.priced = in_panels(self.rule, plans, self.out.dtype, planning_context().topology_of(self.mesh))
        return self.priced

    def overlaps(self) -> bool:
        """Whether this reduction overlaps the next matmul; not if both could share a redistributed first operand."""
        return sends(self.end) and (self.streamed is not None or not self.plans[0].steps)

    def executor(self) -> PanelExecutor:
        """The executor that runs the matmul in panels, or in bulk overlapped with another matmul."""
        if self.streamed is not None:
            return self.streamed
        if self.beside is None:
            plans = self.plans[0], self.plans[1], self.end
            self.beside = PanelExecutor(self.rule, plans, self.out.dtype, Stream(1), self.bias_plan)
        return self.beside

    def bias_layout(self) -> Layout:
        """The layout of a bias along the last dim of the result in which it can be added to the local result."""
        return self._with_bias().inputs[2]

    def bias_gradient(self) -> Layout:
        """The layout of the bias's gradient as the ranks compute it."""
        return self._with_bias().gradients[2]

    def _with_bias(self) -> Expansion:
        assert self.bias is not None
        last = (self.rule.outputs[0][-1],)
        rule = Rule((*self.rule.inputs, last), self.rule.outputs, passes=self.rule.passes)
        operands = [Operand(s.layout, s.shape, s.itemsize) for s in (*self.specs, self.bias)]
        sizes = sizes_of(rule, operands, [(self.out.shape, self.out.itemsize)])
        expansion = expand(rule, operands, self.strategy.rows, self.strategy.order, sizes)
        assert expansion is not None
        return expansion

    def local(self, coordinate: Coordinate) -> Callable[..., Tensor]:
        """The local matmul of the rank at `coordinate`; if the result is partial, one rank adds the bias."""
        kernel = self.kernel
        if self.bias is None:
            return kernel
        pending = self.strategy.outputs[0].placements
        if any(p == Partial() and coordinate[axis] for axis, p in enumerate(pending)):
            return lambda a, b, bias: kernel(a, b)
        if kernel is F.linear:
            return F.linear
        return lambda a, b, bias: kernel(a, b) + bias

    def __call__(self, tensors: Sequence[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the matmul: the local result, and the two redistributed local operands."""
        a, b = tensors[0]._local, tensors[1]._local
        if self.streamed is not None:
            return self.streamed([t._local for t in tensors]), (a, b)
        if type(a) is LocalTensor or type(b) is LocalTensor or a.is_meta or runtime_of(self.mesh) is None:
            return self.slow(tensors)
        return self.on_local(a, b, None if self.bias is None else tensors[2]._local)

    def on_local(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the matmul on local tensors that have data, on ranks that are processes."""
        if self.warm is None:
            self.warm = self._compared(self.local(coordinate_of(self.mesh)))
            plans = (*self.plans, self.end, *([] if self.bias_plan is None else [self.bias_plan]))
            self.movers = [runner(p) if p.steps else None for p in plans]
        move_a, move_b, finish, *move_bias = self.movers
        if move_a is not None:
            a = move_a(a)
        if move_b is not None:
            b = move_b(b)
        if bias is None:
            out = self.warm(a, b)
        else:
            out = self.warm(a, b, bias if move_bias[0] is None else move_bias[0](bias))
        return (out if finish is None else finish(out)), (a, b)

    def _compared(self, local: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Run the local matmul; in debug mode the ranks compare their calls before."""
        if not comparing():
            return local

        def run_compared(*tensors: Tensor) -> Tensor:
            compare_calls(f"{self.name} of {' and '.join(map(repr, self.specs))}", self.mesh)
            return local(*tensors)

        return run_compared

    def slow(self, tensors: Sequence[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Run the matmul on ranks simulated in one process, or on tensors without data."""
        plans = self.plans if self.bias_plan is None else (*self.plans, self.bias_plan)
        moved = tuple(run(p, t._local) for p, t in zip(plans, tensors, strict=True))
        return run(self.end, run_on_ranks(self.mesh, self.local, moved, {})), moved[:2]

    def wrap_moved(self, i: int, moved: Sequence[Tensor]) -> Any:
        """The redistributed local operand `i` as a distributed tensor."""
        return wrap(moved[i], self.specs[i].with_layout(self.strategy.inputs[i]))

    def decision(self) -> Decision:
        """The record of the chosen strategy."""
        operands = tuple(Operand(spec.layout, spec.shape, spec.itemsize) for spec in self.specs)
        outputs = ((self.out.shape, self.out.itemsize),)
        topology = planning_context().topology_of(self.mesh)
        return Decision(
            *(self.name, operands, outputs, self.rule, self.strategy, tuple(self.plans), topology),
            bias=self.bias_plan,
            ends=(self.end,),
            wanted=self.wanted,
            panels=self.in_panels,
            run_in=1 if self.streamed is None else self.streamed.stream.panels,
        )

    # -- gradients

    def gradient(self, i: int, grad: Spec, other: Spec) -> MatmulExecutable:
        """The executable of operand `i`'s gradient: the matmul of the result's gradient and the other operand."""
        key = (i, grad, other)
        executable = self.gradients.get(key)
        if executable is None:
            executable = self.gradients[key] = self._gradient(i, grad, other)
        return executable

    def back(self, grad: Spec, a: Spec | None, b: Spec | None) -> GradientPair | None:
        """The executable of both gradients together, where neither is overlapped or conjugated; else None."""
        key = (grad, a, b)
        if key not in self.backs:
            self.backs[key] = gradient_pair_of(self, grad, a, b)
        return self.backs[key]

    def _gradient(self, i: int, grad: Spec, other: Spec) -> MatmulExecutable:
        (a, b), (out,) = self.rule.inputs, self.rule.outputs
        terms, specs = ((out, b), (grad, other)) if i == 0 else ((a, out), (other, grad))
        rule = Rule(terms, (self.rule.inputs[i],), passes=self.rule.passes, loops=True)
        target = self.specs[i]
        rows = tuple(_turned(row, i) for row in self.strategy.rows)
        name, order = f"{self.name} backward", self.strategy.order
        complete = not i and (isinstance(self.stream, Stream) or self.streamed is not None)
        return matmul_executable(name, rule, specs, target, rows, order, self.stream, complete=complete)


class GradientPair:
    """The executable of both operands' gradients: two matmuls that share one redistributed result gradient."""

    __slots__ = ("first", "second")

    def __init__(self, first: MatmulExecutable | None, second: MatmulExecutable | None) -> None:
        self.first, self.second = first, second

    def __call__(self, grad: Tensor, a: Any, b: Any) -> tuple[Any, Any]:
        """The local gradients of both operands from the result's local gradient."""
        for_a = for_b = None
        if self.first is not None:
            out, (grad, _) = self.first.on_local(grad, b._local)
            for_a = wrap(out, self.first.out)
        if self.second is not None:
            for_b = wrap(self.second.on_local(a._local, grad)[0], self.second.out)
        return for_a, for_b


def gradient_pair_of(product: MatmulExecutable, grad: Spec, a: Spec | None, b: Spec | None) -> GradientPair | None:
    """The executable of both gradients of a matmul, where neither is overlapped or conjugated; else None."""
    if grad.dtype.is_complex or runtime_of(product.mesh) is None:
        return None
    first = None if b is None else product.gradient(0, grad, b)
    if first is not None:
        if first.streamed is not None or (a is not None and first.overlaps()):
            return None
        grad = grad.with_layout(first.strategy.inputs[0])
    second = None if a is None else product.gradient(1, grad, a)
    return None if second is not None and second.streamed is not None else GradientPair(first, second)


def matmul_executable(
    name: str,
    rule: Rule,
    specs: tuple[Spec, Spec],
    like: Spec,
    rows: tuple[Row, ...],
    order: Order,
    stream: Stream | Auto | None = None,
    complete: bool = False,
) -> MatmulExecutable:
    """The executable of a gradient matmul with these rows, whose result has `like`'s layout, except for partial sums.

    With `complete` no sum is left partial: it is reduced at once, overlapped with the next matmul.
    """
    operands = [Operand(spec.layout, spec.shape, spec.itemsize) for spec in specs]
    sizes = sizes_of(rule, operands, [(like.shape, like.itemsize)])
    expansion = expand(rule, operands, rows, order, sizes)
    assert expansion is not None, "the gradient's factors are those of the product"
    target = like.layout.cotangent()
    end = target if complete else keep_partial_sums(expansion.outputs[0], target)
    out = spec_of(end, like.shape, contiguous_stride(like.shape), like.dtype, like.device)
    strategy = Strategy(expansion.inputs, expansion.outputs, rows, expansion.gradients, (end,), order)
    if isinstance(stream, Stream):
        stream = replace(stream, axis=None)  # which loop moves most differs
    return MatmulExecutable(name, rule, specs, None, out, strategy, Constraints(result=end, kept=NEITHER), None, stream)


def _turned(row: Row, i: int) -> Row:
    """The row of an axis in the matmul of operand `i`'s gradient: a partial operand that takes part stays partial."""
    if not isinstance(row, PassThrough):
        return row
    other = 1 - i
    return row if row.operands == frozenset({other}) else None


def sends(moves: Plan) -> bool:
    """Whether a plan communicates anything."""
    return any(not isinstance(step, Slice | Pend) for step in moves.steps)


def _plan(spec: Spec, layout: Layout) -> Plan:
    return plan(spec.layout, layout, spec.shape, spec.itemsize, planning_context().topology_of(layout.mesh))
