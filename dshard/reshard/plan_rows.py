"""A reshard plan as rows and lines, for tables and for machines."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dshard.redistribute import numel
from dshard.reshard.baselines import BASELINES, baseline_seconds
from dshard.reshard.reshard_plan import ReshardPlan
from dshard.tables import human_bytes
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class ChainRow:
    """One chain as a row: `slice` is the region, with the flattened elements if it is a piece; times in seconds."""

    start: float
    seconds: float
    nbytes: int
    chunks: int
    form: str
    slice: str
    ranks: tuple[int, ...]
    terms: int


def chain_rows(plan: ReshardPlan) -> list[ChainRow]:
    """One row for each chain of a plan."""
    rows = []
    for chain in plan.chains:
        piece = "" if len(chain.span) == numel(chain.region) else f" {chain.span.start}:{chain.span.stop}"
        nbytes, cut = len(chain.span) * plan.itemsize, f"[{chain.region_text}]{piece}"
        rows.append(
            ChainRow(chain.start, chain.seconds, nbytes, chain.chunks, chain.form, cut, chain.ranks, chain.terms)
        )
    return rows


def baselines_of(plan: ReshardPlan, topology: Topology) -> dict[str, float]:
    """The makespans of published strategies for the reshard of `plan`; none if a reduction is partial."""
    if plan.src.partial_axes() or plan.dst.partial_axes():
        return {}
    unit_tasks = (plan.src, plan.dst, plan.shape, plan.itemsize, topology)
    return {baseline: baseline_seconds(baseline, *unit_tasks) for baseline in BASELINES}


def summary_lines(plan: ReshardPlan, topology: Topology) -> list[str]:
    """Lines of text on the steps within one mesh, the bytes between hosts, and the seconds of all."""
    around = [(moved, where) for moved, where in ((plan.first, "first"), (plan.last, "last")) if moved is not None]
    return [
        *(f"{where}, on one mesh: {moved.src} -> {moved.dst}" for moved, where in around),
        *(f"host {a} -> host {b}: {human_bytes(nbytes)}" for (a, b), nbytes in sorted(plan.crossing().items())),
        f"makespan {plan.makespan * 1e6:.1f} us, {plan.ratio:.2f} of the lower bound; "
        f"{plan.seconds * 1e6:.1f} us with messages and links within hosts",
        *(f"{name}: makespan {seconds * 1e6:.1f} us" for name, seconds in baselines_of(plan, topology).items()),
    ]


def data_of(plan: ReshardPlan, topology: Topology) -> dict[str, Any]:
    """A reshard plan as JSON values."""
    crossing = [{"from": a, "to": b, "nbytes": nbytes} for (a, b), nbytes in sorted(plan.crossing().items())]
    return {
        "src": str(plan.src),
        "dst": str(plan.dst),
        "seconds": plan.seconds,
        "makespan": plan.makespan,
        "bound": plan.bound,
        "ratio": plan.ratio,
        "steps": plan.steps(),
        "hosts": crossing,
        "baselines": baselines_of(plan, topology),
        "chains": [asdict(row) for row in chain_rows(plan)],
    }
