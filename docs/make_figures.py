"""Draws the figures of docs/concepts.md.

PYTHONPATH=. python docs/make_figures.py
"""

from __future__ import annotations

from pathlib import Path

from dshard import Layout, Mesh, visualize
from dshard.layout import parse_layout

DOCS = Path(__file__).parent
GRID = Mesh((2, 2), ("dp", "tp"))
FIGURES: dict[str, tuple[str, tuple[int, ...]]] = {
    "replicated": ("dp:S(0) tp:R", (6, 8)),
    "blocks": ("dp:S(0) tp:S(1)", (6, 8)),
    "uneven": ("dp:S(0) tp:S(1)", (5, 7)),
    "nested": ("dp:S(0) tp:S(0)", (7, 8)),
    "ordered": ("dp:S(0) tp:S(0); 0:tp,dp", (7, 8)),
    "empty": ("dp:S(0) tp:S(0)", (3, 8)),
    "partial": ("dp:S(0) tp:P(sum)", (6, 8)),
}


def layout_of(name: str) -> Layout:
    return parse_layout(FIGURES[name][0], GRID)


def figures() -> dict[str, str]:
    """The SVG of each figure."""
    return {name: visualize(layout_of(name), shape).svg() for name, (_, shape) in FIGURES.items()}


if __name__ == "__main__":
    for name, svg in figures().items():
        (DOCS / "figures" / f"{name}.svg").write_text(svg)
