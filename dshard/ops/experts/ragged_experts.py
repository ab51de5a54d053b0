"""The executable of the ragged form: tokens go to their experts, and what these make of them comes back.

The body runs under torch's own autograd on the rows that a rank receives; its graph is kept by the node of the call.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import Program, Session, has_only_shape, run_program
from dshard.core.executable import ComposedExecutable
from dshard.core.observe import OBSERVERS, finish_observed
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.spec import contiguous_spec
from dshard.core.wrapper import Wrapper, is_recorded, wrap
from dshard.mesh import Coordinate
from dshard.ops.composite import recorded_gradients
from dshard.ops.experts.experts_choice import ExpertsChoice
from dshard.ops.experts.local_experts import Body, LocalExperts, ends_of, experts_without_data
from dshard.ops.experts.token_route import TokenExchange, TokenPairs, TokenRoute
from dshard.rules.expert_loops import OPERANDS
from dshard.torch_private import keeps_graph

Recorded: TypeAlias = Callable[[Sequence[Tensor]], Any]


@dataclass(slots=True)
class _Pass:
    """What the forward pass of a rank leaves to its backward pass: the way of its tokens, and the graph of the body.

    Of each level the way has the route, and the numbers of rows and pairs before it.
    """

    way: list[tuple[TokenExchange, TokenRoute, tuple[int, int]]]
    leaves: list[Tensor]
    out: Tensor


@dataclass(slots=True)
class _Passes:
    """The passes of a call, by the coordinate of the rank; `keeps` whether a backward pass is to come."""

    keeps: bool
    of_ranks: dict[Coordinate, _Pass] = field(default_factory=dict)


class RaggedExperts(ComposedExecutable):
    """A layer of experts in the ragged form; `recorded` is the static form, of whose gradients there are gradients."""

    def __init__(self, choice: ExpertsChoice, body: Body, capacity: int | None, recorded: Recorded) -> None:
        super().__init__(choice.decision, self._run)
        self.levels, self.capacity = choice.levels, capacity
        self.body, self.recorded, self.specs, self.result = body, recorded, choice.specs, choice.result
        self.layouts, self.gradients = choice.strategy.inputs, choice.strategy.gradients
        self.computed = choice.strategy.outputs[0]
        self.arrived: list[int] = []  # rows of other ranks, told to observers: of this rank, or of each simulated one

    def _run(self, tensors: Args, kwargs: Kwargs) -> Any:
        moved = [redistribute(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]
        if is_recorded(tensors):
            out = _Ragged.apply(self, *moved)  # type: ignore[no-untyped-call]
        else:
            out = self.forward(_Passes(False), moved)
        return redistribute(out, self.result.layout)

    def forward(self, passes: _Passes, tensors: Sequence[Wrapper], needed: Sequence[bool] = ()) -> Wrapper:
        """The result, in the layout in which it is computed."""
        program = partial(self._forward, passes, tuple(needed))
        (local,) = run_program(self.computed.mesh, program, [t._local_tensor for t in tensors])
        spec = self.result
        return wrap(local, contiguous_spec(self.computed, spec.shape, spec.dtype, spec.device))

    def backward(
        self, passes: _Passes, grad: Tensor, tensors: Sequence[Wrapper], needed: Sequence[bool], retain: bool
    ) -> list[Wrapper | None]:
        """The gradients of the operands in their layouts, None where they are not needed."""
        cotangent = self.computed.cotangent()
        grad = redistribute(as_distributed(grad, cotangent), cotangent)
        program = partial(self._backward, passes, tuple(needed), retain)
        run = partial(run_program, self.computed.mesh, program, [t._local_tensor for t in (grad, *tensors)])
        local = finish_observed(self.decision, run) if OBSERVERS and self.decision is not None else run()
        return [
            wrap(x, contiguous_spec(layout, spec.shape, spec.dtype, spec.device)) if is_needed else None
            for x, layout, spec, is_needed in zip(local, self.gradients, self.specs, needed, strict=True)
        ]

    # -- the programs of a rank

    def _forward(
        self, passes: _Passes, needed: tuple[bool, ...], at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        x, index, weight, *parameters = tensors
        tokens, flat = x.reshape(-1, x.shape[-1]), index.reshape(-1).long()
        row = torch.arange(len(flat), device=index.device) // max(1, index.shape[-1])
        given, way = TokenPairs(tokens, row, flat, weight.reshape(-1)), []
        for level in self.levels:
            before = len(given.rows), len(given.row)
            route, given = yield from level.dispatch(at, space, given, self.capacity is not None)
            way.append((level, route, before))
        if OBSERVERS:
            self.arrived.append(sum(level.from_others(at, route) for level, route, _ in way))
        if passes.keeps:
            with torch.enable_grad():
                of_leaves = (needed[0], needed[2], *needed[OPERANDS:])
                leaves = [
                    each.detach().requires_grad_(is_needed)
                    for each, is_needed in zip((given.rows, given.weight, *parameters), of_leaves, strict=True)
                ]
                summed = self._summed(at, given, leaves)
            passes.of_ranks[at] = _Pass(way, leaves, summed)
            summed = summed.detach()
        else:
            summed = self._summed(at, given, [given.rows, given.weight, *parameters])
        for level, route, (rows, _) in reversed(way):
            summed = yield from level.combine(at, space, route, summed, rows)
        return (summed.reshape(x.shape),)

    def _summed(self, at: Coordinate, given: TokenPairs, tensors: Sequence[Tensor]) -> Tensor:
        """The weighted sum of what this rank's experts make of each row that arrived."""
        rows, weight, *parameters = tensors
        if has_only_shape(rows):
            held = len(self.levels[-1].own(at))
            return experts_without_data((rows, weight, weight, *parameters), held=held, pairs=len(weight))
        experts = LocalExperts(self.body, self.levels[-1].own(at), self.levels[-1].total, self.capacity)
        local, order = torch.sort(given.expert - experts.held.start, stable=True)
        row = given.row[order]
        out = experts.weighted(rows[row], ends_of(local, len(experts.held)), weight[order], parameters)
        return out.new_zeros(rows.shape).index_add(0, row, out).to(rows.dtype)

    def _backward(
        self,
        passes: _Passes,
        needed: tuple[bool, ...],
        retain: bool,
        at: Coordinate,
        space: Session,
        tensors: Sequence[Tensor],
    ) -> Program[tuple[Tensor, ...]]:
        (grad, x), weight = tensors[:2], tensors[3]
        done = passes.of_ranks[at] if retain else passes.of_ranks.pop(at)
        of_rows = grad.reshape(-1, x.shape[-1])
        for level, route, _ in done.way:
            of_rows = yield from level.send(at, space, route, of_rows)
        leaves = [leaf for leaf in done.leaves if leaf.requires_grad]
        gradients = iter(_gradients(done.out, leaves, of_rows, retain))
        for_x, for_weight, *of_parameters = (next(gradients) if x.requires_grad else None for x in done.leaves)
        empty = x.new_empty(0)
        results = [empty if each is None else each for each in of_parameters]
        if for_x is None and for_weight is None:
            return (empty, empty, empty, *results)
        for_x = torch.zeros_like(of_rows) if for_x is None else for_x
        for_weight = torch.zeros_like(done.leaves[1]) if for_weight is None else for_weight
        for level, route, before in reversed(done.way):
            for_x, for_weight = yield from level.combine_gradients(at, space, route, (for_x, for_weight), before)
        return (for_x.view(x.shape), empty, for_weight.view(weight.shape), *results)


def _gradients(out: Tensor, leaves: Sequence[Tensor], grad: Tensor, retain: bool) -> Sequence[Tensor]:
    """The gradients of a graph's leaves; zeros where `out` does not depend on them."""
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(out, leaves, grad, retain_graph=retain, allow_unused=True, materialize_grads=True)


class _Ragged(torch.autograd.Function):
    """The autograd node of a layer of experts in the ragged form."""

    @staticmethod
    def forward(ctx: Context, experts: RaggedExperts, *tensors: Wrapper) -> Wrapper:
        ctx.experts, ctx.passes = experts, _Passes(True)
        ctx.save_for_backward(*tensors)
        return experts.forward(ctx.passes, tensors, ctx.needs_input_grad[1:])

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        experts: RaggedExperts = ctx.experts
        needed, tensors = ctx.needs_input_grad[1:], ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, *experts.backward(ctx.passes, grad, tensors, needed, keeps_graph()))
        layout = experts.computed.cotangent()
        grad = redistribute(as_distributed(grad, layout), layout)
        return (
            None,
            *recorded_gradients(lambda x: redistribute(experts.recorded(x), layout), tensors, grad, needed),
        )
