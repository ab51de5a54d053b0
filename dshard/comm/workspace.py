"""Pools of reusable buffers, so that panels and reduced gradients allocate nothing new after the first ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from sys import getrefcount
from threading import Lock
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.caches import Cache
from dshard.comm.runtime import Runtime
from dshard.comm.streams import Stream, current_stream
from dshard.layout import Shape
from dshard.torch_private import storage_references

KEPT_BYTES = 1 << 17
"""The least bytes of a buffer for results that is kept: the C library itself keeps smaller ones that are freed."""
Kind = tuple[torch.device, torch.dtype, bool, Stream | None]
WORKSPACES: WeakSet[Workspace] = WeakSet()
"""All workspaces: that of this process, and those of runs without data."""


@dataclass(eq=False)
class Workspace:
    """Flat buffers by device, dtype and stream: a buffer that is free on one stream may be in use on another.

    `allocations` counts the buffers allocated, `held` is the bytes lent now, `peak` the most lent at once; `storages`
    are those of the allocated buffers.
    """

    free: defaultdict[Kind, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    allocations: int = 0
    held: int = 0
    peak: int = 0
    storages: set[StorageWeakRef] = field(default_factory=set)

    def __post_init__(self) -> None:
        WORKSPACES.add(self)

    @contextmanager
    def session(self, runtime: Runtime | None = None) -> Iterator[Session]:
        """Lend buffers within the block, for work on the process groups of `runtime`, or on none.

        They are returned at the end of the block; after an error they are not, for they may still be in use.
        """
        lent = Session(self, runtime)
        try:
            yield lent
            lent.end()
        finally:
            self.held -= sum(lent.nbytes.values())

    def clear(self) -> None:
        """Give all free buffers back to torch."""
        self.free.clear()


def borrowed_now() -> int:
    """Bytes that all workspaces have lent now."""
    return sum(space.held for space in tuple(WORKSPACES))


def in_use(sizes: Mapping[StorageWeakRef, int]) -> int:
    """Bytes of the given storages that still exist, and of the buffers lent by workspaces.

    Free buffers of a workspace, and idle ones for results, which on real ranks persist between steps, are not in use.
    """
    kept = RESULTS.idle().union(*(space.storages for space in tuple(WORKSPACES)))
    return sum(size for ref, size in sizes.items() if ref not in kept and not ref.expired()) + borrowed_now()


def _holders(flat: Tensor) -> tuple[int, int]:
    """References to the memory of `flat`, in C++ and in Python."""
    memory = flat.untyped_storage()
    return storage_references(memory._cdata), getrefcount(memory)


@dataclass(eq=False, slots=True)
class ResultBuffer:
    """A flat buffer for results, the references to its memory while nobody has any, and when it was last taken."""

    flat: Tensor
    alone: tuple[int, int]
    taken: int

    @property
    def is_idle(self) -> bool:
        """Whether nobody in this process holds this memory: no tensor, array or storage."""
        return _holders(self.flat) == self.alone

    @property
    def is_replaced(self) -> bool:
        """Whether a holder of a result has moved the memory to where other processes share it, or resized it."""
        return self.flat.is_shared() or self.flat.untyped_storage().nbytes() != self.flat.nbytes


class ResultBuffers:
    """Flat buffers on a CPU for results that live until anyone drops them, such as gradients of a bucket.

    They stay from step to step: memory that goes back to the system comes back page by page, of which each is cleared
    at its first write. Accelerators have allocators of torch's for that. Idle ones are dropped when another size is
    asked for, and those whose memory was shared with other processes, or resized; `clear_caches` drops all.
    """

    def __init__(self) -> None:
        self.buffers = Cache("buffers for results", 1024)
        self.takes = 0  # of buffers, so far
        self._lock = Lock()  # calls of torch let other threads run

    def take(self, size: int, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """An uninitialised flat tensor on the device of `like`, whose memory nobody else has.

        None where none is kept: on an accelerator, and in inference mode, whose tensors are not written outside of it.
        """
        if type(like) is not Tensor or like.device.type != "cpu" or torch.is_inference_mode_enabled():
            return None
        with self._lock:
            self.takes += 1
            for number, buffer in tuple(self.buffers.items()):
                if buffer.is_replaced:
                    del self.buffers[number]
                elif buffer.flat.numel() == size and buffer.flat.dtype is dtype and buffer.is_idle:
                    self.buffers.hits += 1
                    buffer.taken = self.takes
                    return buffer.flat.detach()  # type: ignore[no-any-return]
            for number, buffer in tuple(self.buffers.items()):
                if buffer.is_idle:
                    del self.buffers[number]
            flat = like.new_empty(size, dtype=dtype)
            if type(flat) is not Tensor:  # within a mode that has none with data
                return flat
            self.buffers.add(_number(flat), ResultBuffer(flat, _holders(flat), self.takes))
            return flat.detach()

    def idle(self) -> set[StorageWeakRef]:
        """The storages of the buffers whose memory nobody has."""
        return {StorageWeakRef(each.flat.untyped_storage()) for each in tuple(self.buffers.values()) if each.is_idle}

    def taken_after(self, takes: int) -> set[StorageWeakRef]:
        """The storages of the buffers that were taken after so many takes."""
        buffers = [buffer for buffer in tuple(self.buffers.values()) if buffer.taken > takes]
        return {StorageWeakRef(buffer.flat.untyped_storage()) for buffer in buffers}


RESULTS = ResultBuffers()
"""The buffers for results of this process."""


@dataclass(slots=True)
class Session:
    """The buffers that one user has borrowed, by the address of their storage."""

    workspace: Workspace
    runtime: Runtime | None = None
    lent: dict[int, tuple[Kind, Tensor]] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)

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


def _number(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


class FreshBuffers(Session):
    """New buffers at each request, for use while torch traces: the compiler plans the memory of a graph."""

    def take(self, shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate an uninitialised contiguous buffer."""
        return like.new_empty(shape, dtype=dtype)

    def give(self, x: Tensor) -> None:
        """Do nothing: a new buffer is returned to no pool."""


WORKSPACE = Workspace()
"""The buffers of this process."""
