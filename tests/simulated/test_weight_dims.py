"""Weights of three dims, as einsum takes them, and models of one block: laid out as layers of `nn.Linear` are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn

from dshard import Mesh, parallelize, plan_model
from dshard.placements import Shard
from dshard.testing import simulated, whole

WIDTH, HEADS, INNER, EXPERTS = 32, 8, 48, 4


def linear(n: int, m: int) -> nn.Linear:
    return nn.Linear(n, m, bias=False)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.2)


class LinearBlock(nn.Module):
    """Attention and a feed-forward layer of `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A residual sum that one matmul makes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, INNER), linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class EinsumBlock(nn.Module):
    """The same layers, whose weights have a dim for heads and one for their features."""

    def __init__(self, q: str = "dhk", out: str = "hkd") -> None:
        super().__init__()
        self.norm1, self.norm2, self.dims = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), (q, out)
        sizes = {"d": WIDTH, "h": HEADS, "k": WIDTH // HEADS}
        self.q, self.k, self.v, self.out = (weight(*(sizes[dim] for dim in dims)) for dims in (q, q, q, out))
        self.up, self.down = weight(WIDTH, INNER), weight(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (torch.einsum(f"bsd,{self.dims[0]}->bhsk", y, w) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum(f"bhsk,{self.dims[1]}->bsd", mixed, self.out)
        inner = F.gelu(torch.einsum("bsd,df->bsf", self.norm2(x), self.up))
        return x + torch.einsum("bsf,fd->bsd", inner, self.down)


class DenseExperts(nn.Module):
    """Experts that all compute all tokens, weighted by a router; `first` has the weights before the activations."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.norm, self.router, self.first = nn.RMSNorm(WIDTH), linear(WIDTH, EXPERTS), first
        self.up, self.down = weight(EXPERTS, WIDTH, INNER), weight(EXPERTS, INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gates = self.router(y).softmax(-1)
        if self.first:
            inner = F.silu(torch.einsum("edf,bsd->ebsf", self.up, y))
            return x + torch.einsum("ebsd,bse->bsd", torch.einsum("efd,ebsf->ebsd", self.down, inner), gates)
        inner = F.silu(torch.einsum("bsd,edf->bsef", y, self.up))
        return x + torch.einsum("bsef,efd,bse->bsd", inner, self.down, gates)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "linear": (LinearBlock, {"q": 0, "k": 0, "v": 0, "out": 1, "up": 0, "down": 1}),
    "feed-forward": (FeedForward, {"up": 0, "down": 1}),
    "d h k": (EinsumBlock, {"q": 1, "k": 1, "v": 1, "out": 0, "up": 1, "down": 0}),
    "h d k": (lambda: EinsumBlock("hdk", "hdk"), {"q": 0, "k": 0, "v": 0, "out": 0, "up": 1, "down": 0}),
    "experts": (DenseExperts, {"up": 2, "down": 1}),
    "experts, weights first": (lambda: DenseExperts(first=True), {"up": 2, "down": 1}),
}
"""A block, and the dim of each weight that Megatron shards on eight ranks."""


def blocks(make: Callable[[], nn.Module], n: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(n))).to(dtype)


@pytest.mark.parametrize(("block", "n"), one_way_each(BLOCKS, [1, 2]))
def test_megatron_shards_inner_features_wherever_a_weight_has_them(block: str, n: int) -> None:
    make, expected = BLOCKS[block]
    plan = plan_model(blocks(make, n), Mesh((8,), ("tp",)), "megatron", torch.empty(8, 6, WIDTH))
    sharded = {name: p.dim for name, (p,) in plan.parameters.items() if isinstance(p, Shard)}
    own = {name.removesuffix(".weight"): dim for name, dim in sharded.items()}
    assert own == {f"{i}.{name}": dim for i in range(n) for name, dim in expected.items()}


@pytest.mark.parametrize("block", ["d h k", "h d k"])
def test_weights_of_several_dims_send_no_more_than_those_of_linear_layers(block: str) -> None:
    batch, mesh = torch.empty(8, 6, WIDTH), Mesh((8,), ("tp",))
    models = [blocks(BLOCKS[name][0], 2) for name in ("linear", block)]
    theirs, ours = (plan_model(model, mesh, "megatron", batch).cost.nbytes for model in models)
    assert ours <= theirs


@pytest.mark.parametrize(
    ("block", "strategy"), one_way_each(BLOCKS, ["megatron", "megatron-sp", "atp", "fsdp x megatron"])
)
def test_they_equal_one_device(block: str, strategy: str) -> None:
    alone = blocks(BLOCKS[block][0], 1, torch.float64)
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    alone(x).square().mean().backward()
    shape = (4,) if strategy.startswith("megatron") else (2, 2)
    mesh = Mesh(shape, ("a", "b")[: len(shape)])
    with simulated(mesh):
        model = parallelize(copy.deepcopy(alone), mesh, strategy, x)
        model(x).square().mean().backward()
        found = [whole(p.grad) for p in model.parameters()]
    for mine, parameter in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-11, atol=1e-11)
