"""Steps computed on layouts one by one, as a reference for searches that represent layouts as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from math import prod

from dshard.layout import Layout, Shape
from dshard.placements import Partial, ReduceOp, Replicate, Shard
from dshard.redistribute import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    MakePartial,
    ReduceExchange,
    ReduceScatter,
    Slice,
    Step,
)
from dshard.redistribute.space import commute


def steps_from(layout: Layout, dims: Sequence[int], partial: dict[int, ReduceOp]) -> list[Step]:
    """The steps from `layout` that shard only `dims` and make partial only the axes, with the ops, of `partial`."""
    names = layout.mesh.names
    ops = {placement.reduce_op for placement in layout.placements if isinstance(placement, Partial)}
    steps = _reductions(layout, dims)
    for dim in layout.sharded_dims():
        axes = layout.names_of(dim)
        for first in range(len(axes)):
            steps.append(AllGather(axes[first:], dim))
            steps += [AllToAll(axes[first:], dim, other) for other in dims if other != dim]
    replicated = [i for i, placement in enumerate(layout.placements) if placement == Replicate()]
    steps += [Slice((names[i],), layout.replace(i, Shard(dim))) for i in replicated for dim in dims]
    for axes in _subsets([names[i] for i in replicated if i in partial]):
        (op, *others) = {partial[names.index(axis)] for axis in axes}
        if not others and all(commute(each, op) for each in ops):
            steps.append(MakePartial(axes, op))
    return steps


def _reductions(layout: Layout, dims: Sequence[int]) -> list[Step]:
    by_op: dict[ReduceOp, list[str]] = {}
    for i, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            by_op.setdefault(placement.reduce_op, []).append(layout.mesh.names[i])
    steps: list[Step] = []
    for op, names in by_op.items():
        for axes in _subsets(names):
            steps += [ReduceScatter(order, op, dim) for dim in dims for order in permutations(axes)]
            steps.append(AllReduce(axes, op))
    return steps


def _subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(name for bit, name in enumerate(names) if subset >> bit & 1) for subset in range(1, 1 << len(names))]


def steps_straight(layout: Layout, target: Layout) -> list[Step]:
    """The single steps that lead from `layout` to `target` at once."""
    return [step for step in (_exchange_to(layout, target), _reduce_exchange_to(layout, target)) if step is not None]


def _exchange_to(layout: Layout, dst: Layout) -> Exchange | Slice | None:
    """The exchange from `layout` to `dst` if both are partial on the same axes; a slice if chunks nest."""
    partial = {(i, p) for i, p in enumerate(layout.placements) if isinstance(p, Partial)}
    if partial != {(i, p) for i, p in enumerate(dst.placements) if isinstance(p, Partial)} or layout == dst:
        return None
    dims = {*layout.sharded_dims(), *dst.sharded_dims()}
    moved = _reordered((layout.axes_of(dim), dst.axes_of(dim)) for dim in dims)
    names = layout.mesh.names
    if _nested(layout, dst):
        return Slice(tuple(names[i] for i in moved if layout.placements[i] != dst.placements[i]), dst)
    return Exchange(tuple(names[i] for i in moved), dst)


def _reduce_exchange_to(layout: Layout, dst: Layout) -> ReduceExchange | None:
    """The reduction of all partial axes straight to `dst`, if that shards them within what each rank holds."""
    names = layout.mesh.names
    pairs = list(zip(names, layout.placements, dst.placements, strict=True))
    ends = [(name, a.reduce_op, b) for name, a, b in pairs if isinstance(a, Partial) and a != b]
    ops = {op for _, op, _ in ends}
    begins = any(isinstance(b, Partial) and a != b for _, a, b in pairs)
    if len(ops) != 1 or begins or not all(isinstance(b, Shard) for _, _, b in ends):
        return None
    return ReduceExchange(tuple(name for name, _, _ in ends), ops.pop(), dst) if _nested(layout, dst) else None


def _nested(layout: Layout, dst: Layout) -> bool:
    """Whether each rank's chunk of `dst` lies in what it holds of `layout`, whatever the sizes."""
    dims = layout.sharded_dims()
    return all(dst.axes_of(dim)[: len(layout.axes_of(dim))] == layout.axes_of(dim) for dim in dims)


def _reordered(axes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[int, ...]:
    return tuple(sorted({axis for have, want in axes if have != want for axis in (*have, *want)}))


def before_partial(src: Layout, dst: Layout) -> Layout:
    """`dst`, but replicated on the axes that are partial there and not in `src`."""
    pairs = zip(src.placements, dst.placements, strict=True)
    placements = tuple(Replicate() if isinstance(b, Partial) and a != b else b for a, b in pairs)
    return dst if placements == dst.placements else Layout(dst.mesh, placements, dst.order)


def useful_dims(src: Layout, dst: Layout, shape: Shape) -> tuple[int, ...]:
    """The tensor dims that intermediate layouts may shard: those that either layout shards, and the largest other."""
    dims = {*src.sharded_dims(), *dst.sharded_dims()}
    others = [dim for dim in range(len(shape)) if dim not in dims]
    if others:
        dims.add(max(others, key=lambda dim: (shape[dim], -dim)))
    return tuple(sorted(dims))


def copied(step: Step, layout: Layout, shape: Shape) -> int:
    """Elements that the busiest rank copies in its own memory because regions are not contiguous."""
    n = prod(layout.mesh.shape[layout.mesh.axis(axis)] for axis in step.axes)
    own = layout.local_numel(shape)
    match step:
        case ReduceExchange(_, _, dst):
            return n * dst.local_numel(shape)
        case _ if n == 1:
            return 0
        case AllGather(_, dim):
            return n * own if dim else 0
        case ReduceScatter(_, _, dim):
            return own if dim else 0
        case AllToAll(_, src, dim):
            return own * ((src != 0) + (dim != 0))
        case Slice(_, dst):
            return dst.local_numel(shape)
        case Exchange(_, dst):
            strided = any(layout.axes_of(dim) != dst.axes_of(dim) for dim in range(1, len(shape)))
            return 2 * dst.local_numel(shape) if strided else 0
        case MakePartial():
            return own
        case _:
            return 0
