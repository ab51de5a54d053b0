"""A transformer layer and a stack of three, whose middle layer's plan is typical of any in a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import Mesh, plan_model
from dshard.parallel import ModelPlan, Moves

TOKENS, BATCH = 32, 64
SHAPES = {
    "data": Mesh((4,), ("dp",)),
    "fsdp": Mesh((4,), ("x",)),
    "megatron": Mesh((4,), ("tp",)),
    "megatron-sp": Mesh((4,), ("tp",)),
    "atp": Mesh((2, 2), ("d1", "d2")),
    "optimus": Mesh((2, 2), ("r", "c")),
    "tesseract": Mesh((2, 2, 2), ("d", "r", "c")),
    "ulysses": Mesh((4,), ("cp",)),
}
"""A small mesh for each strategy."""


class Attention(nn.Module):
    """Attention with separate matmuls for queries, keys and values."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a two-layer perceptron, each pre-normalised."""

    def __init__(self, hidden: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(hidden), Attention(hidden, heads), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Stack(nn.Module):
    """Three layers behind a projection to the hidden size."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


def planned(
    strategy: str, mesh: Mesh, hidden: int = 256, heads: int = 64, batch: int = BATCH, tokens: int = TOKENS
) -> ModelPlan:
    """ModelPlan a stack on meta tensors."""
    with torch.device("meta"):
        return plan_model(Stack(hidden, heads), mesh, strategy, torch.empty(batch, tokens, 8))


def middle(plan: ModelPlan, direction: str) -> list[Moves]:
    """Return the moves of the middle layer in one direction."""
    assert plan.cost is not None
    return [m for m in plan.cost.moves if m.module.startswith("layers.1") and m.direction == direction]
