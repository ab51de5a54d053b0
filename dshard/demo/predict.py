"""Predict the communication of a step under each strategy, before any rank is started."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dshard import trace
from dshard.demo.lay_out import lay_out
from dshard.demo.layouts import SINGLE, Strategy, find, names
from dshard.demo.vit import build
from dshard.ops.matmul.options import use_strategy


@dataclass(frozen=True, slots=True)
class Predicted:
    """One training step: its collectives, the bytes that the busiest rank of each receives, their predicted seconds."""

    strategy: str
    collectives: int
    nbytes: int
    seconds: float


def predict(
    strategy: Strategy, ranks: int, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Predicted:
    """A step on tensors without data, on a mesh without processes; the same on every rank. `strategy` has a mesh."""
    mesh = strategy.on(ranks)
    assert mesh is not None
    mesh = replace(mesh, device_type=device)
    model = build(0, dtype).to("meta")
    place = lay_out(model, strategy, mesh)
    images = place(torch.empty(batch, 8, 8, device="meta", dtype=dtype))
    labels = place(torch.empty(batch, dtype=torch.long, device="meta"))
    with trace() as sent, use_strategy(matmul=strategy.matmul):
        F.cross_entropy(model(images), labels).backward()
        torch.optim.AdamW(model.parameters()).step()
    return Predicted(strategy.name, len(sent.events), sent.nbytes, sum(event.seconds for event in sent.events))


def rank(ranks: int, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Predicted]:
    """All strategies worth training on so many ranks, the one whose step communicates for the shortest time first."""
    found = [predict(find(name), ranks, batch, device, dtype) for name in names(ranks) if name != SINGLE.name]
    return sorted(found, key=lambda predicted: predicted.seconds)
