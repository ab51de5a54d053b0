"""The console on which results, errors and notes are printed, and the common form of tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Drawing: TypeAlias = RenderableType
"""A value that can be shown or exported."""

WIDE = 128
"""Columns of what is exported, and of what is printed to no terminal."""


def show(value: Drawing) -> None:
    """Print to the user, in colour on a terminal only."""
    console = Console()
    console.width = columns()
    console.print(value)


def columns() -> int:
    """Return the width of the output: that of the terminal or of COLUMNS, else `WIDE`."""
    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else max(console.width, WIDE)


def error(message: str) -> None:
    """Print a failure on stderr, with its first line highlighted."""
    first, _, rest = message.partition("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(first)}")
    if rest.strip():
        console.print(escape(rest.strip("\n")), style="dim")


def note(message: str) -> None:
    """Print a note on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(message), style="dim")


def data(value: object) -> None:
    """Print a value as JSON."""
    text(json.dumps(value, indent=2))


def text(value: str) -> None:
    """Print text as it is; where nobody reads it any more, the program ends, as with `show`."""
    Console().out(value, highlight=False)


def drop_output() -> None:
    """Drop what was not written to stdout: Python would try once more at its end, and print a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    styles: Sequence[str] = (),
    total: Sequence[str] = (),
    no_wrap: bool = False,
) -> Table:
    """Build a table of rows under headings; a heading that begins with ">" aligns its column right, for numbers.

    `styles` are those of the rows, `total` is a row apart at the end. With `no_wrap` no cell takes several lines.
    """
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, show_header=any(heads))
    for head in heads:
        justify: JustifyMethod = "right" if head.startswith(">") else "left"
        drawn.add_column(head.removeprefix(">"), justify=justify, no_wrap=no_wrap, overflow="fold")
    for i, row in enumerate(rows):
        drawn.add_row(*map(_cell, row), style=styles[i] if styles else None)
    if total:
        drawn.add_section()
        drawn.add_row(*map(_cell, total))
    return drawn


def _cell(cell: str | Text) -> str | Text:
    return escape(cell) if isinstance(cell, str) else cell


def title(text: str) -> Text:
    """Return the title of a table, which is not wrapped to the table's width."""
    return Text(text, style="italic")


def count(n: int, thing: str) -> str:
    """Format a number with its noun, in the plural unless it is 1.

    >>> count(1, "rank"), count(1000, "step")
    ('1 rank', '1,000 steps')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"
