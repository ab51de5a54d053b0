"""Models of Hugging Face whose sequences are split train as on one device: losses, all gradients, and further steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.real_models import BATCH, TOKENS, InDouble, batch_of, build
from torch import Tensor, nn

import dshard
from dshard import Mesh, Shard
from dshard.comm import plain
from dshard.parallel import parallelize, plan_model
from dshard.testing import RankPool, simulated, whole

FAMILIES = ("llama", "qwen3", "gemma2", "gpt2", "vit", "whisper")
MESHES = {
    "context": Mesh((2, 2), ("dp", "cp")),
    "ulysses": Mesh((3,), ("cp",)),  # four heads, and eight or five tokens
    "ulysses x context": Mesh((2, 2), ("u", "c")),
    "context x megatron": Mesh((2, 2), ("cp", "tp")),
    "fsdp x ulysses x megatron-sp": Mesh((2, 2, 2), ("dp", "cp", "tp")),
}
CASES = [(family, strategy) for family in FAMILIES for strategy in MESHES]
SAMPLE = [("whisper", "context")]
ON_FOUR = [(family, strategy) for family, strategy in CASES if MESHES[strategy].size == 4]


@plain()
def labelled(family: str, seed: int = 1) -> dict[str, Tensor]:
    """A batch with labels, some of them ignored; of texts some are padded."""
    batch, generator = batch_of(family, seed), torch.Generator().manual_seed(seed)
    if family == "vit":
        return batch | {"labels": torch.randint(0, 10, (BATCH,), generator=generator)}
    labels = torch.randint(0, 32, (BATCH, TOKENS - (family == "whisper")), generator=generator)
    labels[0, :3] = -100
    if family == "whisper":
        return batch | {"labels": labels}
    mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
    mask[1, :2] = mask[2, :1] = 0
    return batch | {"labels": labels, "attention_mask": mask}


def step(model: nn.Module, family: str, seed: int = 1) -> Tensor:
    with InDouble():
        loss: Tensor = model(**labelled(family, seed)).loss
    loss.backward()
    return loss.detach()


@cache
def alone(family: str) -> tuple[Tensor, dict[str, Tensor | None], list[float]]:
    """The loss and the gradients of a step on one device, and the losses of further steps."""
    model = build(family)
    loss = step(model, family)
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return loss, grads, steps(model, family)


def steps(model: nn.Module, family: str) -> list[float]:
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for seed in range(2, 4):
        optimiser.step()
        optimiser.zero_grad()
        losses.append(step(model, family, seed).item())
    return losses


def errors(family: str, strategy: str, mesh: Any, expected: Any) -> dict[str, float]:
    """How far loss, gradients and later losses are from those of one device."""
    right, grads, later = expected
    model = parallelize(build(family), mesh, strategy, **labelled(family))
    found = {"loss": (whole(step(model, family)) - right).abs().item()}
    for name, parameter in model.named_parameters():
        theirs = grads[name]
        assert (parameter.grad is None) == (theirs is None), name
        if theirs is not None:
            found[name] = (whole(parameter.grad) - theirs).abs().max().item()
    pairs = zip(steps(model, family), later, strict=True)
    return found | {f"step {i}": abs(a - b) for i, (a, b) in enumerate(pairs)}


@pytest.mark.parametrize(
    ("family", "strategy"), [pytest.param(*c, marks=() if c in SAMPLE else pytest.mark.thorough) for c in CASES]
)
def test_a_model_whose_sequence_is_split_trains_as_on_one_device(family: str, strategy: str) -> None:
    expected, mesh = alone(family), MESHES[strategy]
    with simulated(mesh):
        found = errors(family, strategy, mesh, expected)

    worst = max(found, key=found.__getitem__)
    assert found[worst] < 1e-9, worst


def on_ranks(family: str, strategies: list[str]) -> None:
    expected = alone(family)
    for strategy in strategies:
        mesh = dshard.init_device_mesh("cpu", MESHES[strategy].shape, mesh_dim_names=MESHES[strategy].names)
        found = errors(family, strategy, mesh, expected)
        assert max(found.values()) < 1e-9, (strategy, found)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_on_real_ranks(ranks: RankPool, family: str) -> None:
    ranks.run(on_ranks, family, [strategy for own, strategy in ON_FOUR if own == family], timeout=300)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_every_residual_stream_is_split_over_its_sequence(family: str) -> None:
    plan = plan_model(build(family), Mesh((4,), ("cp",)), "ulysses", **labelled(family))

    placed = [placements for placements in plan.outputs.values() if len(placements)]
    assert len(placed) > 4
    assert all(isinstance(placement, Shard) for (placement,) in placed)
    assert plan.cost is not None
    assert any("all_to_all" in move.collective for move in plan.cost.moves)


class Attentive(nn.Module):
    """Words, one attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)
        self.qkv = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in self.qkv)
        return self.head(x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def trained(model: nn.Module) -> list[float]:
    x, optimiser, losses = torch.arange(32).view(2, 16) % 5, torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(4):
        optimiser.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def trained_in_a_ring() -> list[float]:
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    return trained(parallelize(Attentive(), mesh, "context", torch.zeros(2, 16, dtype=torch.long)))


@pytest.mark.ranks
def test_in_a_ring_of_several_hops_buffers_are_used_again_in_a_derived_backward_pass(ranks: RankPool) -> None:
    for losses in ranks.run(trained_in_a_ring):
        assert losses == pytest.approx(trained(Attentive()), rel=1e-5)
