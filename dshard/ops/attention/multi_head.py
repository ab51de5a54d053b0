"""`torch.nn.functional.multi_head_attention_forward`, which `nn.MultiheadAttention` and `nn.Transformer` call.

Torch's own function merges the batch with the heads, and no layout of the merged dim shards the heads. Here the dims
stay separate, and attention is `scaled_dot_product_attention`, so that mesh axes shard heads, batch or sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.core.plain_tensors import implicit_replication
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import bind_arguments, without_asking
from dshard.torch_private import check_attention_shapes

_NAMES = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights"),
    *("attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "static_k"),
    *("static_v", "average_attn_weights", "is_causal"),
)
_DEFAULTS = {"training": True, "need_weights": True, "average_attn_weights": True}
_torchs_own = without_asking(F.multi_head_attention_forward)


def multi_head_attention(func: Function, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor | None]:
    """`multi_head_attention_forward` of distributed or meta tensors; called with `__torch_function__` enabled.

    Calls with `bias_k`, `bias_v`, `add_zero_attn`, `static_k` or `static_v` run torch's own function.
    """
    arguments = _DEFAULTS | dict(zip(_NAMES, bind_arguments(_NAMES, args, _DEFAULTS | kwargs), strict=True))
    rare = any(arguments[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if rare or arguments["add_zero_attn"]:
        with implicit_replication():  # it makes zeros of its own
            return _torchs_own(*args, **kwargs)  # type: ignore[no-any-return]
    query, key, value, heads = (arguments[name] for name in ("query", "key", "value", "num_heads"))
    padding, mask = arguments["key_padding_mask"], arguments["attn_mask"]
    is_batched = check_attention_shapes(query, key, value, padding, mask, heads)
    _check(arguments)
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in _projected(arguments))  # sequence, (batch,) heads, features
    q, k, v = (x.permute(1, 2, 0, 3) if is_batched else x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    causal = bool(arguments["is_causal"]) and padding is None and not arguments["need_weights"]
    bias = None if causal else _bias(mask, padding, heads, q.dtype)
    dropout = arguments["dropout_p"] if arguments["training"] else 0.0
    weights = None
    if arguments["need_weights"]:
        scores = q * (1 / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        weights = F.dropout(weights, dropout) if dropout else weights
        out = weights @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal)
    out = out.permute(2, 0, 1, 3).flatten(2)
    out = F.linear(out if is_batched else out.squeeze(1), arguments["out_proj_weight"], arguments["out_proj_bias"])
    if weights is not None and arguments["average_attn_weights"]:
        weights = weights.mean(1)
    return out, weights if weights is None or is_batched else weights.squeeze(0)


def _check(arguments: dict[str, Any]) -> None:
    """Refuse what torch refuses."""
    query, key, value, heads = (arguments[name] for name in ("query", "key", "value", "num_heads"))
    width, expected = query.shape[-1], arguments["embed_dim_to_check"]
    if width != expected or width % heads:
        raise AssertionError(
            f"multi_head_attention_forward of {width} features with {heads} heads: "
            f"the module has {expected} features, and each head as many as the others"
        )
    if key.shape[:-1] != value.shape[:-1] or (not arguments["use_separate_proj_weight"] and key.shape != value.shape):
        raise AssertionError(f"the key's shape {tuple(key.shape)} does not match the value's {tuple(value.shape)}")
    if arguments["is_causal"] and arguments["attn_mask"] is None:
        raise RuntimeError("is_causal says that attn_mask is causal: give that mask, too")
    mask, rows = arguments["attn_mask"], query.shape[1] if query.dim() > 2 else 1
    sizes = (query.shape[0], key.shape[0])
    if mask is not None and tuple(mask.shape) not in (sizes, (rows * heads, *sizes)):
        raise RuntimeError(
            f"an attn_mask of shape {tuple(mask.shape)}: give one of shape {sizes}, or {(rows * heads, *sizes)}"
        )


def _projected(arguments: dict[str, Any]) -> tuple[Tensor, ...]:
    """The queries, keys and values: by one matmul if they are projections of one tensor."""
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    weight, bias = arguments["in_proj_weight"], arguments["in_proj_bias"]
    if not arguments["use_separate_proj_weight"]:
        if query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        weights = weight.chunk(3)
    else:
        weights = tuple(arguments[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"))
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    return tuple(F.linear(*each) for each in zip((query, key, value), weights, biases, strict=True))


def _bias(mask: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """The sum of both additive masks, with dims batch, heads, queries, keys; None without masks."""
    bias = None
    if mask is not None:
        bias = _added(mask, dtype)
        bias = bias.unflatten(0, (-1, heads)) if mask.dim() > 2 else bias
    if padding is not None:
        hidden = _added(padding, dtype)
        hidden = hidden[:, None, None] if padding.dim() > 1 else hidden
        bias = hidden if bias is None else bias + hidden
    return bias


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form of a mask: minus infinity where a boolean mask is true."""
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
