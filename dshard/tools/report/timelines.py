"""Tables of the timelines of pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dshard.pipeline import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Choice,
    Compute,
    Forward,
    Program,
    Span,
    Timeline,
    simulate,
)
from dshard.step_timeline import PlacedEvent
from dshard.tables import human_bytes
from dshard.tools.report.console import WIDE, count, table, title

COLUMNS, LEAST = 72, 16
"""Columns of a timeline, and of one in a narrow terminal."""
SHADES = " ░▒▓█"
"""Shares of a column of time, from idle to busy."""
BESIDE = 40
"""Columns of what stands beside it."""


def simulation_table(choice: Choice, width: int = WIDE) -> Group:
    """The computations of each stage, to scale, with its idle time and its memory, in `width` columns."""
    columns = max(LEAST, min(COLUMNS, width - BESIDE))
    program, timeline = choice.program, choice.timeline
    signals = simulate(program, timeline.costs.signals()).makespan
    over = f", {timeline.makespan / signals - 1:.1%} above that" if signals else ""
    foot = f"{timeline.makespan:g} s; with messages of one byte {signals:g} s{over}"
    parts = timeline_table(timeline, columns), Text(foot), Text(_legend(program, columns), style="dim")
    return Group(title(_title(program)), *parts)


def timeline_table(timeline: Timeline, columns: int = COLUMNS) -> Table:
    """The computations of each stage, to scale."""
    rows = [
        (
            str(stage),
            _bar(spans, timeline.makespan, columns),
            f"{timeline.bubble(stage):.1%}",
            str(timeline.in_flight(stage)),
            human_bytes(timeline.peak_bytes(stage)),
        )
        for stage, spans in enumerate(timeline.spans)
    ]
    return table((">stage", "timeline", ">idle", ">in flight", ">peak"), rows, no_wrap=True)


def step_timeline(slots: Sequence[PlacedEvent], columns: int = COLUMNS) -> Table:
    """The local work and the network of a step, to scale: each column is as dark as its share of time is busy."""
    makespan = max([slot.end for slot in slots], default=0.0) or 1.0
    rows = []
    for queue in ("compute", "network"):
        own = [slot for slot in slots if slot.event.queue == queue]
        busy = [0.0] * columns
        for slot in own:
            begin, end = slot.begin * columns / makespan, slot.end * columns / makespan
            for column in range(int(begin), min(columns, int(end) + 1)):
                busy[column] += max(0.0, min(end, column + 1) - max(begin, column))
        bar = "".join([SHADES[min(len(SHADES) - 1, round(share * (len(SHADES) - 1)))] for share in busy])
        seconds = sum([slot.event.seconds for slot in own])
        rows.append((queue, Text(bar, style="blue" if queue == "compute" else "green"), f"{seconds * 1e3:.3f}"))
    return table(("queue", f"{makespan * 1e3:.3f} ms", ">ms"), rows, no_wrap=True)


def schedules_table(ranked: Sequence[Choice], budget: int | None = None) -> Group:
    """All schedules, the fastest first; those that exceed the memory are dim."""
    rows, styles = [], []
    for choice in ranked:
        program, timeline = choice.program, choice.timeline
        stages = range(program.n_stages)
        idle = sum(map(timeline.bubble, stages)) / program.n_stages
        delay = "" if program.delay is None else str(program.delay)
        in_flight = str(max(map(timeline.in_flight, stages)))
        peak = human_bytes(choice.peak_bytes)
        rows.append((program.schedule, delay, f"{timeline.makespan:g}", f"{idle:.1%}", in_flight, peak))
        styles.append("" if budget is None or choice.peak_bytes <= budget else "dim")
    heads = ("schedule", ">delay", ">seconds", ">idle", ">in flight", ">peak")
    return Group(title(_size(ranked[0].program)), table(heads, rows, styles=styles, no_wrap=True))


def _title(program: Program) -> str:
    delay = "" if program.delay is None else f", weights delayed by {program.delay}"
    overlap = "" if program.overlap else ", waiting for what is sent"
    return f"{program.schedule}{delay}{overlap}: {_size(program)}"


def _size(program: Program) -> str:
    many = "" if program.n_microbatches == 1 else "es"
    return f"{count(program.n_stages, 'stage')}, {program.n_microbatches} microbatch{many}"


def _legend(program: Program, columns: int) -> str:
    backward = "B backward" if program.delay is None else "I gradients of inputs, W of weights"
    return f"F forward, {backward}, each with its microbatch; a column is 1/{columns} of the whole"


def _bar(spans: Sequence[Span], makespan: float, columns: int) -> Text:
    """Draw spans to scale in one line; each begins with its name and continues in dashes."""
    bar = Text(no_wrap=True)
    scale = columns / makespan if makespan else 0.0
    for span in spans:
        begin, end = round(span.begin * scale), round(span.end * scale)
        bar.append("." * (begin - len(bar)), style="dim")
        bar.append(str(span.compute)[: end - begin].ljust(end - begin, "-"), style=_STYLES[type(span.compute)])
    bar.append("." * (columns - len(bar)), style="dim")
    return bar


_STYLES: dict[type[Compute], str] = {
    Forward: "blue",
    Backward: "green",
    BackwardInput: "cyan",
    BackwardWeight: "yellow",
}
