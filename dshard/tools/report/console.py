"""The console on which results, errors and notes are printed, and the common form of tables."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TypeAlias

from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dshard.tables import human_bytes
from dshard.tools.demo import Progress, Settings

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
    drawn = (Table if no_wrap else _Narrowing)(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, show_header=any(heads)
    )
    for head in heads:
        justify: JustifyMethod = "right" if head.startswith(">") else "left"
        drawn.add_column(head.removeprefix(">"), justify=justify, no_wrap=no_wrap, overflow="fold")
    for i, row in enumerate(rows):
        drawn.add_row(*map(_cell, row), style=styles[i] if styles else None)
    if total:
        drawn.add_section()
        drawn.add_row(*map(_cell, total))
    return drawn


class _Narrowing(Table):
    """A table that breaks lines between words, and no numbers, where it is too wide, as long as that is enough.

    rich takes from the widest columns first, whatever stands in them.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        words, numbers, lines = list[int](), list[int](), list[int]()
        for column in self.columns:
            head, *cells = (Measurement.get(console, options, cell) for cell in (column.header, *column.cells))
            longest = max((cell.maximum for cell in cells), default=0)
            words.append(max(each.minimum for each in (head, *cells)))
            numbers.append(max(words[-1], longest) if column.justify == "right" else words[-1])
            lines.append(max(head.maximum, longest))
        room = options.max_width - 2 * len(words) + 1  # beside the gaps of two
        for column, width in zip(self.columns, narrowed([words, numbers, lines], room), strict=True):
            column.width = width
        return super().__rich_console__(console, options)


def narrowed(wanted: Sequence[Sequence[int]], room: int) -> list[int]:
    """The widths of columns: at least the last ones in `wanted` that fit in the room, and some of the next ones.

    >>> narrowed([[7, 9, 3], [20, 9, 3]], 40), narrowed([[7, 9, 3], [20, 9, 3]], 25), narrowed([[7, 9, 3]], 12)
    ([20, 9, 3], [13, 9, 3], [4, 5, 3])
    """
    known = [[1] * len(wanted[0]), *wanted]
    fitting = max(i for i, widths in enumerate(known) if not i or sum(widths) <= room)
    widths, most = [*known[fitting]], known[min(fitting + 1, len(wanted))]
    for left, i in enumerate(sorted(range(len(widths)), key=lambda i: most[i] - widths[i])):
        spare = max(room - sum(widths), 0) // (len(widths) - left)
        widths[i] += min(most[i] - widths[i], spare)
    return widths


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


# -- progress bars and spinners, shown on stderr, and only on a terminal

PATIENCE = 1.0
"""Seconds that need no sign of life."""


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner for work that takes longer than a second and reports no progress."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    spinner = Spinner("dots", what)
    live = Live(spinner, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    timer = Timer(PATIENCE, live.start)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        live.stop()


@contextmanager
def demo_progress(settings: Settings, visible: bool) -> Iterator[Callable[[Progress], None]]:
    """Show a bar for each strategy, moved by the yielded function."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=Console(stderr=True), disable=not visible) as bars:
        tasks = {
            strategy.name: bars.add_task(strategy.name, total=settings.steps, start=False, loss="")
            for strategy in settings.chosen()
        }

        def move(progress: Progress) -> None:
            bars.start_task(tasks[progress.strategy])
            bars.update(tasks[progress.strategy], completed=progress.step, loss=f"loss {progress.loss:.4f}")

        yield move


@contextmanager
def measure_progress(visible: bool, verb: str = "measuring") -> Iterator[Callable[[tuple[float, str]], None]]:
    """Show one bar; the yielded function sets its completed share and names the current measurement."""
    columns = (TextColumn(verb), BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
    with Bars(*columns, console=Console(stderr=True), disable=not visible) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda done: bars.update(task, completed=done[0], description=done[1])


@contextmanager
def checkpoint_progress(visible: bool = True, what: str = "checkpoint") -> Iterator[Callable[[int, int], None]]:
    """Show one bar of this rank's bytes; pass the yielded function as `progress=` to `save` or `load`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[done]}"))
    with Bars(*columns, console=Console(stderr=True), disable=not visible) as bars:
        task = bars.add_task(what, total=1.0, done="")

        def move(done: int, total: int) -> None:
            share = done / total if total else 1.0
            bars.update(task, completed=share, done=f"{human_bytes(done)} of {human_bytes(total)}")

        yield move


@contextmanager
def search_progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the priced plans, on a terminal only."""
    columns = (TextColumn("pricing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("plans", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
