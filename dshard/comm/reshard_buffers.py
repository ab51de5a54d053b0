"""Buffers of one rank while a tensor is resharded to another mesh: sent, summed and received regions."""

from __future__ import annotations

from torch import Tensor

from dshard.comm.pieces import span_of, view_of
from dshard.comm.transport import movable
from dshard.layout import Region, Shape, overlap
from dshard.redistribute.step import inside, numel
from dshard.reshard import ReshardPlan, reduced_axes, region_of


class Buffers:
    """Flat buffers of one rank for the regions and chains of a plan, allocated at their first use.

    `x` is the local tensor under `plan.chains_src`; outside the source mesh only its dtype and device count. A region
    that is contiguous within a local tensor is sent or received there, without a copy.
    """

    def __init__(self, plan: ReshardPlan, rank: int, x: Tensor) -> None:
        self._chains, self._like, self._here = plan.chains, x, x
        self._own = region_of(plan.chains_src, plan.shape, rank)
        self._needed = region_of(plan.chains_dst, plan.shape, rank)
        self._out: Tensor | None = None
        if rank in plan.chains_dst.mesh:
            self._out = x.new_empty(plan.chains_dst.local_shape(plan.shape, plan.chains_dst.mesh.coordinate(rank)))
        self._packed: dict[Region, Tensor] = {}
        self._receive_buffers: dict[Region, tuple[Tensor, bool]] = {}
        self._sums: dict[int, Tensor] = {}
        if self._own is not None and self._needed is not None and not reduced_axes(plan.chains_src):
            self._copy_own(self._own, self._needed)

    def chunk(self, chain: int, index: int, position: int) -> Tensor:
        """The buffer of a chunk at a position on a chain, in a dtype that can be sent."""
        return movable(self._chunk(chain, index, position))

    def add(self, chain: int, index: int, position: int) -> None:
        """Add this rank's term to a chunk that arrived; copy a completed sum to the result if this rank needs it."""
        route = self._chains[chain]
        if 0 < position < route.terms:
            piece = route.piece(index)
            total = self._chunk(chain, index, position)
            total += self._own_elements(route.region)[piece.start : piece.stop]
            is_last, needed = position == route.terms - 1, self._needed
            if is_last and needed is not None and overlap(route.region, needed) == route.region:
                self._receive_buffer(route.region)[piece.start : piece.stop] = total

    def result(self) -> Tensor | None:
        """The local tensor under `plan.chains_dst`, once all chunks have arrived; None outside the destination mesh."""
        for region, (flat, in_place) in self._receive_buffers.items():
            if not in_place:
                assert self._out is not None
                assert self._needed is not None
                view_of(self._out, inside(region, self._needed)).copy_(flat.view([len(indices) for indices in region]))
        return self._out

    def _chunk(self, chain: int, index: int, position: int) -> Tensor:
        route = self._chains[chain]
        piece = route.piece(index)
        if 0 < position < route.terms:
            if chain not in self._sums:
                self._sums[chain] = self._like.new_empty(len(route.span))
            return self._sums[chain][piece.start - route.span.start : piece.stop - route.span.start]
        flat = self._own_elements(route.region) if position == 0 else self._receive_buffer(route.region)
        return flat[piece.start : piece.stop]

    def _own_elements(self, region: Region) -> Tensor:
        """This rank's own elements of a region, flat."""
        if region not in self._packed:
            assert self._own is not None
            self._packed[region] = _flat(self._here, inside(region, self._own))
        return self._packed[region]

    def _receive_buffer(self, region: Region) -> Tensor:
        """The flat receive buffer of a region: a view of the result where the region is contiguous there."""
        if region not in self._receive_buffers:
            assert self._out is not None
            assert self._needed is not None
            span = span_of([inside(region, self._needed)], _sizes(self._out))
            if span is None:
                self._receive_buffers[region] = self._out.new_empty(numel(region)), False
            else:
                self._receive_buffers[region] = self._out.view(-1)[span.start : span.stop], True
        return self._receive_buffers[region][0]

    def _copy_own(self, own: Region, needed: Region) -> None:
        shared = overlap(own, needed)
        if shared is not None:
            assert self._out is not None
            view_of(self._out, inside(shared, needed)).copy_(view_of(self._here, inside(shared, own)))


def _flat(x: Tensor, region: Region) -> Tensor:
    """The elements of `x` within `region`, flat; a view where they are contiguous."""
    if x.is_contiguous() and (span := span_of([region], _sizes(x))) is not None:
        return x.view(-1)[span.start : span.stop]
    return view_of(x, region).contiguous().view(-1)


def _sizes(x: Tensor) -> Shape:
    return tuple(x.shape)
