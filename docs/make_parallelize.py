"""Writes into docs/parallelize.md what each strategy sends for one transformer layer.

PYTHONPATH=. python docs/make_parallelize.py
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import Mesh, plan_model
from dshard.parallel import Moves, Plan
from dshard.tables import human_bytes

PAGE = Path(__file__).parent / "parallelize.md"
HIDDEN, HEADS, BATCH, TOKENS = 1024, 16, 8, 512
MESHES = {
    "data": Mesh((4,), ("dp",)),
    "fsdp": Mesh((4,), ("x",)),
    "megatron": Mesh((4,), ("tp",)),
    "megatron-sp": Mesh((4,), ("tp",)),
    "atp": Mesh((2, 2), ("d1", "d2")),
    "optimus": Mesh((2, 2), ("r", "c")),
    "tesseract": Mesh((2, 2, 2), ("depth", "r", "c")),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Layers(nn.Module):
    """Two layers after what makes the residual stream: the second is like any in the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.layer = nn.Linear(64, HIDDEN), Layer(), Layer()
        self.last = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(self.embed(x))))


def planned(strategy: str, mesh: Mesh) -> Plan:
    with torch.device("meta"):
        return plan_model(Layers(), mesh, strategy, torch.empty(BATCH, TOKENS, 64))


def table() -> str:
    """The collectives of the middle layer, of each module in each direction, and the bytes that a rank receives."""
    rows = ["| strategy | module | forward | backward |", "|---|---|---|---|"]
    for strategy, mesh in MESHES.items():
        cost = planned(strategy, mesh).cost
        assert cost is not None
        moves = [m for m in cost.moves if m.module == "layer" or m.module.startswith("layer.")]
        for module in dict.fromkeys(m.module for m in moves):
            cells = [
                said([m for m in moves if (m.module, m.direction) == (module, d)]) for d in ("forward", "backward")
            ]
            rows.append(f"| {strategy} ({mesh}) | {module.removeprefix('layer.')} | {' | '.join(cells)} |")
        total = [human_bytes(sum(m.nbytes for m in moves if m.direction == d)) for d in ("forward", "backward")]
        rows.append(f"| {strategy} ({mesh}) | **all** | **{total[0]}** | **{total[1]}** |")
    return "\n".join(rows)


def said(moves: list[Moves]) -> str:
    return "; ".join(f"{m.count} {m.collective} {m.axis}, {human_bytes(m.nbytes)}" for m in moves)


def put(text: str, name: str, body: str) -> str:
    """`text` with what stands between the markers of this name replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{body}\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text(), "collectives", table()))
