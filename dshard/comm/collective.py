"""A collective as a value: the flat pieces that one rank sends and receives, and the report for listeners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

from dshard.comm.backends import Backend, sum_dtype
from dshard.errors import ShapeError
from dshard.mesh import Mesh
from dshard.placements import ReduceOp, chunk
from dshard.redistribute.layout_state import StepLoad

T = TypeVar("T")
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter"]
# dtypes that every backend moves; the others travel as bytes
MOVES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
}


@dataclass(frozen=True, slots=True)
class CollectiveReport:
    """The report of a collective for listeners: its name, its mesh, and the elements that this rank receives.

    `busiest` are the elements of the rank that receives the most, where a plan knows them; 0 where it does not. `load`
    is that of a step of a redistribution.
    """

    collective: str
    mesh: Mesh
    elements: int
    busiest: int = 0
    load: StepLoad | None = None

    def load_of(self, itemsize: int) -> StepLoad | None:
        """The load of elements of so many bytes."""
        return None if self.load is None else self.load._replace(itemsize=itemsize)


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of one rank of the group along `axes`, whose `ranks` have the order of the mesh.

    `send` and `recv` are the sizes of the flat pieces, in elements: one for each rank, or one for all. `op` is the
    reduction, `root` the index of the rank that sends a broadcast or scatter. A collective that is part of another has
    no `report`.
    """

    kind: Kind
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    send: tuple[int, ...]
    recv: tuple[int, ...]
    op: ReduceOp | None = None
    root: int = 0
    report: CollectiveReport | None = None

    def in_bytes(self, itemsize: int) -> Collective:
        """This collective on bytes in place of elements of `itemsize` bytes."""
        send, recv = (tuple(size * itemsize for size in sizes) for sizes in (self.send, self.recv))
        return replace(self, send=send, recv=recv)


def collectives_for(collective: Collective, dtype: torch.dtype, backend: Backend) -> list[tuple[Collective, int]]:
    """The collectives by which a backend runs `collective`, each with the number of equal terms that it receives.

    Terms are reduced locally; 0 means no terms. If the backend cannot reduce, or pieces differ in size, the pieces are
    exchanged instead: the same bytes, and half precision is summed in single. An all_reduce is then an exchange and an
    all_gather.
    """
    if collective.op is None or native(collective, dtype, backend):
        return [(collective, 0)]
    n = len(collective.ranks)
    if collective.kind == "reduce_scatter":
        return [(replace(collective, kind="all_to_all", recv=collective.recv * n), n)]
    slots = sorted(collective.ranks)  # a process group deals out the chunks, and sorts its ranks
    sizes = tuple(len(chunk(collective.send[0], n, slots.index(rank))) for rank in collective.ranks)
    own = sizes[collective.index]
    exchange = replace(collective, kind="all_to_all", send=sizes, recv=(own,) * n)
    gather = replace(collective, kind="all_gather", send=(own,), recv=sizes, op=None, report=None)
    return [(exchange, n), (gather, 0)]


def native(collective: Collective, dtype: torch.dtype, backend: Backend) -> bool:
    """Whether a backend runs this reduction itself."""
    if backend.reduces_all:
        return True
    assert collective.op is not None
    if collective.kind == "reduce_scatter" and (not backend.scatters or len(set(collective.send)) > 1):
        return False
    return reduces(dtype, collective.op, backend)


def reduces(dtype: torch.dtype, op: ReduceOp, backend: Backend) -> bool:
    """Whether the backend itself reduces as torch does on one device: in this dtype, and keeping NaNs."""
    if op in ("max", "min") or (op == "avg" and not dtype.is_floating_point):
        return False
    return dtype in backend.sums


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""The dtypes in whose place numbers are reduced that torch cannot add or compare; the highest bit orders them."""


def reduce(terms: Tensor, op: ReduceOp) -> Tensor:
    """Terms along dim 0 -> their reduction, in the terms' own dtype; half precision is reduced in single."""
    dtype = terms.dtype
    if dtype in _SIGNED:
        signed = terms.view(_SIGNED[dtype])
        lowest = torch.iinfo(signed.dtype).min if op in ("max", "min") else 0
        return (reduce(signed ^ lowest, op) ^ lowest).view(dtype)
    wide = terms.to(sum_dtype(dtype))
    match op:
        case "sum":
            return wide.sum(0).ne(0) if dtype == torch.bool else wide.sum(0, dtype=wide.dtype).to(dtype)
        case "product":
            return wide.prod(0).ne(0) if dtype == torch.bool else wide.prod(0, dtype=wide.dtype).to(dtype)
        case "avg":
            total = wide.sum(0)  # whole numbers and truth values are summed in int64
            exact = dtype.is_floating_point or dtype.is_complex
            return total.div_(len(terms), rounding_mode=None if exact else "floor").to(dtype)
        case "max" | "min":
            if dtype.is_complex:
                raise ShapeError(f"a partial {op} of {dtype}: complex numbers have no order; use sum, avg or product")
            return (wide.amax(0) if op == "max" else wide.amin(0)).to(dtype)


def by_slot(items: Sequence[T], slots: Sequence[int]) -> list[T]:
    """Items in the order of the group -> the items in the order of the process group.

    >>> by_slot([10, 20, 30], [2, 0, 1])
    [20, 30, 10]
    """
    return [items[i] for i in sorted(range(len(slots)), key=slots.__getitem__)]
