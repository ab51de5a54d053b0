"""Features that are compressed between the residual stream and wider inner features stay replicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in, one_way_each
from helpers.planned_models import as_meta, batch, language_model
from torch import Tensor, nn

from dshard import Mesh, Placement, Replicate, Shard, StrategyError, Topology, distribute_tensor, trace, use_topology
from dshard.parallel import parallelize, plan_model
from dshard.parallel.auto import names
from dshard.testing import simulated, whole

WIDTH, HEADS, RANK, ROTATED = 24, 4, 6, 4


class LatentAttention(nn.Module):
    """Keys and values of a latent that they share, beside rotated features of one head: DeepSeek-V2, section 2.1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * 3 * ROTATED)
        self.compress = nn.Linear(WIDTH, RANK + ROTATED)
        self.latent_norm = nn.LayerNorm(RANK)
        self.expand = nn.Linear(RANK, HEADS * 4 * ROTATED)
        self.out = nn.Linear(HEADS * 2 * ROTATED, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        residual, x = x, self.norm(x)
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, shared = self.compress(x).split([RANK, ROTATED], -1)
        half = torch.ones(ROTATED // 2)
        shared = torch.cat([shared[..., 0::2] * half, shared[..., 1::2] * -half], -1)[:, None]
        key, value = self.expand(self.latent_norm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, -1)
        key = torch.cat([key, shared.expand(-1, HEADS, -1, -1)], -1)
        attended = F.scaled_dot_product_attention(query, key, value)
        return residual + self.out(attended.transpose(1, 2).flatten(-2))


class Adapted(nn.Module):
    """A feed-forward block with an adapter of low rank beside each of its layers; of rank 0 without."""

    def __init__(self, width: int = WIDTH, rank: int = RANK) -> None:
        super().__init__()
        self.up, self.down, self.rank = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), rank
        if rank:
            self.up_a, self.up_b = nn.Linear(width, rank, bias=False), nn.Linear(rank, 4 * width, bias=False)
            self.down_a, self.down_b = nn.Linear(4 * width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.rank:
            return x + self.down(F.gelu(self.up(x)))
        h = F.gelu(self.up(x) + self.up_b(self.up_a(x)))
        return x + self.down(h) + self.down_b(self.down_a(h))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), LatentAttention(), Adapted(), LatentAttention(), Adapted())


def test_a_latent_is_made_whole_and_expanded_by_heads() -> None:
    plan = plan_model(model(), Mesh((4,), ("tp",)), "megatron", torch.empty(2, 5, WIDTH, device="meta"))
    expected: dict[str, Placement] = {
        "1.query.weight": Shard(0),
        "1.compress.weight": Replicate(),
        "1.compress.bias": Replicate(),
        "1.latent_norm.weight": Replicate(),
        "1.expand.weight": Shard(0),
        "1.out.weight": Shard(1),
        "2.up_a.weight": Replicate(),
        "2.up_b.weight": Shard(0),
        "2.down_a.weight": Shard(1),
        "2.down_b.weight": Replicate(),
    }
    assert {name: plan.parameters[name] for name in expected} == {name: (p,) for name, p in expected.items()}
    assert {(move.collective, move.direction) for move in plan.cost.moves} == {
        ("all_reduce", "forward"),
        ("all_reduce", "backward"),
    }, "nothing is gathered"


SHAPES = {"fsdp x megatron": (2, 2), "megatron": (4,), "optimus": (2, 2), "megatron-sp": (3,)}


@pytest.mark.parametrize("strategy", one_in(2, SHAPES))
def test_latents_and_their_gradients_equal_one_device(strategy: str) -> None:
    shape = SHAPES[strategy]
    alone, mesh, x = model().double(), Mesh(shape, ("a", "b")[: len(shape)]), torch.randn(3, 5, WIDTH).double()
    expected = alone(x)
    expected.square().mean().backward()
    with simulated(mesh):
        laid = parallelize(model().double(), mesh, strategy, x)
        found = laid(x)
        found.square().mean().backward()

        torch.testing.assert_close(whole(found.detach()), expected.detach())
        for (name, mine), theirs in zip(laid.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, msg=name)


@pytest.mark.parametrize("topology", ["dgx-h100", "cpu"])
def test_heads_of_unequal_sizes_keep_scores_only_where_no_kernel_takes_them(topology: str) -> None:
    rows, length = 2, 1024
    with torch.device("meta"), use_topology(Topology.preset(topology)):
        cost = plan_model(LatentAttention(), Mesh((2,), ("x",)), "data", torch.empty(rows, length, WIDTH)).cost
    scores = rows // 2 * HEADS * length * length * 4
    assert (cost.memory.peak > scores) == (topology == "cpu")


NAMES = (
    *("data", "fsdp", "megatron", "megatron-sp"),
    *("atp", "optimus", "data x megatron", "fsdp x megatron", "data x megatron-sp", "fsdp x megatron-sp"),
)


@pytest.mark.parametrize(("strategy", "trained"), one_way_each(NAMES, ["adapters", "all"], every=4))
def test_adapters_send_hardly_more_than_their_base(strategy: str, trained: str) -> None:
    sent = []
    for rank in (0, 4):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(256, 256), Adapted(256, rank), Adapted(256, rank))
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not rank or trained == "all" or name.endswith(("_a.weight", "_b.weight")))
        mesh = Mesh((2, 2), ("a", "b")) if " x " in strategy or strategy in ("atp", "optimus") else Mesh((4,), ("a",))
        sent.append(plan_model(net, mesh, strategy, torch.empty(8, 128, 256, device="meta")).cost.nbytes)
    assert sent[1] <= 1.05 * sent[0]


class Lora(nn.Module):
    """A layer with a low-rank one beside it, as peft makes it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        options: Any = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, rank, **options), nn.Linear(rank, base.out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.b(self.a(x))
        return out


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """The model with an adapter beside each linear layer of its blocks, which alone is trained."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and "head" not in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Lora(module, rank))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".a.weight", ".b.weight")))
    return model


OF_FOUR = [(family, name) for family in ("gpt", "llama", "mixture") for name in names(1)]
MIXED = [(family, name) for family in ("gpt", "llama", "mixture") for name in names(2)]
FEW = {*OF_FOUR[::5], ("gpt", "atp"), ("llama", "megatron x megatron"), ("mixture", "megatron-sp x megatron")}
"""With those under which adapters once sent more than their base."""


@pytest.mark.parametrize(
    ("family", "strategy"),
    [case if case in FEW else pytest.param(*case, marks=pytest.mark.thorough) for case in OF_FOUR + MIXED],
)
def test_adapters_of_models_send_hardly_more_than_their_base_under_any_name(family: str, strategy: str) -> None:
    mesh, sent = Mesh((4,), ("a",)) if (family, strategy) in OF_FOUR else Mesh((2, 2), ("a", "b")), list[int]()
    for rank in (0, 8):
        model, tokens = as_meta(language_model(family, width=256, vocabulary=512).float(), batch(8, 64, 512))
        if rank:
            model = with_adapters(model, rank)
        try:
            sent.append(plan_model(model, mesh, strategy, *tokens).cost.nbytes)
        except StrategyError as error:
            pytest.skip(str(error)[:80])
    assert sent[1] <= 1.05 * sent[0]


def test_gradients_that_are_partial_or_not_are_reduced_together() -> None:
    mesh, x = Mesh((2, 2), ("a", "b")), torch.randn(8, 64, 256, dtype=torch.float64)
    weights = torch.randn(2, 256, 512, dtype=torch.float64)

    def loss(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        y = x * 2
        return (y @ first).sin().sum() + y.sin().sum() + (y @ second).cos().sum() + y.cos().sum()

    alone = x.clone().requires_grad_()
    loss(alone, *weights).backward()
    with simulated(mesh):
        mine = distribute_tensor(x, mesh, (Shard(0), Replicate())).requires_grad_()
        value = loss(mine, *[distribute_tensor(w, mesh, (Replicate(), Shard(1))) for w in weights])
        with trace() as sent:
            value.backward()
        assert [(event.collective, event.axis) for event in sent.events] == [("all_reduce", "b")]
        torch.testing.assert_close(whole(mine.grad), alone.grad)
