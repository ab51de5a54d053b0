"""Functions of torch on distributed tensors and tensors of another class, which may have its own rules for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dshard.core.signature import Args, Function, Kwargs
from dshard.core.subclasses import has_own_rules, is_causal_bias, refuse_own_rules
from dshard.core.wrapper import Wrapper
from dshard.ops.attention.causal_bias import attention_with_bias

_DEFAULT = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def by_other_class(func: Function, types: Iterable[Any], args: Args, kwargs: Kwargs) -> Any:
    """The result by another class's `__torch_function__`; NotImplemented where it is plain data, or leaves it to us.

    Raises:
        MixedError: a class whose operators know nothing of distributed tensors.
    """
    kinds = [kind for kind in types if not issubclass(kind, Wrapper)]
    if func is F.scaled_dot_product_attention and any(map(is_causal_bias, kinds)):
        return attention_with_bias(func, args, kwargs)
    refuse_own_rules(getattr(func, "__name__", str(func)), kinds)
    for kind in kinds:
        rules = kind.__torch_function__
        if getattr(rules, "__func__", None) is not _DEFAULT and not has_own_rules(kind):
            out = rules(func, types, args, kwargs)
            if out is not NotImplemented:
                return out
    return NotImplemented
