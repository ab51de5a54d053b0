"""What people see: tables and progress bars of values that the library returned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from dshard.demo import Progress, Row, Settings

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def show(value: RenderableType) -> None:
    """Print to the user; in colour on a terminal only."""
    Console().print(value)


def error(message: str) -> None:
    """Print a failure where it does not mix with results: its first line stands out, the rest explains."""
    first, _, rest = message.partition("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(first)}")
    if rest.strip():
        console.print(escape(rest.strip("\n")), style="dim")


def data(value: object) -> None:
    """Print a value for machines."""
    print(json.dumps(value, indent=2), file=sys.stdout, flush=True)


@contextmanager
def demo_progress(settings: Settings, visible: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar for each strategy; the function given moves them."""
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


def demo_table(rows: Sequence[Row], settings: Settings) -> Table:
    """One line for each strategy; it fits a terminal of 80 columns."""
    scale = f"{count(settings.steps, 'step')}, {count(settings.ranks, 'rank')}, {settings.device}"
    table = Table(
        title=f"A vision transformer on handwritten digits: {scale}",
        caption="Loss diff.: the largest from the single device at any step.\n"
        "Collectives and the bytes they bring: of one rank, in one step.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    for heading in ("strategy", "mesh"):
        table.add_column(heading, no_wrap=True)
    for heading in ("final\nloss", "loss\ndiff.", "test\naccuracy", "collec-\ntives", "bytes", "time/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.strategy,
        row.mesh,
        f"{row.final_loss:.5f}",
        f"{row.max_loss_diff:.1e}",
        f"{row.test_accuracy:.1%}",
        f"{row.collectives_per_step:,}",
        human_bytes(row.bytes_per_step),
        f"{row.seconds:.1f}",
    )


def demo_data(rows: Sequence[Row]) -> dict[str, object]:
    """The table for machines."""
    return {"rows": [asdict(row) for row in rows]}


def count(n: int, thing: str) -> str:
    """A number of things as people say it.

    >>> count(1, "rank"), count(1000, "step")
    ('1 rank', '1,000 steps')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def human_bytes(n: float) -> str:
    """A number of bytes as people say it.

    >>> human_bytes(0), human_bytes(2048), human_bytes(1536 * 1024)
    ('0 B', '2.0 KiB', '1.5 MiB')
    """
    for unit in UNITS:
        if n < 1024 or unit == UNITS[-1]:
            break
        n /= 1024
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
