"""Named choices of loops: the tables of attention and of experts, and what a caller may ask of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Generic, NamedTuple, TypeVar

from dshard.errors import StrategyError
from dshard.mesh import Mesh
from dshard.validate import suggestion

L = TypeVar("L", bound=str)


class NamedLoops(NamedTuple, Generic[L]):
    """A named choice of loops, with the roles of its mesh axes and its source."""

    roles: str
    loops: tuple[L, ...]
    source: str


@dataclass(frozen=True, slots=True)
class LoopTable(Generic[L]):
    """The loops of an operator, and named choices of them, for the option `keyword`; `example` shows loops by axis."""

    keyword: str
    loops: tuple[L, ...]
    example: str
    rows: Mapping[str, NamedLoops[L]]

    def checked(self, requested: object) -> str | tuple[L | None, ...] | None:
        """Check a name of the table, or loops, one for each mesh axis or None for any, and return it."""
        if requested is None or (isinstance(requested, str) and requested in self.rows):
            return requested
        if isinstance(requested, tuple | list) and requested and all(x in (None, *self.loops) for x in requested):
            return tuple(requested)
        loops = f"a loop ({', '.join(self.loops)}) for each mesh axis, such as {self.example}, or None for any"
        hint = suggestion(requested, self.rows) if isinstance(requested, str) else ""
        raise StrategyError(f"{self.keyword}={requested!r}: use {', '.join(self.rows)}, or {loops}{hint}")

    def assignments(self, requested: str | tuple[L | None, ...] | None, mesh: Mesh) -> list[dict[int, L | None]]:
        """The loops of mesh axes, None for any: those of a name on all choices of axes, of which others may have any.

        Raises:
            StrategyError: loops for more axes than the mesh has, or without a name for fewer.
        """
        if isinstance(requested, str):
            roles, loops, _ = self.rows[requested]
            if len(loops) > mesh.ndim:
                raise StrategyError(
                    f"{self.keyword}={requested!r} needs {len(loops)} mesh axes ({', '.join(roles.split())}), but the "
                    f"mesh ({mesh}) has {mesh.ndim}"
                )
            return [dict(zip(axes, loops, strict=True)) for axes in permutations(range(mesh.ndim), len(loops))]
        if requested is not None and len(requested) != mesh.ndim:
            raise StrategyError(
                f"{self.keyword}={requested}: {len(requested)} loops for the mesh ({mesh}); give one for each axis"
            )
        return [dict(enumerate(requested or (None,) * mesh.ndim))]
