"""Grouped matmuls, such as those of experts: values and gradients of one device in all layouts, and without data."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Partial, Replicate, ShapeError, Shard, trace
from dshard.layout import replicated
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2, 2), ("a", "b"))
OFFS = torch.tensor([2, 2, 5, 8], dtype=torch.int32)
SHAPES = {
    "rows": ((8, 12), (4, 12, 20)),
    "columns": ((4, 12, 20), (20, 8)),
    "sums": ((12, 8), (8, 20)),
    "batches": ((4, 8, 12), (4, 12, 20)),
}


def grouped(a: Tensor, b: Tensor, offs: Tensor | None) -> Tensor:
    return F.grouped_mm(a, b, offs=offs)


@pytest.mark.parametrize("form", SHAPES)
def test_a_grouped_matmul_equals_one_device_in_all_layouts(form: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(shape) for shape in SHAPES[form])
    offs = None if form == "batches" else OFFS
    expected = [t.requires_grad_() for t in (a, b)]
    out = grouped(*expected, offs)
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    with simulated(MESH):
        for dims in product((0, a.ndim - 1), (0, b.ndim - 1)):
            x, y = (
                distribute(t.detach(), Layout(MESH, (Replicate(), Shard(dim)))).requires_grad_()
                for t, dim in zip((a, b), dims, strict=True)
            )
            z = grouped(x, y, None if offs is None else distribute(offs, replicated(MESH)))
            torch.testing.assert_close(whole(z.detach()), out.detach(), rtol=1e-5, atol=1e-5)
            (z * distribute(weights, replicated(MESH))).sum().backward()
            for mine, theirs in zip((x, y), expected, strict=True):
                torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_grouped_matmul_without_data_takes_every_dtype(dtype: torch.dtype) -> None:
    x, w = (torch.empty(shape, dtype=dtype, device="meta") for shape in SHAPES["rows"])
    offs = torch.empty(4, dtype=torch.int32, device="meta")
    layouts = ((Replicate(), Replicate()), (Replicate(), Shard(2)), (Replicate(), Replicate()))
    out = grouped(
        *(DTensor.from_local(*_local(t, p), shape=t.shape) for t, p in zip((x, w, offs), layouts, strict=True))
    )

    assert out.shape == (8, 20)
    assert out.dtype == dtype
    assert out.placements == (Replicate(), Shard(1))


def _local(t: Tensor, placements: tuple[Replicate | Shard, ...]) -> tuple[Tensor, Mesh, tuple[Replicate | Shard, ...]]:
    shape = Layout(MESH, placements).local_shape(tuple(t.shape), (0, 0))
    return torch.empty(shape, dtype=t.dtype, device="meta"), MESH, placements


@pytest.mark.parametrize("ranks", [2, 3, 5, 12])
@pytest.mark.parametrize("form", ["rows", "columns", "sums"])
@pytest.mark.parametrize("ends", [(2, 2, 5, 8), (0, 0, 0, 8), (8, 8, 8, 8), (1, 3, 4, 8)])
def test_ranks_that_share_the_tokens_compute_their_part_of_each_group(
    form: str, ranks: int, ends: tuple[int, ...]
) -> None:
    """Whole numbers, so that equal is equal; uneven and empty shards, empty groups."""
    torch.manual_seed(0)
    mesh, offs = Mesh((ranks,), ("x",)), torch.tensor(ends, dtype=torch.int32)
    a, b = (torch.randint(-4, 5, shape).float() for shape in SHAPES[form])
    dims = {"rows": (0, None), "columns": (None, 1), "sums": (1, 0)}[form]
    expected = [t.clone().requires_grad_() for t in (a, b)]
    out = grouped(*expected, offs)
    incoming = torch.randint(-4, 5, out.shape).float()
    out.backward(incoming)
    with simulated(mesh):
        x, y = (
            distribute(t, Layout(mesh, (Replicate() if dim is None else Shard(dim),))).requires_grad_()
            for t, dim in zip((a, b), dims, strict=True)
        )
        with trace() as sent:
            z = grouped(x, y, distribute(offs, replicated(mesh)))
            z.backward(distribute(incoming, z.layout.cotangent()))
        assert (
            ranks > 8 or z.placements == {"rows": (Shard(0),), "columns": (Shard(1),), "sums": (Partial("sum"),)}[form]
        )
        if ranks == 2:  # else others are as cheap for so little data
            assert [event.collective for event in sent.events] == ([] if form == "sums" else ["all_reduce"])
        torch.testing.assert_close(whole(z.detach()), out.detach(), rtol=0, atol=0)
        for mine, theirs in zip((x, y), expected, strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=0, atol=0)


@pytest.mark.parametrize("shapes", [((8,), (4, 12, 20)), ((4, 4), (4, 4)), ((8, 12), (4, 12, 20))], ids=str)
def test_operands_that_make_no_groups_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with simulated(MESH):
        a, b = (distribute(torch.ones(shape), replicated(MESH)) for shape in shapes)
        with pytest.raises(ShapeError, match="without offs: give operands of 2 or 3 dims, and offs"):
            grouped(a, b, None)
