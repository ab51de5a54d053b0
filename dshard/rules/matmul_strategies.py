"""Named matmul strategies: rows of one table over the space of schedules.

Design: docs/design/0005-products.md
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import isqrt

from dshard.errors import StrategyError
from dshard.mesh import Mesh
from dshard.rules.expand import Allowed, Row
from dshard.rules.matmul_loops import Loop, Schedule, Stored
from dshard.rules.panel_stream import Stream
from dshard.rules.rule import Rule
from dshard.validate import suggestion


@dataclass(frozen=True, slots=True)
class NamedStrategy:
    """A named schedule, with the roles of its mesh axes and its source."""

    name: str
    roles: tuple[str, ...]
    schedule: Schedule
    source: str
    square: bool = False

    def __str__(self) -> str:
        axes = " ".join(f"{role}:{loop}" for role, loop in zip(self.roles, self.schedule.loops, strict=True))
        return f"{self.name:18} {axes:22} {self.schedule!s:34} {self.source}"


def _named(
    name: str, roles: str, loops: str, stored: str, source: str, square: bool = False, stream: Stream | None = None
) -> NamedStrategy:
    loop: tuple[Loop, ...] = tuple(loops)  # type: ignore[arg-type]  # letters of the table below
    where: tuple[Stored, ...] = tuple(stored)  # type: ignore[arg-type]
    return NamedStrategy(name, tuple(roles.split()), Schedule(loop, where, stream), source, square)


STRATEGIES: dict[str, NamedStrategy] = {
    row.name: row
    for row in (
        _named("data", "x", "m", "R", "data parallel"),
        _named("weight-gathered", "x", "m", "k", "FSDP, ZeRO-3: the weight is stored sharded"),
        _named("column", "x", "n", "R", "Megatron"),
        _named("column-sequence", "x", "n", "m", "Megatron with sequence parallelism"),
        _named("row", "x", "k", "R", "Megatron"),
        _named("row-sequence", "x", "k", "m", "Megatron with sequence parallelism"),
        _named("summa", "r c", "mn", "kk", "Optimus algorithm 1, C = AB, C stationary"),
        _named("summa-abt", "r c", "mk", "nn", "Optimus algorithm 2, A stationary"),
        _named("summa-atb", "r c", "kn", "mm", "Optimus algorithm 3, B stationary"),
        _named("cannon", "r c", "mn", "kk", "Cannon: SUMMA with rings", True, Stream(1, "k", "ring")),
        _named("tesseract", "depth r c", "mmn", "Rkk", "Tesseract algorithm 3"),
        _named("2.5d", "depth r c", "kmn", "Rkk", "Solomonik and Demmel: the depth splits k"),
        _named("3d", "x y z", "mnk", "kmm", "Agarwal; Colossal-AI 3D"),
        _named("column-first", "d1 d2", "nk", "RR", "ATP section 3.2"),
        _named("row-first", "d1 d2", "kn", "RR", "ATP section 3.2"),
        _named("weight-stationary", "x y", "kn", "nk", "Pope et al. 2-D weight stationary"),
    )
}

ORDERED = frozenset({"column-first", "row-first"})
"""Names that fix the role of each mesh axis; for all others every assignment of axes to roles is tried."""


def strategies() -> tuple[str, ...]:
    """The strategy names that `strategy=` and `use_strategy` accept.

    >>> strategies()[:3]
    ('data', 'weight-gathered', 'column')
    """
    return tuple(STRATEGIES)


def strategy_named(name: str) -> NamedStrategy:
    """The named strategy called `name`."""
    strategy = STRATEGIES.get(name) if isinstance(name, str) else None
    if strategy is None:
        known = f"use {', '.join(STRATEGIES)}" if isinstance(name, str) else "give a name, or a dshard.Schedule"
        raise StrategyError(f"there is no strategy {name!r}: {known}{suggestion(name, STRATEGIES)}")
    return strategy


def allowed_rows(strategy: str | Schedule, rule: Rule, mesh: Mesh) -> tuple[Allowed, ...]:
    """The alternative assignments of rows that this strategy allows a matmul. Axes without a role may have any row.

    Where the matmul lacks the loop of a schedule, as that of a vector lacks rows, the axis shards nothing.
    """
    rows = factors_of(rule)
    if isinstance(strategy, Schedule):
        if len(strategy.loops) != mesh.ndim:
            raise StrategyError(
                f"the schedule [{strategy}] is for {len(strategy.loops)} mesh axes, but the mesh ({mesh}) has "
                f"{mesh.ndim}: give one loop for each axis"
            )
        return (tuple(rows[loop] or frozenset({None}) for loop in strategy.loops),)
    named = strategy_named(strategy)
    loops = named.schedule.loops
    if len(loops) > mesh.ndim:
        raise StrategyError(
            f"the strategy {named.name!r} needs {len(loops)} mesh axes ({', '.join(named.roles)}), but the mesh "
            f"({mesh}) has {mesh.ndim}: use init_device_mesh(device_type, {nearest(mesh.size, len(loops))})"
        )
    if named.square and not _square_pair(mesh):
        q = isqrt(mesh.size)
        raise StrategyError(
            f"the strategy {named.name!r} needs two mesh axes of one size, but the mesh is ({mesh}): "
            f"use a mesh of ({q}, {q}), or 'summa', which takes any two axes"
        )
    axes = range(mesh.ndim)
    assignments = [axes[: len(loops)]] if named.name in ORDERED else permutations(axes, len(loops))
    alternatives: dict[Allowed, None] = {}
    for picked in assignments:
        if named.square and len({mesh.shape[axis] for axis in picked}) > 1:
            continue
        alternatives[tuple(rows[loops[picked.index(axis)]] if axis in picked else None for axis in axes)] = None
    return tuple(alternatives)


def factors_of(rule: Rule) -> dict[Loop, frozenset[Row]]:
    """The factors of a matmul that each loop may shard: batch factors, which all tensors have, count as m."""
    a, b = ({name for dim in term for name in dim} for term in rule.inputs[:2])
    out = {name for dim in rule.outputs[0] for name in dim}
    return {"m": frozenset(a & out), "n": frozenset((b & out) - a), "k": frozenset((a & b) - out)}


def nearest(ranks: int, axes: int) -> tuple[int, ...]:
    """The mesh shape of `axes` axes for `ranks` ranks that is as close to a cube as the factors allow.

    >>> nearest(8, 3), nearest(8, 2), nearest(12, 2)
    ((2, 2, 2), (2, 4), (3, 4))
    """
    if axes == 1:
        return (ranks,)
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    target = ranks ** (1 / axes)
    first = max((d for d in divisors if d <= target + 1e-9), default=1)
    return (first, *nearest(ranks // first, axes - 1))


def _square_pair(mesh: Mesh) -> bool:
    shape: Sequence[int] = mesh.shape
    return len(set(shape)) < len(shape)
