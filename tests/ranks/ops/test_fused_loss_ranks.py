"""A chunked cross entropy on real ranks: the values and gradients of one device, and the planned bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.looking_soon import looking_soon
from torch import Tensor, nn

import dshard
from dshard import Layout, RankError, init_device_mesh, linear_cross_entropy
from dshard.comm import bind
from dshard.core.observe import Decision, observing
from dshard.layout import parse_layout
from dshard.testing import RankPool, count_traffic, distribute, whole

pytestmark = pytest.mark.ranks
LAYOUTS = [
    ("a:S(0) b:S(0)", "a:R b:R", "a:S(0) b:S(0)"),
    ("a:S(1) b:R", "a:S(0) b:S(0)", "a:R b:R"),
    ("a:S(0) b:R", "a:R b:S(0)", "a:S(0) b:R"),
    ("a:S(1) b:S(1)", "a:S(1) b:S(1)", "a:R b:S(0)"),
    ("a:P(sum) b:S(0)", "a:S(1) b:S(0)", "a:R b:R"),
]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 6, dtype=torch.float64, generator=generator)
    weight = torch.randn(11, 6, dtype=torch.float64, generator=generator)
    return x, weight, torch.arange(13) % 11


def wrong_layouts(reduction: str, call: Callable[..., Any]) -> list[str]:
    """The layouts in which this rank has other values, or receives other bytes, than are planned."""
    mesh, wrong = bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))), []
    x, weight, target = operands()
    alone = [t.clone().requires_grad_() for t in (x, weight)]
    expected = F.cross_entropy(F.linear(*alone), target, reduction=reduction, ignore_index=3)
    expected.sum().backward()
    for texts in LAYOUTS:
        of_x, of_weight, of_target = (parse_layout(text, mesh) for text in texts)
        laid: list[Any] = [distribute(x, of_x), distribute(weight, of_weight), distribute(target, of_target)]
        laid[:2] = [t.requires_grad_() for t in laid[:2]]
        decisions: list[Decision] = []
        with observing(decisions.append), count_traffic() as traffic:
            loss = call(*laid, reduction=reduction, ignore_index=3, rows=2)
        planned = sum(each.nbytes for each in decisions[0].collectives())
        loss.sum().backward()
        pairs = [(loss.detach(), expected.detach()), *((a.grad, b.grad) for a, b in zip(laid, alone, strict=False))]
        values = all(torch.allclose(whole(a), b, rtol=1e-12, atol=1e-12) for a, b in pairs)  # type: ignore[arg-type]
        if not values or traffic.nbytes > planned:
            wrong.append(f"{texts}: values {values}, {traffic.nbytes} bytes of {planned}")
    return wrong


@pytest.mark.parametrize("reduction", one_in(2, ["mean", "none"]))
def test_the_loss_is_that_of_one_device(ranks: RankPool, reduction: str) -> None:
    assert ranks.run(wrong_layouts, reduction, linear_cross_entropy) == [[]] * 4


@looking_soon()
def with_a_wrong_target() -> float:
    """The loss where rank 2 has a target that is no class."""
    mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    x, weight, target = (distribute(t, Layout(mesh, (dshard.Shard(0),))) for t in operands())
    if torch.distributed.get_rank() == 2:
        target.to_local()[0] = 11
    return float(linear_cross_entropy(x, weight, target).item())


def test_a_target_that_is_no_class_on_one_rank_ends_all(ranks: RankPool) -> None:
    with pytest.raises(
        RankError, match="rank 2 raised IndexError: index 11 is out of bounds for dimension 1 with size 11"
    ):
        ranks.run(with_a_wrong_target)


def compiled_loss(*tensors: Tensor) -> Any:
    return linear_cross_entropy(*tensors, rows=4)


def compiled_is_eager() -> bool:
    mesh = bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    results = []
    for function in (compiled_loss, torch.compile(compiled_loss, fullgraph=True, backend="aot_eager")):
        x, weight, target = (distribute(t, parse_layout("a:S(0) b:R", mesh)) for t in operands())
        loss = function(x.requires_grad_(), weight.requires_grad_(), target)
        loss.backward()
        results.append([whole(loss.detach()), whole(x.grad), whole(weight.grad)])  # type: ignore[arg-type]
    return all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*results, strict=True))


@pytest.mark.thorough
def test_a_compiled_loss_is_the_eager_one(ranks: RankPool) -> None:
    assert ranks.run(compiled_is_eager) == [True] * 4


class Labeller(nn.Module):
    """A model that computes its loss itself, of its head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 12), nn.Linear(12, 10, bias=False)

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return linear_cross_entropy(self.up(x).relu(), self.head.weight, target)


def wrong_steps(strategy: str) -> list[str]:
    """The steps of a parallelized model after which this rank has other parameters than one device."""
    torch.manual_seed(0)
    model, wrong = Labeller().double(), []
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = [(torch.randn(8, 8, dtype=torch.float64), torch.randint(10, (8,))) for _ in range(6)]
    dshard.parallelize(model, mesh, strategy, *batches[0])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for i, (x, target) in enumerate(batches):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            optimizer.zero_grad()
            each(x, target).backward()
            optimizer.step()
        pairs = zip(model.parameters(), alone.parameters(), strict=True)
        if not all(torch.allclose(whole(a), b, rtol=1e-12, atol=1e-12) for a, b in pairs):  # type: ignore[arg-type]
            wrong.append(f"{i}: {model.rehearsed}")
    return wrong


@pytest.mark.parametrize("strategy", one_in(3, ["fsdp x megatron", "data x megatron", "fsdp x data"]))
def test_steps_of_models_that_compute_their_loss(ranks: RankPool, strategy: str) -> None:
    """From the third step on what autograd and dshard do is answered from a record."""
    assert ranks.run(wrong_steps, strategy) == [[]] * 4
