"""Table 2 of ATP: parameters and operations of one layer of its models, counted from a layer on meta."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.papers.traced import Sizes
from dshard.simulate import record
from dshard.topology import BYTES

DATA = Path(__file__).parent / "data" / "atp_2.csv"
SEQUENCES, TOKENS = 4, 2048
PARAMETERS, OPERATIONS = 1000 * 2**20, 2**40
"""The paper's billion and its tera: only with these are its figures 12 h^2 and 72 b s h^2 (1 + s / 6h)."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A row: published and counted, in the paper's units."""

    model: str
    hidden: int
    heads: int
    published: tuple[float, float]
    counted: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """Counted over published, less one."""
        (parameters, operations), (mine, other) = self.published, self.counted
        return mine / parameters - 1, other / operations - 1


def layers() -> tuple[Layer, ...]:
    """All rows."""
    with DATA.open() as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return tuple(_layer(row) for row in rows)


def _layer(row: dict[str, str]) -> Layer:
    hidden, heads = int(row["hidden"]), int(row["heads"])
    sizes = Sizes(hidden, heads, TOKENS, hidden // heads)
    with torch.device("meta"):
        block, x = sizes.block(), torch.empty(SEQUENCES, TOKENS, hidden)
    forward = record(lambda: block(x), BYTES).flops
    counted = (
        sum(linear.numel() for linear in block.parameters() if linear.ndim == 2) / PARAMETERS,
        3 * forward / OPERATIONS,
    )
    return Layer(row["model"], hidden, heads, (float(row["parameters"]), float(row["operations"])), counted)
