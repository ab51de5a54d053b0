"""Functions of torch on distributed tensors and tensors of another class, which may have its own rules for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dshard.core.plain_tensors import replicated_tensor
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.subclasses import is_causal_bias, refuse_own_rules
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper

_DEFAULT = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def by_other_class(func: Function, types: Iterable[Any], args: Args, kwargs: Kwargs) -> Any:
    """The result by another class's `__torch_function__`; NotImplemented where it is plain data, or leaves it to us.

    Raises:
        MixedError: a class whose operators know nothing of distributed tensors.
    """
    others = [kind for kind in types if not issubclass(kind, Wrapper)]
    if func is F.scaled_dot_product_attention and any(map(is_causal_bias, others)):
        args, kwargs = _without_bias(args, kwargs)
        return func(*args, **kwargs)
    refuse_own_rules(getattr(func, "__name__", str(func)), others)
    for kind in others:
        if getattr(kind.__torch_function__, "__func__", _DEFAULT) is not _DEFAULT:
            out = kind.__torch_function__(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
    return NotImplemented


def _without_bias(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments of attention with is_causal for a CausalBias, or a replicated mask of its alignment.

    Raises:
        MixedError: it is given as another operand, or beside none that is distributed.
        ValueError: as on one device, beside `is_causal`.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, bias, dropout, causal, scale, gqa = bind_arguments(names, args, kwargs)
    refuse_own_rules("scaled_dot_product_attention", map(type, (q, k, v)))
    if causal:
        raise ValueError("CausalBias should not be used with causal=True")
    n, m, mask = bias.seq_len_q, bias.seq_len_kv, None
    is_upper_left = n == m or bias.variant == type(bias.variant).UPPER_LEFT
    if not is_upper_left:  # of which kernels of different devices have different ideas
        operand = next(x for x in (q, k, v) if isinstance(x, Wrapper))
        lower_right = torch.ones(n, m, dtype=torch.bool, device=operand.device).tril(m - n)
        mask = replicated_tensor(lower_right, operand._spec.layout.mesh)
    return (q, k, v, mask, dropout or 0.0, is_upper_left), {"scale": scale, "enable_gqa": bool(gqa)}
