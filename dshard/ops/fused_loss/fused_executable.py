"""The executable of a fused cross entropy, and its node in autograd's graph.

The gradients of a loss that is a number are computed in the forward pass, with the logits of each chunk, and are
multiplied in the backward pass. Those of a loss for each row are computed from the logits once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import Program, Session, plain, run_program, sum_dtype
from dshard.core.executable import ComposedExecutable
from dshard.core.moves import run_on_ranks
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.wrapper import is_recorded, wrap
from dshard.layout import replicated
from dshard.ops.composite import recorded_gradients
from dshard.ops.fused_loss.chunked_loss import ChunkedLoss
from dshard.ops.fused_loss.fused_choice import FusedChoice

Recorded: TypeAlias = Callable[[Sequence[Any]], Any]
"""The loss of operands by operators whose gradients have gradients."""
Needed: TypeAlias = tuple[bool, bool, bool]
"""Whether x, weight and bias get a gradient."""


class FusedLoss(ComposedExecutable):
    """A fused cross entropy of distributed tensors; `recorded` is the loss of which there are second derivatives."""

    def __init__(self, choice: FusedChoice, recorded: Recorded) -> None:
        super().__init__(choice.decision, self._run)
        self.loss, self.result, self.recorded = choice.loss, choice.result, recorded
        self.layouts, self.mesh = choice.strategy.inputs, choice.result.layout.mesh
        x, wide = choice.specs[0], sum_dtype(choice.specs[0].dtype)
        self.factor = contiguous_spec(replicated(self.mesh), (), wide, x.device)
        pairs = list(zip(choice.specs, choice.strategy.gradients, strict=True))
        of_operands = [pairs[i] for i in (0, 1, 3)[: 2 + self.loss.has_bias]]
        self.of_operands = [contiguous_spec(at, s.shape, s.dtype, s.device) for s, at in of_operands]
        self.summed = [self.of_operands[0], *(spec.with_dtype(wide) for spec in self.of_operands[1:])]

    def _run(self, tensors: Args, kwargs: Kwargs) -> Any:
        moved = [redistribute(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]
        return run_recorded_loss(self, moved)

    def forward(self, tensors: Sequence[Any], needed: Needed) -> list[Tensor]:
        """The loss; with one that is a number, also the factor of the gradients that follow, of those needed."""
        local = run_program(self.mesh, partial(self.loss.program, needed), [t._local_tensor for t in tensors])
        loss: list[Tensor] = [wrap(local[0], self.result)]
        if len(local) == 1:
            return loss
        return [*loss, wrap(local[1], self.factor), *self._wrapped(local[2:], self.summed, needed)]

    def backward(self, grad: Tensor, tensors: Sequence[Any], kept: Sequence[Any], needed: Needed) -> list[Tensor]:
        """The gradients that are needed: of what the forward pass has kept, or of the operands once more."""
        grad = self.like_result(grad)
        if not kept:
            operands = [t._local_tensor for t in (grad, *tensors)]
            local = run_program(self.mesh, partial(self.loss.gradients, needed), operands)
            return [
                x.to(spec.dtype)
                for x, spec in zip(self._wrapped(local, self.summed, needed), self._needed(needed), strict=True)
            ]
        specs = self._needed(needed)
        scaled = partial(self.loss.scaled, dtypes=[spec.dtype for spec in specs])
        local = run_on_ranks(self.mesh, lambda at: scaled, tuple(x._local_tensor for x in (grad, *kept)), {})
        return [wrap(x, spec) for x, spec in zip(local, specs, strict=True)]

    def like_result(self, grad: Tensor) -> Any:
        """The gradient of the result in the result's layout."""
        return redistribute(as_distributed(grad, self.result.layout), self.result.layout)

    def _needed(self, needed: Needed) -> list[Spec]:
        return [spec for spec, is_needed in zip(self.of_operands, needed, strict=False) if is_needed]

    @staticmethod
    def _wrapped(local: Sequence[Tensor], specs: Sequence[Spec], needed: Needed) -> list[Tensor]:
        return [wrap(x, spec) for x, spec, is_needed in zip(local, specs, needed, strict=False) if is_needed]


class LocalFusedLoss:
    """A fused cross entropy of plain tensors: on simulated ranks they are one tensor of all, and so written to once."""

    def __init__(self, loss: ChunkedLoss, recorded: Recorded) -> None:
        self.loss, self.recorded = loss, recorded

    @plain()
    def forward(self, tensors: Sequence[Tensor], needed: Needed) -> list[Tensor]:
        """The loss; with one that is a number, also the factor of the gradients that follow, of those needed."""
        loss, *rest = self._finished(self.loss.program(needed, (), Session(), tensors))
        return [loss, *rest[:1], *_of(rest[1:], needed)]

    @plain()
    def backward(self, grad: Tensor, tensors: Sequence[Tensor], kept: Sequence[Tensor], needed: Needed) -> list[Tensor]:
        """The gradients that are needed: of what the forward pass has kept, or of the operands once more."""
        x, weight, _, *rest = tensors
        dtypes = [t.dtype for t in _of((x, weight, *rest[: self.loss.has_bias]), needed)]
        if kept:
            return list(self.loss.scaled(grad, *kept, dtypes=dtypes))
        gradients = _of(self._finished(self.loss.gradients(needed, (), Session(), (grad, *tensors))), needed)
        return [each.to(dtype) for each, dtype in zip(gradients, dtypes, strict=True)]

    @staticmethod
    def like_result(grad: Tensor) -> Tensor:
        """The gradient itself."""
        return grad

    @staticmethod
    def _finished(program: Program[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What a program returns that sends nothing."""
        try:
            next(program)
        except StopIteration as stop:
            results: tuple[Tensor, ...] = stop.value
            return results
        raise AssertionError("a rank that has everything sends nothing")


def run_recorded_loss(loss: FusedLoss | LocalFusedLoss, tensors: Sequence[Any]) -> Any:
    """The loss of these operands, recorded by autograd if it records one of them."""
    if is_recorded(tensors):
        return _Fused.apply(loss, *tensors)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return loss.forward(tensors, (False, False, False))[0]


class _Fused(torch.autograd.Function):
    """The autograd node of a fused cross entropy; the gradient has the layout of its result."""

    @staticmethod
    def forward(ctx: Context, loss: FusedLoss | LocalFusedLoss, *tensors: Tensor) -> Tensor:
        has_bias = loss.loss.has_bias
        of_x, of_weight, _, *rest = ctx.needs_input_grad[1:]
        ctx.loss, ctx.needed, ctx.n_operands = loss, (of_x, of_weight, has_bias and rest[0]), len(tensors)
        out, *kept = loss.forward(tensors, ctx.needed)
        ctx.save_for_backward(*tensors, *kept)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        loss: FusedLoss | LocalFusedLoss = ctx.loss
        saved, n = ctx.saved_tensors, ctx.n_operands
        tensors, kept = saved[:n], saved[n:]
        if torch.is_grad_enabled():
            needed, grad = ctx.needs_input_grad[1:], loss.like_result(grad)
            return (None, *recorded_gradients(lambda x: loss.like_result(loss.recorded(x)), tensors, grad, needed))
        gradients = iter(loss.backward(grad, tensors, kept, ctx.needed))
        of_x, of_weight, of_bias = (next(gradients) if is_needed else None for is_needed in ctx.needed)
        rest = ((of_bias, None) if loss.loss.has_bias else (None,))[: n - 3]
        return (None, of_x, of_weight, None, *rest)


def _of(tensors: Sequence[Any], needed: Needed) -> list[Any]:
    """Those tensors that are needed."""
    return [x for x, is_needed in zip(tensors, needed, strict=False) if is_needed]
