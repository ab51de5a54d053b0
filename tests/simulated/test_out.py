"""`out=` keeps its own layout, and receives the whole result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dshard import Layout, Mesh, MixedError, Partial, Placement, Replicate, ShapeError, Shard
from dshard.ops.custom import without_out
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2,), ("tp",))
X = torch.arange(6.0).view(2, 3)


def placed(x: torch.Tensor, placement: Placement) -> Any:
    return distribute(x, Layout(MESH, (placement,)))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_out_keeps_its_layout(placement: Placement) -> None:
    with simulated(MESH):
        x, out = placed(X, Shard(0)), placed(torch.zeros(2, 3), placement)

        assert torch.add(x, x, alpha=2, out=out) is out
        assert out.placements == (placement,)
        assert whole(out).equal(X * 3)


@pytest.mark.parametrize("function", [torch.matmul, torch.mm])
def test_operands_of_a_product_have_their_places_by_name(function: Any) -> None:
    with simulated(MESH):
        x, y = placed(X, Shard(0)), placed(X.t().contiguous() + 1, Shard(1))
        second = "other" if function is torch.matmul else "mat2"

        for out in (None, placed(torch.zeros(2, 2), Replicate())):
            named = {second: y, "input": x} | ({} if out is None else {"out": out})
            assert whole(function(**named)).equal(X @ (X.t() + 1))


def test_out_of_products_and_reductions() -> None:
    with simulated(MESH):
        x, square, row = placed(X, Shard(1)), placed(torch.zeros(2, 2), Shard(0)), placed(torch.zeros(3), Shard(0))

        torch.mm(x, x.t(), out=square)
        torch.sum(x, 0, out=row)

        assert whole(square).equal(X @ X.t())
        assert whole(row).equal(X.sum(0))


def test_several_outs_are_written() -> None:
    with simulated(MESH):
        values, indices = placed(torch.zeros(3), Replicate()), placed(torch.zeros(3, dtype=torch.long), Shard(0))

        torch.max(placed(X, Shard(0)), 0, out=(values, indices))

        assert whole(values).equal(X.max(0).values)
        assert whole(indices).equal(X.max(0).indices)


def test_out_may_be_an_operand() -> None:
    with simulated(MESH):
        x = placed(X, Shard(0))
        torch.mul(x, 2, out=x)

        assert whole(x).equal(X * 2)


def test_what_does_not_fit_is_refused() -> None:
    with simulated(MESH):
        x = placed(X, Shard(0))
        with pytest.raises(ShapeError, match=r"out has shape \(3, 3\), the result \(2, 3\); .* give out that shape"):
            torch.add(x, x, out=placed(torch.zeros(3, 3), Shard(0)))
        with pytest.raises(RuntimeError, match=r"torch.float32 to out tensor with dtype torch.int64"):
            torch.add(x, x, out=placed(torch.zeros(2, 3, dtype=torch.long), Shard(0)))
        with pytest.raises(MixedError):
            torch.add(x, x, out=torch.zeros(2, 3))


def test_the_operator_without_out_takes_the_same_arguments() -> None:
    assert without_out(torch.ops.aten.add.out) == torch.ops.aten.add.Tensor
    assert without_out(torch.ops.aten.max.dim_max) == torch.ops.aten.max.dim
