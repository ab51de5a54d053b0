"""On real ranks: copies, averages, buffers and compiled calls of parameters from before `parallelize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.kept_parameters import ON_RANKS, X, build
from torch import Tensor, nn

from dshard import DTensor, init_device_mesh, parallelize
from dshard.testing import RankPool, whole

pytestmark = pytest.mark.ranks


def outcomes(name: str, plan: str) -> tuple[list[Tensor], list[Tensor]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    model = build()
    alone = ON_RANKS[name](model, lambda: None)
    model = build()
    out = ON_RANKS[name](model, lambda: parallelize(model, mesh, plan, X))
    return [whole(x).detach() if isinstance(x, DTensor) else x.detach() for x in out], [x.detach() for x in alone]


@pytest.mark.parametrize("name", ON_RANKS)
def test_parameters_from_before_are_those_of_one_device(ranks: RankPool, name: str) -> None:
    for results, alone in ranks.run(outcomes, name, "fsdp"):
        torch.testing.assert_close(results, alone)


class Referring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 5)
        self.weights = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0]) + self.layer(x)


def compiled() -> tuple[Tensor, Any]:
    mesh, x = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), torch.ones(4, 5)
    model, alone = Referring(), Referring()
    parallelize(model, mesh, "fsdp", x)
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    alone(x).sum().backward()
    return whole(model.layer.weight.grad), alone.layer.weight.grad  # type: ignore[arg-type]


@pytest.mark.thorough  # the first graph of a process takes long
def test_a_reference_in_a_compiled_model_gets_its_gradient(ranks: RankPool) -> None:
    for grad, alone in ranks.run(compiled):
        torch.testing.assert_close(grad, alone)
