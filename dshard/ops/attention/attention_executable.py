"""Executables of a choice of attention: local attention to the keys that a rank has, and what brings it the others.

Design: docs/design/0019-attention-rings.md
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.core.call import LocalOp
from dshard.core.executable import ComposedExecutable, Executable, wrap_as
from dshard.core.signature import Args, Kwargs
from dshard.core.wrapper import is_recorded
from dshard.mesh import Coordinate
from dshard.ops.attention.attention_choice import AttentionChoice
from dshard.ops.attention.key_windows import windowed
from dshard.ops.attention.local_attention import Attend, of_key_heads
from dshard.ops.attention.partial_attention import PartialAttention
from dshard.ops.attention.score_functions import ScoreFunctions
from dshard.ops.composite import SavedOperands, SavingExecutable, run_recorded

AttendAt: TypeAlias = Callable[[Sequence[range], range], Attend]
"""Local attention of the scores at ranges of the batch dims, heads and queries, and at one of the keys."""


def executable_of(
    choice: AttentionChoice, attend_at: AttendAt, functions: Callable[[], ScoreFunctions], positions: Sequence[int]
) -> Executable | ComposedExecutable:
    """The executable of a choice, of whose operands those at `positions` are distributed.

    `functions` are for ranks that have some of the keys of their queries, `attend_at` for those that have all of them.
    """
    how, result = choice.how, choice.result
    if how.keys == "split" or how.ring.axes:
        return PartialAttention(choice, functions)
    strategy = choice.within.strategy
    assert strategy is not None
    saves_copies = how.keys == "every head" or strategy.outputs[0].leaves_empty(result.shape)
    make = SavingExecutable if saves_copies else Executable
    kernel = partial(_kernel, choice, attend_at)
    local = make(choice.within, kernel, [result], positions, wrap_as(result), gradients=strategy.gradients)
    if how.windows is None and how.repeats == 1:
        return local
    return ComposedExecutable(choice.decision, partial(_on_brought_keys, choice, local))


def _kernel(choice: AttentionChoice, attend_at: AttendAt, at: Coordinate) -> LocalOp:
    """The local attention of the rank at a coordinate: its queries and their key heads, or its window of the keys."""
    (query, key, *_), windows = choice.specs, choice.how.windows
    *ranges, _ = choice.strategy.inputs[0].region(query.shape, at)
    attend = attend_at(ranges, range(key.shape[-2]) if windows is None else windows.window(at))
    if choice.how.keys != "every head":
        return attend
    return of_key_heads(ranges[-2], query.shape[-3] // key.shape[-3], attend)


def _on_brought_keys(choice: AttentionChoice, local: Executable, tensors: Args, kwargs: Kwargs) -> Any:
    """Attention to windows of the keys, or to key heads that are repeated."""
    how, moved = choice.how, tuple[Any, ...]()
    query, *keys = (redistribute(x, layout) for x, layout in zip(tensors, choice.strategy.inputs, strict=True))
    if how.windows is not None:
        moved = (query, *windowed(how.windows, keys))
    else:
        moved = (query, *(x.repeat_interleave(how.repeats, -3) for x in keys[:2]), *keys[2:])
    if not is_recorded(tensors):
        return local(moved)
    out = run_recorded(local, *moved)
    return out if how.repeats == 1 else SavedOperands.apply(out, *tensors)  # type: ignore[no-untyped-call]


# -- batch dims and heads of attention that torch broadcasts: the kernels of blocks need equal ones


def lead_differs(tensors: Sequence[Tensor], gqa: bool) -> bool:
    """Whether query, key and value differ in batch dims or, but for grouped queries, heads."""
    first = -3 if gqa else -2
    query, key, value = (x.shape[:first] for x in tensors)
    return not query == key == value


def broadcast_lead(tensors: Sequence[Tensor], gqa: bool) -> Sequence[Tensor]:
    """Query, key and value with equal batch dims and, but for grouped queries, heads: those of size 1 are expanded.

    Sizes that do not match are left to torch, which refuses them.
    """
    if not lead_differs(tensors, gqa):
        return tensors
    first = -3 if gqa else -2
    leads = {tuple(x.shape[:first]) for x in tensors}
    ndim = max(map(len, leads))
    sizes = [{lead[i - ndim] for lead in leads if len(lead) >= ndim - i} - {1} for i in range(ndim)]
    if any(len(of_dim) > 1 for of_dim in sizes):
        return tensors
    lead = [max(of_dim, default=1) for of_dim in sizes]
    return [x.expand(*lead, *x.shape[first:]) for x in tensors]
