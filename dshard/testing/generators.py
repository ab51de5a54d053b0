"""Hypothesis strategies for property tests: meshes, shapes, layouts of every kind, DTensors.

    @given(redistributions())
    def test_a_plan_ends_where_it_should(case):
        src, dst, shape = case
        ...

Sizes do not divide, dims and shards may be empty, axes may have one rank, several axes may shard one dim in any order.
Examples shrink to the simplest case: one axis, one rank, replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from dshard.errors import ShapeError
from dshard.layout import DimOrder, Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, ReduceOp, Replicate, Shard
from dshard.tensor import DTensor
from dshard.testing.simulated_ranks import distribute, simulated
from dshard.validate import as_int, as_shape, check_type

AXIS_NAMES = ("dp", "tp", "pp", "x", "y", "z")
Redistribution: TypeAlias = tuple[Layout, Layout, Shape]
"""A source layout, a destination layout on the same mesh, and the shape of the tensor."""


@st.composite
def meshes(
    draw: DrawFn,
    *,
    min_axes: int = 1,
    max_axes: int = 3,
    max_size: int = 4,
    max_ranks: int = 64,
    permuted: bool = True,
) -> Mesh:
    """Meshes of named axes, each of 1 to `max_size` ranks; `permuted` ones may have their ranks in any order."""
    sizes = st.lists(st.integers(1, max_size), min_size=min_axes, max_size=max_axes)
    shape = tuple(draw(sizes.filter(lambda candidate: prod(candidate) <= max_ranks)))
    names = draw(st.permutations(AXIS_NAMES)) if len(shape) <= len(AXIS_NAMES) else ()
    ranks = draw(st.permutations(range(prod(shape)))) if permuted and draw(st.booleans()) else ()
    return Mesh(shape, tuple(names[: len(shape)]), tuple(ranks))


def shapes(*, min_dims: int = 0, max_dims: int = 4, max_size: int = 7) -> SearchStrategy[Shape]:
    """Shapes of `min_dims` to `max_dims` dims of sizes 0 to `max_size`."""
    return st.lists(st.integers(0, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


def placements(ndim: int, *, partial: Sequence[ReduceOp] = ("sum",)) -> SearchStrategy[Placement]:
    """Placements that a tensor of `ndim` dims can have on one mesh axis; `partial` are the reductions to include."""
    as_int(ndim, "ndim", ShapeError, least=0)
    choices: list[Placement] = [Replicate(), *map(Shard, range(ndim)), *map(Partial, partial)]
    return st.sampled_from(choices)


@st.composite
def layouts(draw: DrawFn, mesh: Mesh, ndim: int, *, partial: Sequence[ReduceOp] = ("sum",)) -> Layout:
    """Layouts on `mesh` of a tensor of `ndim` dims: nested shards in any order, at most one `partial` reduction."""
    op = draw(st.sampled_from(partial)) if partial else None
    choice = placements(ndim, partial=() if op is None else (op,))
    chosen = tuple(draw(choice) for _ in mesh.shape)
    orders: list[DimOrder] = []
    for dim in range(ndim):
        axes = [axis for axis, placement in enumerate(chosen) if placement == Shard(dim)]
        if len(axes) > 1:
            orders.append((dim, tuple(draw(st.permutations(axes)))))
    return Layout(mesh, chosen, tuple(orders))


@st.composite
def redistributions(
    draw: DrawFn,
    mesh: SearchStrategy[Mesh] | None = None,
    shape: SearchStrategy[Shape] | None = None,
    *,
    partial: Sequence[ReduceOp] = ("sum",),
) -> Redistribution:
    """Two layouts on one mesh, and a shape that both can have; by default any of `meshes()` and `shapes()`.

    Partial placements in both layouts have the same reduction.
    """
    where = draw(meshes() if mesh is None else mesh)
    size = draw(shapes() if shape is None else shape)
    one: list[tuple[ReduceOp, ...]] = [(op,) for op in partial]
    op = draw(st.sampled_from(one or [()]))
    src, dst = (draw(layouts(where, len(size), partial=op)) for _ in range(2))
    return src, dst, size


@st.composite
def dtensors(
    draw: DrawFn,
    mesh: SearchStrategy[Mesh] | None = None,
    shape: SearchStrategy[Shape] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    partial: Sequence[ReduceOp] = ("sum",),
) -> DTensor:
    """DTensors of small whole numbers, all ranks of whose mesh are simulated in this process.

    Use them within `simulated(x.layout.mesh)`; `whole(x)` is the value on one device.
    """
    where = draw(meshes() if mesh is None else mesh)
    size = draw(shapes() if shape is None else shape)
    layout = draw(layouts(where, len(size), partial=partial))
    seed = draw(st.integers(0, 2**16))
    with simulated(where):
        return distribute(whole_numbers(size, dtype, seed), layout, seed=seed)


def whole_numbers(shape: Sequence[int], dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A random tensor of small whole numbers, whose sums and products are exact in every dtype; fixed by its seed.

    >>> whole_numbers((2, 3), torch.int8).dtype
    torch.int8

    Raises:
        ShapeError: the shape has values that are no sizes.
    """
    shape = as_shape(shape, "shape", ShapeError)
    check_type(dtype, torch.dtype, "dtype", "give one of torch's, such as torch.float64")
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    low = -4 if dtype.is_signed else 0
    numbers = torch.randint(low, 5, tuple(shape), generator=generator).to(dtype)
    if dtype.is_complex:
        numbers += 1j * torch.randint(low, 5, tuple(shape), generator=generator)
    return numbers
