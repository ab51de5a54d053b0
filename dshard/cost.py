"""Seconds of one collective on a link, and of local work. Asks no planner."""

from __future__ import annotations

from dshard.topology import Link, Topology


def all_gather_seconds(nbytes: float, n: int, link: Link) -> float:
    """Seconds of a ring all_gather over `n` ranks in which the busiest receives `nbytes`."""
    return (n - 1) * link.latency + nbytes / link.bandwidth


def reduce_scatter_seconds(nbytes: float, n: int, link: Link) -> float:
    """Seconds of a ring reduce_scatter over `n` ranks in which the busiest receives `nbytes`."""
    return (n - 1) * link.latency + nbytes / link.bandwidth


def all_reduce_seconds(nbytes: float, n: int, link: Link) -> float:
    """Seconds of a ring all_reduce, a reduce_scatter and an all_gather, in which the busiest receives `nbytes`."""
    return 2 * (n - 1) * link.latency + nbytes / link.bandwidth


def all_to_all_seconds(nbytes: float, n: int, link: Link) -> float:
    """Seconds of a pairwise all_to_all over `n` ranks in which the busiest receives `nbytes`."""
    return (n - 1) * link.latency + nbytes / link.bandwidth


def work_seconds(flops: float, nbytes: float, topology: Topology) -> float:
    """Seconds of local work that takes `flops` operations and touches `nbytes` of memory: the roofline."""
    return topology.launch + max(flops / topology.flops, nbytes / topology.memory_bandwidth)
