"""Tables and progress bars that show the library's values in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dshard.compare import Comparison
from dshard.compare.comparison import HEADINGS as COMPARED
from dshard.errors import NotationError
from dshard.explain import Explanation, Report
from dshard.explain.report_values import NOTHING, figures
from dshard.parallel import ModelPlan, PlanTable
from dshard.parallel.plan_table import HEADINGS as PLANS_HEADINGS
from dshard.parallel.plan_values import HEADINGS as PLAN_HEADINGS
from dshard.pipeline import Choice, Timeline
from dshard.redistribute import Plan, plan
from dshard.redistribute.layout_state import step_seconds
from dshard.reshard import ReshardPlan
from dshard.reshard.reshard_plan import chain_rows, summary_lines
from dshard.step_timeline import PlacedEvent
from dshard.tables import human_bytes
from dshard.tools.demo import Predicted, Row, Settings
from dshard.tools.report.console import WIDE, Drawing, count, table, title
from dshard.tools.report.console import checkpoint_progress as checkpoint_progress
from dshard.tools.report.console import data as data
from dshard.tools.report.console import demo_progress as demo_progress
from dshard.tools.report.console import drop_output as drop_output
from dshard.tools.report.console import error as error
from dshard.tools.report.console import measure_progress as measure_progress
from dshard.tools.report.console import note as note
from dshard.tools.report.console import search_progress as search_progress
from dshard.tools.report.console import show as show
from dshard.tools.report.console import text as text
from dshard.tools.report.console import waiting as waiting
from dshard.tools.report.timelines import simulation_table, step_timeline, timeline_table
from dshard.tools.selftest import Result, SelfTest
from dshard.topology import BYTES, Topology
from dshard.trace import EXPERT_HEADINGS, HEADINGS, Trace, expert_rows
from dshard.trace import NUMBERS as EXPERT_NUMBERS

Exported: TypeAlias = (
    Report | Explanation | Trace | Comparison | ModelPlan | Topology | Choice | Timeline | PlanTable | SelfTest
)
"""Values that have a table."""
MOST_CHAINS = 64
"""Chains of a plan between meshes that a table has."""


def export(value: Exported | Drawing, path: str | PathLike[str], *, form: str | None = None) -> None:
    """Write an explanation, a trace or a table to a file: "html", "svg" or "txt", or "json" for machines.

    The form is the file's ending unless given.
    """
    file = Path(path)
    form = form or file.suffix.removeprefix(".")
    if form == "json" and isinstance(value, Report | Explanation | Trace | Comparison):
        file.write_text(value.to_json(), encoding="utf-8")
        return
    console = Console(record=True, file=StringIO(), width=WIDE)
    console.print(drawing_of(value))
    match form:
        case "html":
            console.save_html(str(file))
        case "svg":
            console.save_svg(str(file), title="dshard")
        case "txt":
            console.save_text(str(file))
        case _:
            raise NotationError(f"cannot write {str(file)!r}: use a name that ends in .html, .svg, .txt or .json")


def drawing_of(value: Exported | Drawing) -> Drawing:
    """Return the table of a value, or `value` itself if it is drawable."""
    match value:
        case Report(operators):
            return Group(*map(explanation_table, operators)) if operators else Text(NOTHING)
        case Explanation():
            return explanation_table(value)
        case Trace():
            return trace_table(value)
        case Comparison():
            return comparison_table(value)
        case ModelPlan():
            return model_table(value)
        case Topology():
            return measured_table(value) if value.measured else topology_table(value)
        case Choice():
            return simulation_table(value)
        case Timeline():
            return timeline_table(value)
        case PlanTable():
            return plans_table(value)
        case SelfTest():
            return selftest_table(value)
        case _:
            return value


def demo_table(rows: Sequence[Row], settings: Settings) -> Table:
    """The demo's results, one line for each strategy; fits a terminal of 80 columns."""
    heads = ("strategy", "mesh", ">final\nloss", ">loss\ndiff.", ">accu-\nracy", ">collec-\ntives", ">bytes", ">time/s")
    drawn = table(heads, map(_cells, rows), no_wrap=True)
    scale = f"{count(settings.steps, 'step')}, {count(settings.ranks, 'rank')}, {settings.device}"
    drawn.title = f"A vision transformer on handwritten digits: {scale}"
    drawn.caption = (
        "Loss diff.: the largest from one device. Ranks share the cores of their host.\n"
        "Collectives and the bytes they bring: of one rank, in one step."
    )
    return drawn


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
    """Summarise the predicted communication of each strategy in a line, the cheapest first.

    >>> predictions([Predicted("data", 34, 1 << 20, 0.01), Predicted("megatron", 8, 6 << 20, 0.02)])
    'auto: data, predicted to communicate for 10.0 ms in a step (megatron 20.0 ms)'
    """
    first, *rest = (f"{predicted.seconds * 1e3:.1f} ms" for predicted in ranked)
    others = ", ".join(f"{predicted.strategy} {ms}" for predicted, ms in zip(ranked[1:], rest, strict=True))
    return f"auto: {ranked[0].strategy}, predicted to communicate for {first} in a step ({others})"


def plan_table(moved: Plan, itemsize: int, topology: Topology, why: str) -> Group:
    """The steps of one redistribution, with the bytes that the busiest rank receives in each."""
    rows = [
        (step["step"], step["axes"], step["change"], human_bytes(step["nbytes"]), f"{step['seconds'] * 1e6:.1f}")
        for step in plan_rows(moved, itemsize, topology)
    ]
    total = ("total", "", "", human_bytes(moved.busiest() * itemsize), f"{moved.seconds * 1e6:.1f}")
    return Group(
        title(f"[{moved.src}] -> [{moved.dst}]  of {moved.shape}\ntopology {topology}; {why}"),
        table(("step", "axes", "from -> to", ">received", ">predicted us"), rows, total=total),
        *_more_bytes(moved, itemsize, topology),
    )


def _more_bytes(moved: Plan, itemsize: int, topology: Topology) -> list[Text]:
    """Return a note on the plan that sends fewer bytes and how to ask for it, if there is one."""
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
    rows = []
    for stage, (name, axes, change), load in zip(moved.shaped_stages(), moved.words(), moved.loads(), strict=True):
        seconds, nbytes = step_seconds(*stage, itemsize, topology), load.received * itemsize
        rows.append({"step": name, "axes": axes, "change": change, "nbytes": nbytes, "seconds": seconds})
    return rows


def reshard_table(resharding: ReshardPlan, topology: Topology, why: str) -> Group:
    """The chains of a plan between meshes, by the time they start, and the bytes between each pair of hosts."""
    src, dst = (f"[{layout}] on ({layout.mesh})" for layout in (resharding.src, resharding.dst))
    rows = [
        (
            f"{row.start * 1e6:.1f}",
            f"{row.seconds * 1e6:.1f}",
            human_bytes(row.nbytes),
            str(row.chunks),
            row.form,
            row.slice,
            " > ".join(map(str, row.ranks)),
        )
        for row in chain_rows(resharding)[:MOST_CHAINS]
    ]
    hidden = len(resharding.chains) - MOST_CHAINS
    more = [count(hidden, "chain") + " more"] if hidden > 0 else []
    return Group(
        title(f"{src} -> {dst}  of {resharding.shape}\ntopology {topology}; {why}"),
        table((">start us", ">busy us", ">bytes", ">chunks", "form", "slice", "ranks"), rows),
        Text("\n".join([*more, *summary_lines(resharding, topology)])),
    )


def topology_table(topology: Topology) -> Group:
    """The layers of a topology, outermost first."""
    rows = [
        (
            layer.name,
            "any" if layer.ranks is None else str(layer.ranks),
            f"{layer.group_bandwidth / 1e9:g}",
            f"{layer.latency * 1e6:g}",
        )
        for layer in topology.layers
    ]
    heads = ("layer", ">ranks in each parent", ">group GB/s", ">latency us")
    return Group(title(str(topology)), table(heads, rows))


def explanation_table(explanation: Explanation, legend: str = "") -> Group:
    """The candidates of one operator, with the chosen one marked and the reason for it."""
    times = (">gather\nus", ">compute\nus", ">reduce\nus", ">back-\nward us")
    heads = ("", "axes, layouts", ">received", ">mes-\nsages", ">peak", *times, ">x\nbound")
    rows: list[list[str | Text]] = []
    styles = []
    for candidate in explanation.candidates:
        chosen = candidate is explanation.chosen
        layouts = candidate.placements.replace(", ", "\n  ").replace(" -> ", "\n  -> ")
        what = Text.assemble((candidate.name, "bold"), (f"\n  {layouts}", "" if chosen else "dim"))
        rows.append(["*" if chosen else "", what, *figures(candidate)])
        styles.append("green" if chosen else "")
    foot = [*explanation.foot(), *([legend] if legend else [])]
    return Group(
        title("\n".join(explanation.head())),
        table(heads, rows, styles=styles),
        Text("\n".join(foot)),
        Text(""),
    )


def trace_table(trace: Trace) -> Group:
    """The events of a trace, by operator, collective, axis and module, and its layers of experts."""
    numbers = ("count", "received", "predicted ms", "measured ms")
    heads = [f">{head}" if head in numbers else head for head in HEADINGS]
    received = f"{count(len(trace.events), 'collective')}, {human_bytes(trace.nbytes)} received"
    drawn = title(received), table(heads, trace.rows())
    if not trace.experts:
        return Group(*drawn)
    heads = [f">{head}" if head in EXPERT_NUMBERS else head for head in EXPERT_HEADINGS]
    return Group(*drawn, title("layers of experts"), table(heads, expert_rows(trace.experts)))


def comparison_table(comparison: Comparison) -> Group:
    """The modules of a comparison: the first that differs in red, others that differ in yellow."""
    rows = comparison.rows()
    heads = [*COMPARED[:3], *(f">{head}" for head in COMPARED[3:])]
    styles = [{"*": "bold red", "!": "yellow"}.get(row[0], "") for row in rows]
    return Group(title(comparison.head()), table(heads, rows, styles=styles))


def model_table(model_plan: ModelPlan, slots: Sequence[PlacedEvent] = ()) -> Group:
    """Modules of a model with their layouts and the collectives of each in a step, and the timeline of that."""
    heads = [f">{head}" if head in ("received", "ms") else head for head in PLAN_HEADINGS]
    drawn = title(model_plan.head()), table(heads, model_plan.rows()), Text("\n".join(model_plan.notes()))
    return Group(*drawn, *([step_timeline(slots)] if slots else []))


def measured_table(topology: Topology) -> Group:
    """The figures measured for each collective along each set of axes; bandwidth is that of the largest size."""
    rows = [
        (
            measured.collective or "any",
            ",".join(measured.axes),
            f"{measured.latency * 1e6:.0f}",
            f"{measured.bandwidth / 1e6:,.0f}",
            human_bytes(max(measured.sizes, default=0)),
            f"{measured.spread:.0%}",
            "" if measured.overlap is None else f"{measured.overlap:.0%}",
        )
        for measured in topology.measured
    ]
    device = topology.device
    parts = [
        ", ".join(f"{name} {rate / 1e9:,.0f} Gflop/s" for name, rate in device.flops),
        f"memory {device.memory_bandwidth / 1e9:.1f} GB/s",
        f"launch {device.launch * 1e6:.1f} us",
    ]
    if device.dispatch:
        parts.append(f"distributed operator {device.dispatch * 1e6:.0f} us ({device.in_place * 1e6:.0f} in place)")
    if device.alone < 1:
        parts.append(f"{1 / device.alone:.1f} times as fast while other ranks wait")
    return Group(
        title(str(topology)),
        table(("collective", "axes", ">latency us", ">MB/s", ">up to", ">spread", ">beside work"), rows),
        Text(f"{device.name}: {', '.join(parts)}"),
    )


SHOWN = 12
"""Plans that a table has, unless a number is given."""
_NUMBERS = frozenset({"seconds", "MFU", "memory", "network s", "hidden s", "received"})


def plans_table(plans: PlanTable, why: str = "as given", top: int = SHOWN, efficiency: str = "") -> Group:
    """The fastest plans that fit, `top` of them, and the smallest of the others."""
    topology, memory = plans.topology, plans.memory
    limit = "no memory limit is known: give --memory" if memory is None else f"{human_bytes(memory)} of each device"
    heads = [f">{head}" if head in _NUMBERS else head for head in PLANS_HEADINGS]
    notes = ["- does not fit"] if not all(plans.fits(each.plan) for each in plans.plans[:top]) else []
    if plans.skipped:
        notes.append(f"{count(plans.skipped, 'plan')} left out: weights and moments alone do not fit")
    if plans.left:
        notes.append(f"{count(plans.left, 'plan')} not priced in the time: give --seconds")
    searched = [(each.plan, each.plan.search) for each in plans.plans if each.plan.search is not None]
    notes += [f"planned: {search.notes(plan)[0]}" for plan, search in searched]
    notes += [f"{efficiency}; MFU: the share of that peak"] if efficiency else []
    lines = [title(plans.summary), title(f"{count(len(plans.plans), 'plan')}, {limit}, on {topology.name} ({why})")]
    first = plans.plans[0].plan.cost.loops()
    experts = [Text(f"experts of the first by {loops}: {modules}") for loops, modules in first.items()]
    return Group(*lines, table(heads, plans.rows()[:top]), *experts, Text("; ".join(notes), style="dim"))


def plans_data(plans: PlanTable, top: int = SHOWN) -> dict[str, Any]:
    """The same as JSON values."""
    rows = []
    for each in plans.plans[:top]:
        cost, memory = each.plan.cost, each.plan.cost.memory
        held = {name: getattr(memory, name) for name in ("parameters", "gradients", "optimizer", "activations")}
        rows.append(
            each.data()
            | {"seconds": cost.seconds, "mfu": plans.mfu(each.plan), "fits": plans.fits(each.plan)}
            | {"memory": held | {"transient": memory.transient, "total": memory.total}}
            | {"network": cost.communication, "hidden": cost.hidden, "received": cost.nbytes, "work": cost.work}
            | {"experts": dict(cost.experts), "certificate": each.plan.certificate}
        )
    numbers = {"memory": plans.memory, "flops": plans.flops, "skipped": plans.skipped, "not_priced": plans.left}
    return {"model": plans.summary, **numbers, "plans": rows}


_LINES = 60  # of an error in a report


def selftest_table(selftest: SelfTest) -> Table:
    """One line for each check on each backend."""
    rows = [
        (each.backend, each.check, "passed" if each.passed else "FAILED", f"{each.seconds:.1f}", _first_line(each))
        for each in selftest.results
    ]
    drawn = table(("backend", "check", "", ">time/s", "compared"), rows)
    drawn.title = "dshard selftest: " + ", ".join(f"{name} {value}" for name, value in selftest.machine.items())
    drawn.caption = f"{len(rows) - len(selftest.failed)} of {len(rows)} passed."
    return drawn


def selftest_failures(selftest: SelfTest) -> str:
    """Format the failed checks as text to send to the maintainers."""
    lines = [f"{count(len(selftest.failed), 'check')} failed; please open an issue with what follows"]
    lines += [f"{name}: {value}" for name, value in selftest.machine.items()]
    for each in selftest.failed:
        lines += ["", f"--- {each.backend}, {each.check}", *each.detail.splitlines()[:_LINES]]
    return "\n".join(lines)


def _first_line(result: Result) -> str:
    return result.detail.partition("\n")[0][:200]
