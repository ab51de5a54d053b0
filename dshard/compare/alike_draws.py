"""Random values that a plain model draws as the laid-out one does."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard.core.signature import Args
from dshard.core.spec import spec_of
from dshard.core.trees import replace_tensors, tensors_in
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import replicated
from dshard.mesh import Mesh
from dshard.ops.random import get_rng_state, is_random, manual_seed, set_rng_state
from dshard.parallel.reachable_state import ReachableState
from dshard.torch_private import OpOverload, TorchDispatchMode


@contextmanager
def draws_of_dshard(mesh: Mesh, roots: Iterable[Tensor]) -> Iterator[None]:
    """Within the block random operators on what follows from `roots` draw what they draw on distributed tensors.

    Those are the tensors that a laid-out model has distributed. What a model makes from nothing is plain there, too,
    and draws from torch's generator. All other operators run as they are, attention as several, of which one draws.
    """
    with sdpa_kernel(SDPBackend.MATH), _DrawsOfDShard(mesh, roots):
        yield


class _DrawsOfDShard(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, mesh: Mesh, roots: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layout = replicated(mesh)
        _mark(roots)

    def __torch_dispatch__(self, func: Any, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follows = any(hasattr(x, "_dshard_follows") for x in tensors_in((args, kwargs)))
        if follows and isinstance(func, OpOverload) and is_random(func):
            operands: dict[int, Tensor] = {}
            wrapped_args, wrapped_kwargs = replace_tensors((args, kwargs), lambda x: self._wrapped(x, operands))
            out = func(*wrapped_args, **wrapped_kwargs)
            out = replace_tensors(out, lambda x: operands.get(id(x), x._local_tensor))  # type: ignore[attr-defined]
        else:
            out = func(*args, **kwargs)
        if follows:
            _mark(tensors_in(out))
        return out

    def _wrapped(self, x: Tensor, operands: dict[int, Tensor]) -> Wrapper:
        wrapped = wrap(x.data, spec_of(self.layout, tuple(x.shape), x.stride(), x.dtype, x.device))
        operands[id(wrapped)] = x
        return wrapped


def _mark(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        x._dshard_follows = True  # type: ignore[attr-defined]


@contextmanager
def same_generators() -> Iterator[None]:
    """Within the block the generators of torch, dshard, Python and numpy begin alike; afterwards they are as before."""
    draws = get_rng_state()
    with ReachableState().replaced({}):  # restores dshard's mark in torch's generator, too, and last
        for seed in torch.manual_seed, random.seed, manual_seed:
            seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        try:
            yield
        finally:
            set_rng_state(draws)
