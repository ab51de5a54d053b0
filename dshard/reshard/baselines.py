"""Published strategies in our cost model, from "On Optimizing the Communication of Model Parallelism"."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from dshard.layout import Layout
from dshard.reshard.chain import Form
from dshard.reshard.chain_forms import drafts
from dshard.reshard.host_network import HostNetwork, Resource, host_network_of
from dshard.reshard.order import Choice, Use, balanced, in_order, uses_of
from dshard.reshard.tasks import Task, tasks
from dshard.topology import Topology

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
