"""Attention on the local tensors of one rank: a range of the queries, and of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.layout import Shape

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
        if q.is_meta and _is_fused(q, k, v, mask):
            return _without_scores(q, k, v, mask, options)
        return F.scaled_dot_product_attention(
            q, k, v, mask, 0.0, options.causal, scale=options.scale, enable_gqa=options.gqa
        )

    return attend


def of_queries(queries: range, options: Options) -> Attend:
    """Causal attention of a range of the queries to the keys that the last of them may see."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x[..., : max(queries.stop, 1), :] for x in (k, v))
        seen = causal(queries, range(k.shape[-2]), q.device)
        return F.scaled_dot_product_attention(q, k, v, seen, 0.0, scale=options.scale, enable_gqa=options.gqa)

    return attend


def of_key_heads(heads: range, groups: int, attend: Attend) -> Attend:
    """Attention of a range of the query's heads, which each find their own among all heads of the keys."""

    def attend_own_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        own = torch.arange(heads.start, heads.stop, device=k.device) // groups  # made there: the host need not wait
        k, v = k.index_select(-3, own), v.index_select(-3, own)
        return attend(q, k, v) if mask is None else attend(q, k, v, mask)

    return attend_own_heads


def causal(queries: range, keys: range, device: torch.device) -> Tensor:
    """Which of a range of keys each of a range of queries may see: those at its place and before."""
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    return seen.tril(queries.start - keys.start)


def four_dims(x: Tensor, batch: Shape = ()) -> Tensor:
    """The tensor with the four dims of `block_kernels`: batch dims become one, which is first broadcast to `batch`."""
    if x.dim() <= 4:
        return x.reshape((1,) * (4 - x.dim()) + x.shape)
    if batch and prod(x.shape[:-3]) > 1:
        x = x.expand(*batch, *x.shape[-3:])
    return x.flatten(0, -4)


def _is_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a device has a kernel for these that keeps no scores; torch asks none about tensors without data."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    fits = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return fits and q.numel() > 0 and k.numel() > 0 and (mask is None or not mask.requires_grad)


def _without_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: Options) -> Tensor:
    """Attention by the CPU's kernel; fused kernels of other devices save as much: operands, result, one sum a query."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.empty_like(mask, dtype=q.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(q, k, v, 0.0, options.causal, attn_mask=mask, scale=options.scale)[0]
    return result
