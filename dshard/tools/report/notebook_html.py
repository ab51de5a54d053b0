"""HTML of values for notebooks: pictures of tensors and layouts, tables of other values."""

from __future__ import annotations

from html import escape
from io import StringIO
from math import prod

from rich.console import Console

from dshard.layout import Layout, Shape
from dshard.notebook import Drawn
from dshard.placements import Shard
from dshard.tensor import DTensor
from dshard.tools.report import Exported, drawing_of
from dshard.tools.report.console import WIDE
from dshard.tools.report.visualize import visualize

MOST = 512
"""Ranks of the largest mesh that is drawn."""

_PRE = '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25">{code}</pre>'


def html(value: Drawn | DTensor) -> str:
    """Return the HTML of a value: a picture of a tensor or layout, else its table, else its text.

    A layout is drawn for a tensor of one row or column on each rank. Nothing is sent.
    """
    if isinstance(value, Layout | DTensor):
        layout = value.layout if isinstance(value, DTensor) else value
        shape = tuple(value.shape) if isinstance(value, DTensor) else _least(layout)
        if layout.mesh.size <= MOST and all(shape):
            return visualize(layout, shape).svg()
        return _PRE.format(code=escape(repr(value)))
    if not isinstance(value, Exported):
        return _PRE.format(code=escape(str(value)))
    console = Console(record=True, file=StringIO(), width=WIDE)
    console.print(drawing_of(value))
    return console.export_html(inline_styles=True, code_format=_PRE)


def _least(layout: Layout) -> Shape:
    """Return the smallest shape of which each rank holds a chunk, of each block, along every sharded dim."""
    dims = [placement.dim for placement in layout.placements if isinstance(placement, Shard)]
    sizes = zip(layout.placements, layout.mesh.shape, strict=True)
    split = [(placement.dim, size) for placement, size in sizes if isinstance(placement, Shard)]
    ndim = max([1, *dims]) + 1
    return tuple(layout.blocks.get(i, 1) * prod(size for dim, size in split if dim == i) for i in range(ndim))
