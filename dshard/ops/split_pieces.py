"""`split` and `chunk` of a sharded dim: each piece has the tensor's layout, and each rank sends just what peers lack.

So a projection that computes queries, keys and values at once, sharded as one tensor, leaves each of them sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from dshard.core.call import LocalOp
from dshard.core.checks import infer
from dshard.core.moves import run_on_ranks
from dshard.core.spec import spec_of
from dshard.core.view_sync import PartialView, register_view
from dshard.core.wrapper import wrap
from dshard.layout import Layout
from dshard.ops.exchange import Move, Moves, cuts_split, exchange_indices, slice_
from dshard.ops.reduced_norms import split_axes
from dshard.torch_private import OpOverload

_ATEN = torch.ops.aten
_SLICE = _ATEN.slice.Tensor


def pieces(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.split(sizes, dim)`: views with memory of their own. One exchange for all where every piece shards evenly."""
    x, dim = args[0], _dim(args) % args[0].dim()
    outs = infer(func, (x._spec.meta(), *args[1:]), dict(kwargs))
    sizes, layout = [out.shape[dim] for out in outs], x._spec.layout
    ends = list(accumulate(sizes, initial=0))
    ranks = _ranks(layout, dim)
    if any(size % ranks for size in sizes):
        return [slice_(_SLICE, (x, dim, *ends[i : i + 2], 1), {}) for i in range(len(sizes))]
    together = exchange_indices(str(func), [x], dim, _dealt(sizes, ends, ranks), x._spec.meta())
    local_sizes = [size // ranks for size in sizes]

    def cut(at: Any) -> LocalOp:
        return lambda local: list(local.split(local_sizes, dim))

    views = []
    locals_ = run_on_ranks(layout.mesh, cut, (together._local,), {})
    for i, (local, out) in enumerate(zip(locals_, outs, strict=True)):
        spec = spec_of(layout, tuple(out.shape), out.stride(), out.dtype, x._spec.device)
        views.append(wrap(local, spec))
        register_view(views[-1], PartialView(x, local, spec, _SLICE, (dim, *ends[i : i + 2], 1)))
    return views


def _dealt(sizes: Sequence[int], starts: Sequence[int], ranks: int) -> Moves:
    """The moves that give each rank in turn its chunk of each piece."""
    moves, at = [], 0
    for rank in range(ranks):
        for start, size in zip(starts, sizes, strict=False):
            n = size // ranks
            moves.append(Move(0, range(start + rank * n, start + (rank + 1) * n), at))
            at += n
    return tuple(moves)


def _ranks(layout: Layout, dim: int) -> int:
    return prod(layout.mesh.shape[axis] for axis in split_axes(layout, (dim,)))


def _dim(args: tuple[Any, ...]) -> int:
    return args[2] if len(args) > 2 else 0


def pays(args: tuple[Any, ...]) -> bool:
    """Whether a sharded dim is cut, into pieces that shard evenly or are no more than the ranks that shard it."""
    x, asked, dim = args[0], args[1], _dim(args)
    if not cuts_split(x, dim):
        return False
    n, ranks = x.shape[dim], _ranks(x._spec.layout, dim % x.dim())
    if isinstance(asked, int):
        asked = [min(asked, n - start) for start in range(0, n, asked)] if asked > 0 else []
    if len(asked) < 2 or min(asked) < 1:
        return False
    return len(asked) <= ranks or all(size % ranks == 0 for size in asked)


SPLITS = frozenset({_ATEN.split.Tensor, _ATEN.split_with_sizes.default})
"""The operators that cut a sharded dim into pieces."""
