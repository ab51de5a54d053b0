"""Tables of plans of a model."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.text import Text

from dshard.parallel import PlanTable
from dshard.parallel.plan_table import HEADINGS
from dshard.tables import human_bytes
from dshard.tools.report.console import count, table, title

SHOWN = 12
"""Plans that a table has, unless a number is given."""
_NUMBERS = frozenset({"seconds", "MFU", "memory", "network s", "hidden s", "received"})


def plans_table(plans: PlanTable, why: str = "as given", top: int = SHOWN, efficiency: str = "") -> Group:
    """The fastest plans that fit, `top` of them, and the smallest of the others."""
    topology, memory = plans.topology, plans.memory
    limit = "no memory limit is known: give --memory" if memory is None else f"{human_bytes(memory)} of each device"
    heads = [f">{head}" if head in _NUMBERS else head for head in HEADINGS]
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
