"""Claims of the papers about whole layers and models, each under its number in their order.

Volumes are bytes that each rank receives, of rings: an all_reduce of n bytes over p ranks is 2 (p - 1) / p n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.transformer_layers import BATCH, SHAPES, TOKENS, Stack, middle, planned
from helpers.vision_transformer import Vision, batch, vision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import Mesh, Replicate, Shard, StrategyError, distribute_tensor, parallelize, plan_model
from dshard.parallel import ModelPlan
from dshard.testing import simulated, whole


def laid_out(strategy: str, mesh: Mesh, **options: Any) -> nn.Module:
    return parallelize(vision(**options), mesh, strategy, batch()[0])


def loss_of(model: nn.Module, mesh: Mesh | None, seed: int = 0) -> Tensor:
    images, labels = batch(seed=seed)
    if mesh is not None:
        labels = distribute_tensor(labels, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return F.cross_entropy(model(images), labels)


def curve(model: nn.Module, mesh: Mesh | None, steps: int) -> list[float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = loss_of(model, mesh, step)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


# -- volumes, on meshes without processes


@pytest.mark.parametrize("ranks", [64])
def test_m1_m4_a_megatron_layer_reduces_twice_each_way(ranks: int) -> None:
    plan = planned("megatron", Mesh((ranks,), ("tp",)))
    tensor = BATCH * TOKENS * 256 * 4

    for direction in ("forward", "backward"):
        moves = middle(plan, direction)
        assert {m.collective for m in moves} == {"all_reduce"}
        assert sum(m.count for m in moves) == 2
        assert sum(m.nbytes for m in moves) == 4 * (ranks - 1) * tensor // ranks


class Fused(nn.Module):
    """Attention whose queries, keys and values are one product, cut in three."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (8, -1)).transpose(1, 2) for y in (q, k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_m1_a_fused_projection_cut_in_three_sends_what_separate_ones_send() -> None:
    """Its three blocks are sharded each, so a rank cuts out its heads by itself."""
    model, tensor = nn.Sequential(nn.Linear(8, 64), *(Fused(64) for _ in range(3))), BATCH * TOKENS * 64 * 4
    plan = plan_model(model, Mesh((4,), ("tp",)), "megatron", torch.empty(BATCH, TOKENS, 8, device="meta"))

    assert plan.parameters["2.qkv.weight"] == plan.parameters["2.qkv.bias"] == (Shard(0, blocks=3),)
    for direction in ("forward", "backward"):
        moves = [m for m in plan.cost.moves if m.module.startswith("2") and m.direction == direction]
        assert [(m.collective, m.count, m.nbytes) for m in moves] == [("all_reduce", 1, 2 * 3 * tensor // 4)]


def test_m5_sequence_parallelism_sends_the_same_and_holds_less() -> None:
    whole_sequence, split = (planned(name, Mesh((4,), ("tp",))) for name in ("megatron", "megatron-sp"))

    assert sum(m.nbytes for m in middle(split, "forward")) == sum(m.nbytes for m in middle(whole_sequence, "forward"))
    for direction in ("forward", "backward"):
        counts = Counter(
            m.collective for m in middle(split, direction) for _ in range(m.count) if "norm" not in m.module
        )
        assert counts == {"all_gather": 2, "reduce_scatter": 2}
    assert split.cost.memory.activations < whole_sequence.cost.memory.activations


def test_m2_s4_heads_need_only_divide_the_columns() -> None:
    assert planned("optimus", Mesh((3, 3), ("r", "c")), hidden=36, heads=3).cost is not None
    with pytest.raises(StrategyError, match=r"has 3 heads in dim 0, split over 9 ranks .* use at most 3 ranks there"):
        planned("megatron", Mesh((9,), ("tp",)), hidden=36, heads=3)


def test_a4_atp_reduces_after_each_linear_and_moves_nothing_between() -> None:
    plan = planned("atp", Mesh((4, 2), ("d1", "d2")))
    tensor = BATCH * TOKENS * 256 * 4
    sent = {(m.module.removeprefix("layers.1."), m.axis): (m.collective, m.nbytes) for m in middle(plan, "forward")}

    assert sent["up", "d2"] == ("all_reduce", 2 * 1 * (4 * tensor // 4) // 2)  # f3
    assert sent["attention", "d1"] == sent["layers.1", "d1"] == ("all_reduce", 2 * 3 * (tensor // 2) // 4)  # f2, f4
    assert all(collective == "all_reduce" for collective, _ in sent.values())


def scattered(plan: ModelPlan, layers: Iterable[str], *, reduce: bool) -> ModelPlan:
    """A plan of ATP in which each rank has heads of its own over d2, too: their inputs scattered, outputs gathered.

    With `reduce` queries, keys and values are reduced and scattered at once.
    """
    own = [f"{layer}.attention.{name}" for layer in layers for name in ("q", "k", "v")]
    products = dict(plan.products)
    if reduce:
        products |= {name: replace(products[name], stored=("R", "P")) for name in own}
    return replace(plan, products=products, outputs=plan.outputs | dict.fromkeys(own, (Shard(2), Shard(2))), cost=None)


@pytest.mark.parametrize("reduce", [False, True])
def test_a4_heads_are_scattered_before_attention_and_gathered_after_it(reduce: bool) -> None:
    named, tensor = planned("atp", Mesh((4, 2), ("d1", "d2"))), BATCH * TOKENS * 256 * 4
    plan = scattered(named, ["layers.0", "layers.1", "layers.2"], reduce=reduce)
    with torch.device("meta"):
        moves = middle(plan_model(Stack(256, 64), plan.mesh, plan, torch.empty(BATCH, TOKENS, 8)), "forward")
    sent = {
        (m.module.removeprefix("layers.1."), m.collective, m.axis): m.nbytes for m in moves if "norm" not in m.module
    }

    f1 = 2 * 1 * 3 * (tensor // 4) // 2
    if reduce:
        assert sent.pop(("attention", "reduce_scatter", "d2")) == f1 // 2
    else:
        assert sum(sent.pop((f"attention.{name}", "all_reduce", "d2")) for name in ("q", "k", "v")) == f1
    assert sent == {
        ("attention.out", "all_gather", "d2"): (tensor // 4) // 2,
        ("attention", "all_reduce", "d1"): 2 * 3 * (tensor // 2) // 4,  # f2
        ("up", "all_reduce", "d2"): 2 * 1 * (4 * tensor // 4) // 2,  # f3
        ("layers.1", "all_reduce", "d1"): 2 * 3 * (tensor // 2) // 4,  # f4
    }


@pytest.mark.parametrize("reduce", [False, True])
def test_a4_scattered_heads_give_the_same(reduce: bool) -> None:
    mesh, alone, model = SHAPES["atp"], vision(layers=1), vision(layers=1)
    loss_of(alone, None).backward()
    named = plan_model(model, mesh, "atp", batch()[0])
    with simulated(mesh):
        parallelize(model, mesh, scattered(named, ["layers.0"], reduce=reduce))
        loss_of(model, mesh).backward()

        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-9, atol=1e-11)


def test_s3_an_optimus_layer_keeps_its_activations_in_blocks() -> None:
    plan = planned("optimus", Mesh((2, 2), ("r", "c")))

    assert {str(plan.outputs[f"layers.1.{name}"]) for name in ("attention.out", "down")} == {
        "(Shard(dim=0), Shard(dim=2))"
    }
    assert all(m.nbytes for m in middle(plan, "forward"))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_m5_what_a_megatron_layer_holds_beside_attention(ranks: int) -> None:
    """Feed-forward block of T tokens and h features: norm, what up and the activation take, what down takes, output."""
    tensor = BATCH * TOKENS * 64 * 4
    statistics, weights = 2 * BATCH * TOKENS * 4, 2 * 4 * 64 * 64 * 4

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def activations(layers: int, strategy: str) -> int:
        with torch.device("meta"):
            model = nn.Sequential(*(Block() for _ in range(layers)))
            memory = plan_model(model, Mesh((ranks,), ("tp",)), strategy, torch.empty(BATCH, TOKENS, 64)).cost.memory
        assert memory.parameters == layers * (weights // ranks + (256 // ranks + 3 * 64) * 4)
        return memory.activations

    def layer(strategy: str) -> int:
        return activations(3, strategy) - activations(2, strategy)

    assert layer("megatron") == 2 * tensor + 2 * 4 * tensor // ranks + statistics
    # the input of up is kept gathered, too, so that going back it is not gathered once more: the volume stays the same
    assert layer("megatron-sp") == (2 * tensor + 2 * 4 * tensor + statistics) // ranks + tensor


# -- values, on simulated ranks


@pytest.mark.parametrize("strategy", one_in(2, SHAPES))
def test_d2_every_kind_of_layer_under_every_strategy(strategy: str) -> None:
    mesh, alone = SHAPES[strategy], vision()
    expected = loss_of(alone, None)
    expected.backward()
    predicted = alone(batch()[0]).argmax(-1)
    with simulated(mesh):
        model = laid_out(strategy, mesh)
        loss = loss_of(model, mesh)
        loss.backward()

        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
        for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-9, atol=1e-11, msg=name)
        assert torch.equal(whole(model(batch()[0]).argmax(-1)), predicted)


def test_d3_one_state_across_strategies() -> None:
    expected = vision().state_dict()
    for strategy in ("optimus", "megatron", "atp", "fsdp"):
        with simulated(SHAPES[strategy]):
            found = {name: whole(x.detach()) for name, x in laid_out(strategy, SHAPES[strategy]).state_dict().items()}

        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_e2_replicas_over_the_depth_stay_equal_to_the_bit() -> None:
    mesh = SHAPES["tesseract"]
    with simulated(mesh):
        model = laid_out("tesseract", mesh, layers=1)
        curve(model, mesh, 5)

        for parameter in model.parameters():
            whole(parameter.detach())  # refuses replicas that differ in a bit


@pytest.mark.thorough
def test_e5_data_beside_tesseract_on_ranks_in_any_order() -> None:
    order = (3, 9, 0, 14, 7, 1, 12, 5, 10, 2, 15, 8, 4, 11, 6, 13)
    mesh = Mesh((2, 2, 2, 2), ("dp", "d", "r", "c"), order)
    alone = vision(layers=1)
    loss_of(alone, None).backward()
    with simulated(mesh):
        model = laid_out("tesseract", mesh, layers=1)
        loss_of(model, mesh).backward()

        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-9, atol=1e-11)


class First(nn.Module):
    """Of a vision model what the first of two stages has."""

    def __init__(self, of: Vision) -> None:
        super().__init__()
        self.patches, self.position, self.layer = of.patches, of.position, of.layers[0]

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(self.patches(images).flatten(2).transpose(1, 2) + self.position)


class Second(nn.Module):
    """And the rest."""

    def __init__(self, of: Vision) -> None:
        super().__init__()
        self.layer, self.norm, self.head = of.layers[1], of.norm, of.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(x)).mean(1))


@pytest.mark.thorough
def test_e5_data_and_pipeline_beside_tesseract_on_32_ranks() -> None:
    """Figure 6 of Tesseract: 2 x 2 x [2, 2, 2]; two microbatches cross from stage to stage and back."""
    axes = ("dp", "d", "r", "c")
    meshes = [Mesh((2, 2, 2, 2), axes, tuple(range(first, first + 16))) for first in (0, 16)]
    alone, model = vision(width=2), vision(width=2)
    images, labels = batch(16)
    F.cross_entropy(alone(images), labels).backward()
    wanted = [p.grad for stage in (First(alone), Second(alone)) for p in stage.parameters()]
    with simulated(32):
        first, second = First(model), Second(model)
        parallelize(first, meshes[0], "tesseract", images[:8])
        parallelize(second, meshes[1], "tesseract", torch.empty(8, 4, 8, dtype=torch.float64, device="meta"))
        split = [Shard(0), Shard(0), Shard(0), Shard(2)]
        for part in (slice(8), slice(8, 16)):
            crossed = first(images[part]).redistribute(meshes[1], split)
            target = distribute_tensor(labels[part], meshes[1], [Replicate()] * 4, src_data_rank=None)
            (F.cross_entropy(second(crossed), target) / 2).backward()

        found = [p.grad for stage in (first, second) for p in stage.parameters()]
        assert {grad.layout.mesh for grad in found} == set(meshes)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.thorough
@pytest.mark.parametrize("depth", [1, 2])
def test_e6_losses_of_fifty_steps_do_not_depend_on_the_mesh(depth: int) -> None:
    mesh = Mesh((depth, 2, 2), ("d", "r", "c"))
    expected = curve(vision(layers=1), None, 50)
    with simulated(mesh):
        found = curve(laid_out("tesseract", mesh, layers=1), mesh, 50)

    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-9


@pytest.mark.parametrize("strategy", ["megatron-sp", "optimus"])
def test_s12_a_checkpointed_layer_draws_the_same_dropout(strategy: str) -> None:
    mesh, gradients = SHAPES[strategy], []
    for again in (None, partial(checkpoint, use_reentrant=False), dshard.parallel.checkpoint):
        with simulated(mesh):
            model = laid_out(strategy, mesh, layers=1, dropout=0.3, again=again)
            dshard.manual_seed(9)
            loss_of(model, mesh).backward()
            gradients.append([whole(p.grad) for p in model.parameters()])

    for found in gradients[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], found, strict=True))
