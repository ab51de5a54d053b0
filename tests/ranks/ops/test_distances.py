"""Distances between rows: what is sent for split rows and features; values, gradients and refusals on real ranks."""

from __future__ import annotations

from itertools import product
from math import inf
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from torch import Tensor

import dshard
from dshard import Layout, Mesh, Partial, Placement, Replicate, Shard, trace
from dshard.comm import bind
from dshard.testing import RankPool, distribute, simulated, whole

POWERS = (0.0, 1.0, 1.5, 2.0, inf)
PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())


def operands(n: int, m: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(n, m, generator=generator), torch.randn(n + 2, m, generator=generator)
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


@pytest.mark.parametrize("p", one_in(3, POWERS))
@pytest.mark.parametrize(
    ("first", "second", "forward", "backward"),
    [
        (Shard(0), Replicate(), [], []),
        (Replicate(), Shard(0), [], ["all_reduce"]),
        (Shard(1), Shard(1), ["all_reduce"], []),
        (Shard(1), Replicate(), ["all_reduce"], []),
    ],
)
def test_no_operand_is_gathered(
    p: float, first: Placement, second: Placement, forward: list[str], backward: list[str]
) -> None:
    mesh = Mesh((4,), ("x",))
    with simulated(mesh), trace() as sent:
        x, y = (
            distribute(z.detach(), Layout(mesh, (at,))).requires_grad_()
            for z, at in zip(operands(9, 1 << 16), (first, second), strict=True)
        )
        distances = torch.cdist(x, y, p)
        count = len(sent.events)
        torch.autograd.grad(distances.sum(), x)
    kinds = [event.collective for event in sent.events if event.op != "number"]
    assert kinds[:count] == forward
    assert (p == inf and first == Shard(1)) or kinds[count:] == backward


def gradients(x: Any, y: Any, p: float) -> list[Any]:
    distances = torch.cdist(x, y, p)
    return [distances, *torch.autograd.grad((distances * distances).sum(), (x, y))]


def wrong_on_ranks(shape: tuple[int, ...]) -> list[str]:
    mesh = bind(dshard.init_device_mesh("cpu", shape))
    wrong = []
    choices: list[tuple[Placement, ...]] = list(product(PLACEMENTS, repeat=len(shape)))
    for i, (n, p) in enumerate(product((2, 6), POWERS)):
        right = gradients(*operands(n, 3), p)
        for step in (1, 5):
            at = choices[(i * step) % len(choices)], choices[(i * step + 3) % len(choices)]
            given = [distribute(z.detach(), Layout(mesh, each)) for z, each in zip(operands(n, 3), at, strict=True)]
            for _ in range(2):  # cold and warm
                x, y = (z.detach().requires_grad_() for z in given)
                found = map(whole, gradients(x, y, p))
                if not all(torch.allclose(a, b) for a, b in zip(found, right, strict=True)):
                    wrong.append(f"p={p}, {n} rows, {at}")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("shape", [(4,), pytest.param((2, 2), marks=pytest.mark.thorough)])
def test_values_and_gradients_on_real_ranks_with_few_rows(ranks: RankPool, shape: tuple[int, ...]) -> None:
    assert ranks.run(wrong_on_ranks, shape) == [[]] * 4


def errors_in_half_precision() -> list[str]:
    mesh, errors = bind(dshard.init_device_mesh("cpu", (4,))), []
    for at in (Shard(0), Shard(1)):
        x, y = (distribute(z.detach(), Layout(mesh, (at,))) for z in operands(3, 3, torch.bfloat16))
        try:
            torch.cdist(x, y, 1.0)
        except NotImplementedError as error:
            errors.append(str(error))
    return errors


@pytest.mark.ranks
def test_a_dtype_that_torch_refuses_is_refused_by_ranks_without_rows_too(ranks: RankPool) -> None:
    x, y = operands(3, 3, torch.bfloat16)
    with pytest.raises(NotImplementedError) as refused:
        torch.cdist(x, y, 1.0)

    assert ranks.run(errors_in_half_precision) == [[str(refused.value)] * 2] * 4
