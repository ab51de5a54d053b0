"""Simulation of all ranks of a mesh in one process, with the local tensors of every rank.

These are made of a global tensor, and it of them, without collectives; partials included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from types import TracebackType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dshard import comm
from dshard.comm import local_part
from dshard.core.local_checks import check_strided
from dshard.core.spec import contiguous_spec
from dshard.core.subclasses import as_plain
from dshard.errors import LayoutError, MeshError
from dshard.layout import Layout, Region, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Partial, ReduceOp
from dshard.tensor import DTensor
from dshard.torch_private import LocalTensorMode, current_mode, pop_mode, push_mode
from dshard.validate import as_int, check_type

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


@contextmanager
def simulated(ranks: int | Mesh) -> Iterator[None]:
    """Simulate `ranks` ranks, or those of a mesh, in this process: every DTensor holds the tensors of all of them.

    Meshes within the block may be pure (`dshard.Mesh`) or torch's: where torch.distributed is not initialised it is for
    the block, with a process group that sends nothing.

    >>> import torch
    >>> from dshard import Layout, Mesh, Partial, Replicate
    >>> mesh = Mesh((2, 2), ("dp", "tp"))
    >>> with simulated(mesh):
    ...     x = distribute(torch.arange(6.0), Layout(mesh, (Partial(), Replicate())))
    ...     whole(x * 2)
    tensor([ 0.,  2.,  4.,  6.,  8., 10.])

    Raises:
        MeshError: `ranks` is neither a number nor a mesh.
    """
    if not isinstance(ranks, Mesh):
        ranks = as_int(ranks, "simulated: ranks, a number or a dshard.Mesh", MeshError, least=1)
    members = frozenset(ranks.ranks if isinstance(ranks, Mesh) else range(ranks))
    with _process_group(max(members) + 1), _RanksMode(members) as mode:
        # States of the generators for each rank, put back at every operator, would undo what a checkpoint restores.
        mode._per_rank_rng_states.clear()
        yield


class _RanksMode(LocalTensorMode):
    """torch's mode of simulated ranks, but removed from the mode stack while it is disabled."""

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Disable the mode within the block."""
        is_innermost = current_mode() is self
        with super().disable():
            if is_innermost:
                pop_mode()
            try:
                yield
            finally:
                if is_innermost:
                    push_mode(self)

    def _unpatch_random_functions(self) -> None:
        """Keep torch's seed functions patched; while the mode is disabled they behave as unpatched."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        super()._unpatch_random_functions()


@contextmanager
def _process_group(world_size: int) -> Iterator[None]:
    """Provide a process group within the block: the existing one, or one that sends nothing."""
    if dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # which torch wraps once more each time
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def distribute(x: Tensor, layout: Layout, *, seed: int = 0) -> DTensor:
    """A DTensor of the value `x`, which every rank passes, in any layout, with any order of axes and partials.

    Unlike `distribute_tensor` it sends nothing. The terms of a partial are random, and reduce to `x`: exactly where `x`
    holds small whole numbers, else within rounding.

    Raises:
        LayoutError: the layout has a dim that the tensor has not, or a reduction that its dtype has not.
        ArgumentError: `x` is no tensor.
    """
    check_strided(x, "distribute", "the whole tensor")
    check_type(layout, Layout, "the layout", "give a dshard.Layout", LayoutError)
    layout.check(x.shape)
    x = comm.of_first_rank(as_plain(x))  # made within simulated(...), alike on all ranks
    with comm.plain():
        part = local_tensor_of(x, layout, seed)
    local = comm.local_of(layout, lambda at, device: part(at).to(device))
    shape = tuple(x.shape)
    device = comm.device_of_result(local, layout.mesh)
    return DTensor._wrap(local, contiguous_spec(layout, shape, x.dtype, device))


def whole(x: DTensor) -> Tensor:
    """Return the global value of `x`, joined from the local tensors of all ranks by its layout.

    Every local tensor must have the shape and dtype of its layout, and replicas must be equal to the bit. It works for
    simulated ranks, and on real ones, where all ranks of the mesh call it together.

    Raises:
        AssertionError: a local tensor does not fit the layout.
        MeshError: this rank is not in the mesh.
    """
    with comm.plain():
        return join_local_tensors(_parts(x), x.layout, tuple(x.shape), x.dtype)


def parts(x: DTensor) -> dict[int, Tensor]:
    """Return the local tensors of `x` by rank of the mesh."""
    with comm.plain():
        return {x.layout.mesh.rank(at): part for at, part in _parts(x).items()}


def _parts(x: DTensor) -> Parts:
    check_type(x, DTensor, "whole and parts", "give a DTensor; a plain tensor is whole")
    mesh, local = x.layout.mesh, x._local_tensor
    if comm.are_simulated([local]):
        return {mesh.coordinate(rank): part for rank, part in comm.by_rank(local, mesh).items()}
    runtime = comm.runtime_of(mesh)
    if runtime is None or runtime.coordinate is None:
        raise MeshError(f"the mesh ({mesh}) has no processes here: use whole within simulated(mesh), or on its ranks")
    own = runtime.coordinate, local.detach().cpu()
    return dict(sorted(comm.gather_objects(own, runtime.group(mesh.names).process_group)))
