"""Tables of simulated training steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dshard.simulate import Model, PlacedEvent, SearchResult, Step
from dshard.step_timeline import Event
from dshard.tables import human_bytes
from dshard.tools.report.console import count, table, title
from dshard.tools.selftest import Result, SelfTest
from dshard.topology import Topology

SHOWN = 12
"""Setups that a table has, unless a number is given."""


def setups_table(setups: SearchResult, why: str = "as given", top: int = SHOWN) -> Group:
    """The fastest setups, `top` of them; those that no other beats in both time and memory are marked."""
    topology = setups.topology
    heads = ("", "setup", ">seconds", ">sequences/s", ">idle", ">memory", ">network s", ">received")
    front = set(map(id, setups.front))
    rows = [
        (
            ("*" if id(step) in front else " ") + ("+" if step.setup.beyond else ""),
            str(step.setup),
            f"{step.seconds:.4g}",
            f"{step.sequences_per_second:.4g}",
            f"{step.bubble:.0%}",
            human_bytes(step.memory.total),
            f"{step.totals.network:.3g}",
            human_bytes(step.totals.nbytes),
        )
        for step in setups.steps[:top]
    ]
    limit = "no memory limit is known: give --memory"
    if setups.memory is not None:
        limit = f"{setups.fitting} fit in {human_bytes(setups.memory)} of each {topology.device.name}"
    counts = f"{setups.tried} setups, {limit}, {len(setups.steps)} simulated"
    note = (
        "* no other setup is both faster and smaller; + asks for more than parallelize does by itself; "
        "idle: what the pipeline waits"
    )
    return Group(title(f"{counts}, on {topology.name} ({why})"), table(heads, rows), Text(note, style="dim"))


def step_table(step: Step, slots: Sequence[PlacedEvent], topology: Topology, why: str) -> Group:
    """Seconds, bytes sent and memory of a step, and its events by name."""
    sums = [
        ("seconds", f"{step.seconds:.4g}, {step.sequences_per_second:.4g} sequences per second"),
        ("computing", f"{step.totals.compute:.4g} s, {step.totals.flops:.3g} operations"),
        ("network", f"{step.totals.network:.4g} s, {human_bytes(step.totals.nbytes)} received"),
        ("collectives", str(step.totals.collectives)),
        ("pipeline waits", f"{step.bubble:.0%}"),
    ]
    memory = step.memory
    parts = ("weights", "gradients", "optimizer", "activations", "transient", "total")
    sums += [(f"memory: {name}", human_bytes(getattr(memory, name))) for name in parts]
    groups: defaultdict[tuple[str, str, str], list[Event]] = defaultdict(list)
    for event in (slot.event for slot in slots):
        groups[event.name, event.phase, " ".join(event.axes)].append(event)
    rows = []
    for (name, phase, axes), events in groups.items():
        nbytes = sum(event.nbytes for event in events)
        seconds = f"{sum(event.seconds for event in events):.3g}"
        rows.append((name, phase, str(len(events)), seconds, human_bytes(nbytes) if nbytes else "", axes))
    return Group(
        title(f"{step.setup}, a batch of {step.batch}, on {topology.name} ({why})"),
        table(("", ""), sums),
        title("one microbatch of one stage, and the end of the step"),
        table(("event", "phase", ">count", ">seconds", ">received", "axes"), rows),
    )


def below_model(model: Model, drawn: Group) -> Group:
    """A table of what a model does, below the sizes that were read of it."""
    return Group(title(model.summary), drawn)


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
