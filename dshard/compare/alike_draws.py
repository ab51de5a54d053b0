"""Random values that a plain model draws as the laid-out one does."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dshard.core.moves import replace_tensors, tensors_in
from dshard.core.signature import Args
from dshard.core.spec import spec_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import replicated
from dshard.mesh import Mesh
from dshard.ops.random import get_rng_state, is_random, manual_seed, set_rng_state
from dshard.ops.random.operators import seeded
from dshard.torch_private import OpOverload, TorchDispatchMode

SEED = 0


@contextmanager
def draws_of_dshard(mesh: Mesh, roots: Iterable[Tensor]) -> Iterator[None]:
    """Within the block random operators on what follows from `roots` draw what they draw on distributed tensors.

    Those are the tensors that a laid-out model has distributed. What a model makes from nothing is plain there, too,
    and draws from torch's generator. All other operators run as they are.
    """
    with _AttentionByOperators(), _DrawsOfDShard(mesh, roots):
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
        if follows and isinstance(func, OpOverload) and is_random(func) and "attention" not in func.name():
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


class _AttentionByOperators(TorchFunctionMode):
    """Attention with dropout draws its mask by an operator of its own, not within a kernel."""

    def __torch_function__(self, func: Any, types: object, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drops = func is F.scaled_dot_product_attention and (kwargs.get("dropout_p") or any(args[4:5]))
        with sdpa_kernel(SDPBackend.MATH) if drops else nullcontext():
            return func(*args, **kwargs)


def _mark(tensors: Iterable[Tensor]) -> None:
    for x in tensors:
        x._dshard_follows = True  # type: ignore[attr-defined]


@contextmanager
def same_generators(device: torch.device) -> Iterator[None]:
    """Within the block the generators of torch, dshard, Python and numpy begin with one seed, the same on all ranks.

    Afterwards they are as before.
    """
    numpy = sys.modules.get("numpy")
    python, draws, of_numpy = random.getstate(), get_rng_state(), numpy and numpy.random.get_state()
    with seeded(SEED, device):  # restores dshard's mark in torch's generator, too, and last
        random.seed(SEED)
        manual_seed(SEED)
        if numpy:
            numpy.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(python)
            set_rng_state(draws)
            if numpy:
                numpy.random.set_state(of_numpy)
