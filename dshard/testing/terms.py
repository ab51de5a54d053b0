"""From a global tensor to the local tensors of all ranks, and back, without collectives; partials included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from dshard.comm import local_part
from dshard.errors import LayoutError
from dshard.layout import Layout, Region, Shape
from dshard.mesh import Coordinate
from dshard.placements import Partial, ReduceOp

Parts: TypeAlias = dict[Coordinate, Tensor]


def local_tensor_of(x: Tensor, layout: Layout, seed: int) -> Callable[[Coordinate], Tensor]:
    """Return a function from a coordinate to its local tensor of `x`, a copy; the terms of partials are random."""
    ops, sizes = _partial_ops(layout)
    terms = split(x.detach(), ops, sizes, seed)
    return lambda at: local_part(terms[_term_index(layout, at)], layout, at)


def join_local_tensors(parts: Mapping[Coordinate, Tensor], layout: Layout, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Join local tensors into the global tensor.

    Raises:
        AssertionError: a local tensor has another shape or dtype than the layout gives it, or replicas differ.
    """
    terms: dict[int, Tensor] = {}
    replicas: dict[tuple[int, tuple[Region, ...]], tuple[Coordinate, Tensor]] = {}
    for at, part in parts.items():
        expected_shape = layout.local_shape(shape, at)
        if tuple(part.shape) != expected_shape or part.dtype != dtype:
            raise AssertionError(
                f"[{layout}] of shape {shape}: the rank at {at} holds {tuple(part.shape)} of {part.dtype}, "
                f"not {expected_shape} of {dtype}"
            )
        index, regions = _term_index(layout, at), layout.regions(shape, at)
        first, replica = replicas.setdefault((index, regions), (at, part))
        if not _same(part, replica):
            raise AssertionError(f"[{layout}]: the ranks at {first} and {at} hold different values:\n{replica}\n{part}")
        term = terms.setdefault(index, part.new_empty(shape))
        for region, within in zip(regions, layout.local_regions(shape, at), strict=True):
            term[_slices(region)] = part[_slices(within)]
    ops, sizes = _partial_ops(layout)
    return reduce([terms[i] for i in range(prod(sizes))], ops, sizes)


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(indices.start, indices.stop) for indices in region)


def _partial_ops(layout: Layout) -> tuple[list[ReduceOp], list[int]]:
    """Return the reduction and the number of ranks of each partial axis of the layout."""
    pairs = list(zip(layout.placements, layout.mesh.shape, strict=True))
    return [p.reduce_op for p, _ in pairs if isinstance(p, Partial)], [n for p, n in pairs if isinstance(p, Partial)]


def _term_index(layout: Layout, at: Coordinate) -> int:
    """Return the index of the term that the rank at coordinate `at` holds."""
    index = 0
    for axis in layout.partial_axes():
        index = index * layout.mesh.shape[axis] + at[axis]
    return index


def _same(a: Tensor, b: Tensor) -> bool:
    if a.dtype == torch.complex32:  # which torch cannot compare
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return a is b or torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def split(x: Tensor, ops: Sequence[ReduceOp], sizes: Sequence[int], seed: int) -> list[Tensor]:
    """Split `x` into random terms that `reduce` to it, one for each rank of the partial axes of these `sizes`.

    >>> terms = split(torch.tensor([1.0, 2.0, 3.0]), ["sum"], [2], seed=0)
    >>> terms[0] + terms[1]
    tensor([1., 2., 3.])
    """
    n = prod(sizes)
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    if not ops or ("avg" in ops and not exact):  # a mean of different whole numbers would be rounded axis by axis
        return [x] * n
    generator = torch.Generator().manual_seed(seed)
    owner = torch.randint(n, x.shape, generator=generator).to(x.device)
    noise = [torch.randint(1, 4, x.shape, generator=generator).to(x.device) for _ in range(n)]
    match ops[0]:
        case "sum" | "avg":
            return _addends(x, noise, owner, prod(_averaged_sizes(ops, sizes)))
        case "product":
            return _factors(x, noise, owner)
        case "max" | "min":
            return _bounds(x, noise, owner, ops[0])


def reduce(terms: Sequence[Tensor], ops: Sequence[ReduceOp], sizes: Sequence[int]) -> Tensor:
    """Reduce the terms of partial axes with these `sizes`; half precision is reduced in single."""
    if not ops:
        return terms[0]
    dtype = terms[0].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    stacked = torch.stack([term.to(torch.float32) if half else term for term in terms])
    match ops[0]:
        case "sum" | "avg":
            return _mean(stacked, prod(_averaged_sizes(ops, sizes))).to(dtype)
        case "product":
            return stacked.all(0) if dtype == torch.bool else stacked.prod(0, dtype=stacked.dtype).to(dtype)
        case "max":
            return stacked.amax(0).to(dtype)
        case "min":
            return stacked.amin(0).to(dtype)


def _mean(terms: Tensor, share: int) -> Tensor:
    """Return the sum of the terms divided by `share`."""
    if terms.dtype == torch.bool:
        return terms.any(0)
    total = terms.sum(0)
    exact = terms.dtype.is_floating_point or terms.dtype.is_complex
    return total / share if exact else torch.div(total, share, rounding_mode="floor")


def _averaged_sizes(ops: Sequence[ReduceOp], sizes: Sequence[int]) -> list[int]:
    return [size for op, size in zip(ops, sizes, strict=True) if op == "avg"]


def _addends(x: Tensor, noise: Sequence[Tensor], owner: Tensor, share: int) -> list[Tensor]:
    """Random terms that add up to `share` times `x`: whole numbers, and the rest on the owner of each element."""
    if x.dtype == torch.bool:
        return [x & ((owner == i) | (some == 1)) for i, some in enumerate(noise)]
    others = [((owner != i) * (some - 2)).to(x.dtype) for i, some in enumerate(noise)]
    missing = x * share - sum(others)
    return [torch.where(owner == i, missing, other) for i, other in enumerate(others)]


def _factors(x: Tensor, noise: Sequence[Tensor], owner: Tensor) -> list[Tensor]:
    """Random factors whose product is `x`: signs or powers of two, and the rest on the owner of each element."""
    if x.dtype == torch.bool:
        return [x | ((owner != i) & (some == 1)) for i, some in enumerate(noise)]
    exact = x.dtype.is_floating_point or x.dtype.is_complex
    table = torch.tensor([1, -1, 2, -0.5] if exact else [1, -1, -1, 1], device=x.device).to(x.dtype)
    others = [torch.where(owner != i, table[some], table[0]) for i, some in enumerate(noise)]
    product = torch.stack(others).prod(0).to(x.dtype)
    missing = x / product if exact else x * product
    return [torch.where(owner == i, missing, other) for i, other in enumerate(others)]


def _bounds(x: Tensor, noise: Sequence[Tensor], owner: Tensor, op: ReduceOp) -> list[Tensor]:
    """Random terms whose max or min is `x`: the value on its owner, values that do not exceed it elsewhere."""
    if x.dtype.is_complex:
        raise LayoutError(f"a partial {op} of {x.dtype}: complex numbers have no order; use sum, avg or product")
    if x.dtype == torch.bool:
        return _addends(x, noise, owner, 1) if op == "max" else _factors(x, noise, owner)
    sign, better = (-1, torch.minimum) if op == "max" else (1, torch.maximum)
    noisy = [(x + (sign * some).to(x.dtype)).to(x.dtype) for some in noise]
    return [torch.where(owner == i, x, better(x, worse)) for i, worse in enumerate(noisy)]  # an overflow wraps
