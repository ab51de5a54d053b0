"""What a rank holds, counted from the storages alive after each operator."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Held(TorchDispatchMode):
    """Bytes of all storages made within the block: the most that were alive after any operator.

    Storages of `given` tensors count nothing, nor do those of wrappers and of the meta device, which hold
    nothing.
    """

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {StorageWeakRef(x.untyped_storage()): 0 for x in given}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) in (Tensor, Parameter) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, sum(size for ref, size in self.sizes.items() if not ref.expired()))
        return out
