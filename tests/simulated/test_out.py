"""`out=` keeps its own layout, and receives the whole result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dshard import Layout, Mesh, MixedError, Partial, Placement, Replicate, ShapeError, Shard, parallelize
from dshard.core.trees import leaves
from dshard.ops.custom import without_out
from dshard.parallel.strategies import StrategyName
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


SQUARE = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 2.0], [0.5, 2.0, 5.0]])
COMPOSED: dict[str, Callable[..., Any]] = {
    "determinant": torch.linalg.det,
    "sign and logarithm": torch.linalg.slogdet,
    "inverse": torch.linalg.inv,
    "solution": lambda x, **out: torch.linalg.solve(x, x * 2 + 1, **out),
    "factors": torch.linalg.lu_factor,
    "rank": torch.linalg.matrix_rank,
    "product": lambda x, **out: torch.kron(x, x, **out),
    "sorted rows": torch.msort,
    "logarithm": torch.nn.functional.logsigmoid,
    "elements": lambda x, **out: torch.masked_select(x, x > 1, **out),
    "row of parts": lambda x, **out: torch.split_with_sizes_copy(x, [1, 2], **out),
}


@pytest.mark.parametrize("name", COMPOSED)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_what_torch_composes_of_operators_is_written(name: str, placement: Placement) -> None:
    expected = COMPOSED[name](SQUARE)
    with simulated(MESH):
        x = placed(SQUARE, Shard(0))
        outs = [placed(torch.full_like(each, 7), placement if each.dim() else Replicate()) for each in leaves(expected)]

        COMPOSED[name](x, out=outs[0] if isinstance(expected, torch.Tensor) else outs)

        for out, each in zip(outs, leaves(expected), strict=True):
            torch.testing.assert_close(whole(out), each)


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
        with pytest.raises(ShapeError, match=r"linalg_inv: out has shape \(3,\), the result \(2, 2\)"):
            torch.linalg.inv(placed(X[:, :2], Shard(0)), out=placed(torch.zeros(3), Shard(0)))
        with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
            torch.linalg.inv(placed(X[:, :2], Shard(0)).requires_grad_(), out=placed(torch.zeros(2, 2), Shard(0)))
        with pytest.raises(RuntimeError, match="BoolTensor"):
            torch.masked_select(x, placed(X, Shard(0)))


def test_the_operator_without_out_takes_the_same_arguments() -> None:
    assert without_out(torch.ops.aten.add.out) == torch.ops.aten.add.Tensor
    assert without_out(torch.ops.aten.max.dim_max) == torch.ops.aten.max.dim


class IntoOut(nn.Module):
    """A linear layer beside statistics of its result, which torch writes into tensors that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            sums, total = h.new_zeros(len(h) + 1, 4), h.new_empty(4)
            torch.cumsum(h, 0, out=sums[1:])
            torch.sum(h, 0, out=total)
            square = torch.mm(h, h.mT, out=h.new_empty(len(h), len(h)))
        return h * sums[1:] * total + square.sum()


@pytest.mark.parametrize("strategy", ["data", "megatron"])
def test_a_model_that_writes_into_out_is_planned(strategy: StrategyName) -> None:
    torch.manual_seed(0)
    mesh, alone, x = Mesh((2,), ("x",)), IntoOut(), torch.randn(4, 3)
    expected = alone(x)
    with simulated(mesh):
        found = parallelize(copy.deepcopy(alone), mesh, strategy, x)(x)

        torch.testing.assert_close(whole(found), expected)
