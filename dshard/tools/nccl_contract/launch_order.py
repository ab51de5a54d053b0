"""The order in which a process begins operations on its communicators, compared between ranks.

Each operation carries what its process had begun before. Of two ranks that take part in it both must have begun equally
many operations on each other communicator that they share: else they submit them in different orders, whatever happens
to wait for what this time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

Communicator: TypeAlias = str
Ranks: TypeAlias = tuple[int, ...]
_SHOWN = 24  # communicators that an operation carries, the last used


@dataclass(frozen=True, slots=True)
class Begun:
    """The number of operations begun on a communicator of these ranks, and the last one with its source line."""

    ranks: Ranks
    count: int
    last: str


Launches: TypeAlias = dict[Communicator, Begun]


@dataclass(slots=True)
class LaunchLog:
    """The operations that this process has begun on each communicator, ordered by last use."""

    begun: Launches = field(default_factory=dict)

    def before(self) -> Launches:
        """Return the operations begun so far on the most recently used communicators."""
        return dict(list(self.begun.items())[-_SHOWN:])

    def add(self, communicator: Communicator, ranks: Ranks, what: str) -> None:
        """Record the beginning of an operation."""
        former = self.begun.pop(communicator, None)
        self.begun[communicator] = Begun(ranks, 1 if former is None else former.count + 1, what)


def messages_between(group: Communicator, a: int, b: int, *, alone: bool) -> Communicator:
    """Name the communicator of messages between two ranks: the group's own for those within groups.

    torch gives those outside of groups a communicator of their own (ProcessGroupNCCL.cpp, getKeySendRecv).
    """
    return f"{group}, {'single' if alone else 'grouped'} messages of {min(a, b)} and {max(a, b)}"


def disagreement(here: int, mine: Launches, there: int, theirs: Launches, but: Communicator) -> str:
    """Describe which launches before an operation on `but` differ between two ranks, or return ""."""
    for name in {*mine, *theirs} - {but}:
        known = mine.get(name) or theirs[name]
        if here not in known.ranks or there not in known.ranks:
            continue
        counts = [_count(launches, name) for launches in (mine, theirs)]
        if None not in counts and counts[0] != counts[1]:
            ahead, launches, other = (
                (here, mine, there) if (counts[0] or 0) > (counts[1] or 0) else (there, theirs, here)
            )
            return f"rank {ahead} had begun {launches[name].last}, on {name}, before it, and rank {other} had not"
    return ""


def _count(launches: Launches, name: Communicator) -> int | None:
    """Count the operations begun on a communicator; None if its entry may have been dropped since."""
    begun = launches.get(name)
    return begun.count if begun is not None else None if len(launches) >= _SHOWN else 0
