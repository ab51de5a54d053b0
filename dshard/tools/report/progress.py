"""Progress bars and spinners, shown on stderr, and only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.spinner import Spinner

from dshard.tables import human_bytes
from dshard.tools.demo import Progress, Settings

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
def search_progress(visible: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of the priced plans, on a terminal only."""
    columns = (TextColumn("pricing"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Bars(*columns, console=console, transient=True, disable=not (visible and console.is_terminal)) as bars:
        task = bars.add_task("plans", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
