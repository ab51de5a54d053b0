"""Schedules: a loop for each mesh axis, and where the tensor that lacks it is stored. All of them, in closed form.

On an axis with loop m, A and C are sharded over m, and B, which has no m, moves: it is whole there, or stored sharded
and gathered. Loop n moves A; loop k moves C, which is left pending, all-reduced, or reduce-scattered. That makes ten
choices an axis and 10^r schedules on r axes, and every strategy that has a name is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, TypeAlias

from dshard.errors import LayoutError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.ops.matmul.stream import Stream
from dshard.placements import Partial, Placement, Replicate, Shard

Loop: TypeAlias = Literal["m", "n", "k"]
Stored: TypeAlias = Literal["R", "P", "m", "n", "k"]

STORAGES: dict[Loop, tuple[Stored, ...]] = {
    "m": ("R", "k", "n"),
    "n": ("R", "m", "k"),
    "k": ("P", "R", "m", "n"),
}
"""Where the moving tensor may be stored: B under loop m, A under n, C under k."""

_DIMS: tuple[dict[Loop, int], ...] = ({"m": 0, "k": 1}, {"k": 0, "n": 1}, {"m": 0, "n": 1})


@dataclass(frozen=True, slots=True)
class Schedule:
    """C[m, n] = A[m, k] B[k, n] on a mesh: for each mesh axis its loop, and the storage of the tensor that lacks it.

    >>> summa = Schedule(("m", "n"), ("k", "k"))
    >>> print(summa)
    m:B in S(k), n:A in S(k)
    >>> [str(layout) for layout in summa.layouts(Mesh((2, 2), ("r", "c")))]
    ['r:S(0) c:S(1)', 'r:S(0) c:S(1)', 'r:S(0) c:S(1)']

    `stream` says in which panels it runs; None moves every tensor whole.

    Raises:
        LayoutError: a storage that its loop does not have.
    """

    loops: tuple[Loop, ...]
    stored: tuple[Stored, ...]
    stream: Stream | None = None

    def __post_init__(self) -> None:
        if len(self.loops) != len(self.stored):
            raise LayoutError(f"a schedule of {len(self.loops)} loops stores {len(self.stored)} tensors: give one each")
        for loop, stored in zip(self.loops, self.stored, strict=True):
            if loop not in STORAGES:
                raise LayoutError(f"{loop!r} is no loop: use m, n or k")
            if stored not in STORAGES[loop]:
                raise LayoutError(f"under loop {loop} a tensor is not stored {stored!r}: use {STORAGES[loop]}")

    def layouts(self, mesh: Mesh) -> tuple[Layout, Layout, Layout]:
        """Where A, B and C are stored. Axes that split the work are major, those that only store are minor.

        Raises:
            LayoutError: the schedule is for another number of mesh axes.
        """
        if mesh.ndim != len(self.loops):
            raise LayoutError(f"a schedule for {len(self.loops)} mesh axes on the mesh ({mesh}) of {mesh.ndim}")
        a, b, c = (_layout(mesh, self.loops, self.stored, tensor) for tensor in range(3))
        return a, b, c

    def volume(self, mesh: Mesh, m: int, k: int, n: int) -> float:
        """Elements that each rank receives, where all sizes divide: the sum over A and B gathered and C reduced."""
        held = {loop: prod(self._sizes(mesh, loop)) for loop in STORAGES}
        gathered_a = prod(self._sizes(mesh, "n", "m", "k"))
        gathered_b = prod(self._sizes(mesh, "m", "k", "n"))
        scattered = prod(self._sizes(mesh, "k", "m", "n"))
        reduced = prod(self._sizes(mesh, "k", "R"))
        a, b, c = m * k / (held["m"] * held["k"]), k * n / (held["k"] * held["n"]), m * n / (held["m"] * held["n"])
        return (
            a * (1 - 1 / gathered_a)
            + b * (1 - 1 / gathered_b)
            + c * ((1 - 1 / scattered) + 2 / scattered * (1 - 1 / reduced))
        )

    def _sizes(self, mesh: Mesh, loop: Loop, *stored: Stored) -> list[int]:
        """The sizes of the axes with this loop, and with one of these storages if any are given."""
        return [
            size
            for size, mine, where in zip(mesh.shape, self.loops, self.stored, strict=True)
            if mine == loop and (not stored or where in stored)
        ]

    def __str__(self) -> str:
        moving = {"m": "B", "n": "A", "k": "C"}
        return ", ".join(
            f"{loop}:{moving[loop]} {stored if stored in 'RP' else f'in S({stored})'}"
            for loop, stored in zip(self.loops, self.stored, strict=True)
        )


def schedules(axes: int) -> Iterator[Schedule]:
    """All 10^axes schedules of a mesh of so many axes.

    >>> len(list(schedules(2)))
    100
    """
    options = [(loop, stored) for loop, storages in STORAGES.items() for stored in storages]
    for picked in product(options, repeat=axes):
        yield Schedule(tuple(loop for loop, _ in picked), tuple(stored for _, stored in picked))


def _layout(mesh: Mesh, loops: tuple[Loop, ...], stored: tuple[Stored, ...], tensor: int) -> Layout:
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
