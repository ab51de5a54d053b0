"""Reports for people: tables and progress bars of values that the library returned."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dshard.demo import Predicted, Row, Settings
from dshard.errors import NotationError
from dshard.explain import Explanation, Report
from dshard.explain.report_values import NOTHING, figures
from dshard.parallel import Plan as ModelPlan
from dshard.parallel.atp_search import MeshChoice
from dshard.parallel.plan_values import HEADINGS as PLAN_HEADINGS
from dshard.redistribute import Plan, plan
from dshard.redistribute.price import step_seconds
from dshard.report.progress import checkpoint_progress as checkpoint_progress
from dshard.report.progress import demo_progress as demo_progress
from dshard.report.progress import measure_progress as measure_progress
from dshard.report.progress import search_progress as search_progress
from dshard.report.progress import waiting as waiting
from dshard.reshard import ReshardPlan
from dshard.reshard.plan_rows import chain_rows, summary_lines
from dshard.tables import human_bytes
from dshard.topology import BYTES, Topology
from dshard.trace import HEADINGS, Trace


def show(value: Drawing) -> None:
    """Print to the user; in colour on a terminal only, and never folded where there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDE)
    console.print(value)


Drawing: TypeAlias = RenderableType
"""What can be shown or exported."""

WIDE = 128
"""Columns of what is exported, and of what is printed to no terminal."""


def export(
    value: Report | Explanation | Trace | ModelPlan | Drawing, path: str | PathLike[str], *, form: str | None = None
) -> None:
    """Write an explanation, a trace or a table to a file: "html", "svg" or "txt", or "json" for machines.

    The form is the file's ending unless given.

    Raises:
        NotationError: another form, or "json" for a table, which has no data.
    """
    file = Path(path)
    form = form or file.suffix.removeprefix(".")
    if form == "json" and isinstance(value, Report | Explanation | Trace):
        file.write_text(value.to_json())
        return
    console = Console(record=True, file=StringIO(), width=WIDE)
    console.print(drawn(value))
    match form:
        case "html":
            console.save_html(str(file))
        case "svg":
            console.save_svg(str(file), title="dshard")
        case "txt":
            console.save_text(str(file))
        case _:
            raise NotationError(f"cannot write {str(file)!r}: use a name that ends in .html, .svg, .txt or .json")


def drawn(value: Report | Explanation | Trace | ModelPlan | Drawing) -> Drawing:
    """The table of an explanation, a trace or a model's plan."""
    match value:
        case Report(operators):
            return Group(*map(explanation_table, operators)) if operators else Text(NOTHING)
        case Explanation():
            return explanation_table(value)
        case Trace():
            return trace_table(value)
        case ModelPlan():
            return model_table(value)
        case _:
            return value


def error(message: str) -> None:
    """Print a failure where it does not mix with results: its first line stands out, the rest explains."""
    first, _, rest = message.partition("\n")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"[bold red]error:[/] {escape(first)}")
    if rest.strip():
        console.print(escape(rest.strip("\n")), style="dim")


def note(message: str) -> None:
    """Print a note where it does not mix with results."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(escape(message), style="dim")


def data(value: object) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2), file=sys.stdout, flush=True)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table of rows under headings."""
    table = Table(*heads, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def demo_table(rows: Sequence[Row], settings: Settings) -> Table:
    """The demo's results, one line for each strategy; fits a terminal of 80 columns."""
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
    for heading in ("final\nloss", "loss\ndiff.", "accu-\nracy", "collec-\ntives", "bytes", "time/s"):
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


def predictions(ranked: Sequence[Predicted]) -> str:
    """A line of the predicted communication of each strategy in a step, the cheapest first.

    >>> predictions([Predicted("data", 34, 1 << 20, 0.01), Predicted("megatron", 8, 6 << 20, 0.02)])
    'auto: data, predicted to communicate for 10.0 ms in a step (megatron 20.0 ms)'
    """
    first, *rest = (f"{found.seconds * 1e3:.1f} ms" for found in ranked)
    others = ", ".join(f"{found.strategy} {ms}" for found, ms in zip(ranked[1:], rest, strict=True))
    return f"auto: {ranked[0].strategy}, predicted to communicate for {first} in a step ({others})"


def demo_data(rows: Sequence[Row]) -> dict[str, object]:
    """The demo's results as JSON values."""
    return {"rows": [asdict(row) for row in rows]}


def count(n: int, thing: str) -> str:
    """A number and a noun, as text.

    >>> count(1, "rank"), count(1000, "step")
    ('1 rank', '1,000 steps')
    """
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def plan_table(moved: Plan, itemsize: int, topology: Topology, why: str = "as given") -> Group:
    """The steps of one redistribution, with the bytes that the busiest rank receives in each."""
    title, table = _titled(f"[{moved.src}] -> [{moved.dst}]  of {moved.shape}\ntopology {topology}; {why}")
    for heading in ("step", "axes", "from -> to"):
        table.add_column(heading)
    for heading in ("received", "predicted us"):
        table.add_column(heading, justify="right")
    for step in plan_rows(moved, itemsize, topology):
        table.add_row(
            step["step"],
            step["axes"],
            escape(step["change"]),
            human_bytes(step["nbytes"]),
            f"{step['seconds'] * 1e6:.1f}",
        )
    table.add_section()
    total = human_bytes(moved.busiest() * itemsize)
    table.add_row("total", "", "", total, f"{moved.seconds * 1e6:.1f}")
    return Group(title, table, *_more_bytes(moved, itemsize, topology))


def _more_bytes(moved: Plan, itemsize: int, topology: Topology) -> list[Text]:
    """A note if another plan sends fewer bytes, and how to ask for it."""
    fewest = plan(moved.src, moved.dst, moved.shape, itemsize, BYTES)
    more, least = moved.busiest() * itemsize, fewest.busiest() * itemsize
    if more <= least:
        return []
    less = f"{more / least:.2f} times as much, in less time" if least else "in less time"
    return [
        Text(
            f"The plan of fewest bytes brings {human_bytes(least)} to the busiest rank and takes "
            f"{fewest.seconds_on(topology, itemsize) * 1e6:.1f} us here; this one brings {human_bytes(more)}, {less}. "
            "Ask for the other with --topology bytes, or use_topology(BYTES).",
            style="dim",
        )
    ]


def plan_rows(moved: Plan, itemsize: int, topology: Topology) -> list[dict[str, Any]]:
    """The steps of a redistribution as JSON values."""
    found = []
    for (step, layout), (name, axes, change), load in zip(moved.stages(), moved.words(), moved.loads(), strict=True):
        seconds, nbytes = step_seconds(step, layout, moved.shape, itemsize, topology), load.received * itemsize
        found.append({"step": name, "axes": axes, "change": change, "nbytes": nbytes, "seconds": seconds})
    return found


def reshard_table(found: ReshardPlan, topology: Topology, why: str = "as given", most: int = 64) -> Group:
    """The chains of a plan between meshes, by the time they start, and what crosses from host to host."""
    src, dst = (f"[{layout}] on ({layout.mesh})" for layout in (found.src, found.dst))
    title, table = _titled(f"{src} -> {dst}  of {found.shape}\ntopology {topology}; {why}")
    for heading in ("start us", "busy us", "bytes", "chunks"):
        table.add_column(heading, justify="right")
    for heading in ("form", "slice", "ranks"):
        table.add_column(heading)
    for row in chain_rows(found)[:most]:
        ranks = " > ".join(map(str, row.ranks))
        seconds = (f"{row.start * 1e6:.1f}", f"{row.seconds * 1e6:.1f}")
        table.add_row(*seconds, human_bytes(row.nbytes), str(row.chunks), row.form, escape(row.slice), ranks)
    hidden = len(found.chains) - most
    more = [count(hidden, "chain") + " more"] if hidden > 0 else []
    return Group(title, table, Text("\n".join([*more, *summary_lines(found, topology)])))


def meshes_table(choices: Sequence[MeshChoice], topology: Topology, why: str = "as given") -> Group:
    """Meshes for a transformer, the cheapest first."""
    title, table = _titled(f"Meshes for one training step, communication alone\ntopology {topology}; {why}")
    table.add_column("mesh")
    table.add_column("name")
    for heading in ("ms", "ms on d1", "ms on d2", "received"):
        table.add_column(heading, justify="right")
    for choice in choices:
        parts = (choice.seconds, choice.seconds_on("d1"), choice.seconds_on("d2"))
        table.add_row(str(choice.mesh), choice.name, *(f"{s * 1e3:.3f}" for s in parts), human_bytes(choice.nbytes))
    return Group(title, table)


def topology_table(topology: Topology) -> Group:
    """The layers of a topology, outermost first."""
    title, table = _titled(str(topology))
    for heading in ("layer", "ranks in each parent", "group GB/s", "latency us"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for layer in topology.layers:
        ranks = "any" if layer.ranks is None else str(layer.ranks)
        table.add_row(layer.name, ranks, f"{layer.group_bandwidth / 1e9:g}", f"{layer.latency * 1e6:g}")
    return Group(title, table)


_NUMBERS = ("count", "received", "predicted ms", "measured ms")


def explanation_table(found: Explanation, legend: str = "") -> Group:
    """The candidates of one operator, the chosen one marked, and why it was."""
    title, table = _titled("\n".join(found.head()))
    table.add_column("", no_wrap=True)
    table.add_column("axes, layouts")
    for heading in (
        "received",
        "mes-\nsages",
        "peak",
        "gather\nus",
        "compute\nus",
        "reduce\nus",
        "back-\nward us",
        "x\nbound",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for candidate in found.candidates:
        chosen = candidate is found.chosen
        layouts = candidate.placements.replace(", ", "\n  ").replace(" -> ", "\n  -> ")
        what = Text.assemble((candidate.name, "bold"), (f"\n  {layouts}", "" if chosen else "dim"))
        table.add_row("*" if chosen else "", what, *figures(candidate), style="green" if chosen else "")
    foot = [*found.foot(), *([legend] if legend else [])]
    return Group(title, table, Text("\n".join(foot)), Text(""))


def trace_table(found: Trace) -> Group:
    """The events of a trace, by operator, collective, axis and module."""
    title, table = _titled(f"{count(len(found.events), 'collective')}, {human_bytes(found.nbytes)} received")
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    for row in found.rows():
        table.add_row(*map(escape, row))
    return Group(title, table)


def model_table(found: ModelPlan) -> Group:
    """Modules of a model with their layouts and what each sends in a step."""
    first, *_, last = str(found).split("\n")
    title, table = _titled(first)
    for heading in PLAN_HEADINGS:
        table.add_column(heading, justify="right" if heading in ("received", "ms") else "left", overflow="fold")
    for row in found.rows():
        table.add_row(*map(escape, row))
    return Group(title, table, Text(last if found.cost is not None else ""))


def measured_table(topology: Topology) -> Group:
    """The figures measured for each collective along each set of axes; bandwidth is that of the largest size."""
    title, table = _titled(str(topology))
    for heading in ("collective", "axes"):
        table.add_column(heading)
    for heading in ("latency us", "MB/s", "up to", "spread"):
        table.add_column(heading, justify="right")
    for found in topology.measured:
        table.add_row(
            found.collective or "any",
            ",".join(found.axes),
            f"{found.latency * 1e6:.0f}",
            f"{found.bandwidth / 1e6:,.0f}",
            human_bytes(max(found.sizes, default=0)),
            f"{found.spread:.0%}",
        )
    device = topology.device
    rates = ", ".join(f"{name} {rate / 1e9:,.0f} Gflop/s" for name, rate in device.flops)
    memory = f"memory {device.memory_bandwidth / 1e9:.1f} GB/s"
    host = f"launch {device.launch * 1e6:.1f} us"
    host += (
        f", distributed operator {device.dispatch * 1e6:.0f} us ({device.in_place * 1e6:.0f} in place)"
        if device.dispatch
        else ""
    )
    return Group(title, table, Text(f"{device.name}: {rates}, {memory}, {host}"))


def _titled(title: str) -> tuple[Text, Table]:
    """A title, not folded to the width of its table, and the empty table."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    return Text(title, style="italic"), table
