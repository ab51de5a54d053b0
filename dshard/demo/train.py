"""Train one unchanged model under each strategy, and compare every loss with that of a single device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dshard import DTensor, init_device_mesh
from dshard.comm import Event, listen
from dshard.demo.data import Digits, batches, load
from dshard.demo.lay_out import Place, lay_out
from dshard.demo.layouts import SINGLE, Strategy, find, names
from dshard.demo.vit import build
from dshard.ops.matmul.options import use_strategy

BATCH = 128
# Adam divides each gradient by its size: an epsilon well above rounding keeps rounding from becoming whole steps.
RATE, EPSILON = 5e-3, 1e-6


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a run: strategies, ranks, steps. No strategies: all that are worth it on so many ranks."""

    strategies: tuple[str, ...] = ()
    ranks: int = 4
    steps: int = 100
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"

    def chosen(self) -> list[Strategy]:
        """The strategies to train, each once. A single device comes first: the others are compared with it."""
        asked = self.strategies or names(self.ranks)
        return [find(name) for name in dict.fromkeys([SINGLE.name, *(find(name).name for name in asked)])]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run: reported after each step."""

    strategy: str
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class Run:
    """One training as one rank saw it: the losses are those of the whole batch, the collectives are the rank's own."""

    losses: list[float]
    test_accuracy: float
    events: list[Event]
    seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one strategy. Collectives, and the bytes received, are those of one rank; `losses` of each step."""

    strategy: str
    mesh: str
    final_loss: float
    max_loss_diff: float
    test_accuracy: float
    collectives_per_step: int
    bytes_per_step: int
    seconds: float
    losses: tuple[float, ...] = ()


Tell = Callable[[Progress], None]


def train_all(settings: Settings, tell: Tell) -> list[Row]:
    """Train under each strategy in turn, all ranks together. Rank 0 alone trains a single device, and has the rows."""
    runs: dict[str, Run] = {}
    for strategy in settings.chosen():
        if strategy is not SINGLE or dist.get_rank() == 0:
            runs[strategy.name] = train(strategy, settings, tell)
    if dist.get_rank() != 0:
        return []
    return [_row(find(name), run, runs[SINGLE.name], dist.get_world_size()) for name, run in runs.items()]


def train(strategy: Strategy, settings: Settings, tell: Tell) -> Run:
    """Train the model laid out by `strategy`; on the same batches in the same order, whatever the strategy."""
    training, test = load(settings.dtype)
    model, place = _lay_out(strategy, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up_and_decay(settings.steps))
    losses: list[float] = []
    events: list[Event] = []
    start = time.perf_counter()
    with listen(events.append), use_strategy(matmul=strategy.matmul):
        for batch in batches(training, BATCH, settings.steps, settings.seed):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(place(batch.images)), place(batch.labels))
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            tell(Progress(strategy.name, len(losses), losses[-1]))
    seconds = time.perf_counter() - start
    with use_strategy(matmul=strategy.matmul):
        return Run(losses, _accuracy(model, test, place), events, seconds)


def _lay_out(strategy: Strategy, settings: Settings) -> tuple[nn.Module, Place]:
    """The model under `strategy`, and the function that puts a batch where the model wants it."""
    device = torch.device(settings.device)
    model = build(settings.seed, settings.dtype).to(device)
    mesh = strategy.on(settings.ranks)
    if mesh is None:
        return model, lambda batch: batch.to(device)
    place = lay_out(model, strategy, init_device_mesh(device.type, mesh.shape, mesh_dim_names=mesh.names))
    return model, lambda batch: place(batch.to(device))


@torch.no_grad()
def _accuracy(model: nn.Module, test: Digits, place: Place) -> float:
    """The share of the test images whose digit the model finds."""
    logits = model(place(test.images))
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    right = logits.argmax(-1).cpu() == test.labels
    return float(right.double().mean())


def _warm_up_and_decay(steps: int) -> Callable[[int], float]:
    """Factors of the learning rate: a tenth of the steps to grow, a cosine to fall."""
    return lambda step: min(1.0, 10 * (step + 1) / steps) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _row(strategy: Strategy, run: Run, reference: Run, ranks: int) -> Row:
    steps = len(run.losses)
    return Row(
        strategy=strategy.name,
        mesh=str(strategy.on(ranks) or "1 device"),
        final_loss=run.losses[-1],
        max_loss_diff=max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True)),
        test_accuracy=run.test_accuracy,
        collectives_per_step=round(len(run.events) / steps),
        bytes_per_step=round(sum(event.nbytes for event in run.events) / steps),
        seconds=run.seconds,
        losses=tuple(run.losses),
    )
