"""Functions whose output sizes depend on values, written as indexing: masks, and sequences of several lengths.

Torch's own kernels read the values from memory, and their gradients are operators without a rule. Here the host reads
the values, or the positions where a mask is true; then every rank knows the indices of ordinary lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import numbers_of
from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import bind_arguments, call_torch


def selects(index: object) -> bool:
    """Whether an index says by truth values what it stands for, so that their number depends on values."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def is_mask(index: object) -> bool:
    """Whether an index is a mask, which stands for as many indices as it has dims."""
    if isinstance(index, list):
        return bool(index) and all(isinstance(one, bool) for one in index)
    return isinstance(index, Tensor) and selects(index) and index.dim() > 0


def index_parts(index: object) -> tuple[object, ...]:
    """The indices in `x[index]`: as torch reads it, a short list with more than numbers in it is a tuple."""
    if isinstance(index, list) and len(index) < 32 and any(map(_is_no_number, index)):
        return tuple(index)
    return index if isinstance(index, tuple) else (index,)


def _is_no_number(part: object) -> bool:
    return part is None or part is Ellipsis or isinstance(part, slice) or hasattr(part, "__len__")


def without_masks(x: Tensor, index: object) -> object:
    """An index of `x` with each mask replaced by the positions where it is true."""
    parts = index_parts(index)
    if not any(map(is_mask, parts)):
        return index
    dim, indices = 0, list[object]()
    for i, part in enumerate(parts):
        if part is Ellipsis:
            dim = x.dim() - sum(map(_indexed_dims, parts[i + 1 :]))
        elif isinstance(part, Tensor | list) and is_mask(part):
            shape = tuple(part.shape) if isinstance(part, Tensor) else (len(part),)
            selected = tuple(x.shape[dim : dim + len(shape)])
            if shape != selected:
                raise IndexError(
                    f"a mask of shape {shape} at dim {dim} of a tensor of shape {tuple(x.shape)}: "
                    f"a mask has the sizes of the dims that it selects from, {selected}"
                )
            if isinstance(part, Tensor):
                indices.extend(part.nonzero().unbind(1))
            else:
                indices.append([i for i, one in enumerate(part) if one])
            dim += len(shape)
            continue
        else:
            dim += _indexed_dims(part)
        indices.append(part)
    return tuple(indices)


def _indexed_dims(part: object) -> int:
    """The number of tensor dims that an entry of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and selects(part):
        return part.dim()
    return 1


def masked_select(func: Function, args: Args, kwargs: Kwargs) -> Tensor:
    """`torch.masked_select`: the elements of `input`, broadcast with `mask`, where `mask` is true."""
    x, mask, out = bind_arguments(("input", "mask", "out"), args, kwargs)
    if out is not None or mask.dtype != torch.bool:
        return call_torch(func, args, kwargs)  # type: ignore[no-any-return]
    shape = torch.broadcast_shapes(x.shape, mask.shape) or (1,)
    selected: Tensor = x.expand(shape)[mask.expand(shape)]
    return selected


def pack_padded_sequence(func: Function, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    """`torch._pack_padded_sequence`: the steps of sorted sequences in order of time, and the batch size at each time.

    The batch sizes are a plain tensor, as torch reads them from memory.
    """
    x, lengths, batch_first = bind_arguments(("input", "lengths", "batch_first"), args, kwargs)
    counts = numbers_of(lengths)
    steps, rows = (x.shape[1], x.shape[0]) if batch_first else (x.shape[0], x.shape[1])
    if len(counts) != rows or not counts or counts != sorted(counts, reverse=True) or not 0 < counts[-1] <= steps:
        empty = torch.empty((rows, steps) if batch_first else (steps, rows), device="cpu")
        return func(empty, torch.tensor(counts, device="cpu"), batch_first)  # type: ignore[no-any-return]  # raises torch's error
    sizes = [sum(count > step for count in counts) for step in range(counts[0])]
    with implicit_replication():
        return x[_places(sizes, batch_first, x.device)], torch.tensor(sizes, device="cpu")


def pad_packed_sequence(func: Function, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor]:
    """`torch._pad_packed_sequence`: packed sequences as one padded tensor, and their lengths."""
    names = ("data", "batch_sizes", "batch_first", "padding_value", "total_length")
    data, numbers, batch_first, padding, total = bind_arguments(names, args, kwargs)
    sizes = numbers_of(numbers)
    steps, rows = max(len(sizes), total), sizes[0]
    if 0 < total < len(sizes):
        raise ValueError(f"total_length={total} of sequences of which the longest has {len(sizes)} steps: give as many")
    shape = (rows, steps) if batch_first else (steps, rows)
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(rows)], device="cpu")
    with implicit_replication():
        padded = data.new_full((*shape, *data.shape[1:]), padding)
        return padded.index_put(_places(sizes, batch_first, data.device), data), lengths


def pad_sequence(func: Function, args: Args, kwargs: Kwargs) -> Tensor:
    """`torch.nn.utils.rnn.pad_sequence`: each sequence padded, and stacked; torch writes them to a plain tensor."""
    names = ("sequences", "batch_first", "padding_value", "padding_side")
    sequences, batch_first, padding, side = bind_arguments(names, args, kwargs)
    if side not in (None, "left", "right"):
        raise RuntimeError(f"pad_sequence(padding_side={side!r}): sequences are padded on the left or on the right")
    first, most = sequences[0], max(x.shape[0] for x in sequences)

    def padded(x: Tensor) -> Tensor:
        missing = most - x.shape[0]
        ends = (missing, 0) if side == "left" else (0, missing)
        return F.pad(x.to(first.dtype), (0, 0) * (x.dim() - 1) + ends, value=0.0 if padding is None else padding)

    return torch.stack([padded(x) for x in sequences], 0 if batch_first else 1)


def _places(sizes: Sequence[int], batch_first: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The index of each packed step in the padded tensor."""
    pairs = [(step, row) for step, size in enumerate(sizes) for row in range(size)]
    step, row = torch.tensor(pairs, device=device).unbind(1)
    return (row, step) if batch_first else (step, row)


def repeated(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`repeat_interleave` by counts in a tensor: a lookup at the repeated indices."""
    x, repeats, dim, size = bind_arguments(("input", "repeats", "dim", "output_size"), args, kwargs)
    if dim is None:
        x, dim = x.flatten(), 0
    places = torch.repeat_interleave(repeats.expand(x.shape[dim]), output_size=size)
    return x.index_select(dim, places)
