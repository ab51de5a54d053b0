"""Named choices of loops: rows of the tables of attention and of experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

L = TypeVar("L", bound=str)


@dataclass(frozen=True, slots=True)
class NamedLoops(Generic[L]):
    """A named choice of loops, with the roles of its mesh axes and its source."""

    name: str
    roles: tuple[str, ...]
    loops: tuple[L, ...]
    source: str

    def __str__(self) -> str:
        axes = " ".join(f"{role}:{loop}" for role, loop in zip(self.roles, self.loops, strict=True))
        return f"{self.name:20} {axes:16} {self.source}"


def by_name(rows: Iterable[tuple[str, str, tuple[L, ...], str]]) -> dict[str, NamedLoops[L]]:
    """The table of these rows: name, roles in one text, loops, and source."""
    return {name: NamedLoops(name, tuple(roles.split()), loops, source) for name, roles, loops, source in rows}
