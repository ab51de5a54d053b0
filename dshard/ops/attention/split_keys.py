"""Loop k: each rank attends to its range of the keys, and the results are merged by the log-sum-exp of each row.

The ranks' results and statistics stand side by side in one more dim, which the axes of loop k shard. They are merged by
operators on distributed tensors, so that gradients of every order are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.core.call import LocalOp
from dshard.core.executable import ComposedExecutable, Executable
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import Spec, contiguous_stride, spec_of
from dshard.core.wrapper import wrap
from dshard.layout import Layout
from dshard.mesh import Coordinate
from dshard.ops.attention.attention_choice import Choice
from dshard.ops.attention.local_attention import Options, with_statistics
from dshard.ops.composite import Saved, run_recorded
from dshard.placements import Replicate, Shard
from dshard.rules.attention_loops import axes_of_row
from dshard.rules.strategy import Strategy


class SplitKeys(ComposedExecutable):
    """Attention with loop k: its decision is complete, and what runs within repeats it."""

    def __init__(self, choice: Choice, specs: Sequence[Spec], out: Tensor, options: Options) -> None:
        parts = _parts(choice, specs, out, options)
        super().__init__(choice.decision, partial(_merged, parts, out.dtype, choice.end))


def _parts(choice: Choice, specs: Sequence[Spec], out: Tensor, options: Options) -> Executable:
    """What ranks compute: results and statistics, each with a dim in front that the axes of loop k shard."""
    strategy, mesh = choice.strategy, specs[0].layout.mesh
    axes = axes_of_row(strategy.rows, "k")
    wide = torch.promote_types(out.dtype, torch.float32)
    layout = _in_front(strategy.inputs[0], axes)
    shapes = [(prod(mesh.shape[axis] for axis in axes), *shape) for shape in (tuple(out.shape), tuple(out.shape[:-1]))]
    results = [spec_of(layout, shape, contiguous_stride(shape), wide, specs[0].device) for shape in shapes]
    decision = replace(choice.decision, exchanges=(), ends=())
    kernel = partial(_kernel, strategy, specs, options)

    def both(local: tuple[Tensor, ...], args: Sequence[Any], moved: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(wrap(x, spec) for x, spec in zip(local, results, strict=True))

    return Executable(decision, kernel, results, range(len(specs)), both, gradients=strategy.gradients)


def _kernel(strategy: Strategy, specs: Sequence[Spec], options: Options, at: Coordinate) -> LocalOp:
    queries, keys = (
        layout.dim_range(len(spec.shape) - 2, spec.shape[-2], at)
        for layout, spec in zip(strategy.inputs[:2], specs[:2], strict=True)
    )
    return with_statistics(queries, keys, options)


def _merged(parts: Executable, dtype: torch.dtype, end: Layout, tensors: Args, kwargs: Kwargs) -> Any:
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    out, told = run_recorded(parts, *tensors) if recorded else parts(tensors)
    whole = told._spec.layout
    for axis, placement in enumerate(whole.placements):
        if placement == Shard(0):
            whole = whole.replace(axis, Replicate())
    most = redistribute(told.detach().amax(0, keepdim=True), whole)
    weights = (told - most.masked_fill(most == -inf, 0.0)).exp()
    total = redistribute(weights.sum(0, keepdim=True), whole)
    weights = weights / total.masked_fill(total == 0, 1.0)
    merged = redistribute((out * weights.unsqueeze(-1)).sum(0), end).to(dtype)
    return Saved.apply(merged, *tensors) if recorded else merged  # type: ignore[no-untyped-call]


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
