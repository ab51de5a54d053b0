"""The entry of `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.comm import plain
from dshard.core.operands import common_mesh
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import autocast, bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.mesh import Coordinate
from dshard.ops.attention import attention_rule
from dshard.ops.composite import Local, run_composite
from dshard.rules.rule import Rule
from dshard.rules.strategy import Strategy


def attention(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`scaled_dot_product_attention`: local for each head and each batch entry."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    query, k, v, mask, dropout, causal, scale, gqa = bind_arguments(names, args, kwargs)
    causal, gqa = bool(causal), bool(gqa)
    if dropout:
        _accepted(query, k, v, mask, dropout, causal, scale, gqa)
        return _attention_with_dropout(query, k, v, mask, dropout, causal, scale, gqa)
    tensors = autocast((query, k, v) if mask is None else (query, k, v, mask))

    def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if q.is_meta and _is_fused(q, k, v, mask):
            return _without_scores(q, k, v, mask, causal, scale)
        return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)

    n_queries, dim = query.shape[-2], query.dim() - 2

    def kernel(strategy: Strategy, at: Coordinate) -> Local:
        held = strategy.inputs[0].dim_range(dim, n_queries, at)
        if not causal or len(held) == n_queries:
            return local

        def from_there(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = torch.ones(len(held), k.shape[-2], dtype=torch.bool, device=q.device).tril(held.start)
            return F.scaled_dot_product_attention(q, k, v, seen, 0.0, scale=scale, enable_gqa=gqa)

        return from_there

    def rule() -> Rule:
        return attention_rule([tuple(t.shape) for t in tensors], gqa)

    return run_composite(rule, local, tensors, ("attention", causal, scale, gqa), kernel)


def _is_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a device has a kernel for these that keeps no scores; torch asks none about tensors without data."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return False
    fits = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] and q.shape[-1] == k.shape[-1] == v.shape[-1]
    return fits and q.numel() > 0 and k.numel() > 0 and (mask is None or not mask.requires_grad)


def _without_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Attention by the CPU's kernel; fused kernels of other devices save as much: operands, result, one sum a query."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.empty_like(mask, dtype=q.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)[0]
    return result


def _accepted(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> None:
    """Let torch refuse arguments that it would refuse on one device."""
    tensors = [t._spec.meta() if isinstance(t, Wrapper) else t for t in (query, key, value, mask)]
    common_mesh("attention", [t for t in (query, key, value, mask) if t is not None])
    dropout, causal, scale, gqa = rest
    q, k, v, m = tensors
    with torch.no_grad(), plain():
        F.scaled_dot_product_attention(q, k, v, m, dropout, causal, scale=scale, enable_gqa=gqa)


def _attention_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """Attention by operators on distributed tensors: torch's kernels would draw another dropout mask on each rank."""
    if gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -inf)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1)
    if mask is not None:  # a query that sees no key at all gets zeros
        weights = weights.masked_fill((scores == -inf).all(-1, keepdim=True), 0.0)
    return F.dropout(weights, dropout) @ value
