"""Simple plans between meshes, for comparison with those that dshard makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dshard import Layout, Topology
from dshard.reshard import ReshardPlan
from dshard.reshard.chains import Form, drafts, host_network_of
from dshard.reshard.reshard_plan import _scheduled, _without_chains


def plan_of_form(
    src: Layout, dst: Layout, shape: Sequence[int], itemsize: int, topology: Topology, form: Form, *, balance: bool
) -> ReshardPlan:
    """A plan with every task in one form, in the order of the source's regions, of layouts without partials.

    Each piece comes from the sender with the least to send so far, or without `balance` from the first replica.
    """
    network = host_network_of(topology)
    empty, unit_tasks = _without_chains(src, dst, tuple(shape), itemsize, network)
    candidates = [
        draft
        for number, task in enumerate(unit_tasks)
        for draft in drafts(task, form, network, number if balance else 0)
    ]
    return _scheduled(empty, [d if balance else replace(d, heads=d.heads[:1]) for d in candidates], None)
