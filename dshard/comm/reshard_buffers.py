"""The memory of one rank while a tensor crosses between meshes: what it holds, what it adds up, what lands on it."""

from __future__ import annotations

from torch import Tensor

from dshard.comm.transfer import span_of, view_of
from dshard.comm.transport import movable
from dshard.layout import Region, Shape
from dshard.redistribute import inside, numel
from dshard.reshard import Chain, ReshardPlan, overlap, pending_axes, region_of


class Buffers:
    """Flat memory for each region and chain of a plan that this rank has to do with; made when first asked for.

    `x` is its local tensor under `plan.held`; of a rank outside the source mesh, only its dtype and device count. What
    lies in one piece within a local tensor is sent and received there, without a copy.
    """

    def __init__(self, plan: ReshardPlan, rank: int, x: Tensor) -> None:
        self._chains, self._like, self._here = plan.chains, x, x
        self._own = region_of(plan.held, plan.shape, rank)
        self._needed = region_of(plan.landed, plan.shape, rank)
        self._out: Tensor | None = None
        if rank in plan.landed.mesh:
            self._out = x.new_empty(plan.landed.local_shape(plan.shape, plan.landed.mesh.coordinate(rank)))
        self._packed: dict[Region, Tensor] = {}
        self._landing: dict[Region, tuple[Tensor, bool]] = {}
        self._sums: dict[int, Tensor] = {}
        if self._own is not None and self._needed is not None and not pending_axes(plan.held):
            self._keep(self._own, self._needed)

    def chunk(self, chain: int, index: int, position: int) -> Tensor:
        """The memory of a chunk at this rank's position on a chain, in a dtype that can be sent."""
        return movable(self._chunk(chain, index, position))

    def add(self, chain: int, index: int, position: int) -> None:
        """Add this rank's term to a chunk that arrived; the sum lands here if it is whole, and needed."""
        along = self._chains[chain]
        if 0 < position < along.terms:
            piece = along.piece(index)
            total = self._chunk(chain, index, position)
            total += self._holding(along.region)[piece.start : piece.stop]
            if position == along.terms - 1 and self._needs(along):
                self._land(along.region)[piece.start : piece.stop] = total

    def landed(self) -> Tensor | None:
        """The local tensor under `plan.landed`, once all has arrived; None outside the destination mesh."""
        for region, (flat, in_place) in self._landing.items():
            if not in_place:
                assert self._out is not None
                assert self._needed is not None
                view_of(self._out, inside(region, self._needed)).copy_(flat.view(_shape(region)))
        return self._out

    def _chunk(self, chain: int, index: int, position: int) -> Tensor:
        along = self._chains[chain]
        piece = along.piece(index)
        if 0 < position < along.terms:
            if chain not in self._sums:
                self._sums[chain] = self._like.new_empty(len(along.span))
            return self._sums[chain][piece.start - along.span.start : piece.stop - along.span.start]
        flat = self._holding(along.region) if position == 0 else self._land(along.region)
        return flat[piece.start : piece.stop]

    def _needs(self, along: Chain) -> bool:
        return self._needed is not None and overlap(along.region, self._needed) == along.region

    def _holding(self, region: Region) -> Tensor:
        """What this rank holds of a region."""
        if region not in self._packed:
            assert self._own is not None
            self._packed[region] = _flat(self._here, inside(region, self._own))
        return self._packed[region]

    def _land(self, region: Region) -> Tensor:
        """Where a region lands: in the result where it lies there in one piece."""
        if region not in self._landing:
            assert self._out is not None
            assert self._needed is not None
            span = span_of([inside(region, self._needed)], _sizes(self._out))
            if span is None:
                self._landing[region] = self._out.new_empty(numel(region)), False
            else:
                self._landing[region] = self._out.view(-1)[span.start : span.stop], True
        return self._landing[region][0]

    def _keep(self, own: Region, needed: Region) -> None:
        both = overlap(own, needed)
        if both is not None:
            assert self._out is not None
            view_of(self._out, inside(both, needed)).copy_(view_of(self._here, inside(both, own)))


def _flat(x: Tensor, region: Region) -> Tensor:
    """A part of a tensor, flat; without a copy where it lies in one piece."""
    if x.is_contiguous() and (span := span_of([region], _sizes(x))) is not None:
        return x.view(-1)[span.start : span.stop]
    return view_of(x, region).contiguous().view(-1)


def _sizes(x: Tensor) -> Shape:
    return tuple(x.shape)


def _shape(region: Region) -> Shape:
    return tuple(map(len, region))
