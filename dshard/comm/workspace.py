"""Pools of reusable buffers, so that work on panels allocates nothing new after the first panels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.comm.backends import sum_dtype
from dshard.comm.collective import Collective, reduce
from dshard.comm.runtime import Runtime
from dshard.comm.streams import Stream, current_stream
from dshard.layout import Shape
from dshard.placements import ReduceOp

Pool = tuple[torch.device, torch.dtype, bool, Stream | None]
WORKSPACES: WeakSet[Workspace] = WeakSet()
"""All workspaces that have buffers: that of this process, and those of runs without data."""


@dataclass(eq=False)
class Workspace:
    """Flat buffers by device, dtype and stream: a buffer that is free on one stream may be in use on another.

    `allocations` counts the buffers allocated, `held` is the bytes lent now, `peak` the most lent at once; `storages`
    are those of the allocated buffers.
    """

    free: defaultdict[Pool, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    allocations: int = 0
    held: int = 0
    peak: int = 0
    storages: set[StorageWeakRef] = field(default_factory=set)

    def session(self, runtime: Runtime | None = None) -> PooledSession:
        """Lend buffers within the block, for work on the process groups of `runtime`, or on none.

        They are returned at the end of the block; after an error they are not, for they may still be in use.
        """
        return PooledSession(self, runtime)

    def clear(self) -> None:
        """Give all free buffers back to torch."""
        self.free.clear()


def lent_beside(sizes: Mapping[int, int]) -> int:
    """Bytes that all workspaces have lent now, less those of their buffers among these storages, by address.

    Free buffers, which on real ranks persist between steps, are not in use.
    """
    spaces = tuple(WORKSPACES) if WORKSPACES else ()
    return sum([space.held - sum([sizes.get(buffer.cdata, 0) for buffer in space.storages]) for space in spaces])


class Session:
    """New buffers for one program on the process groups of `runtime`, freed as soon as nothing needs them.

    `in_flight` says that other work runs beside the collectives, `owns` that what is sent may be overwritten, and
    `packs_in_place` that the tensors that are packed may be, too, where nothing else has their memory.
    """

    lends = traces = False
    """Whether buffers return to a pool, and so are there until the program gives them back; whether torch traces."""

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        in_flight: bool = False,
        owns: bool = False,
        packs_in_place: bool = False,
    ) -> None:
        self.runtime, self.in_flight, self.owns, self.packs_in_place = runtime, in_flight, owns, packs_in_place

    def take(self, shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised contiguous buffer on the device of `like`, of its dtype unless one is given."""
        return like.new_empty(shape, dtype=dtype)

    def give(self, x: Tensor) -> None:
        """Do nothing: a new buffer returns to no pool."""

    def flat(self, x: Tensor) -> Tensor:
        """The elements of `x`, flat: a view where possible."""
        return x.reshape(-1)

    def dense(self, view: Tensor) -> Tensor:
        """A contiguous tensor with the elements of `view`."""
        return view.contiguous()

    def concatenated(self, views: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """A flat buffer with the elements of all the views, each of one of these sizes."""
        out = self.take((sum(sizes),), views[0])
        for part, view in zip(out.split(list(sizes)), views, strict=True):
            part.view(view.shape).copy_(view)
        return out

    def reduced(self, terms: Tensor, op: ReduceOp) -> Tensor:
        """The reduction of the rows of a buffer, which it replaces."""
        return reduce(terms, op)

    def to_receive(self, collective: Collective, sent: Tensor) -> Tensor | None:
        """The buffer to receive in; None for one that the collective makes as it likes best."""
        if self.owns and collective.kind == "all_reduce":
            return sent if sent.is_contiguous() else None
        if self.in_flight and collective.kind == "all_gather":  # in place: copies to send would stay in flight
            return sent.new_empty(sum(collective.recv))
        return None


class GraphSession(Session):
    """Tensors without memory, while torch traces: the compiler plans the memory of a graph."""

    traces = True

    def concatenated(self, views: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
        """A flat tensor with the elements of all the views: one operator of the graph, in place of copies."""
        return torch.cat([view.reshape(-1) for view in views])


class PooledSession(Session):
    """The buffers that one user has borrowed from a workspace, by the address of their storage."""

    lends = True

    def __init__(self, workspace: Workspace, runtime: Runtime | None = None) -> None:
        super().__init__(runtime, in_flight=True)
        self.workspace = workspace
        self.lent: dict[int, tuple[Pool, Tensor]] = {}
        self.nbytes: dict[int, int] = {}

    def __enter__(self) -> PooledSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end()
        self.workspace.held -= sum(self.nbytes.values())

    def take(self, shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Borrow an uninitialised contiguous buffer on the device of `like`, of its dtype unless one is given."""
        size, dtype, pool = prod(shape), like.dtype if dtype is None else dtype, self.workspace
        kind = (like.device, dtype, torch.is_inference_mode_enabled(), current_stream(like.device))
        fitting = [x for x in pool.free[kind] if x.numel() >= size]
        if fitting:
            storage = min(fitting, key=Tensor.numel)
            pool.free[kind] = [x for x in pool.free[kind] if x is not storage]
        else:
            storage = torch.empty(size, dtype=dtype, device=like.device)
            pool.allocations += 1
            pool.storages.add(StorageWeakRef(storage.untyped_storage()))
            WORKSPACES.add(pool)
        number = _number(storage)
        self.lent[number], self.nbytes[number] = (kind, storage), size * dtype.itemsize
        pool.held += size * dtype.itemsize
        pool.peak = max(pool.peak, pool.held)
        return storage[:size].view(shape)

    def give(self, x: Tensor) -> None:
        """Return the buffer of which `x` is a view, if this session borrowed it; a later borrower may overwrite it."""
        entry = self.lent.pop(_number(x), None)
        if entry is not None:
            self.workspace.free[entry[0]].append(entry[1])
            self.workspace.held -= self.nbytes.pop(_number(x))

    def end(self) -> None:
        """Return all buffers."""
        for _, storage in tuple(self.lent.values()):
            self.give(storage)

    def flat(self, x: Tensor) -> Tensor:
        """The elements of `x`, flat: a view where it is contiguous."""
        return x.view(-1) if x.is_contiguous() else self.dense(x).view(-1)

    def dense(self, view: Tensor) -> Tensor:
        """A buffer with the elements of `view`."""
        return self.take(tuple(view.shape), view).copy_(view)

    def reduced(self, terms: Tensor, op: ReduceOp) -> Tensor:
        """Reduce the rows of a buffer into another; half precision is summed in single."""
        wide = sum_dtype(terms.dtype)
        total = self.take((terms.shape[1],), terms, wide)
        if op in ("sum", "avg") and (wide.is_floating_point or wide.is_complex):
            torch.sum(terms, 0, dtype=wide, out=total)
            if op == "avg":
                total.div_(len(terms))
        else:
            total.copy_(reduce(terms, op))
        out = total
        if wide != terms.dtype:
            out = self.take((terms.shape[1],), terms)
            out.copy_(total)
            self.give(total)
        self.give(terms)
        return out


def _number(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


WORKSPACE = Workspace()
"""The buffers of this process."""
