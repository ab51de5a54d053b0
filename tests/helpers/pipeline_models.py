"""Models cut into stages, their layouts by name, and their results on one device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import DeviceMesh, Replicate, Shard, distribute_module, distribute_tensor
from dshard.pipeline import Pipeline, Stage

SAMPLES, WIDTH, HEADS, VOCABULARY, LENGTH = 6, 8, 2, 11, 5


class Down(nn.Module):
    """An encoder of a U-Net, which returns a skip at this resolution, and its output at half of it."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.halve = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = F.gelu(self.conv(x))
        return self.halve(skip), skip


class Up(nn.Module):
    """A decoder of a U-Net, which doubles the resolution and joins the skip."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.twice, self.conv = nn.ConvTranspose2d(channels, channels, 2, stride=2), nn.Conv2d(2 * channels, out, 1)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([self.twice(x), skip], 1)).tanh()


class DownTwice(nn.Module):
    """Two encoders in one stage, which returns two skips."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Down(2, 4), Down(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, a = self.first(x)
        x, b = self.second(x)
        return x, a, b


class UpTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Up(4, 4), Up(4, 2)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return self.second(self.first(x, b), a)


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.words(tokens) + self.places.weight[: tokens.shape[1]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.down_attention = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(2, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down_attention(y)
        return x + self.down(F.gelu(self.up(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(self.norm(x))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


Part = tuple[nn.Module, tuple[str, ...], tuple[str, ...]]


def parts(model: str, n_stages: int) -> list[Part]:
    """Return the modules of a model, equal on each call, with the names of their inputs and outputs."""
    torch.manual_seed(3)
    x = ("x",)
    match model, n_stages:
        case "u", 2:
            stages = [(DownTwice(), x, ("x", "a", "b")), (UpTwice(), ("x", "a", "b"), x)]
        case "u", 4:
            up = ("x", "a")
            stages = [(Down(2, 4), x, up), (Down(4, 4), x, ("x", "b")), (Up(4, 4), ("x", "b"), x), (Up(4, 2), up, x)]
        case "gpt", 2:
            stages = [(nn.Sequential(Embed(), Block()), x, x), (nn.Sequential(Block(), Head()), x, x)]
        case _:
            stages = [(Embed(), x, x), (Block(), x, x), (Block(), x, x), (Head(), x, x)]
    return [(module.double(), takes, gives) for module, takes, gives in stages]


def batch(model: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    if model == "u":
        shape = (SAMPLES, 2, 8, 8)
        return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))  # type: ignore
    return tuple(torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(2))  # type: ignore


LOSS = {"u": F.mse_loss, "gpt": cross_entropy}


@functools.cache
def expected(model: str, n_stages: int) -> tuple[float, list[dict[str, Tensor]]]:
    """Return the loss and the gradients of each stage on one device."""
    stages, values = parts(model, n_stages), {}
    values["x"], target = batch(model)
    for module, takes, gives in stages:
        out = module(*(values[name] for name in takes))
        values.update(zip(gives, out if isinstance(out, tuple) else (out,), strict=True))
    loss = LOSS[model](values["x"], target)
    loss.backward()
    return loss.item(), [{n: p.grad for n, p in module.named_parameters()} for module, _, _ in stages]


@dataclass(frozen=True)
class Where:
    """Ranks and shape of a stage's mesh, and how the stage is laid out: "data", "tensor", "both" or "replicated"."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    strategy: str


@functools.cache
def mesh_of(ranks: tuple[int, ...], shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.tensor(ranks).view(shape))


def lay_out(module: nn.Module, where: Where) -> nn.Module:
    """Shard weights by columns and rows along the last axis if the strategy does; replicate the others."""

    def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        split = where.strategy in ("tensor", "both")
        if not split or not isinstance(part, nn.Linear | nn.Conv2d):
            return
        rows = name.rpartition(".")[2].startswith("down")
        for key, parameter in list(part.named_parameters(recurse=False)):
            last = Replicate() if rows and key == "bias" else Shard(1 if rows else 0)
            placements = [*[Replicate()] * (len(where.shape) - 1), last]
            part.register_parameter(key, distribute_tensor(parameter, mesh, placements))

    return distribute_module(module, mesh_of(where.ranks, where.shape), partition)


def placements_of(where: Where) -> list[Replicate | Shard]:
    """Return the batch's placements, sharded along the first axis if the strategy does so."""
    first = Shard(0) if where.strategy in ("data", "both") else Replicate()
    return [first, *[Replicate()] * (len(where.shape) - 1)]


def staged(model: str, wheres: Sequence[Where]) -> list[Stage]:
    """The stages of a model on this rank."""
    meshes = [mesh_of(where.ranks, where.shape) for where in wheres]  # every rank makes all of them
    stages = []
    for mesh, where, (module, takes, gives) in zip(meshes, wheres, parts(model, len(wheres)), strict=True):
        here = mesh.get_coordinate() is not None
        placements = dict.fromkeys([*takes, "target"], placements_of(where))
        stages.append(Stage(lay_out(module, where) if here else None, mesh, takes, gives, placements))
    return stages


def errors(pipeline: Pipeline, model: str) -> tuple[float, float, float]:
    """Run one step without earlier gradients, and evaluate; return the errors of both losses and the worst gradient."""
    for parameter in pipeline.parameters():
        parameter.grad = None
    loss, gradients = expected(model, len(pipeline.stages))
    loss_of_pipeline = pipeline.step(*batch(model))
    wrong = [
        (parameter.grad.full_tensor() - gradients[pipeline.number][name]).abs().max().item()
        for name, parameter in pipeline.module.named_parameters()
    ]
    with torch.no_grad():
        evaluated = pipeline.step(*batch(model))
    return abs(loss_of_pipeline.item() - loss), abs(evaluated.item() - loss), max(wrong)
