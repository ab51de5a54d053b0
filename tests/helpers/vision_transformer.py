"""A small vision transformer and a batch for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.comm import plain
from helpers.transformer_layers import Layer


class Vision(nn.Module):
    """Patches embedded by a convolution, positions, transformer layers, and a classifier."""

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


class Classifier(Vision):
    """A vision transformer that returns its loss on labels, which stand in a dict, with weights of classes."""

    def forward(self, images: Tensor, targets: dict[str, Tensor], weight: Tensor | None = None) -> Tensor:
        return F.cross_entropy(super().forward(images), targets["labels"], weight)


@plain()
def classifier(**options: Any) -> tuple[Classifier, tuple[Any, ...]]:
    torch.manual_seed(0)
    images, labels = batch()
    return Classifier(**options).double(), (images, {"labels": labels}, torch.rand(10, dtype=torch.float64))
