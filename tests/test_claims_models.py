"""Claims of the papers about whole layers and models, each under its number in their order.

Volumes are bytes that each rank receives, of rings: an all_reduce of n bytes over p ranks is 2 (p - 1) / p n.
"""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import Mesh, Placement, Replicate, Shard, StrategyError, distribute_tensor, parallelize, plan_model
from dshard.comm import plain
from dshard.parallel import Moves, Plan
from dshard.simulate.recording import record
from dshard.testing import simulated, whole

SHAPES = {
    "data": Mesh((4,), ("dp",)),
    "fsdp": Mesh((4,), ("x",)),
    "megatron": Mesh((4,), ("tp",)),
    "megatron-sp": Mesh((4,), ("tp",)),
    "atp": Mesh((2, 2), ("d1", "d2")),
    "optimus": Mesh((2, 2), ("r", "c")),
    "tesseract": Mesh((2, 2, 2), ("d", "r", "c")),
}


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + F.dropout(y, self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Vision(nn.Module):
    """Patches of an image by a convolution, positions, layers, a classifier."""

    def __init__(
        self, heads: int = 4, width: int = 4, layers: int = 2, dropout: float = 0.0, again: Any = None
    ) -> None:
        super().__init__()
        hidden = heads * width
        self.again = again
        self.patches = nn.Conv2d(1, hidden, 2, 2)
        self.position = nn.Parameter(torch.randn(4, hidden))
        self.layers = nn.ModuleList(Layer(hidden, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x) if self.again is None else self.again(layer, x)
        return self.head(self.norm(x).mean(1))


@plain()
def vision(**options: Any) -> Vision:
    torch.manual_seed(0)
    return Vision(**options).double()


@plain()
def batch(size: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(size, 1, 4, 4, dtype=torch.float64, generator=generator)
    return images, torch.randint(0, 10, (size,), generator=generator)


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

TOKENS, BATCH = 32, 64


def planned(strategy: str, mesh: Mesh, hidden: int = 256, heads: int = 64) -> Plan:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(8, hidden)
            self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return x

    with torch.device("meta"):
        return plan_model(Stack(), mesh, strategy, torch.empty(BATCH, TOKENS, 8))


def middle(plan: Plan, direction: str) -> list[Moves]:
    assert plan.cost is not None
    return [m for m in plan.cost.moves if m.module.startswith("layers.1") and m.direction == direction]


@pytest.mark.parametrize("ranks", [64])
def test_m1_m4_a_megatron_layer_reduces_twice_each_way(ranks: int) -> None:
    plan = planned("megatron", Mesh((ranks,), ("tp",)))
    tensor = BATCH * TOKENS * 256 * 4

    for direction in ("forward", "backward"):
        moves = middle(plan, direction)
        assert {m.collective for m in moves} == {"all_reduce"}
        assert sum(m.count for m in moves) == 2
        assert sum(m.nbytes for m in moves) == 4 * (ranks - 1) * tensor // ranks


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
    assert sent["layers.1", "d1"][0] == "all_reduce"  # f2 and f4, in the two halves of the layer
    assert all(collective == "all_reduce" for collective, _ in sent.values())


def test_s3_an_optimus_layer_keeps_its_activations_in_blocks() -> None:
    plan = planned("optimus", Mesh((2, 2), ("r", "c")))

    assert {str(plan.outputs[f"layers.1.{name}"]) for name in ("out", "down")} == {"(Shard(dim=0), Shard(dim=2))"}
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


@pytest.mark.parametrize("strategy", SHAPES)
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


def test_a10_a_model_is_laid_out_by_one_line() -> None:
    mesh = Mesh((2, 2), ("d1", "d2"))
    model, (images, _) = vision(), batch()
    expected = model(images)
    with simulated(mesh):
        parallelize(model, mesh, "atp", images)

        torch.testing.assert_close(whole(model(images).detach()), expected.detach())


@pytest.mark.parametrize("strategy", ["megatron", "megatron-sp", "optimus", "atp"])
def test_s13_the_last_product_of_a_checkpointed_block_is_not_repeated(strategy: str) -> None:
    mesh, found, gradients = SHAPES[strategy], {}, {}
    for keeps in ("all", "inputs"):
        with simulated(mesh):
            torch.manual_seed(0)
            with plain():
                block, given = MLP(), torch.randn(4, 6, 8, dtype=torch.float64)
            parallelize(block, mesh, strategy, given)
            x = distribute_tensor(given, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).requires_grad_()

            def step(x: Tensor = x, block: nn.Module = block, keeps: str = keeps) -> None:
                out = block(x) if keeps == "all" else dshard.parallel.checkpoint(block, x)
                out.square().sum().backward()

            step()
            for t in (x, *block.parameters()):
                t.grad = None
            found[keeps] = record(step, warm=True).flops
            found["up"] = record(lambda x=x, block=block: block.up(x), warm=True).flops
            gradients[keeps] = [whole(t.grad) for t in (x, *block.parameters())]

    assert found["inputs"] == found["all"] + found["up"]  # and not those of both products
    assert all(torch.equal(a, b) for a, b in zip(gradients["all"], gradients["inputs"], strict=True))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32).double(), nn.Linear(32, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("bias", [[Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]], ids=str)
def test_s6_biases_replicated_or_with_one_owner_have_the_same_gradients(bias: list[Placement]) -> None:
    mesh = SHAPES["optimus"]
    with plain():
        torch.manual_seed(0)
        alone, given = MLP(), torch.randn(4, 6, 8, dtype=torch.float64)
        block = deepcopy(alone)
    with simulated(mesh):
        parallelize(block, mesh, {"*.weight": [Shard(1), Shard(0)], "*.bias": bias})
        for model, x in ((alone, given), (block, distribute_tensor(given, mesh, [Shard(0), Shard(2)]))):
            optimiser = torch.optim.AdamW(model.parameters())
            model(x).square().sum().backward()
            optimiser.step()

        for mine, theirs in zip(block.parameters(), alone.parameters(), strict=True):
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(whole(mine.detach()), theirs.detach(), rtol=1e-9, atol=1e-11)  # replicas alike
