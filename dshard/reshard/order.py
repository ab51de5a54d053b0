"""The order of chains: the sender of each piece and its start, for the schedule that ends first.

The model is that of section 3.2 of "On Optimizing the Communication of Model Parallelism": a chain occupies the network
cards of its sender and receivers from its start until its bytes are through, and starts when all of them are free;
links within hosts take no time. Finding the best order is hard (an open shop), so the schedule is reported beside a
lower bound. Both searches, randomised greedy and depth first, count their nodes instead of seconds, so that every rank
finds the same schedule for the same seed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isqrt
from random import Random
from typing import TypeAlias

from dshard.reshard.chains import Chain, Draft, HostNetwork, Resource

MOST_CHUNKS = 64
LEAST_BYTES = 1 << 17
"""The least bytes of a chunk: below this, starting a message costs more than waiting for one."""


def scheduled(
    drafts: Sequence[Draft], itemsize: int, network: HostNetwork, bound: float, seed: int | None
) -> tuple[tuple[Chain, ...], float]:
    """The chains in the order of their starts, and their makespan; without a seed, in the order of the tasks."""
    if not drafts:
        return (), 0.0
    uses = uses_of(drafts, itemsize, network)
    schedule = in_order(uses, balanced(uses)) if seed is None else best(uses, bound, seed)
    chains = [
        _chain(drafts[job], head, start, itemsize, network)
        for (job, head), start in zip(schedule.choices, schedule.starts, strict=True)
    ]
    return tuple(sorted(chains, key=lambda chain: chain.start)), schedule.makespan


def _chain(draft: Draft, head: int, start: float, itemsize: int, network: HostNetwork) -> Chain:
    ranks, nbytes = draft.ranks(head), len(draft.span) * itemsize
    terms, times = len(draft.heads[head]), _hop_seconds(ranks, nbytes, network)
    busy = max([*times, *use_of(ranks, nbytes, network).values()], default=0.0)
    chunks = _chunks(times, nbytes, max(_latencies(ranks, network), default=0.0))
    return Chain(draft.region, draft.span, ranks, draft.form, terms, min(chunks, len(draft.span)), start, busy)


def _chunks(times: Sequence[float], nbytes: int, latency: float) -> int:
    """The number of chunks that takes the least time: pipelining over hops against a latency for each chunk.

    With T seconds for these hops and l for a message, K chunks take T / K + K l more than the slowest hop.
    """
    most = max(1, min(MOST_CHUNKS, nbytes // LEAST_BYTES))
    on_top = sum(times) - max(times, default=0.0)
    if on_top <= 0.0 or latency >= on_top:
        return 1
    return most if latency <= 0.0 else max(1, min(most, isqrt(int(on_top / latency))))


def chains_seconds(chains: Sequence[Chain], itemsize: int, network: HostNetwork) -> float:
    """Seconds until the last chunk has arrived; links within hosts limit bandwidth, but set no order."""
    load: defaultdict[Resource, float] = defaultdict(float)
    end = 0.0
    for chain in chains:
        nbytes = len(chain.span) * itemsize
        times, latencies = _hop_seconds(chain.ranks, nbytes, network), _latencies(chain.ranks, network)
        through = sum(times) / chain.chunks + sum(latencies)
        turns = (chain.chunks - 1) * (chain.seconds / chain.chunks + max(latencies, default=0.0))
        end = max(end, chain.start + through + turns)
        for (sender, receiver), seconds in zip(chain.hops, times, strict=True):
            if not network.crosses(sender, receiver):
                load[sender, "tx"] += seconds
                load[receiver, "rx"] += seconds
    return max(end, *load.values()) if load else end


def _hop_seconds(ranks: Sequence[int], nbytes: int, network: HostNetwork) -> list[float]:
    return [nbytes / network.link(a, b)[1] for a, b in pairwise(ranks)]


def _latencies(ranks: Sequence[int], network: HostNetwork) -> list[float]:
    return [network.link(a, b)[0] for a, b in pairwise(ranks)]


Use: TypeAlias = dict[Resource, float]
"""Seconds for which a chain occupies each resource."""

Choice: TypeAlias = tuple[int, int]
"""The number of a job, and that of its head."""

NODES = 4000
"""The most nodes that the depth-first search visits."""

DEEP = 10
"""The most jobs that are searched in depth."""

RESTARTS, EVALUATIONS = 24, 50_000
"""Randomised greedy attempts, and the starts that they weigh in all, at most."""

EXACT = 1e-9


@dataclass(frozen=True, slots=True)
class StartOrder:
    """A schedule: the choices in the order of their starts, and when the last has ended."""

    choices: tuple[Choice, ...]
    starts: tuple[float, ...]
    makespan: float


def use_of(ranks: Sequence[int], nbytes: float, network: HostNetwork) -> Use:
    """The seconds for which a chain of these ranks occupies each network card."""
    seconds: defaultdict[Resource, float] = defaultdict(float)
    for sender, receiver in pairwise(ranks):
        if network.crosses(sender, receiver):
            seconds[network.card(sender), "tx"] += nbytes / network.bandwidth
            seconds[network.card(receiver), "rx"] += nbytes / network.bandwidth
    return dict(seconds)


def uses_of(drafts: Sequence[Draft], itemsize: int, network: HostNetwork) -> list[list[Use]]:
    """The use of network cards by each draft, for each of its heads."""
    return [
        [use_of(draft.ranks(head), len(draft.span) * itemsize, network) for head in range(len(draft.heads))]
        for draft in drafts
    ]


def in_order(uses: Sequence[Sequence[Use]], choices: Sequence[Choice]) -> StartOrder:
    """The schedule in which each chain starts as soon as all before it leave its cards free."""
    free: defaultdict[Resource, float] = defaultdict(float)
    starts, end = [], 0.0
    for job, head in choices:
        use = uses[job][head]
        start = _start(use, free)
        end = max(end, _occupy(use, start, free))
        starts.append(start)
    return StartOrder(tuple(choices), tuple(starts), end)


def balanced(uses: Sequence[Sequence[Use]], order: Sequence[int] | None = None) -> list[Choice]:
    """Assign each job, in this order, to the sender that has least to send so far; by default in the tasks' order."""
    load: defaultdict[Resource, float] = defaultdict(float)
    choices = []
    for job in range(len(uses)) if order is None else order:
        head = min(range(len(uses[job])), key=lambda head: _peak(uses[job][head], load))
        for resource, seconds in uses[job][head].items():
            load[resource] += seconds
        choices.append((job, head))
    return choices


def best(uses: Sequence[Sequence[Use]], bound: float, seed: int) -> StartOrder:
    """The best schedule: by size, by randomised greedy choice, then depth first; stops at the lower bound."""
    schedule: StartOrder | None = None
    for attempt in _attempts(uses, seed):
        if schedule is None or attempt.makespan < schedule.makespan * (1 - EXACT):
            schedule = attempt
        if schedule.makespan <= bound * (1 + EXACT):
            return schedule
    assert schedule is not None
    return in_depth(uses, schedule, bound) if len(uses) <= DEEP else schedule


def _attempts(uses: Sequence[Sequence[Use]], seed: int) -> Iterator[StartOrder]:
    """Schedules to try: in the order of the tasks, by size, then greedy ones."""
    yield in_order(uses, balanced(uses))
    sizes = [max(use[0].values(), default=0.0) for use in uses]
    yield in_order(uses, balanced(uses, sorted(range(len(uses)), key=lambda job: -sizes[job])))
    random, cost = Random(seed), max(1, sum(map(len, uses)) * len(uses) // 2)
    for i in range(min(RESTARTS, EVALUATIONS // cost)):
        yield greedy(uses, random, noise=0.0 if i == 0 else 0.5)


def greedy(uses: Sequence[Sequence[Use]], random: Random, noise: float) -> StartOrder:
    """Greedy schedule: the job that can start first is next; of several, that of the busiest card, with noise."""
    free: defaultdict[Resource, float] = defaultdict(float)
    left: defaultdict[Resource, float] = defaultdict(float)
    for heads in uses:
        for use in heads:
            for resource, seconds in use.items():
                left[resource] += seconds / len(heads)
    jobs, choices = set(range(len(uses))), []
    while jobs:
        blur = {job: 1.0 + noise * random.random() for job in sorted(jobs)}
        _, _, job, head = min(
            (_start(use, free), -max((left[r] for r in use), default=0.0) * blur[job], job, head)
            for job in blur
            for head, use in enumerate(uses[job])
        )
        jobs.remove(job)
        choices.append((job, head))
        _occupy(uses[job][head], _start(uses[job][head], free), free)
        for use in uses[job]:
            for resource, seconds in use.items():
                left[resource] -= seconds / len(uses[job])
    return in_order(uses, choices)


def in_depth(uses: Sequence[Sequence[Use]], best: StartOrder, bound: float) -> StartOrder:
    """Search depth first, with branch and bound, for a schedule better than `best`; return the best."""
    search = _Search(uses, best, bound)
    search.descend([], frozenset(range(len(uses))), {})
    return search.best


class _Search:
    def __init__(self, uses: Sequence[Sequence[Use]], best: StartOrder, bound: float) -> None:
        self.uses, self.best, self.bound, self.nodes = uses, best, bound, 0
        # what a job occupies whoever sends it
        self.certain = [{r: min(use[r] for use in heads) for r in set.intersection(*map(set, heads))} for heads in uses]

    def descend(self, choices: list[Choice], left: frozenset[int], free: dict[Resource, float]) -> None:
        """Try each next job, from each sender; of equal ones only the first."""
        self.nodes += 1
        if not left:
            self.best = in_order(self.uses, choices)
            return
        seen = []
        for job in sorted(left):
            if self.uses[job] in seen:
                continue
            seen.append(self.uses[job])
            for head, use in enumerate(self.uses[job]):
                if self.nodes >= NODES or self.best.makespan <= self.bound * (1 + EXACT):
                    return
                then = defaultdict(float, free)
                _occupy(use, _start(use, then), then)
                if self._least(left - {job}, then) < self.best.makespan * (1 - EXACT):
                    self.descend([*choices, (job, head)], left - {job}, dict(then))

    def _least(self, left: frozenset[int], free: dict[Resource, float]) -> float:
        """A lower bound on the makespan: the end of the busiest resource if nothing ever waits."""
        busy = dict(free)
        for job in left:
            for resource, seconds in self.certain[job].items():
                busy[resource] = busy.get(resource, 0.0) + seconds
        return max(busy.values(), default=inf)


def _start(use: Use, free: dict[Resource, float]) -> float:
    return max((free.get(resource, 0.0) for resource in use), default=0.0)


def _occupy(use: Use, start: float, free: dict[Resource, float]) -> float:
    """Occupy the resources of `use` from `start` on, and return when the last of them is free again."""
    for resource, seconds in use.items():
        free[resource] = start + seconds
    return start + max(use.values(), default=0.0)


def _peak(use: Use, load: dict[Resource, float]) -> tuple[float, float]:
    """The highest load of a card after adding `use`, senders' cards before all others."""
    sums = [(resource[1] == "tx", load.get(resource, 0.0) + seconds) for resource, seconds in use.items()]
    return max((s for tx, s in sums if tx), default=0.0), max((s for _, s in sums), default=0.0)
