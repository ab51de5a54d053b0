"""Attention on the local tensors of one rank: a range of the queries, and of the keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

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

    def found(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        own = torch.tensor([head // groups for head in heads], dtype=torch.long, device=k.device)
        k, v = k.index_select(-3, own), v.index_select(-3, own)
        return attend(q, k, v) if mask is None else attend(q, k, v, mask)

    return found


def causal(queries: range, keys: range, device: torch.device) -> Tensor:
    """Which of a range of keys each of a range of queries may see: those at its place and before."""
    seen = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
    return seen.tril(queries.start - keys.start)


def with_statistics(queries: range, keys: range, options: Options) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attention to a range of the keys: the result, and the log-sum-exp of each row's scores, in single precision.

    A row that sees none of these keys is zero, and its log-sum-exp is minus infinity. Both have one more dim in front.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        if options.gqa and q.shape[-3] != k.shape[-3]:
            k, v = (x.repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
        factor = q.shape[-1] ** -0.5 if options.scale is None else options.scale
        scores = (q.to(wide) * factor) @ k.to(wide).transpose(-2, -1)
        if options.causal:
            scores = scores.masked_fill(causal(queries, keys, q.device).logical_not(), -inf)
        if mask is not None:
            scores = scores.masked_fill(mask.logical_not(), -inf) if mask.dtype == torch.bool else scores + mask
        if not len(keys):
            nothing = scores.sum(-1) + q.to(wide).sum(-1) * 0
            return (scores @ v.to(wide)).unsqueeze(0), (nothing - inf).unsqueeze(0)
        most = scores.detach().amax(-1, keepdim=True)
        weights = (scores - most.masked_fill(most == -inf, 0.0)).exp()
        total = weights.sum(-1, keepdim=True)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)
        out = (weights / total) @ v.to(wide)
        told = (total.log() + most.masked_fill(empty, 0.0)).squeeze(-1)
        return out.unsqueeze(0), told.masked_fill(empty.squeeze(-1), -inf).unsqueeze(0)

    return attend


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
