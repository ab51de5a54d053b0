"""Deadlock detection: ranks that wait for each other in different collectives."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """The record of a rank that waits: its group and collective, and how often it has waited on each group."""

    rank: int
    group: str
    ranks: tuple[int, ...]
    kind: str
    counts: Mapping[str, int]
    text: str

    @property
    def number(self) -> int:
        """The number of this wait among the waits on its group."""
        return self.counts[self.group]


def stuck(waiting: Mapping[int, Waiting]) -> set[int]:
    """The deadlocked ranks. A rank that is not in `waiting` is assumed to reach every collective.

    A collective that all its ranks have reached ends. A waiting rank goes on once the ranks that it waits for do.
    """
    progressing: set[int] = set()
    while True:
        next_ranks = {
            rank
            for rank, w in waiting.items()
            if rank not in progressing
            and _can_go_on(w, [waiting[peer] for peer in w.ranks if peer != w.rank and peer in waiting], progressing)
        }
        if not next_ranks:
            return set(waiting) - progressing
        progressing |= next_ranks


def _can_go_on(here: Waiting, others: Sequence[Waiting], progressing: Collection[int]) -> bool:
    passed = 0
    for other in others:
        count = other.counts.get(here.group, 0)
        if count < here.number:
            if other.rank not in progressing:
                return False
        elif count > here.number or other.group != here.group:
            passed += 1
        elif other.kind != here.kind:
            return False
    return passed < len(here.ranks) - 1
