"""Buffers that are used again: what moves panel by panel allocates nothing new after its first time."""

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
from dshard.layout import Shape

Kind = tuple[torch.device, torch.dtype, bool]
WORKSPACES: WeakSet[Workspace] = WeakSet()
"""All there are: that of this process, and those of what is running without data."""


@dataclass(eq=False)
class Workspace:
    """Flat buffers by device and dtype.

    `allocations` counts the buffers made, `held` the bytes lent now, `peak` the most lent at once; `storages` are those
    of the buffers made.
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
        """Lend buffers for the block, to what runs on these process groups, or on none.

        They come back at its end: after an error none do, for they may be in use yet.
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
    """Bytes that all workspaces have lent."""
    return sum(space.held for space in tuple(WORKSPACES))


def in_use(sizes: Mapping[StorageWeakRef, int]) -> int:
    """Bytes of those of these storages that are there, and of what workspaces have lent.

    Buffers that a workspace keeps for the next who asks are not in use: on real ranks they stay from step to step.
    """
    kept = set().union(*(space.storages for space in tuple(WORKSPACES)))
    return sum(size for ref, size in sizes.items() if ref not in kept and not ref.expired()) + borrowed_now()


@dataclass(slots=True)
class Session:
    """The buffers lent for one use, by the number of their storage."""

    workspace: Workspace
    runtime: Runtime | None = None
    lent: dict[int, tuple[Kind, Tensor]] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)

    def take(self, shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous buffer, with anything in it, on the device of `like` and with its dtype if none is given."""
        size, dtype, pool = prod(shape), like.dtype if dtype is None else dtype, self.workspace
        kind = (like.device, dtype, torch.is_inference_mode_enabled())
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
        """Return the buffer that `x` lies in, if it is one of these: what is taken next may overwrite it."""
        found = self.lent.pop(_number(x), None)
        if found is not None:
            self.workspace.free[found[0]].append(found[1])
            self.workspace.held -= self.nbytes.pop(_number(x))

    def end(self) -> None:
        """Return all."""
        for _, storage in tuple(self.lent.values()):
            self.give(storage)


def _number(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


class FreshBuffers(Session):
    """Buffers for what is traced: each is new, for what runs later has its memory planned by whoever compiles it."""

    def take(self, shape: Shape, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous buffer."""
        return like.new_empty(shape, dtype=dtype)

    def give(self, x: Tensor) -> None:
        """Nothing."""


WORKSPACE = Workspace()
"""The buffers of this process."""
