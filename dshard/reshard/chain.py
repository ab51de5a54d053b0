"""Chains of ranks along which a region of the tensor is sent from mesh to mesh, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from dshard.layout import Region
from dshard.placements import chunk_of
from dshard.redistribute import numel

Form: TypeAlias = Literal["send", "local_all_gather", "global_all_gather", "broadcast", "multi_rail", "reduce"]
"""Forms of sending a part to its receivers, by how it is split and in which order its pieces visit the receivers."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A piece of a region that is forwarded from rank to rank in `chunks`, as in a pipelined broadcast.

    The piece is the elements `span` of the flattened region. The first `terms` ranks each hold a term of its sum: each
    adds its own to the received sum. The last of them has the value, which all later ranks receive. In the model the
    chain begins `start` seconds after the first chain, and keeps its slowest link busy for `seconds`.

    >>> chain = Chain((range(2), range(4)), range(0, 8), (0, 4, 5), "broadcast", chunks=2)
    >>> chain.hops, list(chain.pieces())
    (((0, 4), (4, 5)), [range(0, 4), range(4, 8)])
    """

    region: Region
    span: range
    ranks: tuple[int, ...]
    form: Form
    terms: int = 1
    chunks: int = 1
    start: float = 0.0
    seconds: float = 0.0

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """The (sender, receiver) pairs along the chain."""
        return tuple(zip(self.ranks, self.ranks[1:], strict=False))

    @property
    def region_text(self) -> str:
        """The region as text, as in "0:4,8:16"."""
        return ",".join(f"{part.start}:{part.stop}" for part in self.region)

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that receive the value."""
        return self.ranks[self.terms :]

    def piece(self, index: int) -> range:
        """The elements of a chunk, counted in the flattened region."""
        return chunk_of(self.span, self.chunks, index)

    def pieces(self) -> tuple[range, ...]:
        """The elements of each chunk that is not empty; empty chunks come last."""
        return tuple(piece for piece in map(self.piece, range(self.chunks)) if piece)

    def begins(self, index: int, hop: int) -> float:
        """Seconds at which a chunk is sent over a hop in the model: a chunk's time for each earlier chunk and hop."""
        return self.start + (index + hop) * self.seconds / self.chunks


def flat_range(region: Region) -> range:
    """The range of all elements of a region, flattened."""
    return range(numel(region))
