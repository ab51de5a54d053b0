"""Operators on complex numbers whose kernels conjugate what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dshard import Layout, Mesh, Placement, Replicate, Shard
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2,), ("x",))
GENERATOR = torch.Generator().manual_seed(0)
X, Y = (torch.randn(3, 4, 4, dtype=torch.complex128, generator=GENERATOR) for _ in range(2))
PROGRAMS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "pseudo-inverse": lambda x, y: torch.linalg.pinv(x),
    "pseudo-inverse of one": lambda x, y: torch.linalg.pinv(x[0]),
    "residuals": lambda x, y: torch.linalg.lstsq(x[..., :2], y, driver="gels").residuals,
    "solution from the right": lambda x, y: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), y, left=False),
    "adjoint product": lambda x, y: x.mH @ y.conj(),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("placement", [Shard(0), Shard(2), Replicate()])
def test_values_and_gradients_are_those_of_one_device(name: str, placement: Placement) -> None:
    expected = value_and_gradients(PROGRAMS[name], X, Y)
    with simulated(MESH):
        layout = Layout(MESH, (placement,))
        got = value_and_gradients(PROGRAMS[name], distribute(X, layout), distribute(Y, layout))

        for value, of_one_device in zip(got, expected, strict=True):
            torch.testing.assert_close(whole(value), of_one_device)


def value_and_gradients(program: Callable[[Any, Any], torch.Tensor], x: Any, y: Any) -> list[torch.Tensor]:
    x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    out = program(x, y)
    loss = (out.abs() ** 2).sum() + (out.real * 0.3).sum()
    gradients = torch.autograd.grad(loss, (x, y), allow_unused=True)
    return [out.detach(), *(each for each in gradients if each is not None)]
