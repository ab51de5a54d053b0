"""Pools of reusable buffers, so that work on panels allocates nothing new after the first panels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.comm.runtime import Runtime
from dshard.comm.streams import Stream, current_stream
from dshard.layout import Shape

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

    Free buffers of a workspace, which on real ranks persist between steps, are not in use.
    """
    kept = set().union(*(space.storages for space in tuple(WORKSPACES)))
    return sum(size for ref, size in sizes.items() if ref not in kept and not ref.expired()) + borrowed_now()


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
