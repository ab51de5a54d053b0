"""A reshard plan as rows and lines, for tables and for machines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from dshard.layout import Layout
from dshard.redistribute import numel
from dshard.reshard.chains import Form, drafts
from dshard.reshard.host_network import HostNetwork, Resource, host_network_of
from dshard.reshard.order import Choice, Use, balanced, in_order, uses_of
from dshard.reshard.reshard_plan import ReshardPlan
from dshard.reshard.tasks import Task, tasks
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


Baseline: TypeAlias = Literal["send/recv", "local all-gather", "naive broadcast", "balanced broadcast"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


def baseline_seconds(
    baseline: Baseline, src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology
) -> float:
    """The makespan of a published strategy, links within hosts and messages taking no time.

    "send/recv" sends each receiver its own copy, "local all-gather" each host one copy, from the sender with the least
    to send (sections 3.1 and 5.1.2); a slice that several hosts need is sent as by "send/recv", as in the authors'
    implementation. For both, messages are assumed never to wait. Both broadcasts send the slices one by one in the
    order of the source's parts: "naive" from the first replica, "balanced" from the sender with the least to send
    (section 3.2).
    """
    network, unit_tasks = host_network_of(topology), tasks(src, dst, shape)
    candidates = [draft for task in unit_tasks for draft in drafts(task, _form(baseline, task, network), network, 0)]
    uses = uses_of(candidates, itemsize, network)
    if baseline in ("send/recv", "local all-gather"):
        return _busiest(uses, balanced(uses))
    choices = balanced(uses) if baseline == "balanced broadcast" else [(job, 0) for job in range(len(uses))]
    return in_order(uses, choices).makespan


def _form(baseline: Baseline, task: Task, network: HostNetwork) -> Form:
    if baseline == "local all-gather" and len(network.by_host(task.receivers)) == 1:
        return "local_all_gather"
    return "broadcast" if baseline.endswith("broadcast") else "send"


def _busiest(uses: Sequence[Sequence[Use]], choices: Sequence[Choice]) -> float:
    load: defaultdict[Resource, float] = defaultdict(float)
    for job, head in choices:
        for resource, seconds in uses[job][head].items():
            load[resource] += seconds
    return max(load.values(), default=0.0)
