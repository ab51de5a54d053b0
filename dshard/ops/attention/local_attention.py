"""Attention on the local tensors of one rank: a range of the queries, and of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import has_only_shape
from dshard.core.context import planning_context
from dshard.core.signature import Context
from dshard.layout import Shape
from dshard.ops.attention.block_kernels import BlockResult, KeyPanel, RowGradients, accumulate_gradients
from dshard.ops.composite import recorded_gradients
from dshard.rules.attention_blocks import visible_blocks
from dshard.torch_private import is_transforming

Attend: TypeAlias = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `scaled_dot_product_attention` beside its tensors and dropout."""

    causal: bool
    scale: float | None
    gqa: bool


def whole(options: Options) -> Attend:
    """Attention of all queries to all keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if has_only_shape(q) and (out := _without_scores(q, k, v, mask, options)) is not None:
            return out
        if q.shape[-1] and not (q.numel() and k.numel() and v.numel()):
            return of_nothing(q, k, v, mask)
        return F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, options.causal, scale=options.scale, enable_gqa=options.gqa
        )

    return attend


def of_nothing(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of tensors without elements: nothing, or zeros.

    Its gradients of every order depend on what those of other ranks depend on, for which they wait for each other;
    torch's depend on all operands.
    """
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // max(x.shape[-3], 1), -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    return scores.softmax(-1) @ v


def of_queries(queries: range, rows: int, options: Options) -> Attend:
    """Causal attention of a range of the queries, of so many rows, to the keys that they may see.

    By blocks of the scores if the device has a kernel for them, so that no mask as large as the scores is made. Without
    data the work is that of the last queries, which see most: so a step that is planned takes as long as on the rank
    for which all others wait.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = range(rows - len(queries), rows) if has_only_shape(q) else queries
        if _has_blocks(q, k, v):
            return cast(Tensor, _OfBlocks.apply(q, k, v, own, options))  # type: ignore[no-untyped-call]
        return _of_mask(q, k, v, own, options)

    return attend


def _of_mask(q: Tensor, k: Tensor, v: Tensor, queries: range, options: Options) -> Tensor:
    k, v = (x[..., : max(queries.stop, 1), :] for x in (k, v))
    if q.shape[-1] and not (q.numel() and k.numel() and v.numel()):
        return of_nothing(q, k, v)
    seen = causal(queries, range(k.shape[-2]), q.device)
    return F.scaled_dot_product_attention(q, k, v, seen, 0.0, scale=options.scale, enable_gqa=options.gqa)


class _OfBlocks(torch.autograd.Function):
    """Causal attention of a range of the queries; recorded gradients are those of attention by a mask."""

    @staticmethod
    def forward(ctx: Context, q: Tensor, k: Tensor, v: Tensor, queries: range, options: Options) -> Tensor:
        panel = _panel(q, k, v, queries, options)
        result = BlockResult(panel.q, panel.v)
        result.add(panel)
        wide_out, lse = result.complete()
        out = wide_out.to(q.dtype).reshape(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.queries, ctx.options = queries, options
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_mask = partial(_of_mask, queries=ctx.queries, options=ctx.options)
            needed = ctx.needs_input_grad[:3]
            return (*recorded_gradients(lambda x: of_mask(*x), (q, k, v), grad, needed), None, None)
        panel = _panel(q, k, v, ctx.queries, ctx.options)
        delta = four_dims((grad.to(lse.dtype) * out).sum(-1, keepdim=True)).squeeze(-1)
        totals = [
            x.new_zeros(four_dims(x).shape, dtype=lse.dtype) if needed else None
            for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False)
        ]
        accumulate_gradients(totals, RowGradients(four_dims(grad), delta, lse, four_dims(out)), panel)
        pairs = zip(totals, (q, k, v), strict=True)
        return (*(None if x is None else x.to(q.dtype).reshape(y.shape) for x, y in pairs), None, None)


def _panel(q: Tensor, k: Tensor, v: Tensor, queries: range, options: Options) -> KeyPanel:
    blocks = visible_blocks((queries,), (range(k.shape[-2]),), causal=True)
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    return KeyPanel(four_dims(q), four_dims(k), four_dims(v), None, blocks, float(scale))


def _has_blocks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a device has a kernel for blocks of the scores; transforms of functions need torch's own operator."""
    if not torch.backends.cuda.flash_sdp_enabled() or is_transforming() or not (q.numel() and k.numel() and v.numel()):
        return False
    heads, key_heads, value_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k, v))
    return q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and heads % key_heads == 0 and key_heads == value_heads


def of_key_heads(heads: range, groups: int, attend: Attend) -> Attend:
    """Attention of a range of the query's heads, each with its own among all key heads."""

    def attend_own_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        own = torch.arange(heads.start, heads.stop, device=k.device) // groups  # made there: the host need not wait
        k, v = k.index_select(-3, own), v.index_select(-3, own)
        return attend(q, k, v) if mask is None else attend(q, k, v, mask)

    return attend_own_heads


def causal(queries: range, keys: range, device: torch.device) -> Tensor:
    """The causal mask of ranges of queries and keys: a query sees the keys at its position and before."""
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    return seen.tril(queries.start - keys.start)


def four_dims(x: Tensor, batch: Shape = ()) -> Tensor:
    """The tensor with the four dims of `block_kernels`: batch dims become one, which is first broadcast to `batch`."""
    if x.dim() <= 4:
        return x.reshape((1,) * (4 - x.dim()) + x.shape)
    if batch and prod(x.shape[:-3]) > 1:
        x = x.expand(*batch, *x.shape[-3:])
    return x.flatten(0, -4)


def _without_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> Tensor | None:
    """Attention of tensors without data by a kernel that saves operands, result and log-sum-exps, and no scores.

    torch asks no device which kernels it has for these. None: the device for which they are priced has no such kernel.
    """
    if not torch.backends.cuda.flash_sdp_enabled() or (mask is not None and mask.requires_grad):
        return None
    if not q.dim() == k.dim() == 4 or q.shape[0] != k.shape[0] or not (q.numel() and k.numel()):
        return None
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.empty_like(mask, dtype=q.dtype)
    if q.shape[-1] == k.shape[-1] == v.shape[-1]:  # the CPU's, which saves as much as those of other devices
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return cast(Tensor, on_cpu(q, k, v, 0.0, options.causal, attn_mask=mask, scale=options.scale)[0])
    if not _on_gpus() or q.shape[1] != k.shape[1]:
        return None
    on_cuda = torch.ops.aten._scaled_dot_product_efficient_attention
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    return cast(Tensor, on_cuda(q, k, v, mask, True, 0.0, options.causal, scale=options.scale)[0])


def _on_gpus() -> bool:
    """Whether choices are priced for GPUs, as the topology in use says; their kernels take heads of unequal sizes."""
    topology = planning_context().topology
    return topology is not None and topology.backend == "nccl"
