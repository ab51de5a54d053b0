"""Memory of a rank, counted from the storages alive after each operator."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 0.3
"""Seconds after which what is held is held for good."""


class Held(TorchDispatchMode):
    """Count the peak bytes of storages created within the block and alive after any operator.

    Storages of `given` tensors count nothing, nor do those of wrappers and of the meta device, which hold
    nothing. Above `limit` a moment is waited: a thread of gloo's may let go late of what it has sent.
    """

    def __init__(self, *given: Tensor, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.sizes: dict[StorageWeakRef, int] = {StorageWeakRef(x.untyped_storage()): 0 for x in given}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) in (Tensor, Parameter) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        if self.limit is not None and self.alive() > self.limit:
            end = time.monotonic() + PATIENCE
            while self.alive() > self.limit and time.monotonic() < end:
                time.sleep(PATIENCE / 100)
        self.most = max(self.most, self.alive())
        return out

    def alive(self) -> int:
        """Return the bytes of the storages alive now."""
        return sum(size for ref, size in self.sizes.items() if not ref.expired())
