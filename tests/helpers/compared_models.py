"""Models that are right under every layout, each with a batch: what `compare` must find no fault in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from helpers.token_net import Net
from helpers.transformer_blocks import GPT, Llama, ViT

ROWS, TOKENS, WIDTH, WORDS = 8, 8, 16, 11


def tokens(*shape: int) -> Tensor:
    return torch.randint(WORDS, shape or (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def features(*shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, TOKENS, WIDTH), generator=torch.Generator().manual_seed(2))


class Residual(nn.Module):
    """A perceptron with dropout and an activation in place."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Checkpointed(nn.Module):
    """Blocks that are computed once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        return x


class Convolutions(nn.Module):
    """A residual network of images with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.inner = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3)
        self.act, self.head = nn.ReLU(inplace=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = x + F.gelu(self.inner(self.conv(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A layer of experts that are all computed, weighted by a router."""

    def __init__(self, experts: int = 4, chosen: int = 2) -> None:
        super().__init__()
        self.norm, self.router, self.chosen = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False), chosen
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights, experts = self.router(y).softmax(-1).topk(self.chosen, -1)
        gates = torch.zeros(*x.shape[:-1], self.up.shape[0], dtype=x.dtype).scatter(-1, experts, weights)
        inner = torch.einsum("bsd,edf->bsef", y, self.up).relu()
        return x + torch.einsum("bsef,efd,bse->bsd", inner, self.down, gates)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn, self.head = kind(WIDTH, WIDTH, batch_first=True, **options), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])  # type: ignore[no-any-return]


class Tied(nn.Module):
    """A head that has the weight of the embedding, and positions of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(WORDS, WIDTH), nn.Sequential(Residual(dropout=0.0), Residual(dropout=0.0))
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids) + self.places))  # type: ignore[no-any-return]


@dataclass
class Answer:
    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Answering(nn.Module):
    """Takes named inputs, and returns a dataclass that has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, *, ids: Tensor, labels: Tensor) -> Answer:
        logits = self.net(ids)
        return Answer(F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits, (logits,))


class Twice(nn.Module):
    """A module that is called twice in a pass, one that is frozen, and draws of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.frozen = Residual(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.frozen(self.shared(x)))
        keep = torch.empty(x.shape[0], 1, 1, dtype=x.dtype).bernoulli_(0.9)  # stochastic depth, of a plain tensor
        return F.rrelu(x * keep + 0.01 * torch.randn_like(x), training=True)


class Gated(nn.Module):
    """Weight normalisation, group norm, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.norm = nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.glu(self.inner(self.norm(x.mT).mT), -1)


class Attending(nn.Module):
    """torch's own attention module, with dropout in its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True), Residual()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.attend(x, x, x, need_weights=False)[0])  # type: ignore[no-any-return]


Case = tuple[Callable[[], nn.Module], dict[str, Tensor] | tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "gpt": (GPT, (features(),)),
    "vit": (ViT, (features(),)),
    "llama": (lambda: Llama(tokens=TOKENS), (features(),)),
    "tokens": (Net, (tokens(),)),
    "dropout": (Residual, (features(),)),
    "deep": (lambda: nn.Sequential(*(Residual(dropout=0.0) for _ in range(6))), (features(),)),
    "checkpointed": (Checkpointed, (features(),)),
    "convolutions": (Convolutions, (features(ROWS, 3, 6, 6),)),
    "experts": (Experts, (features(),)),
    "lstm": (lambda: Recurrent(nn.LSTM), (features(),)),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.2), (features(),)),
    "tied": (Tied, (tokens(),)),
    "answering": (Answering, {"ids": tokens(), "labels": tokens()}),
    "twice": (Twice, (features(),)),
    "gated": (Gated, (features(),)),
    "attending": (Attending, (features(),)),
    "encoder": (lambda: nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.1, batch_first=True), (features(),)),
    "mixed gpt": (lambda: nn.Sequential(GPT(), Experts(), Llama(tokens=TOKENS)), (features(),)),
    "unnormed": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)), (features(),)),
    "images": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(32, 4)),
        (features(ROWS, 3, 6, 6),),
    ),
}
"""Twenty models by their names, each with its inputs by position or by name."""
MESHES: dict[str, tuple[int, ...]] = {"data": (4,), "fsdp": (4,), "megatron": (4,), "data x megatron": (2, 2)}


def made(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A model of this name, alike on all ranks, and its inputs."""
    make, batch = CASES[name]
    torch.manual_seed(3)
    model = make().to(dtype)
    cast = {
        key: x.to(dtype) if x.is_floating_point() else x
        for key, x in dict(batch if isinstance(batch, dict) else enumerate(batch)).items()
    }
    if isinstance(batch, dict):
        return model, (), cast
    return model, tuple(cast.values()), {}
