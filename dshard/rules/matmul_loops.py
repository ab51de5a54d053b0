"""Schedules of matmuls in closed form: a loop for each mesh axis, and the storage of the tensor that lacks it.

On an axis with loop m, A and C are sharded over m, and B, which has no m, moves: it is replicated there, or stored
sharded and gathered. Loop n moves A; loop k moves C, which is left partial, all-reduced, or reduce-scattered. That
makes ten choices an axis and 10^r schedules on r axes, and every strategy that has a name is one of them: a row of
the table below.

Design: docs/design/0005-products.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from math import isqrt, prod
from typing import Literal, TypeAlias

from dshard.errors import LayoutError, StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.expand import Allowed, Row
from dshard.rules.panel_stream import Stream
from dshard.rules.rule import Rule
from dshard.validate import as_tuple, suggestion

Loop: TypeAlias = Literal["m", "n", "k"]
Stored: TypeAlias = Literal["R", "P", "m", "n", "k"]

STORAGES: dict[Loop, tuple[Stored, ...]] = {
    "m": ("R", "k", "n"),
    "n": ("R", "m", "k"),
    "k": ("P", "R", "m", "n"),
}
"""How the moving tensor may be stored: B under loop m, A under n, C under k."""

_DIMS: tuple[dict[Loop, int], ...] = ({"m": 0, "k": 1}, {"k": 0, "n": 1}, {"m": 0, "n": 1})


@dataclass(frozen=True, slots=True)
class Schedule:
    """C[m, n] = A[m, k] B[k, n] on a mesh: for each mesh axis its loop, and the storage of the tensor that lacks it.

    >>> summa = Schedule(("m", "n"), ("k", "k"))
    >>> print(summa)
    m:B in S(k), n:A in S(k)
    >>> {str(layout) for layout in summa.layouts(Mesh((2, 2), ("r", "c")))}
    {'r:S(0) c:S(1)'}

    `stream` says in which panels it runs; None moves every tensor in bulk.

    Raises:
        LayoutError: a storage that its loop does not have.
    """

    loops: tuple[Loop, ...]
    stored: tuple[Stored, ...]
    stream: Stream | None = None

    def __post_init__(self) -> None:
        for name in ("loops", "stored"):
            value = getattr(self, name)
            if type(value) is not tuple:
                way_out = "give one of them for each mesh axis, such as ('m', 'n')"
                letters = tuple(value) if isinstance(value, str) else as_tuple(value, name, way_out, LayoutError)
                object.__setattr__(self, name, letters)
        if self.stream is not None and not isinstance(self.stream, Stream):
            raise LayoutError(f"a schedule in {self.stream!r}: give a dshard.Stream, such as Stream(4), or None")
        if len(self.loops) != len(self.stored):
            raise LayoutError(f"a schedule of {len(self.loops)} loops stores {len(self.stored)} tensors: give one each")
        for loop, stored in zip(self.loops, self.stored, strict=True):
            if not isinstance(loop, str) or loop not in STORAGES:
                raise LayoutError(f"{loop!r} is no loop: use m, n or k")
            if stored not in STORAGES[loop]:
                raise LayoutError(f"under loop {loop} a tensor is not stored {stored!r}: use {STORAGES[loop]}")

    def layouts(self, mesh: Mesh) -> tuple[Layout, Layout, Layout]:
        """The layouts in which A, B and C are stored; axes that shard the work are major, those that only store minor.

        Raises:
            LayoutError: the schedule is for another number of mesh axes.
        """
        if mesh.ndim != len(self.loops):
            raise LayoutError(f"a schedule for {len(self.loops)} mesh axes on the mesh ({mesh}) of {mesh.ndim}")
        a, b, c = (stored_layout(mesh, self.loops, self.stored, tensor) for tensor in range(3))
        return a, b, c

    def volume(self, mesh: Mesh, m: int, k: int, n: int) -> float:
        """Elements that each rank receives, where all sizes divide: the sum over A and B gathered and C reduced.

        A ring over g ranks sends each rank the (g - 1) / g of the tensor that it lacks; an all_reduce is two of them
        (Patarasuk and Yuan, 2009); a tensor gathered or scattered along other axes before is smaller by their sizes.
        """
        a, b, c = self._computed(mesh, m, k, n)
        gathered_a = prod(self._sizes(mesh, "n", "m", "k"))
        gathered_b = prod(self._sizes(mesh, "m", "k", "n"))
        scattered = prod(self._sizes(mesh, "k", "m", "n"))
        reduced = prod(self._sizes(mesh, "k", "R"))
        return (
            a * (1 - 1 / gathered_a)
            + b * (1 - 1 / gathered_b)
            + c * ((1 - 1 / scattered) + 2 / scattered * (1 - 1 / reduced))
        )

    def _computed(self, mesh: Mesh, m: int, k: int, n: int) -> tuple[float, float, float]:
        """Elements of A, B and C in a rank's local matmul."""
        over_m, over_n, over_k = (prod(self._sizes(mesh, loop)) for loop in ("m", "n", "k"))
        return m * k / (over_m * over_k), k * n / (over_k * over_n), m * n / (over_m * over_n)

    def _sizes(self, mesh: Mesh, loop: Loop, *stored: Stored) -> list[int]:
        """The sizes above one of the mesh axes with this loop, and with one of these storages if any are given."""
        return [
            size
            for size, mine, where in zip(mesh.shape, self.loops, self.stored, strict=True)
            if size > 1 and mine == loop and (not stored or where in stored)
        ]

    def __str__(self) -> str:
        moving = {"m": "B", "n": "A", "k": "C"}
        return ", ".join(
            f"{loop}:{moving[loop]} {stored if stored in 'RP' else f'in S({stored})'}"
            for loop, stored in zip(self.loops, self.stored, strict=True)
        )


def schedules(axes: int) -> Iterator[Schedule]:
    """Yield all 10^axes schedules of a mesh of `axes` axes.

    >>> len(list(schedules(2)))
    100
    """
    options = [(loop, stored) for loop, storages in STORAGES.items() for stored in storages]
    for picked in product(options, repeat=axes):
        yield Schedule(tuple(loop for loop, _ in picked), tuple(stored for _, stored in picked))


def stored_layout(mesh: Mesh, loops: tuple[Loop, ...], stored: tuple[Stored, ...], tensor: int) -> Layout:
    """The layout in which one tensor of a schedule is stored, A, B or C by its number, see `Schedule.layouts`."""
    dims = _DIMS[tensor]
    placements: list[Placement] = []
    major: dict[int, list[int]] = {0: [], 1: []}
    minor: dict[int, list[int]] = {0: [], 1: []}
    for axis, (loop, where) in enumerate(zip(loops, stored, strict=True)):
        if loop in dims:
            placements.append(Shard(dims[loop]))
            major[dims[loop]].append(axis)
        elif where in ("m", "n", "k"):
            placements.append(Shard(dims[where]))
            minor[dims[where]].append(axis)
        else:
            placements.append(Partial() if where == "P" else Replicate())
    order = tuple((dim, (*major[dim], *minor[dim])) for dim in (0, 1) if major[dim] or minor[dim])
    return Layout(mesh, tuple(placements), order)


@dataclass(frozen=True, slots=True)
class NamedStrategy:
    """A named schedule, with the roles of its mesh axes and its source."""

    name: str
    roles: tuple[str, ...]
    schedule: Schedule
    source: str
    square: bool = False


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
    if named.square and len({*mesh.shape}) == mesh.ndim:
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
