"""Softmax, layer norm, rms norm: the dims that they work along are whole, or one or two small reductions are sent."""

from __future__ import annotations

import torch
from torch import Tensor

from dshard.comm import sum_dtype
from dshard.core.call import Call, Operator
from dshard.core.checks import check_dim
from dshard.core.signature import Args, Function, Kwargs
from dshard.core.torch_function import bind_arguments
from dshard.core.wrapper import Wrapper
from dshard.ops.custom import accept_call
from dshard.ops.small_reductions import reduce_statistics, small_reductions, stays_sharded
from dshard.rules.rule import Rule, linear


def along(call: Call) -> Rule:
    """Any dim may be sharded except the one along which it works."""
    return call.rule("*... [d] ... -> *... [d] ...", at="dim")


def norm(call: Call) -> Rule:
    """Leading dims may be sharded; the normalised dims may not."""
    normalized, ones = _normalized(call)
    statistics = f", ... {ones}" * (len(call.func._schema.returns) - 1)
    return call.rule(f"... {normalized}, *{normalized} -> ... {normalized}{statistics}")


def _normalized(call: Call) -> tuple[str, str]:
    """The normalised dims of the operands, and of their mean and 1/std."""
    n = len(call.argument("normalized_shape"))
    return " ".join(f"[n{i}]" for i in range(n)), "1 " * n


def norm_backward(call: Call) -> Rule:
    """Leading dims may be sharded, and leave the gradients of the parameters partial; the normalised dims may not."""
    normalized, ones = _normalized(call)
    mask = call.argument("output_mask")  # of the input and the parameters, of which there are as many as statistics
    statistics = f"... {ones}, " * (len(mask) - 1)
    gradients = zip((f"... {normalized}", normalized, normalized), mask, strict=False)
    outputs = ", ".join(term for term, is_needed in gradients if is_needed)
    text = f"... {normalized}, ... {normalized}, {statistics}*{normalized} -> {outputs}"
    return call.rule(text, passes=linear(0))


def rms_norm(func: Function, args: Args, kwargs: Kwargs) -> Tensor | None:
    """`torch.nn.functional.rms_norm` by one sum of squares for each row; None where gathering costs less."""
    x, shape, weight, eps = bind_arguments(("input", "normalized_shape", "weight", "eps"), args, kwargs)
    if not isinstance(x, Wrapper):
        return None
    dims = tuple(range(-len(shape), 0))
    if len(shape) > x.dim() or not stays_sharded(x._spec, tuple(dim + x.dim() for dim in dims), ("sum",)):
        return None
    accept_call(func, args, kwargs)
    wide = reduce_statistics(x, "rms_norm").to(sum_dtype(x.dtype))
    squares = reduce_statistics(wide.pow(2).mean(dims, keepdim=True), "rms_norm")
    out: Tensor = wide * torch.rsqrt(squares + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return (out if weight is None else out * weight).to(x.dtype)


RULES: dict[str, Operator] = {
    "aten::_softmax": Operator(along, alternatives=(small_reductions("max", "sum"),), check=check_dim),
    "aten::_log_softmax": Operator(along, alternatives=(small_reductions("max", "sum"),)),
    "aten::_softmax_backward_data": Operator(along, alternatives=(small_reductions("sum", operand=1),)),
    "aten::_log_softmax_backward_data": Operator(along, alternatives=(small_reductions("sum", operand=1),)),
    "aten::native_layer_norm": Operator(norm, alternatives=(small_reductions("sum", "sum"),)),
    "aten::native_layer_norm_backward": Operator(
        norm_backward, alternatives=(small_reductions("sum", "sum", operand=1),)
    ),
    "aten::_fused_rms_norm": Operator(norm, alternatives=(small_reductions("sum"),)),
    "aten::_fused_rms_norm_backward": Operator(norm_backward, alternatives=(small_reductions("sum", operand=1),)),
}
