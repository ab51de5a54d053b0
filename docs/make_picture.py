"""Draws the picture of the README and of the first page: one model, six layouts, what each sends and takes.

PYTHONPATH=. python docs/make_picture.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import Layout, Mesh, Topology, plan_model, use_topology
from dshard.tools.report.visualize import COLOURS

PICTURE = Path(__file__).parent / "figures" / "layouts.svg"
WIDTH, HEADS, INNER, LAYERS, ROWS, TOKENS = 4096, 32, 11008, 2, 8, 4096
LAYOUTS: dict[str, Mesh] = {
    "data": Mesh((8,), ("dp",), device_type="cuda"),
    "fsdp": Mesh((8,), ("dp",), device_type="cuda"),
    "megatron-sp": Mesh((8,), ("tp",), device_type="cuda"),
    "fsdp x megatron": Mesh((4, 2), ("dp", "tp"), device_type="cuda"),
    "optimus": Mesh((2, 4), ("r", "c"), device_type="cuda"),
    "tesseract": Mesh((2, 2, 2), ("d", "r", "c"), device_type="cuda"),
}
STYLE = """\
.card { fill: #ffffff; stroke: #d0d7de; } text { fill: #1f2328; } .soft { fill: #59636e; } .bar { fill: #8fb4dd; }
@media (prefers-color-scheme: dark) {
  .card { fill: #15181e; stroke: #3d444d; } text { fill: #e6e9ee; } .soft { fill: #9aa4b0; } .bar { fill: #3f6ea5; }
}
.on { fill: #1f2328; }"""
NAME, BATCH, WEIGHT, RECEIVED, TIME, HOLDS, END = 14, 140, 188, 240, 318, 396, 468
TOP, ROW, ICON, BAR = 104, 38, 32, 58


class Block(nn.Module):
    """A layer of the sizes of Llama 2 with 7 B parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (heads(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2) for heads in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def picture() -> str:
    """The SVG."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(torch.bfloat16)
        batch = torch.empty(ROWS, TOKENS, WIDTH, dtype=torch.bfloat16)
    with use_topology(Topology.preset("dgx-h100")):
        plans = {name: plan_model(model, mesh, name, batch) for name, mesh in LAYOUTS.items()}
    numbers = {}
    for name, plan in plans.items():
        assert plan.cost is not None
        numbers[name] = (plan.cost.nbytes / 2**30, plan.cost.seconds * 1e3, plan.cost.memory.total / 2**30)
    most = [max(column) for column in zip(*numbers.values(), strict=True)]
    height = TOP + ROW * len(plans) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {END} {height}" width="{END * 3 // 2}" role="img"',
        'font-family="system-ui, sans-serif" font-size="12.5">',
        f"<title>{caption(numbers)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{END - 1}" height="{height - 1}" rx="8"/>',
        f'<text x="{NAME}" y="27" font-size="16" font-weight="600">One model, six layouts, one line for each</text>',
        f'<text class="soft" x="{NAME}" y="47">A training step of two layers of width {WIDTH:,}, of {ROWS}'
        f" x {TOKENS:,} tokens</text>",
        f'<text class="soft" x="{NAME}" y="64">in bf16, on eight H100 of one host: priced, before anything runs</text>',
        *(
            f'<text class="soft" x="{x}" y="{TOP - 14}" font-size="11.5">{head}</text>'
            for x, head in zip(
                (NAME, BATCH, WEIGHT, RECEIVED, TIME, HOLDS),
                ("strategy", "batch", "weight", "received", "time", "memory"),
                strict=True,
            )
        ),
    ]
    for i, (name, plan) in enumerate(plans.items()):
        y = TOP + i * ROW
        parts.append(f'<text x="{NAME}" y="{y + 20}" font-weight="600" font-size="12">"{name}"</text>')
        parts += icon(BATCH, y, Layout(plan.mesh, plan.batch), (ROWS, WIDTH))
        parts += icon(WEIGHT, y, Layout(plan.mesh, plan.parameters["0.up.weight"]), (INNER, WIDTH))
        for x, value, top, unit in zip((RECEIVED, TIME, HOLDS), numbers[name], most, ("GiB", "ms", "GiB"), strict=True):
            text = f"{value:.0f}" if unit == "ms" else f"{value:.1f}"
            parts.append(f'<rect class="bar" x="{x}" y="{y + 22}" width="{BAR * value / top:.1f}" height="7" rx="2"/>')
            parts.append(f'<text x="{x}" y="{y + 16}">{text} <tspan class="soft">{unit}</tspan></text>')
    note = "Colours are ranks; x2: two ranks hold the same part."
    parts.append(f'<text class="soft" x="{NAME}" y="{height - 12}" font-size="11">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])


def caption(numbers: dict[str, tuple[float, float, float]]) -> str:
    """The numbers in words, for those who do not see the picture."""
    said = (f"{name} {sent:.1f} GiB, {ms:.0f} ms, holds {held:.1f} GiB" for name, (sent, ms, held) in numbers.items())
    return f"Bytes that a rank receives in a training step, its time, and what it holds: {'; '.join(said)}"


def icon(left: float, top: float, layout: Layout, shape: Sequence[int]) -> list[str]:
    """A square for a matrix, cut as its layout cuts it: coloured by rank, with the number of ranks that hold a cell."""
    holders: dict[tuple[range, ...], list[int]] = defaultdict(list)
    for rank, coordinate in enumerate(layout.mesh.coordinates()):
        holders[layout.region(shape, coordinate)].append(rank)
    parts = []
    for (rows, columns), ranks in holders.items():
        x, width = left + ICON * columns.start / shape[1], ICON * len(columns) / shape[1]
        y, height = top + ICON * rows.start / shape[0], ICON * len(rows) / shape[0]
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - 0.6:.1f}" height="{height - 0.6:.1f}"'
            f' fill="{COLOURS[ranks[0]]}"/>'
        )
        if len(ranks) > 1 and height >= 12:
            middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 3.5:.1f}"'
            parts.append(f'<text class="on" {middle} font-size="9.5" text-anchor="middle">x{len(ranks)}</text>')
    return parts


if __name__ == "__main__":
    PICTURE.write_text(picture())
