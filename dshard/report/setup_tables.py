"""Tables of simulated training steps."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dshard.simulate import Found, Slot, Step
from dshard.tables import human_bytes
from dshard.topology import Topology


def setups_table(found: Found, topology: Topology, why: str, top: int) -> Group:
    """The fastest setups; those that no other beats in both time and memory are marked."""
    table = Table("", "setup", "seconds", "sequences/s", "idle", "memory", "network s", "received", box=box.SIMPLE_HEAD)
    for column in table.columns[2:]:
        column.justify = "right"
    front = set(map(id, found.front))
    shown = [step for i, step in enumerate(found.steps) if i < top or id(step) in front]
    for step in shown:
        table.add_row(
            ("*" if id(step) in front else " ") + ("+" if step.setup.beyond else ""),
            str(step.setup),
            f"{step.seconds:.4g}",
            f"{step.sequences_per_second:.4g}",
            f"{step.bubble:.0%}",
            human_bytes(step.memory.total),
            f"{step.totals.network:.3g}",
            human_bytes(step.totals.nbytes),
        )
    counts = f"{found.tried} setups, {found.fitting} fit in memory, {len(found.steps)} simulated"
    note = (
        "* no other setup is both faster and smaller; + asks for more than parallelize does by itself; "
        "idle: what the pipeline waits"
    )
    return Group(Text(f"{counts}, on {topology.name} ({why})", style="italic"), table, Text(note, style="dim"))


def step_table(step: Step, slots: Sequence[Slot], topology: Topology, why: str) -> Group:
    """Seconds, bytes sent and memory of a step, and its events by name."""
    sums = Table("", "", box=box.SIMPLE_HEAD, show_header=False)
    rows = [
        ("seconds", f"{step.seconds:.4g}, {step.sequences_per_second:.4g} sequences per second"),
        ("computing", f"{step.totals.compute:.4g} s, {step.totals.flops:.3g} operations"),
        ("network", f"{step.totals.network:.4g} s, {human_bytes(step.totals.nbytes)} received"),
        ("collectives", str(step.totals.collectives)),
        ("pipeline waits", f"{step.bubble:.0%}"),
    ]
    memory = step.memory
    parts = ("weights", "gradients", "optimizer", "activations", "transient", "total")
    rows += [(f"memory: {name}", human_bytes(getattr(memory, name))) for name in parts]
    for row in rows:
        sums.add_row(*row)
    named = Table("event", "phase", "count", "seconds", "received", "axes", box=box.SIMPLE_HEAD)
    for column in named.columns[2:5]:
        column.justify = "right"
    for (name, phase, axes), events in _grouped(slots).items():
        seconds = sum(slot.event.seconds for slot in events)
        nbytes = sum(slot.event.nbytes for slot in events)
        named.add_row(name, phase, str(len(events)), f"{seconds:.3g}", human_bytes(nbytes) if nbytes else "", axes)
    head = Text(f"{step.setup}, a batch of {step.batch}, on {topology.name} ({why})", style="italic")
    return Group(head, sums, Text("one microbatch of one stage, and the end of the step", style="italic"), named)


def _grouped(slots: Sequence[Slot]) -> dict[tuple[str, str, str], list[Slot]]:
    found: dict[tuple[str, str, str], list[Slot]] = {}
    for slot in slots:
        event = slot.event
        found.setdefault((event.name, event.phase, " ".join(event.axes)), []).append(slot)
    return found
