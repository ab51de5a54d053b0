"""dshard's and torch's `flex_attention` by loops b, h and q: functions that modify scores get global indices.

On CPUs the scores are held in memory, as in torch's own function there, which has no gradients. On other devices a rank
calls torch's function, with `score_mod` and the block mask for its range of the scores. Around a ring the scores of a
panel are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from dshard.comm import has_only_shape, kernel_device, numbers_of, traced
from dshard.core.call_key import call_key
from dshard.core.context import planning_context
from dshard.core.executable import ComposedExecutable, Executable
from dshard.core.operands import common_mesh, spec_like
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.spec import Spec
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.errors import LayoutError
from dshard.ops.attention.attention_choice import AttentionChoice, Candidates, Kind
from dshard.ops.attention.attention_executable import broadcast_lead, executable_of
from dshard.ops.attention.local_attention import Attend, Options, of_nothing, whole
from dshard.ops.attention.score_functions import Modify, ScoreFunctions, modified, modified_at
from dshard.ops.composite import run_executable, run_recorded
from dshard.ops.matmul.options import current_options
from dshard.ops.matmul.rules import same_dtype
from dshard.rules.attention_blocks import Reach
from dshard.rules.attention_loops import RequestedLoops
from dshard.torch_private import no_torch_function


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Modify | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: object,
) -> Any:
    """Compute torch's `flex_attention` of plain or distributed tensors (batch, heads, length, features).

    Batch, heads and queries may be split in any way: `score_mod`, and the `mask_mod` of `block_mask`, are given global
    indices on every rank. Tensors that they use must be plain, equal on all ranks, and get no gradient. On CPUs, and
    around a ring, they are given all indices at once, which broadcast, so they must be made of operators on tensors.
    Keys that are split are brought to the heads, gathered, or go round a ring.

    Raises:
        LayoutError: other options than these for distributed tensors.
        StrategyError: requested loops that are impossible.
    """
    tensors: Sequence[Tensor] = (query, key, value)
    if not any(isinstance(x, Wrapper) for x in tensors):
        plain_call: Function = torch_flex_attention
        return plain_call(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)
    if extra := [name for name, option in options.items() if option]:
        raise LayoutError(
            f"flex_attention of distributed tensors with {', '.join(extra)}: it takes score_mod, block_mask, scale and "
            "enable_gqa; leave the rest out, or call torch's function on local tensors within local_map"
        )
    tensors = broadcast_lead(tensors, enable_gqa)
    with no_torch_function():
        return run_executable(_executable(tensors, score_mod, block_mask, Options(False, scale, enable_gqa)), tensors)


def flex_attention_operator(func: Function, args: Args, kwargs: Kwargs) -> tuple[Any, None, None]:
    """The operator that torch's own `flex_attention` calls, without the statistics of the scores."""
    names = ("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options", "of_scores", "of_mask")
    q, k, v, score_mod, mask, scale, kernel_options, *used = bind_arguments(names, args, kwargs)
    recorded = any(x.requires_grad for x in (q, k, v))  # for which torch asks for the first of them itself
    if kernel_options.get("OUTPUT_MAX") or (kernel_options.get("OUTPUT_LOGSUMEXP") and not recorded):
        raise LayoutError(
            "flex_attention of distributed tensors with return_aux, or return_lse: it gives the result alone; leave "
            "them out, or call it on local tensors within local_map"
        )
    functions = zip((score_mod, mask[-1]), used, strict=True)
    modify, seen = (partial(_with_tensors, function, tensors or ()) for function, tensors in functions)
    keys: tuple[Any, Any, Any, Any] = mask[2:6]
    sizes, lengths = tuple(mask[-3:-1]), tuple(mask[:2])
    blocks = BlockMask.from_kv_blocks(*keys, sizes, seen, lengths, compute_q_blocks=False)
    return flex_attention(q, k, v, modify, blocks, scale, q.shape[1] != k.shape[1]), None, None


def _with_tensors(function: Function, tensors: Sequence[Tensor], *args: Tensor) -> Any:
    return function(*args, *tensors)


def _executable(
    tensors: Sequence[Tensor], score_mod: Modify | None, mask: BlockMask | None, options: Options
) -> Executable | ComposedExecutable:
    """The executable of this call, planned once for operands like these, with the functions of this call."""
    mesh = common_mesh("flex_attention", list(tensors))
    specs = [spec_like(x, mesh) for x in tensors]
    is_eager = all(isinstance(x, Wrapper) and not traced(x._local_tensor) for x in tensors)
    reach = _reach(mask, (specs[0].shape[2], specs[1].shape[2])) if is_eager else None
    choice = _chosen(tensors, specs, options, current_options().attention, is_eager, reach)
    functions = ScoreFunctions(partial(modified_at, score_mod, mask), partial(_recorded, score_mod, mask, options))
    attend_at = partial(_attend_at, score_mod, mask, options)
    positions = [i for i, x in enumerate(tensors) if isinstance(x, Wrapper)]
    return executable_of(choice, attend_at, lambda: functions, positions)


def _recorded(score_mod: Modify | None, mask: BlockMask | None, options: Options, tensors: Sequence[Wrapper]) -> Any:
    """Attention in which ranks have all keys of their queries, with differentiable gradients."""
    specs = [x._spec for x in tensors]
    choice = _chosen(tensors, specs, options, None, False, None)
    attend_at = partial(_attend_at, score_mod, mask, options)
    functions = ScoreFunctions(None, lambda tensors: None)
    local: Any = executable_of(choice, attend_at, lambda: functions, range(3))
    return run_recorded(local, *tensors)


def _chosen(
    tensors: Sequence[Tensor],
    specs: Sequence[Spec],
    options: Options,
    requested: RequestedLoops,
    rings: bool,
    reach: Reach | None,
) -> AttentionChoice:
    """The choice for operands like these, planned once; the candidates have rings, or not."""
    needed = tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)
    kinds: frozenset[Kind] = frozenset({"rings"} if rings else ())

    def choose() -> AttentionChoice:
        same_dtype("flex_attention", [x.dtype for x in tensors])
        return Candidates(specs, options, requested, needed, kinds, reach, held=True).choice()

    key = call_key(("flex_attention", options.scale, options.gqa, requested, needed, kinds, reach), tensors)
    return planning_context().choices.of(key, choose)  # type: ignore[no-any-return]


def _attend_at(
    score_mod: Modify | None, mask: BlockMask | None, options: Options, ranges: Sequence[range], keys: range
) -> Attend:
    """The local attention of the scores at these ranges."""
    return RankScores(score_mod, mask, options, ranges, keys).attend


_REACHES: WeakKeyDictionary[BlockMask, Reach] = WeakKeyDictionary()
"""The keys that queries reach by each block mask, cached as reading them from a GPU takes time."""


def _reach(mask: BlockMask | None, lengths: tuple[int, int]) -> Reach | None:
    """The keys that each block of queries may see by the mask's blocks; None if the mask has other lengths."""
    if mask is None or traced(mask.kv_indices) or tuple(mask.seq_lengths) != lengths:
        return None
    if mask not in _REACHES:
        rows, columns = mask.BLOCK_SIZE
        seen = mask.to_dense().flatten(0, -3).amax(0).bool()
        blocks = [[j for j, is_seen in enumerate(row) if is_seen] for row in numbers_of(seen)]
        ends = (((row[0] * columns, min((row[-1] + 1) * columns, lengths[1])) if row else (0, 0)) for row in blocks)
        _REACHES[mask] = Reach(rows, tuple(ends))
    return _REACHES[mask]


@dataclass(frozen=True, slots=True)
class RankScores:
    """The scores of a rank's ranges of batch, heads, queries and keys, with functions that take global indices."""

    score_mod: Modify | None
    mask: BlockMask | None
    options: Options
    ranges: Sequence[range]
    keys: range

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the rank's queries, by torch's function on devices with kernels for it."""
        if has_only_shape(q):
            return whole(self.options)(q, k, v)
        k, v = (x[:, :, : len(self.keys)] for x in (k, v))
        if not q.numel():
            return of_nothing(q, k, v)
        return self.held(q, k, v) if kernel_device(q.device) == "cpu" or not k.numel() else self.by_torch(q, k, v)

    def by_torch(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by torch's own function, with a block mask of the ranges."""
        first = [each.start for each in (*self.ranges, self.keys)]
        score_mod, mask = self.score_mod, self.mask

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert score_mod is not None
            return score_mod(x, b + first[0], h + first[1], i + first[2], j + first[3])

        own = None
        if mask is not None:
            of_mask, sizes = mask.mask_mod, [len(each) for each in self.ranges]
            batch, heads = (
                n if rows > 1 else None for n, rows in zip(sizes[:2], mask.kv_num_blocks.shape[:2], strict=True)
            )

            def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
                return of_mask(b + first[0], h + first[1], i + first[2], j + first[3])

            own = create_block_mask(seen, batch, heads, sizes[2], k.shape[-2], q.device, BLOCK_SIZE=mask.BLOCK_SIZE)
        modify = None if score_mod is None else score
        out: Tensor = torch_flex_attention(q, k, v, modify, own, self.options.scale, self.options.gqa)
        return out

    def held(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention by single operators, which hold the scores; a query that sees no key gets zeros."""
        if q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if self.options.scale is None else self.options.scale
        indices = [[each] for each in (*self.ranges, self.keys)]
        scores = modified((q * scale) @ k.transpose(-2, -1), self.score_mod, self.mask, indices)
        blind = (scores == -inf).all(-1, keepdim=True)
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        return weights.to(v.dtype) @ v
