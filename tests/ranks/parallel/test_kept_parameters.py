"""On real ranks: copies, averages, buffers and compiled calls of parameters from before `parallelize`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.kept_parameters import ON_RANKS, X, build
from torch import Tensor, nn

from dshard import DTensor, init_device_mesh, parallelize
from dshard.parallel import Precision
from dshard.testing import RankPool, whole

pytestmark = pytest.mark.ranks


def outcomes(name: str, plan: str) -> tuple[list[Tensor], list[Tensor]]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    model = build()
    alone = ON_RANKS[name](model, lambda: None)
    model = build()
    out = ON_RANKS[name](model, lambda: parallelize(model, mesh, plan, X))
    return [whole(x).detach() if isinstance(x, DTensor) else x.detach() for x in out], [x.detach() for x in alone]


@pytest.mark.parametrize("name", one_in(3, ON_RANKS))
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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.table(tokens))))  # type: ignore[no-any-return]


def assigned(plan: str) -> tuple[list[Any], list[Any], list[int]]:
    """Gradients of a model whose weights were assigned, and alone; the numbers of elements that this rank holds."""
    mesh, tokens = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), torch.arange(8).view(2, 4)
    torch.manual_seed(0)
    source, model = Tied(), Tied()
    parallelize(model, mesh, plan, tokens, precision=Precision(reduce_dtype=torch.float64))
    model.load_state_dict(source.state_dict(), assign=True)
    assert model.head.weight is model.table.weight
    for each in (model, source):
        each(tokens).square().sum().backward()
    held = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
    return [whole(p.grad) for p in model.parameters()], [p.grad for p in source.parameters()], held  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["fsdp", "megatron"])
def test_assigned_weights_are_laid_out_as_those_before(ranks: RankPool, plan: str) -> None:
    for grads, alone, held in ranks.run(assigned, plan):
        torch.testing.assert_close(grads, alone)
        assert len(held) == 3
        assert held[0] <= 9 * 6 // 2


def assigned_apart() -> str:
    mesh, x = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), torch.ones(4, 5)
    model = parallelize(nn.Linear(5, 7), mesh, "fsdp", x)
    rank = torch.distributed.get_rank()
    with pytest.raises(RuntimeError) as raised:
        model.load_state_dict({"weight": torch.full((7, 5), float(rank)), "bias": torch.zeros(7)}, assign=True)
    return str(raised.value)


def test_assigned_weights_that_differ_between_ranks_are_refused(ranks: RankPool) -> None:
    assert all("have other values" in message for message in ranks.run(assigned_apart))
