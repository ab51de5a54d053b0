"""Writes into docs/parallelize.md what each strategy sends for one transformer layer.

PYTHONPATH=. python docs/make_parallelize.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from dshard.parallel import Moves
from dshard.tables import human_bytes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from helpers.transformer_layers import SHAPES, middle, planned  # noqa: E402

PAGE = ROOT / "docs" / "parallelize.md"
HIDDEN, HEADS, BATCH, TOKENS = 1024, 16, 8, 512


def table() -> str:
    """The collectives of the middle layer, of each module in each direction, and the bytes that a rank receives."""
    rows = ["| strategy | module | forward | backward |", "|---|---|---|---|"]
    for strategy, mesh in SHAPES.items():
        plan = planned(strategy, mesh, HIDDEN, HEADS, BATCH, TOKENS)
        moves = [*middle(plan, "forward"), *middle(plan, "backward")]
        for module in dict.fromkeys(m.module for m in moves):
            cells = [
                said([m for m in moves if (m.module, m.direction) == (module, d)]) for d in ("forward", "backward")
            ]
            name = module.removeprefix("layers.1").removeprefix(".") or "layer"
            rows.append(f"| {strategy} ({mesh}) | {name} | {' | '.join(cells)} |")
        total = [human_bytes(sum(m.nbytes for m in moves if m.direction == d)) for d in ("forward", "backward")]
        rows.append(f"| {strategy} ({mesh}) | **all** | **{total[0]}** | **{total[1]}** |")
    return "\n".join(rows)


def said(moves: list[Moves]) -> str:
    return "; ".join(f"{m.count or 'in one'} {m.collective} {m.axis}, {human_bytes(m.nbytes)}" for m in moves)


def put(text: str, name: str, body: str) -> str:
    """`text` with what stands between the markers of this name replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{body}\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(put(PAGE.read_text(), "collectives", table()))
