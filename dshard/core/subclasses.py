"""Tensors of other classes than torch's and ours: plain data, or such whose own rules say what operators do with them.

Quantised, nested and masked tensors have rules of `__torch_dispatch__`, which know nothing of distributed tensors, and
memory that means something to these rules alone. Classes without them are plain data, whose class is left aside.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.nn import Parameter

from dshard.comm import plain
from dshard.core.replaced_parameters import Replaced
from dshard.core.wrapper import Wrapper
from dshard.errors import DShardError, MixedError
from dshard.torch_dtensor import TorchDTensor

_OF_TORCH = ("torch._subclasses.", "torch.distributed._local_tensor", "torch.distributed._functional_collectives")
"""Modules whose classes stand for plain tensors: of traces, of simulated ranks, of results in flight."""
_DISTRIBUTED = (Wrapper, TorchDTensor, Replaced)
_CAUSAL_BIAS = ("torch.nn.attention.bias", "CausalBias")
_DISPATCH = Tensor.__torch_dispatch__
_HAVE_RULES: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_causal_bias(kind: type) -> bool:
    """Whether a class is torch's mask for causal attention, whose memory is never filled."""
    return any((each.__module__, each.__qualname__) == _CAUSAL_BIAS for each in kind.__mro__)


def has_own_rules(kind: Any) -> bool:
    """Whether a class of tensors has its own rules of what operators do, so that its memory says little by itself."""
    known = _HAVE_RULES.get(kind)
    if known is None:
        has_rules = is_other(kind) and kind.__torch_dispatch__ is not _DISPATCH
        known = has_rules or is_causal_bias(kind)
        _HAVE_RULES[kind] = known
    return known


def is_other(kind: type) -> bool:
    """Whether a class of tensors is neither one of torch's plain ones nor one of distributed ones."""
    if kind in (Tensor, Parameter) or not issubclass(kind, Tensor) or issubclass(kind, _DISTRIBUTED):
        return False
    return not kind.__module__.startswith(_OF_TORCH)


def refuse_own_rules(what: str, kinds: Iterable[type], error: type[DShardError] = MixedError) -> None:
    """Refuse classes whose rules know nothing of distributed tensors; `what` is asked of a tensor of such a class.

    Raises:
        DShardError: naming the class; of class `error`.
    """
    for kind in kinds:
        if has_own_rules(kind):
            name = f"{kind.__module__}.{kind.__qualname__}"
            if is_causal_bias(kind):
                way = "it is a mask for scaled_dot_product_attention, and for that alone"
            else:
                way = (
                    "give a plain tensor, as x.dequantize() of a quantised weight, x.to_padded_tensor(0.0) of a nested "
                    "or x.get_data() of a masked tensor, or distribute the tensors that it consists of"
                )
            raise error(f"{what} of a {name}: that class has its own rules, which know no distributed tensors; {way}")


def as_plain(x: Any) -> Any:
    """A tensor of a class without rules as torch.Tensor of the same memory; others as they are. Differentiable."""
    if not is_other(type(x)) or has_own_rules(type(x)):
        return x
    with plain():
        return x.as_subclass(Tensor)
