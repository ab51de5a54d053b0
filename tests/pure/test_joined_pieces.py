"""Several tensors in one flat buffer: each element in its place, by few operators, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dshard.comm.pieces import JoinedPieces, view_of
from dshard.comm.workspace import Session
from dshard.layout import Region, Shape
from dshard.placements import chunk

DTYPES = (torch.float64, torch.bfloat16)


def chunks(shape: Shape, dim: int, n: int) -> list[Region]:
    """The regions of `n` ranks that split a tensor along a dim."""
    return [tuple(chunk(size, n, i) if d == dim else range(size) for d, size in enumerate(shape)) for i in range(n)]


def quarters(shape: Shape, n: int) -> list[Region]:
    """Regions that divide a tensor along no one dim: the quarters of it, for the last four of `n` ranks."""
    rows, columns, whole = range(shape[0]), range(shape[-1]), [range(size) for size in shape[1:-1]]
    cut = [[chunk(len(each), 2, i) for i in (0, 1)] for each in (rows, columns)]
    return [(range(0),) * len(shape)] * (n - 4) + [(r, *whole, c) for c in cut[1] for r in cut[0]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[Region]], list[Shape], list[Tensor], torch.dtype]:
    """Regions, shapes and tensors, some of them not contiguous or of another dtype than the buffer's."""
    n, even = draw(st.integers(1, 5)), draw(st.booleans())
    regions, tensors = [], []
    for _ in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 7), min_size=draw(st.integers(0, 1)) if n == 1 else 1, max_size=3)))
        if even:
            shape = tuple(n * size for size in shape) or shape
        dim = draw(st.integers(0, max(0, len(shape) - 1))) if n > 1 else -1
        is_cut = len(shape) < 2 or n < 4 or draw(st.integers(0, 3)) > 0
        regions.append(chunks(shape, dim, n) if is_cut else quarters(shape, n))
        x = torch.randn(shape[::-1]).to(draw(st.sampled_from(DTYPES if draw(st.booleans()) else DTYPES[:1])))
        tensors.append(x.permute(tuple(reversed(range(x.dim())))) if draw(st.booleans()) else x.reshape(shape))
    return regions, [tuple(x.shape) for x in tensors], tensors, torch.float64


def one_by_one(regions: Sequence[Sequence[Region]], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The buffer, made piece by piece."""
    pieces = [view_of(x, r) for of_rank in zip(*regions, strict=True) for x, r in zip(tensors, of_rank, strict=True)]
    return torch.cat([piece.to(dtype).reshape(-1) for piece in pieces])


@given(cases())
def test_a_buffer_has_each_piece_in_its_place(case: Any):
    check(*case)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("rows", [8, 7, 3])
@pytest.mark.parametrize("dims", [(0, 0, 0), (1, 0, 1), (1, 1, 1)])
def test_so_have_those_of_several_matrices(n: int, rows: int, dims: tuple[int, ...]):
    shapes = [(rows, 2, 3) if dim == 0 else (5, rows, 2) for dim in dims]
    regions = [chunks(shape, dim if n > 1 else -1, n) for shape, dim in zip(shapes, dims, strict=True)]
    for dtype in DTYPES:
        check(regions, shapes, [torch.randn(shape, dtype=torch.float64) for shape in shapes], dtype)


def check(regions: list[list[Region]], shapes: list[Shape], tensors: list[Tensor], dtype: torch.dtype) -> None:
    pieces = JoinedPieces(regions, shapes, dtype)

    flat = pieces.pack(list(tensors), Session())

    assert flat.dtype is dtype
    assert flat.is_contiguous()
    assert flat.equal(one_by_one(regions, tensors, dtype))
    assert sum(pieces.sizes) == len(flat)
    for x, out, of_tensor in zip(tensors, pieces.unpack(flat, Session()), regions, strict=True):
        assert out.shape == x.shape
        assert out.is_contiguous()
        assert not out._is_view()
        for region in of_tensor:
            assert view_of(out, region).equal(view_of(x, region).to(dtype))


class Operators(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators(shape: Shape, dim: int, n: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """The operators that pack so many tensors for `n` ranks, and that unpack them."""
    pieces = JoinedPieces([chunks(shape, dim, n)] * count, [shape] * count, dtype)
    tensors = [torch.randn(shape) for _ in range(count)]
    with Operators() as pack:
        flat = pieces.pack(list(tensors), Session())
    with Operators() as unpack:
        pieces.unpack(flat, Session())
    return len(pack.names), len(unpack.names)


@pytest.mark.parametrize("n", [2, 8])
class TestFewOperators:
    """At most so many for each tensor, and some for all of them, as many for two ranks as for eight."""

    def test_to_pack_rows(self, n: int):
        assert operators((16, 3), 0, n, 10)[0] == 2

    def test_to_unpack_rows(self, n: int):
        assert operators((16, 3), 0, n, 10)[1] <= 2 * 10 + 2

    def test_of_columns(self, n: int):
        pack, unpack = operators((3, 16), 1, n, 10)
        assert pack <= 3 * 10 + 4
        assert unpack <= 4 * 10 + 3

    def test_in_another_dtype(self, n: int):
        assert operators((16, 3), 0, n, 10, torch.bfloat16)[0] <= 2 * 10 + 4

    def test_of_uneven_rows(self, n: int):
        pack, unpack = operators((15, 3), 0, n, 10)
        assert pack <= 2 * 10 + 3
        assert unpack <= 3 * 10 + 2
