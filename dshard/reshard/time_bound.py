"""A lower bound on the seconds of any reshard."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dshard.redistribute import numel
from dshard.reshard.host_network import HostNetwork
from dshard.reshard.tasks import Task


def needy_hosts(task: Task, network: HostNetwork) -> tuple[int, ...]:
    """The hosts that must receive a task's slice: they have receivers, and lack some term of it."""
    have = [{network.host(rank) for rank in replicas} for replicas in task.holders]
    return tuple(host for host, _ in network.by_host(task.receivers) if not all(host in hosts for hosts in have))


def lower_bound(tasks: Sequence[Task], itemsize: int, network: HostNetwork) -> float:
    """Seconds that the busiest cards need, however the tasks are sent (latency and links within hosts apart).

    Each host that needs a slice receives it once. Each slice is sent once, by some host that holds it: so the cards of
    any set of hosts send the slices that only these hosts hold.
    """
    rate = network.bandwidth * network.cards
    receives: defaultdict[int, float] = defaultdict(float)
    sends: defaultdict[frozenset[int], float] = defaultdict(float)
    for task in tasks:
        needy = needy_hosts(task, network)
        for host in needy:
            receives[host] += numel(task.region) * itemsize
        if needy:
            hosts = frozenset(network.host(rank) for replicas in task.holders for rank in replicas)
            sends[hosts] += numel(task.region) * itemsize
    sets = {*sends, frozenset().union(*sends)} if sends else set()
    sent = [sum(amount for hosts, amount in sends.items() if hosts <= some) / len(some) for some in sets]
    return max([*receives.values(), *sent], default=0.0) / rate
