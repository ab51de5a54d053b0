"""Run plans between meshes: chains of ranks that forward chunks, all chains at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from hashlib import blake2s
from itertools import groupby
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dshard.caches import cached
from dshard.comm import rank_checks
from dshard.comm.events import LISTENERS, CommEvent, measuring, tell
from dshard.comm.pieces import view_of
from dshard.comm.rank_tensors import are_simulated, has_data, plain, stack, unstack
from dshard.comm.run import run
from dshard.comm.runtime import Group, Runtime, group_of, runtime_of
from dshard.comm.scatter_shards import device_of
from dshard.comm.transport import movable, timed
from dshard.errors import MeshError
from dshard.layout import Region, overlap
from dshard.redistribute.step import inside
from dshard.reshard import ReshardPlan, reduced_axes, region_of

MAX_CHAINS = 1 << 16
"""Chains of one plan that have different message tags."""


@dataclass(frozen=True, slots=True)
class Op:
    """A send or receive of this rank: chunk number `index` of a chain, on hop number `hop`."""

    time: float
    chain: int
    index: int
    hop: int
    sends: bool
    peer: int

    @property
    def position(self) -> int:
        """The position of this rank on the chain."""
        return self.hop if self.sends else self.hop + 1


def reshard(plan: ReshardPlan, x: Tensor) -> Tensor | None:
    """The local tensor of this rank under `plan.dst`, from its local tensor `x` under `plan.src`.

    Every rank of either mesh must call it. On a rank outside the source mesh only the dtype and the device of `x`
    count, and it may be empty; a rank outside the destination mesh gets None.
    """
    if are_simulated([x]):
        return _simulate(plan, x)
    if not has_data(x):
        _emit(plan, max(map(plan.received, plan.ranks)) * plan.itemsize)
        return x.new_empty(plan.dst.largest_shape(plan.shape))
    return _measure(plan, x) if measuring() else begin_reshard(plan, x).finish()


def begin_reshard(plan: ReshardPlan, x: Tensor, *, tag: int = 0, timeout: float | None = None) -> Resharding:
    """Begin to run a plan: this rank's own chunks are sent, and its receives are posted.

    `finish` forwards the chunks of other ranks; until then `x` must not change. Several plans may be in flight between
    the same ranks, each with its own `tag`. Over gloo they begin in any order; a chunk that does not arrive within
    `timeout` seconds, or those of the process group, is an error.

    NCCL has no tags, and needs the same order of all communication on all ranks: plans must begin in the same order on
    all ranks that they share, whatever their tags, and `begin_reshard` forwards chunks. Each tag has a process group,
    so that a plan does not wait for another's. Waits have no `timeout`, which would stop the host: torch's watchdog
    applies the limit of the process group.
    """
    runtime = _runtime(plan)
    if not measuring():
        _emit(plan, plan.received(runtime.rank) * plan.itemsize)
    with torch.no_grad():
        group = group_of(plan.ranks, runtime, tag)
        if rank_checks.enabled():
            rank_checks.compare_on(_compared_text(plan), group, device_of(plan.src.mesh))
        if runtime.rank in plan.src.mesh and plan.first is not None:
            x = run(plan.first, x)
        return Resharding(plan, runtime.rank, x, group, tag, timeout)


class Resharding:
    """A plan between meshes that is in flight on this rank."""

    def __init__(self, plan: ReshardPlan, rank: int, x: Tensor, group: Group, tag: int, timeout: float | None) -> None:
        self.plan, self._group = plan, group.process_group
        self._buffers = Buffers(plan, rank, x)
        self._tag = tag * MAX_CHAINS
        self._timeout = timeout
        self._arriving: dict[tuple[int, int, int], _InFlight] = {}
        self._works: list[_InFlight] = []
        self._in_step = not group.backend.tags
        self._ops = ops_of(plan, rank, self._in_step)
        if self._in_step:
            self._run_in_step()
        else:
            self._post()

    def finish(self) -> Tensor | None:
        """Wait for all chunks; return this rank's local tensor on the destination mesh, or None outside that mesh."""
        with torch.no_grad():
            if not self._in_step:
                for op in self._ops:
                    if op.sends and op.hop > 0:
                        self._wait_for_previous_hop(op)
                        self._works.append(self._start(op))
            for key in list(self._arriving):
                self._finish_receive(key)
            for work in self._works:
                work.wait()
            out = self._buffers.result()
            return out if out is None or self.plan.last is None else run(self.plan.last, out)

    def _post(self) -> None:
        """Post all receives, then all sends of this rank's own chunks; the backend's threads run them in any order."""
        for op in self._ops:
            if not op.sends:
                self._arriving[op.chain, op.index, op.hop] = self._start(op)
        self._works += [self._start(op) for op in self._ops if op.sends and op.hop == 0]

    def _run_in_step(self) -> None:
        """Run the sends and receives of each model time as one group, so that none waits for a later one."""
        for _, now in groupby(self._ops, key=lambda op: op.time):
            ops = list(now)
            for op in ops:
                if op.sends and op.hop > 0:
                    self._wait_for_previous_hop(op)
            works = dist.batch_isend_irecv([self._call(op) for op in ops])
            if len(works) == 1:  # one for all of them
                works *= len(ops)
            for op, work in zip(ops, works, strict=True):
                if op.sends:
                    self._works.append(_InFlight(work, op, None))
                else:
                    self._arriving[op.chain, op.index, op.hop] = _InFlight(work, op, None)

    def _wait_for_previous_hop(self, op: Op) -> None:
        """Wait for the chunk that `op` forwards."""
        key = (op.chain, op.index, op.hop - 1)
        if key in self._arriving:
            self._finish_receive(key)

    def _finish_receive(self, key: tuple[int, int, int]) -> None:
        self._arriving.pop(key).wait()
        chain, index, hop = key
        self._buffers.add(chain, index, hop + 1)

    def _start(self, op: Op) -> _InFlight:
        call = self._call(op)
        work = call.op(call.tensor, op.peer, call.group, call.tag)
        assert work is not None
        return _InFlight(work, op, self._timeout)

    def _call(self, op: Op) -> dist.P2POp:
        chunk, tag = self._buffers.chunk(op.chain, op.index, op.position), self._tag + op.chain % MAX_CHAINS
        return dist.P2POp(dist.isend if op.sends else dist.irecv, chunk, op.peer, self._group, tag)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A send or receive in flight."""

    work: dist.Work
    op: Op
    timeout: float | None

    def wait(self) -> None:
        limit = () if self.timeout is None else (timedelta(seconds=self.timeout),)
        try:
            self.work.wait(*limit)
        except RuntimeError as error:
            what = "take what was sent to it" if self.op.sends else "send what was expected from it"
            raise RuntimeError(f"rank {self.op.peer} did not {what}: {error}") from error


@cached("collective steps", 65536)
def ops_of(plan: ReshardPlan, rank: int, in_step: bool) -> tuple[Op, ...]:
    """The sends and receives of a rank, in an order in which no chunk is forwarded before it arrives."""
    ops, times = [], [chain.begins for chain in plan.chains] if in_step else _byte_times(plan)
    for number, (chain, time) in enumerate(zip(plan.chains, times, strict=True)):
        for hop, (sender, receiver) in enumerate(chain.hops):
            if rank in (sender, receiver):
                peer = receiver if rank == sender else sender
                ops += [
                    Op(time(index, hop), number, index, hop, rank == sender, peer)
                    for index in range(len(chain.pieces()))
                ]
    return tuple(sorted(ops, key=lambda op: (op.time, op.hop, op.chain, op.index)))


Time: TypeAlias = Callable[[int, int], float]
"""The time of a chunk on a hop; it rises strictly from hop to hop, so that ranks cannot wait in a circle."""


@cached("reshard plans", 4096)
def _byte_times(plan: ReshardPlan) -> list[Time]:
    """Times in bytes, where no rank delays its own chunks: the first hops of all pairs share the network.

    Chunks of the same number from different senders arrive together, whatever the planner's model says.
    """
    sent_before: defaultdict[tuple[int, int], int] = defaultdict(int)
    times: list[Time] = []
    for chain in plan.chains:
        times.append(partial(_byte_time, sent_before[chain.hops[0]], len(chain.span) / chain.chunks))
        sent_before[chain.hops[0]] += len(chain.span)
    return times


def _byte_time(before: int, chunk: float, index: int, hop: int) -> float:
    return before + (index + hop) * chunk


def _runtime(plan: ReshardPlan) -> Runtime:
    """The runtime of a mesh of the plan that has this rank."""
    src, dst = runtime_of(plan.src.mesh), runtime_of(plan.dst.mesh)
    if src is None or dst is None:
        raise MeshError(
            f"the mesh ({plan.dst.mesh if dst is None else plan.src.mesh}) has no processes: nothing can be sent; make "
            "both meshes as torch DeviceMesh, on every rank of the world, under torchrun"
        )
    if src.world is not dst.world:
        raise MeshError(
            f"the meshes ({src.mesh}) and ({dst.mesh}) belong to different process groups, one of which has ended: "
            "make both after init_process_group"
        )
    own = dst if src.coordinate is None else src
    if own.coordinate is None:
        raise MeshError(
            f"rank {own.rank} is in neither mesh, ({src.mesh}) nor ({dst.mesh}), and takes no part: call this on the "
            "ranks of either alone"
        )
    return own


def _compared_text(plan: ReshardPlan) -> str:
    """The text of a plan that the ranks compare in debug mode."""
    # only the beginning of a long text is sent: the digest comes first
    digest = blake2s(repr(plan.chains).encode(), digest_size=8).hexdigest()
    return f"{tuple(plan.shape)} {digest} {plan}"


def _emit(plan: ReshardPlan, nbytes: int, measured: float | None = None) -> None:
    """Call the listeners, if there are any, with the event of a plan's chains."""
    if LISTENERS:
        event = crossing_event(plan, nbytes, measured)
        if event is not None:
            tell(event)


def crossing_event(plan: ReshardPlan, nbytes: int, measured: float | None = None) -> CommEvent | None:
    """The event of a plan's chains, in which a rank receives `nbytes`; None for a plan without chains."""
    if not plan.chains:
        return None
    forms = ",".join(sorted({chain.form for chain in plan.chains}))
    axis = " -> ".join(",".join(mesh.names) for mesh in (plan.src.mesh, plan.dst.mesh))
    return CommEvent(f"reshard {forms}", axis, len(plan.ranks), nbytes, plan.src.mesh, measured, plan.chains_seconds)


def _measure(plan: ReshardPlan, x: Tensor) -> Tensor | None:
    """Run a plan and emit its event with the measured seconds; all ranks begin together."""
    runtime = _runtime(plan)
    group, device = group_of(plan.ranks, runtime), device_of(plan.src.mesh)
    out, seconds = timed(group, device, lambda: begin_reshard(plan, x).finish())
    _emit(plan, plan.received(runtime.rank) * plan.itemsize, seconds)
    return out


def _simulate(plan: ReshardPlan, x: Tensor) -> Tensor:
    """Run a plan for all ranks in one process: chunk by chunk, along each chain."""
    _emit(plan, max(map(plan.received, plan.ranks)) * plan.itemsize)
    with plain(), torch.no_grad():
        tensors = unstack(x if plan.first is None else run(plan.first, x))
        like = next(iter(tensors.values()))
        buffers = {rank: Buffers(plan, rank, tensors.get(rank, like)) for rank in plan.ranks}
        for number, chain in enumerate(plan.chains):
            for hop, (sender, receiver) in enumerate(chain.hops):
                for index in range(len(chain.pieces())):
                    buffers[receiver].chunk(number, index, hop + 1).copy_(buffers[sender].chunk(number, index, hop))
                    buffers[receiver].add(number, index, hop + 1)
        local_tensors = {rank: buffers[rank].result() for rank in plan.dst.mesh.ranks}
        out = stack({rank: part for rank, part in local_tensors.items() if part is not None})
    return out if plan.last is None else run(plan.last, out)


# -- buffers of one rank while a tensor is resharded: sent, summed and received regions


class Buffers:
    """Flat buffers of one rank for the regions and chains of a plan, allocated at their first use.

    `x` is the local tensor under `plan.chains_src`; outside the source mesh only its dtype and device count. A region
    that is contiguous within a local tensor is sent or received there, without a copy.
    """

    def __init__(self, plan: ReshardPlan, rank: int, x: Tensor) -> None:
        self._chains, self._here = plan.chains, x
        self._own = region_of(plan.chains_src, plan.shape, rank)
        self._needed = region_of(plan.chains_dst, plan.shape, rank)
        self._out: Tensor | None = None
        if rank in plan.chains_dst.mesh:
            self._out = x.new_empty(plan.chains_dst.local_shape(plan.shape, plan.chains_dst.mesh.coordinate(rank)))
        self._packed: dict[Region, Tensor] = {}
        self._receive_buffers: dict[Region, tuple[Tensor, bool]] = {}
        self._sums: dict[int, Tensor] = {}
        if self._own is not None and self._needed is not None and not reduced_axes(plan.chains_src):
            shared = overlap(self._own, self._needed)
            if shared is not None:
                self._there(shared).copy_(view_of(x, inside(shared, self._own)))

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
                self._there(region).copy_(flat.view([len(indices) for indices in region]))
        return self._out

    def _there(self, region: Region) -> Tensor:
        """A view of the elements of the result within a region."""
        assert self._out is not None
        assert self._needed is not None
        return view_of(self._out, inside(region, self._needed))

    def _chunk(self, chain: int, index: int, position: int) -> Tensor:
        route = self._chains[chain]
        piece = route.piece(index)
        if 0 < position < route.terms:
            if chain not in self._sums:
                self._sums[chain] = self._here.new_empty(len(route.span))
            return self._sums[chain][piece.start - route.span.start : piece.stop - route.span.start]
        flat = self._own_elements(route.region) if position == 0 else self._receive_buffer(route.region)
        return flat[piece.start : piece.stop]

    def _own_elements(self, region: Region) -> Tensor:
        """This rank's own elements of a region, flat; a view where they are contiguous."""
        if region not in self._packed:
            assert self._own is not None
            self._packed[region] = view_of(self._here, inside(region, self._own)).contiguous().view(-1)
        return self._packed[region]

    def _receive_buffer(self, region: Region) -> Tensor:
        """The flat receive buffer of a region: a view of the result where the region is contiguous there."""
        if region not in self._receive_buffers:
            there = self._there(region)
            in_place = there.is_contiguous()
            self._receive_buffers[region] = there.view(-1) if in_place else there.new_empty(there.numel()), in_place
        return self._receive_buffers[region][0]
