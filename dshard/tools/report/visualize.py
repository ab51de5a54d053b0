"""Pictures of layouts: the ranks that hold each region of a tensor, in the terminal, in notebooks and as SVG."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from math import prod
from os import PathLike
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dshard.errors import ShapeError
from dshard.layout import Layout, Region, Shape
from dshard.notebook import Drawn
from dshard.placements import Shard
from dshard.tables import text_table
from dshard.tensor import DTensor
from dshard.tools.report import Exported, drawing_of
from dshard.tools.report.console import WIDE, show, table
from dshard.validate import as_shape, check_type

COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#999999", "#8da0cb")
"""Eight that stay apart for the colour-blind (Okabe and Ito); ranks take them in turn."""

SIDE, MARGIN, LINE, LEAST = 360.0, 56.0, 18.0, 14.0


@dataclass(frozen=True, slots=True)
class Tile:
    """A region of a tensor and the ranks that hold it; `lead` has its indices in all dims but the last two."""

    lead: Region
    rows: range
    columns: range
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a layout for one shape. A notebook draws it, `show` prints it in colour, `svg` returns or writes it.

    Attributes:
        layout: The layout.
        shape: The global shape; a vector is drawn as one row, dims before the last two as panels.
        tiles: Each part that some rank holds, once.
        idle: The ranks that hold nothing.
    """

    layout: Layout
    shape: Shape
    tiles: tuple[Tile, ...]
    idle: tuple[int, ...]

    @property
    def title(self) -> str:
        """The layout and the shape in a line."""
        return f"{self.layout} of {'x'.join(map(str, self.shape)) or 'a scalar'} on {self.layout.mesh}"

    def panels(self) -> dict[Region, list[Tile]]:
        """Group the tiles by their indices in the leading dims, in order."""
        panels: defaultdict[Region, list[Tile]] = defaultdict(list)
        for tile in self.tiles:
            panels[tile.lead].append(tile)
        return dict(panels)

    def show(self) -> None:
        """Print the picture, in colour on a terminal."""
        show(self.__rich__())

    def __rich__(self) -> Group:
        drawn = [Text(self.title, style="italic")]
        tables = [t for lead, tiles in self.panels().items() for t in (Text(_lead(lead)), _table(tiles)) if t]
        return Group(*drawn, *tables, *([Text(self._foot())] if self.idle else []))

    def __str__(self) -> str:
        parts = [self.title]
        for lead, tiles in self.panels().items():
            rows, columns, held = _grid(tiles)
            body = [[_span_text(r), *(_ranks(held.get((r, c), ())) for c in columns)] for r in rows]
            parts += [*([_lead(lead)] if lead else []), text_table(["", *map(_span_text, columns)], body)]
        return "\n".join([*parts, *([self._foot()] if self.idle else [])])

    def __repr__(self) -> str:
        return str(self)

    def _foot(self) -> str:
        return f"nothing on {'rank' if len(self.idle) == 1 else 'ranks'} {_ranks(self.idle)}"

    def svg(self, path: str | PathLike[str] | None = None) -> str:
        """Return the picture as SVG, or write it to `path`; a region held by several ranks has a stripe for each."""
        panels = self.panels()
        rows, columns = self.shape[-2] if len(self.shape) > 1 else 1, self.shape[-1] if self.shape else 1
        width, height = _sides(rows, columns)
        tall = MARGIN + len(panels) * (height + 2 * LINE) + 2 * LINE
        wide = max(width + 2 * MARGIN, 7.2 * len(self.title) + MARGIN)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {tall:.0f}" width="{wide:.0f}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{wide:.0f}" height="{tall:.0f}" fill="white"/>',
            f'<text x="{MARGIN}" y="{LINE}">{escape(self.title)}</text>',
        ]
        y = MARGIN
        for lead, tiles in panels.items():
            if lead:
                parts.append(f'<text x="{MARGIN}" y="{y - LINE / 2 - 8}" fill="#555555">{_lead(lead)}</text>')
            for tile in tiles:
                parts += _tile_svg(tile, y, height / max(1, rows), width / max(1, columns))
            y += height + 2 * LINE
        if self.idle:
            parts.append(f'<text x="{MARGIN}" y="{y}">{self._foot()}</text>')
        text = "\n".join([*parts, "</svg>", ""])
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_svg_(self) -> str:
        return self.svg()


def visualize(x: DTensor | Layout, shape: Sequence[int] | None = None) -> Picture:
    """Draw the layout of a distributed tensor, or a layout for a global `shape`; nothing is sent, no process needed.

    >>> from dshard import Mesh, Shard
    >>> print(visualize(Layout(Mesh((2, 2), ("dp", "tp")), (Shard(0), Shard(1))), (5, 4)))
    dp:S(0) tp:S(1) of 5x4 on dp=2 tp=2
         0:2  2:4
    ---  ---  ---
    0:3  0    1
    3:5  2    3
    """
    if isinstance(x, DTensor):
        if shape is not None:
            raise ShapeError(f"the tensor has a shape, {tuple(x.shape)}: leave out {tuple(shape)}, or give its layout")
        layout, shape = x.layout, tuple(x.shape)
    elif shape is None:
        check_type(x, Layout, "visualize", "give a DTensor, or a dshard.Layout and a shape")
        raise ShapeError(f"the layout [{x}] is of tensors of any shape: give one, as in visualize(layout, (8, 8))")
    else:
        check_type(x, Layout, "visualize", "give a DTensor, or a dshard.Layout and a shape")
        layout, shape = x, as_shape(shape, "shape", ShapeError)
    layout.check(shape)
    held, idle = parts_of(layout, shape)
    tiles = [Tile(region[:-2], region[-2], region[-1], tuple(ranks)) for region, ranks in held.items()]
    return Picture(layout, shape, tuple(sorted(tiles, key=_origin)), tuple(idle))


def parts_of(layout: Layout, shape: Shape) -> tuple[dict[Region, list[int]], list[int]]:
    """Return the ranks that hold each region of a tensor of at least two dims, and the ranks that hold nothing."""
    held: defaultdict[Region, list[int]] = defaultdict(list)
    idle = []
    for at in layout.mesh.coordinates():
        regions = [region for region in layout.regions(shape, at) if all(region)]
        rank = layout.mesh.rank(at)
        for region in regions:
            held[(range(1),) * (2 - len(region)) + region].append(rank)
        if not regions:
            idle.append(rank)
    return dict(held), idle


def _origin(tile: Tile) -> tuple[int, ...]:
    return tuple(part.start for part in (*tile.lead, tile.rows, tile.columns))


def _grid(tiles: Sequence[Tile]) -> tuple[list[range], list[range], dict[tuple[range, range], tuple[int, ...]]]:
    """The ranges of rows, those of columns, and the ranks of each pair."""
    rows, columns = (
        sorted(set(parts), key=lambda r: r.start) for parts in ([t.rows for t in tiles], [t.columns for t in tiles])
    )
    return rows, columns, {(tile.rows, tile.columns): tile.ranks for tile in tiles}


def _table(tiles: Sequence[Tile]) -> Table:
    rows, columns, held = _grid(tiles)
    cells: list[list[str | Text]] = [
        [_span_text(r), *(_coloured_ranks(held.get((r, c), ())) for c in columns)] for r in rows
    ]
    return table(("", *map(_span_text, columns)), cells)


def _coloured_ranks(ranks: Sequence[int]) -> Text:
    return Text(" ").join(Text(f" {rank} ", style=f"black on {colour(rank)}") for rank in ranks)


def colour(rank: int) -> str:
    """The colour of a rank."""
    return COLOURS[rank % len(COLOURS)]


def _tile_svg(tile: Tile, top: float, down: float, across: float) -> list[str]:
    """Draw one tile as SVG: a rectangle for each rank, side by side, then their common frame and label."""
    x, y = MARGIN + tile.columns.start * across, top + tile.rows.start * down
    width, height = len(tile.columns) * across, len(tile.rows) * down
    stripe = width / len(tile.ranks)
    parts = [
        f'<rect x="{x + i * stripe:.2f}" y="{y:.2f}" width="{stripe:.2f}" height="{height:.2f}" fill="{colour(rank)}" '
        f'data-rank="{rank}" data-part="{" ".join(map(_span_text, (*tile.lead, tile.rows, tile.columns)))}"/>'
        for i, rank in enumerate(tile.ranks)
    ]
    label = _ranks(tile.ranks)
    fits = width >= 7 * len(label) and height >= LEAST
    parts.append(
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="none" stroke="#222222">'
        f"<title>rows {_span_text(tile.rows)}, columns {_span_text(tile.columns)}: {label}</title></rect>"
    )
    middle = f'x="{x + width / 2:.2f}" y="{y + height / 2 + 4:.2f}" text-anchor="middle"'
    return [*parts, *([f"<text {middle}>{label}</text>"] if fits else [])]


def _sides(rows: int, columns: int) -> tuple[float, float]:
    """Return the width and height of a panel: in proportion, but the shorter at least a fraction of the longer."""
    rows, columns = max(1, rows), max(1, columns)
    longer = max(rows, columns)
    return SIDE * max(columns / longer, 0.25), SIDE * max(rows / longer, 0.25 if rows > 1 else 0.1)


def _lead(lead: Region) -> str:
    return f"[{', '.join(map(_span_text, lead))}, :, :]" if lead else ""


def _span_text(part: range) -> str:
    return f"{part.start}:{part.stop}"


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks briefly, with runs of consecutive ranks as ranges.

    >>> _ranks((0, 1, 2, 5))
    '0-2,5'
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


# -- HTML of values for notebooks: pictures of tensors and layouts, tables of other values

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
