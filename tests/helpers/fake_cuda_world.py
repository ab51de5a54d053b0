"""A world of fake CUDA ranks in one process, which notices new CPU tensors and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode, fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import Store, _meta_registrations
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from dshard.comm import streams, traced_collectives
from dshard.comm.workspace import WORKSPACE
from dshard.core import replaced_parameters
from dshard.testing.host_sync import _reason

RANKS = 4
OBJECTS = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list")


@dataclass
class Noticed:
    """Counts of a program's operators on fake CUDA tensors that create CPU tensors, or make the host wait."""

    on_cpu: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def beyond(self, allowed: Noticed) -> list[str]:
        """Describe what was noticed and is not in `allowed`."""
        texts = [f"a CPU tensor of {name}" for name in self.on_cpu - allowed.on_cpu]
        return texts + [f"a wait of the host: {name}" for name in self.waits - allowed.waits]


class FakeCuda(FakeTensorMode):
    """FakeTensorMode that notices what programs do."""

    noticed: Noticed | None = None
    _depth = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on fake tensors."""
        self._depth += 1
        try:
            out = super().dispatch(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if out is not NotImplemented and self.noticed is not None and self._depth == 0:
            reason = _reason(func, args, kwargs or {})
            if reason:
                self.noticed.waits[f"{func}: {reason}"] += 1
            # those without elements, by which arguments are checked, cost nothing
            if any(isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() for x in tree_leaves(out)):
                self.noticed.on_cpu[str(func)] += 1
        return out

    @contextmanager
    def watched(self) -> Iterator[Noticed]:
        """Collect what is noticed within the block."""
        before, self.noticed = self.noticed, Noticed()
        try:
            yield self.noticed
        finally:
            self.noticed = before


@contextmanager
def fake_cuda_world(rank: int = 0, ranks: int = RANKS, store: Store | None = None) -> Iterator[FakeCuda]:
    """Simulate one rank of a CUDA world whose NCCL collectives send nothing, with tensors without numbers.

    Fake tensors are taken for those of a program that runs, not for those of torch.compile, which traces with them.
    With a store that all ranks share, each a process, objects are sent over gloo; else the other ranks do not exist.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.object(traced_collectives, "_TRACED", frozenset()))
        # which takes from a tensor what it keeps in its attributes
        stack.enter_context(patch.object(replaced_parameters, "traced", lambda old: True))
        # torch numbers works by Python's random numbers, which a program is then said to draw
        stack.enter_context(patch.object(_meta_registrations, "generate_unique_id", count().__next__))
        stack.enter_context(patch.dict(streams.CURRENT, clear=True))
        # by which a torch made for CUDA looks for a driver
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda device: None))
        for name, value in {"current_device": 0, "is_available": True, "device_count": 1, "set_device": None}.items():
            stack.enter_context(patch.object(torch.cuda, name, lambda *args, _value=value: _value))
        backend = "fake" if store is None else "cpu:gloo,cuda:fake"
        store = store or FakeStore()  # type: ignore[no-untyped-call]
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        stack.callback(WORKSPACE.clear)  # of tensors that no other FakeTensorMode takes
        for name in OBJECTS:
            stack.enter_context(patch.object(dist, name, _without_fakes(getattr(dist, name))))
        yield stack.enter_context(FakeCuda())


def _without_fakes(send: Callable[..., object]) -> Callable[..., object]:
    """Wrap a function that sends objects, to run on real CPU tensors."""

    @wraps(send)
    def sent(*args: Any, **kwargs: Any) -> object:
        with unset_fake_temporarily():
            return send(*args, **kwargs)

    return sent
