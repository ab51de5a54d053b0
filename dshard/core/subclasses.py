"""Tensors of other classes than torch's and ours: plain data, or such whose own rules say what operators do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor
from torch.nn import Parameter

from dshard.caches import cached
from dshard.comm import plain
from dshard.core.replaced_parameters import Replaced
from dshard.core.wrapper import Wrapper
from dshard.errors import DShardError, MixedError
from dshard.torch_dtensor import TorchDTensor
from dshard.torch_private import STAND_INS

_OURS = (Wrapper, TorchDTensor, Replaced)


@cached("classes of tensors", 256)
def kind_of(kind: Any) -> Literal["", "data", "rules"]:
    """The kind of a class of tensors: "" for torch's and ours, plain "data", or "rules" of its `__torch_dispatch__`.

    The memory of the latter, as of quantised tensors, means something to their own "rules" alone; so does that of a
    CausalBias, which is never filled.
    """
    if kind in (Tensor, Parameter) or not issubclass(kind, Tensor) or issubclass(kind, _OURS):
        return ""
    if kind.__module__.startswith(STAND_INS):
        return ""
    return "rules" if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ or is_causal_bias(kind) else "data"


def is_causal_bias(kind: type) -> bool:
    """Whether a class is torch's mask of causal attention, whose module is not imported for this question."""
    return any(each.__module__ == "torch.nn.attention.bias" for each in kind.__mro__)


def refuse_own_rules(what: str, classes: Iterable[Any], error: type[DShardError] = MixedError) -> None:
    """Refuse classes whose rules know nothing of distributed tensors; `what` is asked of a tensor of such a class."""
    for kind in classes:
        if kind_of(kind) == "rules":
            raise error(
                f"{what} of a {kind.__module__}.{kind.__qualname__}: this class has its own rules for operators, which "
                "know nothing of distributed tensors; give a plain tensor, as x.dequantize() of a quantised weight, "
                "x.to_padded_tensor(0.0) of a nested or x.get_data() of a masked tensor, or distribute its parts; a "
                "CausalBias is the attn_mask of scaled_dot_product_attention, and nothing else"
            )


def as_plain(x: Any) -> Any:
    """A tensor of a class that is plain data as a torch.Tensor of the same memory; others unchanged. Differentiable."""
    if kind_of(type(x)) != "data":
        return x
    with plain():
        return x.as_subclass(Tensor)
