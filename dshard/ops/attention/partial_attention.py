"""Attention whose keys are on several ranks: around a ring, or merged from each rank's range of the keys, or both.

The ranks' results and statistics stand side by side in one more dim, which the axes of loop k shard. They are merged by
operators on distributed tensors. The backward pass needs of the result its product with its own gradient alone, one
number for each row, beside the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import run_program
from dshard.core.executable import ComposedExecutable
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.wrapper import Wrapper, each_apart, is_recorded, wrap
from dshard.layout import Layout, Shape
from dshard.ops.attention.attention_choice import AttentionChoice
from dshard.ops.attention.ring_attention import RingAttention
from dshard.ops.attention.score_functions import ScoreFunctions
from dshard.ops.composite import SavedOperands
from dshard.placements import Replicate, Shard
from dshard.rules.attention_loops import axes_of_row


class PartialAttention(ComposedExecutable):
    """Attention of keys on several ranks: its decision is complete, and what runs within repeats it.

    `functions` are made for each call.
    """

    def __init__(self, choice: AttentionChoice, functions: Callable[[], ScoreFunctions]) -> None:
        super().__init__(choice.decision, self._run)
        self.specs, self.functions, self.out = choice.specs, functions, choice.result
        self.layouts, self.gradients = choice.strategy.inputs, choice.strategy.gradients
        self.axes = axes_of_row(choice.strategy.rows, "k")
        shapes = tuple(spec.shape for spec in choice.specs)
        self.ring = RingAttention(self.layouts, shapes, choice.options, choice.how.ring, choice.reach)

    def _run(self, tensors: Args, kwargs: Kwargs) -> Any:
        functions = self.functions()
        moved = [redistribute(t, layout) for t, layout in zip(tensors, self.layouts, strict=True)]
        if is_recorded(tensors):
            out = _Attention.apply(self, functions, *moved)  # type: ignore[no-untyped-call]
            return SavedOperands.apply(redistribute(out, self.out.layout), *tensors)  # type: ignore[no-untyped-call]
        return redistribute(self.forward(functions, moved)[0], self.out.layout)

    @property
    def computed(self) -> Layout:
        """The layout in which the result is computed: that of the queries."""
        return self.layouts[0]

    def forward(self, functions: ScoreFunctions, tensors: Sequence[Wrapper]) -> tuple[Wrapper, Tensor]:
        """The result, and the log-sum-exp of its rows."""
        mesh, (q, *_) = self.computed.mesh, self.specs
        out, lse = run_program(mesh, partial(self.ring.forward, functions), [t._local_tensor for t in tensors])
        if not self.axes:
            local = out.to(self.out.dtype)
            return wrap(local, self._spec(self.out.shape, self.out.dtype)), wrap(
                lse, self._spec(self.out.shape[:-1], lse.dtype)
            )
        layout, n = _in_front(self.computed, self.axes), prod(mesh.shape[axis] for axis in self.axes)
        parts: Any
        sums: Any
        parts, sums = (
            wrap(x.unsqueeze(0), _spec(layout, (n, *shape), x.dtype, q))
            for x, shape in ((out, self.out.shape), (lse, self.out.shape[:-1]))
        )
        complete = layout
        for axis in self.axes:
            complete = complete.replace(axis, Replicate())
        most = redistribute(sums.amax(0, keepdim=True), complete)
        weights = (sums - most.clamp_min(torch.finfo(sums.dtype).min)).exp()  # none where a row sees no key anywhere
        total = redistribute(weights.sum(0, keepdim=True), complete)
        shares = weights / total.clamp_min(1.0)  # of the most one is exactly 1, unless all are 0
        merged = redistribute((parts * shares.unsqueeze(-1)).sum(0), self.out.layout).to(self.out.dtype)
        return merged, (most + total.log()).squeeze(0)

    def backward(
        self, functions: ScoreFunctions, grad: Tensor, tensors: Sequence[Wrapper], needed: Sequence[bool]
    ) -> list[Wrapper | None]:
        """The gradients of the operands in their layouts, None where they are not needed.

        `tensors` are the operands, the result and the log-sum-exp.
        """
        *operands, out, lse = tensors
        grad = redistribute(as_distributed(grad, out._spec.layout), out._spec.layout)
        delta: Any = (grad.to(lse._spec.dtype) * out).sum(-1)
        operands_of_gradient = redistribute(grad, self.computed), redistribute(delta, self.computed), lse, *operands
        program = partial(self.ring.backward, functions, tuple(needed))
        local = run_program(self.computed.mesh, program, [t._local_tensor for t in operands_of_gradient])
        return [
            wrap(x, _spec(layout, spec.shape, spec.dtype, spec)) if is_needed else None
            for x, layout, spec, is_needed in zip(local, self.gradients, self.specs, needed, strict=True)
        ]

    def _spec(self, shape: Shape, dtype: torch.dtype) -> Spec:
        return _spec(self.computed, shape, dtype, self.specs[0])


class _Attention(torch.autograd.Function):
    """The autograd node of attention of keys on several ranks; the gradient has the layout of its result."""

    @staticmethod
    def forward(ctx: Context, attention: PartialAttention, functions: ScoreFunctions, *tensors: Wrapper) -> Wrapper:
        out, lse = attention.forward(functions, tensors)
        ctx.attention, ctx.functions = attention, functions
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        attention: PartialAttention = ctx.attention
        needed, tensors = ctx.needs_input_grad[2:], ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, None, *attention.backward(ctx.functions, grad, tensors, needed))
        operands = each_apart(tensors[:-2])
        wanted = [x for x, is_needed in zip(operands, needed, strict=True) if is_needed]
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the one whose gradients have gradients on any device
            out = redistribute(ctx.functions.recorded(operands), tensors[-2]._spec.layout)
        grad = redistribute(as_distributed(grad, out._spec.layout), out._spec.layout)
        gradients = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
        return (None, None, *(next(gradients) if is_needed else None for is_needed in needed))


def _spec(layout: Layout, shape: Shape, dtype: torch.dtype, like: Spec) -> Spec:
    return contiguous_spec(layout, shape, dtype, like.device)


def _in_front(layout: Layout, axes: Sequence[int]) -> Layout:
    """The layout of a tensor with one more dim in front, which these mesh axes shard."""
    placements = [
        Shard(0) if axis in axes else Shard(p.dim + 1) if isinstance(p, Shard) else Replicate()
        for axis, p in enumerate(layout.placements)
    ]
    order = tuple((dim + 1, each) for dim, each in layout.order)
    if len(axes) > 1:
        order = ((0, tuple(axes)), *order)
    return Layout(layout.mesh, tuple(placements), order)
