"""Operators along a sharded dim from one small summary of each rank's block: scans, and the positions of extremes.

Each rank works on its block; the summaries of all blocks are gathered; each rank combines them to its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.core.call import LocalOp
from dshard.core.checks import infer
from dshard.core.context import planning_context
from dshard.core.moves import leaves, redistributed, run_on_ranks, with_partials_reduced
from dshard.core.spec import Spec, spec_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import DimOrder, Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.custom import Custom
from dshard.ops.reduced_norms import gathered, pays, split_axes
from dshard.placements import Placement, Shard
from dshard.redistribute import plan
from dshard.torch_private import OpOverload

Parts: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Blockwise:
    """An operator along the dim of its second argument: whether it runs block by block, and its implementation."""

    pays: Callable[[tuple[Any, ...]], bool]
    run: Custom


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks into which the mesh axes `axes`, from major to minor, shard `dims` of a tensor."""

    spec: Spec
    axes: tuple[int, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, spec: Spec, dims: tuple[int, ...]) -> Blocks:
        """The blocks of all axes that shard these dims."""
        return cls(spec, tuple(axis for dim in dims for axis in spec.layout.axes_of(dim)), dims)

    @property
    def rest(self) -> Layout:
        """The layout of a tensor without the sharded dims."""
        return gathered(self.spec.layout, self.axes)

    def number(self, at: Coordinate) -> int:
        """The number of the block that the rank at `at` holds."""
        number = 0
        for axis in self.axes:
            number = number * self.spec.layout.mesh.shape[axis] + at[axis]
        return number

    def filled(self, at: Coordinate) -> list[int]:
        """The blocks in the group of the rank at `at` that are not empty."""
        mesh, numbers = self.spec.layout.mesh, []
        for number, peer in enumerate(mesh.peers(tuple(mesh.names[axis] for axis in self.axes), at)):
            if all(self.spec.layout.dim_range(dim, self.spec.shape[dim], peer) for dim in self.dims):
                numbers.append(number)
        return numbers

    def gather(self, summary: Tensor, shape: Shape, dtype: torch.dtype, op: str) -> Tensor:
        """Gather the summaries of all blocks along a new dim 0; `shape` is global, with the tensor's dims in place."""
        mesh = self.spec.layout.mesh
        n = prod(mesh.shape[axis] for axis in self.axes)
        rest = self.rest
        placements = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in rest.placements]
        orders: list[DimOrder] = [(dim + 1, rest.axes_of(dim)) for dim in rest.sharded_dims()]
        stacked: list[Placement] = list(placements)
        for axis in self.axes:
            stacked[axis] = Shard(0)
        layout = Layout(mesh, tuple(stacked), (*orders, (0, self.axes)))
        one = run_on_ranks(mesh, lambda at: lambda x: x.unsqueeze(0).contiguous(), (summary,), {})
        full = (n, *shape)
        spec = spec_of(layout, full, _strides(full), dtype, self.spec.device)
        whole: Tensor = redistributed(wrap(one, spec), Layout(mesh, tuple(placements), tuple(orders)), op)._local
        return whole


def _strides(shape: Shape) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _wrap_all(result: Any, outs: Any, layout: Layout, device: torch.device) -> Any:
    specs = [spec_of(layout, tuple(out.shape), out.stride(), out.dtype, device) for out in leaves(outs)]
    wrapped = [wrap(local, spec) for local, spec in zip(leaves(result), specs, strict=True)]
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


# -- scans


@dataclass(frozen=True, slots=True)
class Scan:
    """The continuation of a scan over blocks: `join` takes a block's outputs and the last ones of each block before."""

    join: Callable[[Parts, Parts], Parts]
    positions: bool = False


def scan(how: Scan) -> Custom:
    """A cumulative operator: each rank scans its block, and continues from the last slices of the blocks before it."""

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = with_partials_reduced(args[0], str(func))
        spec, dim = x._spec, args[1] % args[0].dim()
        outs = infer(func, (spec.meta(), *args[1:]), dict(kwargs))
        blocks, mesh = Blocks.of(spec, (dim,)), spec.layout.mesh

        def local_op(at: Coordinate) -> LocalOp:
            held = spec.layout.dim_range(dim, spec.shape[dim], at)
            return lambda local: _scanned(func, local, (dim, *args[2:]), kwargs, held, how, leaves(outs))

        n = len(leaves(outs))
        outputs = run_on_ranks(mesh, local_op, (x._local,), {})
        small = tuple(1 if d == dim else size for d, size in enumerate(spec.shape))
        ends = [
            blocks.gather(end, small, out.dtype, str(func)) for end, out in zip(outputs[n:], leaves(outs), strict=True)
        ]

        def join_op(at: Coordinate) -> LocalOp:
            before = [i for i in blocks.filled(at) if i < blocks.number(at)]
            if not before or not spec.layout.dim_range(dim, spec.shape[dim], at):
                return lambda own, ends: own
            return lambda own, ends: how.join(tuple(own), tuple(end[before] for end in ends))

        result = run_on_ranks(mesh, join_op, (tuple(outputs[:n]), tuple(ends)), {})
        return _wrap_all(result, outs, spec.layout, spec.device)

    return run


def _scanned(
    func: OpOverload, local: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any], held: range, how: Scan, outs: Any
) -> Parts:
    """The outputs of a block's scan, and their last slices."""
    dim = rest[0]
    if not held:
        small = [1 if d == dim else n for d, n in enumerate(local.shape)]
        empty = [local.new_empty(local.shape, dtype=out.dtype) for out in outs]
        return (*empty, *(local.new_zeros(small, dtype=out.dtype) for out in outs))
    outputs = tuple(leaves(func(local, *rest, **kwargs)))
    if how.positions:
        outputs = (outputs[0], outputs[1] + held.start)
    return (*outputs, *(out.narrow(dim, len(held) - 1, 1) for out in outputs))


def _add(own: Parts, ends: Parts) -> Parts:
    return (own[0] + ends[0].sum(0, dtype=own[0].dtype),)


def _multiply(own: Parts, ends: Parts) -> Parts:
    return (own[0] * ends[0].prod(0, dtype=own[0].dtype),)


def _log_add(own: Parts, ends: Parts) -> Parts:
    total = ends[0][0]
    for end in ends[0][1:]:
        total = torch.logaddexp(total, end)
    return (torch.logaddexp(own[0], total),)


def _latest(better: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Parts, Parts], Parts]:
    """Join of cummax and cummin: the largest or smallest so far, the latest of equals; a NaN stays."""

    def join(own: Parts, ends: Parts) -> Parts:
        value, index = ends[0][0], ends[1][0]
        for next_value, next_index in [*zip(ends[0][1:], ends[1][1:], strict=True), own]:
            later = better(next_value, value) | next_value.isnan()
            value, index = torch.where(later, next_value, value), torch.where(later, next_index, index)
        return value, index

    return join


# -- positions


def extreme(largest: bool, values: bool) -> Custom:
    """max and min along a dim, argmax and argmin: the best of the blocks' extremes, the first of equals."""

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = with_partials_reduced(args[0], str(func))
        spec = x._spec
        outs = infer(func, (spec.meta(), *args[1:]), dict(kwargs))
        given = args[1] if len(args) > 1 else None
        dims = tuple(range(len(spec.shape))) if given is None else (given % len(spec.shape),)
        blocks, mesh = Blocks.of(spec, dims), spec.layout.mesh

        def local_op(at: Coordinate) -> LocalOp:
            region = spec.layout.region(spec.shape, at)
            return lambda local: _own_extreme(local, dims, largest, region, spec.shape)

        small = tuple(1 if d in dims else size for d, size in enumerate(spec.shape))
        found = run_on_ranks(mesh, local_op, (x._local,), {})
        kinds = (spec.dtype, torch.int64)
        all_found = [blocks.gather(each, small, kind, str(func)) for each, kind in zip(found, kinds, strict=True)]
        gone = () if leaves(outs)[0].dim() == len(spec.shape) else dims

        def join_op(at: Coordinate) -> LocalOp:
            return lambda found: _best(found[0], found[1], blocks.filled(at), largest, gone, values)

        result = run_on_ranks(mesh, join_op, (tuple(all_found),), {})
        return _wrap_all(result, outs, without(blocks.rest, gone), spec.device)

    return run


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
    """The best extreme of the blocks that are not empty, and the first index that has it."""
    values, indices = values[filled], indices[filled]
    best = values.max(0).values if largest else values.min(0).values
    hits = (values == best) | (values.isnan() & best.isnan())
    first = torch.where(hits, indices, torch.iinfo(torch.int64).max).amin(0)
    if gone:
        best, first = best.squeeze(gone), first.squeeze(gone)
    return (best, first) if both else first


def without(layout: Layout, gone: tuple[int, ...]) -> Layout:
    """The layout of a tensor less the dims `gone`, which are not sharded."""
    place = {dim: dim - sum(g < dim for g in gone) for dim in layout.sharded_dims()}
    placements = tuple(Shard(place[p.dim]) if isinstance(p, Shard) else p for p in layout.placements)
    return Layout(layout.mesh, placements, tuple((place[dim], axes) for dim, axes in layout.order))


def topk(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """topk: the best `k` of the best `k` of each block."""
    x = with_partials_reduced(args[0], str(func))
    k, dim, largest, in_order = _topk_arguments(*args[1:])
    spec, dim = x._spec, dim % args[0].dim()
    outs = infer(func, (spec.meta(), *args[1:]), dict(kwargs))
    blocks, mesh = Blocks.of(spec, (dim,)), spec.layout.mesh
    counts = {
        number: min(k, len(spec.layout.dim_range(dim, spec.shape[dim], peer)))
        for number, peer in enumerate(mesh.peers(tuple(mesh.names[a] for a in blocks.axes), (0,) * mesh.ndim))
    }

    def local_op(at: Coordinate) -> LocalOp:
        held = spec.layout.dim_range(dim, spec.shape[dim], at)
        return lambda local: _own_best(local, min(k, len(held)), k, dim, largest, held)

    own_best = run_on_ranks(mesh, local_op, (x._local,), {})
    small = tuple(k if d == dim else size for d, size in enumerate(spec.shape))
    kinds = (spec.dtype, torch.int64)
    all_found = [blocks.gather(each, small, kind, str(func)) for each, kind in zip(own_best, kinds, strict=True)]

    def join(values: Tensor, indices: Tensor) -> Parts:
        values, indices = (
            torch.cat([all_blocks[i].narrow(dim, 0, n) for i, n in counts.items()], dim)
            for all_blocks in (values, indices)
        )
        best, where = values.topk(k, dim, largest, in_order)
        return best, indices.gather(dim, where)

    result = run_on_ranks(mesh, lambda at: join, tuple(all_found), {})
    return _wrap_all(result, outs, blocks.rest, spec.device)


def _topk_arguments(k: int, dim: int = -1, largest: bool = True, in_order: bool = True) -> tuple[int, int, bool, bool]:
    return k, dim, largest, in_order


def _own_best(local: Tensor, n: int, k: int, dim: int, largest: bool, held: range) -> Parts:
    """The `n` best of a block and their indices, padded to `k`."""
    values, indices = local.topk(n, dim, largest)
    pad = [m if d != dim else k - n for d, m in enumerate(local.shape)]
    return (
        torch.cat([values, values.new_zeros(pad)], dim),
        torch.cat([indices + held.start, indices.new_zeros(pad)], dim),
    )


# -- when


def _one_pays(args: tuple[Any, ...]) -> bool:
    """Whether one summary of each block costs less than gathering the dim, or all dims where none is given."""
    spec: Spec | None = args[0]._spec if isinstance(args[0], Wrapper) else None
    if spec is None or not spec.layout.sharded_dims() or 0 in spec.shape:
        return False
    given = args[1] if len(args) > 1 else None
    ndim = len(spec.shape)
    dims = tuple(range(ndim)) if given is None else (given % ndim,) if -ndim <= given < ndim else ()
    return pays(spec, dims, ("sum",), planning_context().topology_of(spec.layout.mesh))


def _few_pay(args: tuple[Any, ...]) -> bool:
    """Whether the best `k` of each block cost less than gathering the dim."""
    spec: Spec | None = args[0]._spec if isinstance(args[0], Wrapper) else None
    if spec is None or not spec.shape or 0 in spec.shape or args[1] < 1:
        return False
    dim = args[2] if len(args) > 2 else -1
    axes = split_axes(spec.layout, (dim % len(spec.shape),))
    n = prod(spec.layout.mesh.shape[axis] for axis in axes)
    if not axes or 2 * n * args[1] >= spec.shape[dim]:
        return False
    topology = planning_context().topology_of(spec.layout.mesh)
    small = tuple(n * args[1] if d == dim % len(spec.shape) else size for d, size in enumerate(spec.shape))
    whole = gathered(spec.layout, axes)
    best = plan(spec.layout, whole, small, spec.itemsize + 8, topology)
    return best.seconds < plan(spec.layout, whole, spec.shape, spec.itemsize, topology).seconds


_ATEN = torch.ops.aten

BLOCKWISE: dict[OpOverload, Blockwise] = {
    _ATEN.cumsum.default: Blockwise(_one_pays, scan(Scan(_add))),
    _ATEN.cumprod.default: Blockwise(_one_pays, scan(Scan(_multiply))),
    _ATEN.logcumsumexp.default: Blockwise(_one_pays, scan(Scan(_log_add))),
    _ATEN.cummax.default: Blockwise(_one_pays, scan(Scan(_latest(torch.ge), positions=True))),
    _ATEN.cummin.default: Blockwise(_one_pays, scan(Scan(_latest(torch.le), positions=True))),
    _ATEN.argmax.default: Blockwise(_one_pays, extreme(largest=True, values=False)),
    _ATEN.argmin.default: Blockwise(_one_pays, extreme(largest=False, values=False)),
    _ATEN.max.dim: Blockwise(_one_pays, extreme(largest=True, values=True)),
    _ATEN.min.dim: Blockwise(_one_pays, extreme(largest=False, values=True)),
    _ATEN.topk.default: Blockwise(_few_pay, topk),
}
"""Operators that run on a summary of each block."""
