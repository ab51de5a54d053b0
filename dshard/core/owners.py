"""Owners: ranks that have some of the tensors of a mesh whole for a while, and run functions of them.

One all_to_all brings each owner its tensors, and one brings the results back, in the layouts of the mesh.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, Request, Session, flat_exchange, local_part, run_program
from dshard.comm.pieces import view_of
from dshard.core.context import planning_context
from dshard.core.observe import ASKED, OBSERVERS, Decision, observed
from dshard.core.spec import Spec
from dshard.core.wrapper import Wrapper, wrap
from dshard.cost import PlannedCollective, copy_seconds, planned_collective
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate, Mesh
from dshard.placements import Shard
from dshard.rules.expand import Operand
from dshard.topology import Topology

Sizes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class OwnedTensor(NamedTuple):
    """A tensor of a layout, with elements of `itemsize` bytes, and the rank that has it whole, by its coordinate."""

    layout: Layout
    shape: Shape
    itemsize: int
    owner: Coordinate

    def is_sent(self, at: Coordinate) -> bool:
        """Whether the rank at a coordinate sends its local tensor to the owner: of replicas the owner's nearest."""
        ways = zip(self.layout.placements, at, self.owner, strict=True)
        return all(isinstance(placement, Shard) or here == there for placement, here, there in ways)

    def nbytes(self, at: Coordinate) -> int:
        """The bytes of a rank's local tensor."""
        return prod(self.layout.local_shape(self.shape, at)) * self.itemsize


class OwnedRun(NamedTuple):
    """A function of whole tensors that one rank runs, with the specs of these and of its results on the mesh."""

    owner: Coordinate
    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    run: Callable[[list[Tensor]], list[Tensor]]


@cached("exchanges", 1024)
def sizes_to_owners(tensors: tuple[OwnedTensor, ...], mesh: Mesh, at: Coordinate) -> Sizes:
    """The bytes that the rank at a coordinate sends to, and receives from, each rank, to bring tensors to owners."""
    send = dict.fromkeys(mesh.coordinates(), 0)
    recv = dict(send)
    for x in tensors:
        if x.is_sent(at):
            send[x.owner] += x.nbytes(at)
        for peer in recv if x.owner == at else ():
            recv[peer] += x.nbytes(peer) * x.is_sent(peer)
    return tuple(send.values()), tuple(recv.values())


@cached("exchanges", 1024)
def sizes_from_owners(tensors: tuple[OwnedTensor, ...], mesh: Mesh, at: Coordinate) -> Sizes:
    """The bytes that the rank at a coordinate sends to, and receives from, each rank, to bring tensors back."""
    send = dict.fromkeys(mesh.coordinates(), 0)
    recv = dict(send)
    for x in tensors:
        recv[x.owner] += x.nbytes(at)
        for peer in send if x.owner == at else ():
            send[peer] += x.nbytes(peer)
    return tuple(send.values()), tuple(recv.values())


@cached("exchanges", 1024)
def busiest(sizes: Callable[..., Sizes], tensors: tuple[OwnedTensor, ...], mesh: Mesh) -> int:
    """The bytes that the busiest rank receives from the others."""
    received = [(i, sizes(tensors, mesh, at)[1]) for i, at in enumerate(mesh.coordinates())]
    return max(sum(own) - own[i] for i, own in received)


def run_on_owners(mesh: Mesh, runs: Sequence[OwnedRun], tensors: Sequence[Wrapper], op: str) -> list[Wrapper]:
    """The results of all functions, one after the other; the tensors are their operands, in order.

    Each function runs on its owner alone, on whole tensors of its own. No tensor is a partial sum.
    """
    specs = [spec for run in runs for spec in run.results]
    ins = owned_tensors([(run.owner, spec) for run in runs for spec in run.operands])
    outs = owned_tensors([(run.owner, spec) for run in runs for spec in run.results])

    def program(at: Coordinate, space: Session, local: Sequence[Tensor]) -> Program[tuple[Tensor, ...]]:
        whole, results = iter((yield from _to_owners(mesh, ins, at, local))), list[Tensor | None]()
        for run in runs:
            operands = [next(whole) for _ in run.operands]
            results += run.run([x for x in operands if x is not None]) if run.owner == at else [None] * len(run.results)
        like = [local[0].new_empty(0, dtype=spec.dtype) for spec in specs]
        return (yield from _from_owners(mesh, outs, at, results, like))

    def run_all(*local: Tensor) -> Sequence[Tensor]:
        return run_program(mesh, program, local)

    given = [x._local_tensor for x in tensors]
    local = observed(_decision(mesh, ins, outs, op), run_all, given) if OBSERVERS else run_all(*given)
    return [wrap(x, spec) for x, spec in zip(local, specs, strict=True)]


def owned_tensors(owned: Sequence[tuple[Coordinate, Spec]]) -> tuple[OwnedTensor, ...]:
    """Tensors of these specs and their owners."""
    return tuple([OwnedTensor(spec.layout, spec.shape, spec.itemsize, owner) for owner, spec in owned])


def planned_exchanges(
    mesh: Mesh, ins: tuple[OwnedTensor, ...], outs: tuple[OwnedTensor, ...], topology: Topology
) -> tuple[PlannedCollective, ...]:
    """The two exchanges that bring tensors to their owners and others back."""
    nbytes = busiest(sizes_to_owners, ins, mesh), busiest(sizes_from_owners, outs, mesh)
    return tuple([planned_collective("all_to_all", mesh, mesh.names, n, topology) for n in nbytes if n])


def copy_seconds_of(
    mesh: Mesh, ins: tuple[OwnedTensor, ...], outs: tuple[OwnedTensor, ...], topology: Topology
) -> float:
    """The seconds of the busiest rank's copies: into both buffers, of what it receives as owner, and of its results."""
    return max([_copies(mesh, at, ins, outs, topology) for at in mesh.coordinates()])


def _copies(
    mesh: Mesh, at: Coordinate, ins: tuple[OwnedTensor, ...], outs: tuple[OwnedTensor, ...], topology: Topology
) -> float:
    sent = [sum(sizes(own, mesh, at)[0]) for sizes, own in ((sizes_to_owners, ins), (sizes_from_owners, outs))]
    own = [(x, peer) for x in ins for peer in mesh.coordinates() if x.owner == at and x.is_sent(peer)]
    own += [(x, peer) for x in outs for peer in mesh.coordinates() if x.owner == at]
    copied = [*sent, *[x.nbytes(peer) for x, peer in own]]
    return sum([copy_seconds(nbytes, topology) for nbytes in copied if nbytes])


def _decision(mesh: Mesh, ins: tuple[OwnedTensor, ...], outs: tuple[OwnedTensor, ...], op: str) -> Decision:
    topology = planning_context().topology_of(mesh)
    operands = tuple([Operand(x.layout, x.shape, x.itemsize) for x in ins])
    return Decision(op, operands, topology, exchanges=planned_exchanges(mesh, ins, outs, topology), why=ASKED)


def _to_owners(
    mesh: Mesh, tensors: tuple[OwnedTensor, ...], at: Coordinate, local: Sequence[Tensor]
) -> Program[list[Tensor | None]]:
    """The whole tensors of which this rank is the owner, None for others, from the local tensors of all."""
    owned, peers = [*zip(local, tensors, strict=True)], [*mesh.coordinates()]
    sent = [x for peer in peers for x, own in owned if own.owner == peer and own.is_sent(at)]
    arrived = yield from _exchange(mesh, at, sizes_to_owners, tensors, sent, local)
    whole = [x.new_empty(own.shape) if own.owner == at else None for x, own in owned]
    for peer in peers:
        for x, (layout, shape, _, _) in [(x, own) for x, own in zip(whole, tensors, strict=True) if own.is_sent(peer)]:
            if x is not None:
                part = arrived(x.dtype, layout.local_shape(shape, peer))
                regions = zip(layout.regions(shape, peer), layout.local_regions(shape, peer), strict=True)
                for there, here in regions:
                    view_of(x, there).copy_(view_of(part, here))
    return whole


def _from_owners(
    mesh: Mesh, tensors: tuple[OwnedTensor, ...], at: Coordinate, whole: Sequence[Tensor | None], like: Sequence[Tensor]
) -> Program[tuple[Tensor, ...]]:
    """The local tensors of this rank, of the dtypes of `like`, from whole tensors on their owners."""
    owned, peers = [(x, own) for x, own in zip(whole, tensors, strict=True) if x is not None], [*mesh.coordinates()]
    sent = [local_part(x, own.layout, peer) for peer in peers for x, own in owned]
    arrived = yield from _exchange(mesh, at, sizes_from_owners, tensors, sent, like)
    local = [like[0]] * len(tensors)
    for peer in peers:
        for i, own in enumerate(tensors):
            if own.owner == peer:
                local[i] = arrived(like[i].dtype, own.layout.local_shape(own.shape, at))
    return tuple(local)


Pieces: TypeAlias = Callable[[torch.dtype, Shape], Tensor]


def _exchange(
    mesh: Mesh,
    at: Coordinate,
    sizes: Callable[..., Sizes],
    tensors: tuple[OwnedTensor, ...],
    sent: Sequence[Tensor],
    like: Sequence[Tensor],
) -> Program[Pieces]:
    """Send pieces, in the order of the ranks, and return a function that gives those received one after the other.

    All are of the dtypes of `like`. If there are several, bytes are sent, and copied as they come: they begin anywhere.
    """
    dtype = like[0].dtype if len({x.dtype for x in like}) == 1 else torch.uint8
    pieces = [x.contiguous().reshape(-1).view(dtype) for x in sent if x.numel()]
    buffer = torch.cat(pieces) if pieces else like[0].new_empty(0, dtype=dtype)
    received, start = buffer, 0
    if busiest(sizes, tensors, mesh):
        send, recv = (tuple([n // dtype.itemsize for n in each]) for each in sizes(tensors, mesh, at))
        received = (yield Request(flat_exchange(mesh, mesh.names, at, send, recv), buffer))()

    def piece(own: torch.dtype, shape: Shape) -> Tensor:
        nonlocal start
        first, start = start, start + prod(shape) * own.itemsize // dtype.itemsize
        flat = received[first:start]
        return (flat if own is dtype else flat.clone().view(own)).view(shape)

    return piece
