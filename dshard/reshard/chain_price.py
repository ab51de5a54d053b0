"""Chains made of drafts: chunks and start of each, and the seconds of all together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from dshard.reshard.chains import Chain, Draft
from dshard.reshard.host_network import HostNetwork, Resource
from dshard.reshard.order import balanced, best, in_order, use_of, uses_of

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
