"""Local kernels of indexed operators whose indexed dim is sharded: each rank reads, or writes, the indices it holds.

An index on another rank reads zero, so that the result is a partial sum; elements written there go to a slot beyond the
local tensor, which is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dshard.comm import has_only_shape, kernel_device, recorded, traced
from dshard.core.call import Call, LocalOp, RankCall, writes_first
from dshard.torch_private import assert_async

_embedding = torch.ops.aten.embedding.default


def local_index(
    index: Tensor, held: range, size: int, dim: int, kind: type[Exception] = IndexError
) -> tuple[Tensor, Tensor]:
    """The positions of `index` within the range `held`, 0 outside of it, and whether each is within it."""
    refuse(index, (index >= size) | (index < -size), size, dim, kind)
    index = torch.where(index < 0, index + size, index)
    is_held = (index >= held.start) & (index < held.stop)
    return torch.where(is_held, index - held.start, 0), is_held


def refuse(index: Tensor, beyond: Tensor, size: int, dim: int, kind: type[Exception] = IndexError) -> None:
    """Raise torch's error if some index is beyond the dim; on accelerators, as in torch, when the kernel has run.

    A traced graph asserts it when it runs; a replayed step calls it again.
    """
    if kernel_device(index.device) == "cpu" and not traced(index):
        recorded(("refuses indices", size, dim, kind), partial(_refuse_now, size, dim, kind), index, beyond)
    elif not has_only_shape(index):
        assert_async(~beyond.any(), f"an index is out of bounds for dimension {dim} with size {size}")


def refuse_targets(classes: int, ignored: int, target: Tensor) -> None:
    """Refuse targets of a loss that are no class, as torch does."""
    if not has_only_shape(target):
        refuse(target, ((target < 0) | (target >= classes)) & (target != ignored), classes, 1)


def _refuse_now(size: int, dim: int, kind: type[Exception], index: Tensor, beyond: Tensor) -> None:
    if bool(beyond.any()):
        raise kind(f"index {int(index[beyond][0])} is out of bounds for dimension {dim} with size {size}")


def look_up(table: Tensor, indices: Tensor, *options: Any) -> Tensor:
    """`aten::embedding` with a second derivative also without indices or features, where torch's raises."""
    has_entries, is_sparse = table.numel() and indices.numel(), len(options) > 2 and options[2]
    if has_entries or is_sparse:
        rows: Tensor = _embedding(table, indices, *options)
        return rows
    return table.index_select(0, indices.reshape(-1)).view(*indices.shape, table.shape[1])


def rows_held(rows: range, size: int, look_up: LocalOp) -> LocalOp:
    """`look_up(table, indices)` in the `rows` of a table of `size` that this rank holds; other rows read zero."""

    def run(table: Tensor, indices: Tensor, *args: object, **kwargs: object) -> Tensor:
        refuse(indices, (indices < 0) | (indices >= size), size, 0)
        if not (rows and table.numel() and indices.numel()):  # takes part in the backward pass all the same
            return table.new_zeros((*indices.shape, table.shape[1])) + table.sum()
        is_held = (indices >= rows.start) & (indices < rows.stop)
        read: Tensor = look_up(table, torch.where(is_held, indices - rows.start, 0))
        return read.masked_fill_(~is_held.unsqueeze(-1), 0)

    return run


def reading(call: RankCall) -> LocalOp:
    """A kernel of gather and index_select, along one dim."""
    dim = call.dim() if call.shapes[0] else 0
    held = _held(call, dim)
    if held is None:
        return call.func
    size = call.shapes[0][dim]
    selects = call.func._schema.name == "aten::index_select"

    def read(x: Tensor, _: int, index: Tensor, *args: object, **kwargs: object) -> Tensor:
        index, is_held = local_index(index, held, size, dim, IndexError if selects else RuntimeError)
        if not held:
            shape = [*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]] if selects else index.shape
            return x.new_zeros(shape)
        values: Tensor = call.func(x, dim, index, *args, **kwargs)
        if selects:
            is_held = is_held.reshape(-1, *(1,) * (x.dim() - dim - 1))
        return values.masked_fill_(~is_held, 0)

    return read


def selecting(call: RankCall) -> LocalOp:
    """A kernel of select: the slice on the rank that holds the index, zeros on others."""
    dim, index = call.dim(), call.argument("index")
    held = _held(call, dim)
    if held is None:
        return call.func
    at = index % call.shapes[0][dim]
    if at in held:
        return lambda x, *_: x.select(dim, at - held.start).clone()
    return lambda x, *_: x.new_zeros([n for d, n in enumerate(x.shape) if d != dim])


def indexing(call: RankCall) -> LocalOp:
    """A kernel of x[i, j]: the elements that this rank holds, zeros for others."""
    held_indices = _split(call)
    if not held_indices:
        return call.func

    def read(x: Tensor, indices: Sequence[Tensor | None], *args: object, **kwargs: object) -> Tensor:
        mapped, is_held = _mapped(call, indices, held_indices, x.device)
        if any(not held for held in held_indices.values()):
            is_held = torch.zeros_like(is_held)
            x = x.new_zeros([max(n, 1) if d in held_indices else n for d, n in enumerate(x.shape)])
        values: Tensor = call.func(x, mapped, *args, **kwargs)
        where = [d for d, index in enumerate(indices) if index is not None]
        first = where[0] if where[-1] - where[0] == len(where) - 1 else 0
        is_held = is_held.reshape((*(1,) * first, *is_held.shape, *(1,) * (values.dim() - first - is_held.dim())))
        return values.masked_fill_(~is_held, 0)

    return read


def writing(call: RankCall) -> LocalOp:
    """A kernel of scatter, index_add, index_copy, index_fill and their like, along one dim."""
    dim = call.dim() if call.shapes[0] else 0
    held = _held(call, dim)
    if held is None:
        return _added_once(call, call.func, "i")
    size, in_place = call.shapes[0][dim], writes_first(call.func)
    kind = RuntimeError if "scatter" in call.func._schema.name else IndexError

    def write(x: Tensor, _: int, index: Tensor, *args: object, **kwargs: object) -> Tensor:
        index, is_held = local_index(index, held, size, dim, kind)
        index = torch.where(is_held, index, len(held))
        written = call.func(_with_slot(x, (dim,)), dim, index, *args, **kwargs)
        return _without_slot(written, x, in_place)

    return _added_once(call, write, "i")


def putting(call: RankCall) -> LocalOp:
    """A kernel of x[i, j] = values."""
    held_indices, of_indices = _split(call), [str(row) for row in call.strategy.rows if str(row).startswith("_")]
    if not held_indices:
        return _added_once(call, call.func, *of_indices)
    in_place = writes_first(call.func)

    def write(x: Tensor, indices: Sequence[Tensor | None], *args: object, **kwargs: object) -> Tensor:
        mapped, is_held = _mapped(call, indices, held_indices, x.device)
        mapped = [
            torch.where(is_held, index, len(held_indices[d])) if d in held_indices and index is not None else index
            for d, index in enumerate(mapped)
        ]
        written = call.func(_with_slot(x, tuple(held_indices)), mapped, *args, **kwargs)
        return _without_slot(written, x, in_place)

    return _added_once(call, write, *of_indices)


def _added_once(call: RankCall, write: LocalOp, *factors: str) -> LocalOp:
    """`write`, to zeros but on the first of the ranks that share the indices: the results of all are added."""
    if call.is_first(*factors):
        return write
    return lambda x, *args, **kwargs: write(torch.zeros_like(x), *args, **kwargs)


def _held(call: RankCall, dim: int) -> range | None:
    """The indices of `dim` of the first operand that this rank holds, or None if it holds all."""
    if not call.shapes[0] or not call.strategy.inputs[0].axes_of(dim):
        return None
    return call.held(dim)


def _split(call: RankCall) -> dict[int, range]:
    """The indexed dims that are sharded, and the indices of each that this rank holds."""
    dims = [dim for dim, index in enumerate(call.argument("indices")) if index is not None]
    held_indices = {dim: _held(call, dim) for dim in dims}
    return {dim: held for dim, held in held_indices.items() if held is not None}


def _mapped(
    call: Call, indices: Sequence[Tensor | None], held_indices: dict[int, range], device: torch.device
) -> tuple[list[Tensor | None], Tensor]:
    """The indices as positions in the local tensor, and whether all of them are held by this rank, broadcast.

    Both are on the `device` of the tensor; indices may be on the CPU, as in torch.
    """
    mapped, is_held = list(indices), torch.ones((), dtype=torch.bool, device=device)
    for dim, held in held_indices.items():
        index = indices[dim]
        assert index is not None
        mapped[dim], one = (x.to(device) for x in local_index(index, held, call.shapes[0][dim], dim))
        is_held = is_held & one
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    return mapped, is_held.expand(shape)


def _with_slot(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """`x` with one more index in each of these dims."""
    for dim in dims:
        slot = x.new_zeros([1 if d == dim else n for d, n in enumerate(x.shape)])
        x = torch.cat([x, slot], dim)
    return x


def _without_slot(result: Tensor, x: Tensor, in_place: bool) -> Tensor:
    """The result without its extra slots, cut to the shape of `x`, and written into `x` by in-place operators."""
    for dim, n in enumerate(x.shape):
        result = result.narrow(dim, 0, n)
    return x.copy_(result) if in_place else result.contiguous()
