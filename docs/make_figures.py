"""Draws the figures of docs/concepts.md, and lists the public names in docs/reference.md.

PYTHONPATH=. python docs/make_figures.py
"""

from __future__ import annotations

from pathlib import Path

import dshard
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


def reference() -> str:
    """A page with each public name of our own, documented from its docstring; DeviceMesh is torch's."""
    ours = [name for name in dshard.__all__ if not getattr(dshard, name).__module__.startswith("torch")]
    names = sorted([*ours, "visualize"], key=str.lower)
    where = {"visualize": "dshard.report.visualize.visualize"}
    return "\n\n".join(["# Reference", *(f"::: {where.get(name, f'dshard.{name}')}" for name in names)]) + "\n"


if __name__ == "__main__":
    for name, svg in figures().items():
        (DOCS / "figures" / f"{name}.svg").write_text(svg)
    (DOCS / "reference.md").write_text(reference())
