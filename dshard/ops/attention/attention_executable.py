"""Executables of a choice of attention: local attention to the keys that a rank has, and what brings it the others.

Keys are on several ranks around a ring, or merged from each rank's range of the keys, or both. Then the ranks' results
and statistics stand side by side in one more dim, which the axes of loop k shard, and are merged by operators on
distributed tensors. The backward pass needs of the result its product with its own gradient alone, one number for each
row, beside the log-sum-exp.

Design: docs/design/0019-attention-rings.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.autograd.crossing import as_distributed, redistribute
from dshard.comm import run_program
from dshard.core.call import LocalOp
from dshard.core.executable import ComposedExecutable, Executable, wrap_as
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.spec import Spec, contiguous_spec
from dshard.core.wrapper import Wrapper, is_recorded, wrap
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.attention.attention_choice import AttentionChoice
from dshard.ops.attention.key_windows import windowed
from dshard.ops.attention.local_attention import Attend, of_key_heads
from dshard.ops.attention.ring_attention import RingAttention
from dshard.ops.attention.score_functions import ScoreFunctions
from dshard.ops.composite import SavedOperands, SavingExecutable, recorded_gradients, run_recorded
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
        layout = tensors[-2]._spec.layout

        def recorded(operands: Sequence[Any]) -> Tensor:
            with sdpa_kernel(SDPBackend.MATH):  # the one whose gradients have gradients on any device
                return redistribute(ctx.functions.recorded(operands), layout)

        grad = redistribute(as_distributed(grad, layout), layout)
        return (None, None, *recorded_gradients(recorded, tensors[:-2], grad, needed))


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


AttendAt: TypeAlias = Callable[[Sequence[range], range], Attend]
"""Local attention of the scores at ranges of the batch dims, heads and queries, and at one of the keys."""


def executable_of(
    choice: AttentionChoice, attend_at: AttendAt, functions: Callable[[], ScoreFunctions], positions: Sequence[int]
) -> Executable | ComposedExecutable:
    """The executable of a choice, of whose operands those at `positions` are distributed.

    `functions` are for ranks that have some of the keys of their queries, `attend_at` for those that have all of them.
    """
    how, result = choice.how, choice.result
    if how.keys == "split" or how.ring.axes:
        return PartialAttention(choice, functions)
    strategy = choice.within.strategy
    assert strategy is not None
    saves_copies = how.keys == "every head" or strategy.outputs[0].leaves_empty(result.shape)
    make = SavingExecutable if saves_copies else Executable
    kernel = partial(_kernel, choice, attend_at)
    local = make(choice.within, kernel, [result], positions, wrap_as(result), gradients=strategy.gradients)
    if how.windows is None and how.repeats == 1:
        return local
    return ComposedExecutable(choice.decision, partial(_on_brought_keys, choice, local))


def _kernel(choice: AttentionChoice, attend_at: AttendAt, at: Coordinate) -> LocalOp:
    """The local attention of the rank at a coordinate: its queries and their key heads, or its window of the keys."""
    (query, key, *_), windows = choice.specs, choice.how.windows
    *ranges, _ = choice.strategy.inputs[0].region(query.shape, at)
    attend = attend_at(ranges, range(key.shape[-2]) if windows is None else windows.window(at))
    if choice.how.keys != "every head":
        return attend
    return of_key_heads(ranges[-2], query.shape[-3] // key.shape[-3], attend)


def _on_brought_keys(choice: AttentionChoice, local: Executable, tensors: Args, kwargs: Kwargs) -> Any:
    """Attention to windows of the keys, or to key heads that are repeated."""
    how, moved = choice.how, tuple[Any, ...]()
    query, *keys = (redistribute(x, layout) for x, layout in zip(tensors, choice.strategy.inputs, strict=True))
    if how.windows is not None:
        moved = (query, *windowed(how.windows, keys))
    else:
        moved = (query, *(x.repeat_interleave(how.repeats, -3) for x in keys[:2]), *keys[2:])
    if not is_recorded(tensors):
        return local(moved)
    out = run_recorded(local, *moved)
    return out if how.repeats == 1 else SavedOperands.apply(out, *tensors)  # type: ignore[no-untyped-call]


# -- batch dims and heads of attention that torch broadcasts: the kernels of blocks need equal ones


def lead_differs(tensors: Sequence[Tensor], gqa: bool) -> bool:
    """Whether query, key and value differ in batch dims or, but for grouped queries, heads."""
    first = -3 if gqa else -2
    query, key, value = (x.shape[:first] for x in tensors)
    return not query == key == value


def broadcast_lead(tensors: Sequence[Tensor], gqa: bool) -> Sequence[Tensor]:
    """Query, key and value with equal batch dims and, but for grouped queries, heads: those of size 1 are expanded.

    Sizes that do not match are left to torch, which refuses them.
    """
    if not lead_differs(tensors, gqa):
        return tensors
    first = -3 if gqa else -2
    leads = {tuple(x.shape[:first]) for x in tensors}
    ndim = max(map(len, leads))
    sizes = [{lead[i - ndim] for lead in leads if len(lead) >= ndim - i} - {1} for i in range(ndim)]
    if any(len(of_dim) > 1 for of_dim in sizes):
        return tensors
    lead = [max(of_dim, default=1) for of_dim in sizes]
    return [x.expand(*lead, *x.shape[first:]) for x in tensors]
