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
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.spec import contiguous_spec
from dshard.core.wrapper import Wrapper, each_apart, is_recorded, wrap
from dshard.mesh import Coordinate
from dshard.ops.experts.experts_choice import ExpertsChoice
from dshard.ops.experts.local_experts import Body, LocalExperts, without_data
from dshard.ops.experts.token_route import TokenExchange, TokenRoute
from dshard.rules.expert_loops import OPERANDS
from dshard.torch_private import keeps_graph

Recorded: TypeAlias = Callable[[Sequence[Tensor]], Any]


@dataclass(slots=True)
class _Pass:
    """What the forward pass of a rank leaves to its backward pass: the route, and the graph of the body."""

    route: TokenRoute
    leaves: list[Tensor]
    out: Tensor


@dataclass(slots=True)
class _Passes:
    """The passes of a call, by the coordinate of the rank; `keeps` whether a backward pass is to come."""

    keeps: bool
    of_ranks: dict[Coordinate, _Pass] = field(default_factory=dict)


class RaggedExperts(ComposedExecutable):
    """A layer of experts in the ragged form; `recorded` is the static form, of whose gradients there are gradients."""

    def __init__(self, choice: ExpertsChoice, body: Body, recorded: Recorded) -> None:
        super().__init__(choice.decision, self._run)
        assert choice.exchange is not None
        self.exchange: TokenExchange = choice.exchange
        self.body, self.recorded, self.specs, self.result = body, recorded, choice.specs, choice.result
        self.layouts, self.gradients = choice.strategy.inputs, choice.strategy.gradients
        self.computed = choice.strategy.outputs[0]

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
        local = run_program(self.computed.mesh, program, [t._local_tensor for t in (grad, *tensors)])
        return [
            wrap(x, contiguous_spec(layout, spec.shape, spec.dtype, spec.device)) if is_needed else None
            for x, layout, spec, is_needed in zip(local, self.gradients, self.specs, needed, strict=True)
        ]

    # -- the programs of a rank

    def _forward(
        self, passes: _Passes, needed: tuple[bool, ...], at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        x, index, weight, *parameters = tensors
        tokens, k = x.reshape(-1, x.shape[-1]), index.shape[-1]
        pairs = (index.reshape(-1, k), weight.reshape(-1, k))
        route, rows, weights = yield from self.exchange.dispatch(at, space, tokens, *pairs)
        if passes.keeps:
            with torch.enable_grad():
                of_leaves = (needed[0], needed[2], *needed[OPERANDS:])
                leaves = [
                    each.detach().requires_grad_(is_needed)
                    for each, is_needed in zip((rows, weights, *parameters), of_leaves, strict=True)
                ]
                summed = self._summed(at, route, leaves)
            passes.of_ranks[at] = _Pass(route, leaves, summed)
            summed = summed.detach()
        else:
            summed = self._summed(at, route, [rows, weights, *parameters])
        out = yield from self.exchange.combine(at, space, route, summed, len(tokens))
        return (out.reshape(x.shape),)

    def _summed(self, at: Coordinate, route: TokenRoute, tensors: Sequence[Tensor]) -> Tensor:
        """The weighted sum of what this rank's experts make of each row that arrived."""
        rows, weights, *parameters = tensors
        if has_only_shape(rows):
            return without_data(rows, weights, *parameters)
        experts = LocalExperts(self.body, self.exchange.own(at), self.exchange.total)
        out = experts.weighted(rows[route.row], route.ends, weights, parameters)
        return out.new_zeros(rows.shape).index_add(0, route.row, out).to(rows.dtype)

    def _backward(
        self,
        passes: _Passes,
        needed: tuple[bool, ...],
        retain: bool,
        at: Coordinate,
        space: Session,
        tensors: Sequence[Tensor],
    ) -> Program[tuple[Tensor, ...]]:
        grad, x, index, weight = tensors[:4]
        done, k = passes.of_ranks[at] if retain else passes.of_ranks.pop(at), index.shape[-1]
        width = x.shape[-1]
        of_rows = yield from self.exchange.send(at, space, done.route, grad.reshape(-1, width))
        leaves = [leaf for leaf in done.leaves if leaf.requires_grad]
        gradients = iter(_gradients(done.out, leaves, of_rows, retain))
        of_leaves = [next(gradients) if leaf.requires_grad else None for leaf in done.leaves]
        of_x, of_weight, *of_parameters = of_leaves
        empty = x.new_empty(0)
        if of_x is None and of_weight is None:
            return (empty, empty, empty, *(empty if each is None else each for each in of_parameters))
        sent = (
            of_rows.new_zeros(of_rows.shape) if of_x is None else of_x,
            done.leaves[1] if of_weight is None else of_weight,
        )
        like = (x.reshape(-1, width), weight.reshape(-1, k))
        for_x, for_weight = yield from self.exchange.combine_gradients(at, space, done.route, sent, like)
        results = (for_x.view(x.shape), empty, for_weight.view(weight.shape))
        return (*results, *(empty if each is None else each for each in of_parameters))


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
        operands = each_apart(tensors)
        wanted = [x for x, is_needed in zip(operands, needed, strict=True) if is_needed]
        with torch.enable_grad():
            out = redistribute(experts.recorded(operands), experts.computed.cotangent())
        grad = redistribute(as_distributed(grad, out._spec.layout), out._spec.layout)
        gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return (None, *(next(gradients) if is_needed else None for is_needed in needed))
