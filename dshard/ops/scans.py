"""Operators along a sharded dim by a small summary of each rank's block: scans, and the positions of extremes.

Each rank works on its block; the summaries of all blocks are gathered; each rank combines them to its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.core.call import Alternative, AlternativePlan, Call, LocalOp
from dshard.core.context import planning_context
from dshard.core.moves import local_redistribution, run_on_ranks
from dshard.core.operands import plan_to
from dshard.core.spec import Spec, contiguous_spec, specs_of
from dshard.core.trees import leaves
from dshard.core.wrapper import wrap
from dshard.layout import Layout, Shape, placed
from dshard.mesh import Coordinate
from dshard.ops.small_reductions import split_axes
from dshard.placements import Replicate
from dshard.redistribute import Plan
from dshard.rules.expand import order_of, sharded_anyway, term_layout
from dshard.rules.rule import Rule
from dshard.rules.strategy import completed_layout

Parts: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks into which the mesh axes `axes`, from major to minor, shard `dims` of a tensor without partial axes.

    A summary of a block has the shape `small`.
    """

    spec: Spec
    axes: tuple[int, ...]
    dims: tuple[int, ...]
    small: Shape

    @classmethod
    def of(cls, call: Call, dims: tuple[int, ...], length: int = 1) -> Blocks | None:
        """The blocks of the first operand, and summaries of this length along `dims`; None where none is sharded."""
        spec = call.specs[0].with_layout(completed_layout(call.specs[0].layout))
        if 0 in spec.shape or not split_axes(spec.layout, dims):
            return None
        axes = tuple(axis for dim in dims for axis in spec.layout.axes_of(dim))
        return cls(spec, axes, dims, tuple(length if d in dims else size for d, size in enumerate(spec.shape)))

    @property
    def rest(self) -> Layout:
        """The layout of the tensor with `dims` replicated on all ranks."""
        return placed(self.spec.layout, self.axes, Replicate())

    def number(self, at: Coordinate) -> int:
        """The number of the block that the rank at `at` holds."""
        number = 0
        for axis in self.axes:
            number = number * self.spec.layout.mesh.shape[axis] + at[axis]
        return number

    def peers(self, at: Coordinate) -> list[Coordinate]:
        """The ranks that hold the blocks in the group of the rank at `at`."""
        mesh = self.spec.layout.mesh
        return mesh.peers(tuple(mesh.names[axis] for axis in self.axes), at)

    def held(self, at: Coordinate) -> range:
        """The indices of the first of `dims` that the rank at `at` holds."""
        return self.spec.layout.dim_range(self.dims[0], self.spec.shape[self.dims[0]], at)

    def filled(self, at: Coordinate) -> list[int]:
        """The blocks in the group of the rank at `at` that are not empty."""
        layout, shape = self.spec.layout, self.spec.shape
        return [i for i, peer in enumerate(self.peers(at)) if all(layout.region(shape, peer)[dim] for dim in self.dims)]

    def stacked(self, dtype: torch.dtype) -> tuple[Spec, Layout]:
        """The spec of the summaries of all blocks stacked along a new, sharded dim 0, and that layout replicated."""
        layout, term = self.spec.layout, tuple((str(d),) for d in range(len(self.small)))
        order = order_of([term], [self.rest])
        sharded, replicated = (
            term_layout(layout.mesh, (("block",), *term), each) for each in (order | {"block": self.axes}, order)
        )
        shape = (prod(layout.mesh.shape[axis] for axis in self.axes), *self.small)
        return contiguous_spec(sharded, shape, dtype, self.spec.device), replicated

    def plan(self, dtype: torch.dtype) -> tuple[Plan, int]:
        """The plan that gathers summaries of this dtype, and the bytes of an element."""
        spec, layout = self.stacked(dtype)
        return plan_to(spec, layout, planning_context().topology_of(layout.mesh)), spec.itemsize

    def gather(self, summary: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather the summaries of all blocks along a new dim 0."""
        spec, layout = self.stacked(dtype)
        one = run_on_ranks(layout.mesh, lambda at: lambda x: x.unsqueeze(0).contiguous(), (summary,), {})
        return local_redistribution(spec, layout)(one)


def _alternative(
    call: Call,
    rule: Rule,
    blocks: Blocks,
    result: Layout,
    dtypes: Sequence[torch.dtype],
    local_op: Callable[[Coordinate], LocalOp],
    join_op: Callable[[Coordinate], LocalOp],
) -> AlternativePlan:
    """The plan of a local operator on each block, whose last outputs are summaries of `dtypes`, and of `join_op`.

    `join_op` takes the other outputs of the local operator, and the summaries of all blocks. Outputs are sharded like
    `result`.
    """
    layout, device = blocks.spec.layout, blocks.spec.device
    _, outputs = sharded_anyway(rule, order_of(rule.inputs, [result]), layout.mesh)
    specs = specs_of(outputs, call.outs, device)

    def run(x: Any, *_: object, **__: object) -> Any:
        results = run_on_ranks(layout.mesh, local_op, (x._local_tensor,), {})
        own, summaries = results[: -len(dtypes)], results[-len(dtypes) :]
        every = [blocks.gather(summary, dtype) for summary, dtype in zip(summaries, dtypes, strict=True)]
        joined = run_on_ranks(layout.mesh, join_op, (tuple(own), tuple(every)), {})
        wrapped = [wrap(local, spec) for local, spec in zip(leaves(joined), specs, strict=True)]
        return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)

    return AlternativePlan((layout,), outputs, run, tuple(map(blocks.plan, dtypes)))


def _picked(blocks: Tensor, numbers: Sequence[int]) -> Tensor:
    """The blocks of these numbers, as a view if they are the first ones."""
    if list(numbers) == list(range(len(numbers))):
        return blocks[: len(numbers)]
    # a list as an index becomes a tensor on the CPU, for whose copy to a GPU the host waits
    return torch.stack([blocks[number] for number in numbers])


# -- scans


def scan(join: Callable[[Parts, Parts], Parts], positions: bool = False) -> Alternative:
    """A cumulative operator: each rank scans its block, and continues from the last slices of the blocks before it.

    `join` takes a block's outputs and the last slices of each block before. With `positions` the second output has
    indices.
    """

    def scan_blocks(call: Call, rule: Rule) -> AlternativePlan | None:
        blocks = Blocks.of(call, (call.dim(),)) if call.shapes[0] else None
        if blocks is None:
            return None

        def local_op(at: Coordinate) -> LocalOp:
            return lambda local: _scanned(call, local, blocks.held(at), positions)

        def join_op(at: Coordinate) -> LocalOp:
            before = [i for i in blocks.filled(at) if i < blocks.number(at)]
            if not before or not blocks.held(at):
                return lambda own, ends: own
            return lambda own, ends: join(own, tuple(_picked(end, before) for end in ends))

        dtypes = [out.dtype for out in call.outs]
        return _alternative(call, rule, blocks, blocks.spec.layout, dtypes, local_op, join_op)

    return Alternative("summaries of blocks", scan_blocks)


def _scanned(call: Call, local: Tensor, held: range, positions: bool) -> Parts:
    """The outputs of a block's scan, and their last slices."""
    dim = call.dim()
    if not held:
        small = [1 if d == dim else n for d, n in enumerate(local.shape)]
        empty = [local.new_empty(local.shape, dtype=out.dtype) for out in call.outs]
        return (*empty, *(local.new_zeros(small, dtype=out.dtype) for out in call.outs))
    outputs = tuple(leaves(call.func(local, *call.args[1:], **call.kwargs)))
    if positions:
        outputs = (outputs[0], outputs[1] + held.start)
    return (*outputs, *(out.narrow(dim, len(held) - 1, 1) for out in outputs))


def add(own: Parts, ends: Parts) -> Parts:
    """The join of cumsum."""
    return (own[0] + ends[0].sum(0, dtype=own[0].dtype),)


def multiply(own: Parts, ends: Parts) -> Parts:
    """The join of cumprod."""
    return (own[0] * ends[0].prod(0, dtype=own[0].dtype),)


def log_add(own: Parts, ends: Parts) -> Parts:
    """The join of logcumsumexp."""
    total = ends[0][0]
    for end in ends[0][1:]:
        total = torch.logaddexp(total, end)
    return (torch.logaddexp(own[0], total),)


def latest(better: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Parts, Parts], Parts]:
    """The join of cummax and cummin: the largest or smallest so far, the latest of equals; NaN propagates."""

    def join(own: Parts, ends: Parts) -> Parts:
        value, index = ends[0][0], ends[1][0]
        for next_value, next_index in [*zip(ends[0][1:], ends[1][1:], strict=True), own]:
            later = better(next_value, value) | next_value.isnan()
            value, index = torch.where(later, next_value, value), torch.where(later, next_index, index)
        return value, index

    return join


# -- positions


def _extreme_of_blocks(largest: bool, call: Call, rule: Rule) -> AlternativePlan | None:
    """`max` and `min` along a dim, `argmax` and `argmin`: the best of the blocks' extremes, the first of equals."""
    spec, ndim = call.specs[0], len(call.shapes[0])
    if len(call.outs) == 1 and not call.func._schema.name.startswith("aten::arg"):
        return None  # no position is asked for: a reduction gives the value alone
    dims = tuple(range(ndim)) if call.argument("dim") is None else (call.dim(),) if ndim else ()
    blocks = Blocks.of(call, dims)
    if blocks is None:
        return None
    layout, gone = blocks.spec.layout, () if call.outs[0].dim() == ndim else dims

    def local_op(at: Coordinate) -> LocalOp:
        return lambda local: _own_extreme(local, dims, largest, layout.region(spec.shape, at), spec.shape)

    def join_op(at: Coordinate) -> LocalOp:
        filled = blocks.filled(at)
        return lambda _, every: _best(every[0], every[1], filled, largest, gone, len(call.outs) == 2)

    return _alternative(call, rule, blocks, blocks.rest, (spec.dtype, torch.int64), local_op, join_op)


LARGEST, SMALLEST = (
    Alternative("summaries of blocks", partial(_extreme_of_blocks, largest)) for largest in (True, False)
)


def _own_extreme(local: Tensor, dims: tuple[int, ...], largest: bool, region: Any, shape: Shape) -> Parts:
    """The extreme of a block over one dim or all, and its global index, flat if over all."""
    small = [1 if d in dims else n for d, n in enumerate(local.shape)]
    if not all(region[dim] for dim in dims):
        return local.new_zeros(small), local.new_zeros(small, dtype=torch.int64)
    if len(dims) == 1:
        value, index = local.max(dims[0], True) if largest else local.min(dims[0], True)
        return value, index + region[dims[0]].start
    value, index = local.reshape(-1).max(0) if largest else local.reshape(-1).min(0)
    flat = index.new_zeros(())
    step = 1
    for held, size in zip(reversed(region), reversed(shape), strict=True):
        flat = flat + (index % len(held) + held.start) * step
        index, step = index // len(held), step * size
    return value.view(small), flat.view(small)


def _best(
    values: Tensor, indices: Tensor, filled: Sequence[int], largest: bool, gone: tuple[int, ...], both: bool
) -> Any:
    """The best extreme of the blocks that are not empty, and its first index."""
    values, indices = _picked(values, filled), _picked(indices, filled)
    best = values.max(0).values if largest else values.min(0).values
    hits = (values == best) | (values.isnan() & best.isnan())
    first = torch.where(hits, indices, torch.iinfo(torch.int64).max).amin(0)
    if gone:
        best, first = best.squeeze(gone), first.squeeze(gone)
    return (best, first) if both else first


def _best_of_blocks(call: Call, rule: Rule) -> AlternativePlan | None:
    """`topk`: the best `k` of the best `k` of each block."""
    k, spec = call.argument("k"), call.specs[0]
    dim = call.dim() if spec.shape else 0
    blocks = Blocks.of(call, (dim,), k) if k > 0 else None
    if blocks is None:
        return None
    largest, in_order = call.argument("largest"), call.argument("sorted")
    counts = [min(k, len(blocks.held(peer))) for peer in blocks.peers((0,) * spec.layout.mesh.ndim)]

    def local_op(at: Coordinate) -> LocalOp:
        held = blocks.held(at)
        return lambda local: _own_best(local, min(k, len(held)), k, dim, largest, held)

    def join(_: Parts, every: Parts) -> Parts:
        values, indices = (torch.cat([each[i].narrow(dim, 0, n) for i, n in enumerate(counts)], dim) for each in every)
        best, where = values.topk(k, dim, largest, in_order)
        return best, indices.gather(dim, where)

    return _alternative(call, rule, blocks, blocks.rest, (spec.dtype, torch.int64), local_op, lambda at: join)


BEST_OF_BLOCKS = Alternative("summaries of blocks", _best_of_blocks)


def _own_best(local: Tensor, n: int, k: int, dim: int, largest: bool, held: range) -> Parts:
    """The `n` best of a block and their indices, padded to `k`."""
    values, indices = local.topk(n, dim, largest)
    pad = [m if d != dim else k - n for d, m in enumerate(local.shape)]
    return (
        torch.cat([values, values.new_zeros(pad)], dim),
        torch.cat([indices + held.start, indices.new_zeros(pad)], dim),
    )
