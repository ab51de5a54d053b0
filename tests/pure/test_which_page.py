"""docs/which.md: each line to write is one that a model takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dshard import Mesh, plan_model

PAGE = (Path(__file__).parents[2] / "docs" / "which.md").read_text()
LINES = re.findall(r'init_device_mesh\("cuda", \(([\d, ]+)\)\)\nparallelize\(model, mesh, "(.*?)", x\)', PAGE)


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(self.norm(x)).unflatten(-1, (8, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def test_there_is_a_line_for_each_question_but_the_last() -> None:
    assert len(LINES) == 5
    assert len(re.findall(r"^\*\*\d\. ", PAGE, re.MULTILINE)) == 6


@pytest.mark.parametrize(("shape", "strategy"), LINES)
def test_a_line_lays_out_what_it_says(shape: str, strategy: str) -> None:
    sizes = tuple(int(size) for size in shape.split(",") if size.strip())
    with torch.device("meta"):
        model, x = nn.Sequential(Block(), Block()), torch.empty(16, 32, 64)

    plan = plan_model(model, Mesh(sizes, tuple("abc"[: len(sizes)])), strategy, x)

    whole = sum(p.nbytes for p in model.parameters())
    assert plan.cost is not None
    shared = "fsdp" in strategy or "megatron" in strategy
    assert (plan.cost.memory.parameters < whole) == shared
