"""torch's masks for causal attention, `causal_upper_left` and `causal_lower_right`, which are tensors by name alone."""

from __future__ import annotations

from typing import Any

from dshard.core.plain_tensors import replicated_tensor
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.subclasses import is_causal_bias
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.errors import MixedError


def attention_with_bias(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """`scaled_dot_product_attention` with such a mask: causal attention, or that by a boolean mask of its alignment.

    Raises:
        MixedError: the mask is given as another operand, or no operand beside it is distributed.
        ValueError: as on one device, with `is_causal`.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, bias, dropout, causal, scale, gqa = bind_arguments(names, args, kwargs)
    operand = next((x for x in (q, k, v) if isinstance(x, Wrapper)), None)
    if operand is None or any(is_causal_bias(type(x)) for x in (q, k, v)):
        raise MixedError(
            "scaled_dot_product_attention: a CausalBias is a mask, and query, key and value are tensors: give it as "
            "attn_mask beside distributed ones"
        )
    if causal:
        raise ValueError("CausalBias should not be used with causal=True")
    is_upper_left = bias.seq_len_q == bias.seq_len_kv or bias.variant == type(bias.variant).UPPER_LEFT
    mask = None
    if not is_upper_left:  # whose rows begin at another key: none of the kernels' masks on every device
        mask = replicated_tensor(bias._materialize(operand.device), operand._spec.layout.mesh)
    return func(q, k, v, mask, dropout or 0.0, is_upper_left, scale=scale, enable_gqa=bool(gqa))
