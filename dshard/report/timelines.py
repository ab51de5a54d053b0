"""Tables of the timelines of pipelines."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dshard.pipeline import Backward, BackwardInput, BackwardWeight, Choice, Compute, Forward, Program, Span, simulate
from dshard.report import count
from dshard.tables import human_bytes

COLUMNS = 72
"""Columns of a timeline."""


def simulation_table(choice: Choice, columns: int = COLUMNS) -> Group:
    """The computations of each stage, to scale, with its idle time and its memory."""
    program, timeline = choice.program, choice.timeline
    table = _table("stage", "timeline", "idle", "in flight", "peak")
    for stage, spans in enumerate(timeline.spans):
        table.add_row(
            str(stage),
            _bar(spans, timeline.makespan, columns),
            f"{timeline.bubble(stage):.1%}",
            str(timeline.in_flight(stage)),
            human_bytes(timeline.peak_bytes(stage)),
        )
    signals = simulate(program, timeline.costs.signals()).makespan
    over = f", {timeline.makespan / signals - 1:.1%} above that" if signals else ""
    foot = f"{timeline.makespan:g} s; with messages of one byte {signals:g} s{over}"
    return Group(Text(_title(program), style="italic"), table, Text(foot), Text(_legend(program), style="dim"))


def schedules_table(ranked: Sequence[Choice], budget: int | None = None) -> Group:
    """All schedules, the fastest first; those that exceed the memory are dim."""
    table = _table("schedule", "delay", "seconds", "idle", "in flight", "peak")
    for choice in ranked:
        program, timeline = choice.program, choice.timeline
        stages = range(program.n_stages)
        idle = sum(map(timeline.bubble, stages)) / program.n_stages
        table.add_row(
            program.schedule,
            "" if program.delay is None else str(program.delay),
            f"{timeline.makespan:g}",
            f"{idle:.1%}",
            str(max(map(timeline.in_flight, stages))),
            human_bytes(choice.peak_bytes),
            style="" if budget is None or choice.peak_bytes <= budget else "dim",
        )
    program = ranked[0].program
    return Group(Text(_size(program), style="italic"), table)


def _title(program: Program) -> str:
    delay = "" if program.delay is None else f", weights delayed by {program.delay}"
    overlap = "" if program.overlap else ", waiting for what is sent"
    return f"{program.schedule}{delay}{overlap}: {_size(program)}"


def _size(program: Program) -> str:
    many = "" if program.n_microbatches == 1 else "es"
    return f"{count(program.n_stages, 'stage')}, {program.n_microbatches} microbatch{many}"


def _legend(program: Program) -> str:
    backward = "B backward" if program.delay is None else "I gradients of inputs, W of weights"
    return f"F forward, {backward}, each with its microbatch; a column is 1/{COLUMNS} of the whole"


def _bar(spans: Sequence[Span], makespan: float, columns: int) -> Text:
    """A line to scale: each span begins with its name, and goes on in dashes."""
    found = Text(no_wrap=True)
    scale = columns / makespan if makespan else 0.0
    for span in spans:
        begin, end = round(span.begin * scale), round(span.end * scale)
        found.append("." * (begin - len(found)), style="dim")
        found.append(str(span.compute)[: end - begin].ljust(end - begin, "-"), style=_style(span.compute))
    found.append("." * (columns - len(found)), style="dim")
    return found


def _style(compute: Compute) -> str:
    match compute:
        case Forward():
            return "blue"
        case Backward():
            return "green"
        case BackwardInput():
            return "cyan"
        case BackwardWeight():
            return "yellow"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for heading in headings:
        left = heading in ("timeline", "schedule")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table
