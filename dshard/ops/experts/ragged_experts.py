"""The executable of the ragged form: tokens go to their experts, and what these make of them comes back.

The body runs under torch's own autograd on the rows that a rank receives; its graph is kept by the node of the call.

Design: docs/design/0026-experts.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dshard.autograd.crossing import as_distributed, redistribute, unchecked_apply
from dshard.comm import Program, Session, run_program
from dshard.core.executable import ComposedExecutable
from dshard.core.observe import OBSERVERS, finish_observed
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.wrapper import Wrapper, is_recorded, wrap
from dshard.mesh import Coordinate
from dshard.ops.composite import recorded_gradients
from dshard.ops.experts.experts_choice import ExpertsChoice
from dshard.ops.experts.local_experts import Body, LocalExperts
from dshard.ops.experts.token_route import RankExchange, TokenPairs, TokenRoute
from dshard.rules.expert_loops import OPERANDS
from dshard.torch_private import keeps_graph, run_backward, saved_tensor_hooks

Recorded: TypeAlias = Callable[[Sequence[Tensor]], Any]


@dataclass(slots=True)
class _Pass:
    """What the forward pass of a rank leaves to its backward pass: the way of its tokens, and the graph of the body."""

    way: list[tuple[RankExchange, TokenRoute]]
    leaves: list[Tensor]
    out: Tensor


@dataclass(slots=True)
class _Passes:
    """The passes of a call, by the coordinate of the rank; `keeps` whether a backward pass is to come.

    Within hooks of saved tensors the node of the call saves what the bodies' graphs have `saved`: torch's checkpoint
    runs a forward pass again for each backward pass that asks it for a tensor, and those of bodies are passes within.
    """

    keeps: bool
    of_ranks: dict[Coordinate, _Pass] = field(default_factory=dict)
    saved: list[Tensor] = field(default_factory=list)

    def saving(self) -> AbstractContextManager[object]:
        """Within the block a body runs."""
        if not self.keeps or saved_tensor_hooks(True) is None:
            return nullcontext()
        return saved_tensors_hooks(self._save, self.saved.__getitem__)

    def _save(self, x: Tensor) -> int:
        self.saved.append(x.detach())
        return len(self.saved) - 1


class RaggedExperts(ComposedExecutable):
    """A layer of experts in the ragged form; `recorded` is the static form, of whose gradients there are gradients."""

    def __init__(self, choice: ExpertsChoice, body: Body, capacity: int | None, recorded: Recorded) -> None:
        super().__init__(choice.decision, self._run)
        self.choice, self.body, self.capacity, self.recorded = choice, body, capacity, recorded
        self.computed = choice.computed.layout
        self.arrived: list[int] = []  # rows of other ranks, told to observers: of this rank, or of each simulated one

    def _run(self, tensors: Args, kwargs: Kwargs) -> Any:
        moved = [redistribute(t, layout) for t, layout in zip(tensors, self.choice.strategy.inputs, strict=True)]
        if is_recorded(tensors):
            out = _ragged(self, *moved)
        else:
            out = self.forward(_Passes(False), moved)
        return redistribute(out, self.choice.result.layout)

    def forward(self, passes: _Passes, tensors: Sequence[Wrapper], needed: Sequence[bool] = ()) -> Wrapper:
        """The result, in the layout in which it is computed."""
        program = partial(self._forward, passes, tuple(needed))
        (local,) = run_program(self.computed.mesh, program, [t._local_tensor for t in tensors])
        return wrap(local, self.choice.computed)

    def backward(
        self, passes: _Passes, grad: Tensor, tensors: Sequence[Wrapper], needed: Sequence[bool], retain: bool
    ) -> list[Wrapper | None]:
        """The gradients of the operands in their layouts, None where they are not needed."""
        cotangent = self.computed.cotangent()
        grad = redistribute(as_distributed(grad, cotangent), cotangent)
        program = partial(self._backward, passes, retain)
        run = partial(run_program, self.computed.mesh, program, [t._local_tensor for t in (grad, *tensors)])
        local = finish_observed(self.decision, run) if OBSERVERS and self.decision is not None else run()
        return [
            wrap(x, spec) if is_needed else None
            for x, spec, is_needed in zip(local, self.choice.gradients, needed, strict=True)
        ]

    # -- the programs of a rank

    def _forward(
        self, passes: _Passes, needed: tuple[bool, ...], at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        x, index, weight, *parameters = tensors
        tokens = x.reshape(-1, x.shape[-1])
        index = index.reshape(-1).long()
        row = torch.arange(len(index), device=index.device).div_(max(1, weight.shape[-1]), rounding_mode="floor")
        given, way = TokenPairs(tokens, row, index, weight.reshape(-1)), []
        levels = [level.of_rank(at) for level in self.choice.levels]
        for level in levels:
            route, given = yield from level.dispatch(given, self.capacity is not None)
            way.append((level, route))
        if OBSERVERS:
            self.arrived.append(sum(level.from_others(route) for level, route in way))
        experts = LocalExperts(self.body, level.held[level.own], level.exchange.total, self.capacity)
        leaves = [given.rows, given.weight, *parameters]
        if passes.keeps:
            of_leaves = (needed[0], needed[2], *needed[OPERANDS:])
            leaves = [x.detach().requires_grad_(each) for x, each in zip(leaves, of_leaves, strict=True)]
        with torch.set_grad_enabled(passes.keeps), passes.saving():
            summed = experts.summed((leaves[0], given.expert, *leaves[1:]), given.row)
        if passes.keeps:
            passes.of_ranks[at] = _Pass(way, leaves, summed)
        summed = summed.detach()
        for level, route in reversed(way):
            summed = yield from level.combine(route, summed)
        return (summed.reshape(x.shape),)

    def _backward(
        self, passes: _Passes, retain: bool, at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        (grad, x), weight = tensors[:2], tensors[3]
        done = passes.of_ranks[at] if retain else passes.of_ranks.pop(at)
        of_rows = grad.reshape(-1, x.shape[-1])
        for level, route in done.way:
            of_rows = yield from level.send(route, of_rows)
        leaves = [leaf for leaf in done.leaves if leaf.requires_grad]
        gradients = iter(_gradients(done.out, leaves, of_rows, retain))
        for_x, for_weight, *of_parameters = (next(gradients) if x.requires_grad else None for x in done.leaves)
        empty = x.new_empty(0)
        results = [empty if each is None else each for each in of_parameters]
        if for_x is None and for_weight is None:
            return (empty, empty, empty, *results)
        for_x = torch.zeros_like(of_rows) if for_x is None else for_x
        for_weight = torch.zeros_like(done.leaves[1]) if for_weight is None else for_weight
        for level, route in reversed(done.way):
            for_x, for_weight = yield from level.combine_gradients(route, for_x, for_weight)
        return (for_x.view(x.shape), empty, for_weight.view(weight.shape), *results)


def _gradients(out: Tensor, leaves: Sequence[Tensor], grad: Tensor, retain: bool) -> Sequence[Tensor]:
    """The gradients of a graph's leaves; zeros where `out` does not depend on them."""
    if not out.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = run_backward((out,), (grad,), retain, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False)
    return [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, found, strict=True)]


class _Ragged(torch.autograd.Function):
    """The autograd node of a layer of experts in the ragged form."""

    @staticmethod
    def forward(ctx: Context, experts: RaggedExperts, *tensors: Wrapper) -> Wrapper:
        ctx.experts, ctx.passes = experts, _Passes(True)
        out = experts.forward(ctx.passes, tensors, ctx.needs_input_grad[1:])
        ctx.save_for_backward(*tensors, *ctx.passes.saved)
        ctx.passes.saved.clear()
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        experts: RaggedExperts = ctx.experts
        needed, every = ctx.needs_input_grad[1:], ctx.saved_tensors
        tensors = every[: len(needed)]
        if not torch.is_grad_enabled():
            ctx.passes.saved[:] = every[len(needed) :]
            gradients = experts.backward(ctx.passes, grad, tensors, needed, keeps_graph())
            ctx.passes.saved.clear()
            return (None, *gradients)
        layout = experts.computed.cotangent()
        grad = redistribute(as_distributed(grad, layout), layout)
        return (
            None,
            *recorded_gradients(lambda x: redistribute(experts.recorded(x), layout), tensors, grad, needed),
        )


_ragged = unchecked_apply(_Ragged)
