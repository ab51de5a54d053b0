"""A small vision transformer, as an ordinary `nn.Module` that uses nothing of dshard."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 2
WIDTH = 64
HEADS = 8
BLOCKS = 2
CLASSES = 10


class Attention(nn.Module):
    """Self-attention over all patches in `HEADS` heads.

    The query, key and value of a head are neighbours among the outputs of `qkv`, so its rows split into whole heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)  # [batch, heads, patches, 3 * width of a head]
        query, key, value = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class VitBlock(nn.Module):
    """Attention, then a two-layer perceptron, each applied to its normalised input and added to that input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """8x8 grey images to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(0.3 * torch.randn(16, WIDTH))
        self.blocks = nn.Sequential(*(VitBlock() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(_patches(images)) + self.position
        x = self.norm(self.blocks(x)).mean(1)
        return self.head(x)  # type: ignore[no-any-return]


def build(seed: int, dtype: torch.dtype = torch.float32) -> ViT:
    """Build the model with initial values that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViT().to(dtype)


def _patches(images: Tensor) -> Tensor:
    """[batch, 8, 8] -> [batch, 16 patches, 4 pixels]."""
    batch, side = images.shape[:2]
    n = side // PATCH
    return images.reshape(batch, n, PATCH, n, PATCH).transpose(2, 3).reshape(batch, n * n, PATCH * PATCH)
