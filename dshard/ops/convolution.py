"""Convolutions: batch, channels, and groups of channels if there are several, may be sharded; positions may not.

Sharded input channels leave the output partial; one rank adds the bias.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dshard.comm import depending_on
from dshard.core.call import Call, LocalOp, Operator, RankCall
from dshard.core.checks import check_convolution
from dshard.core.signature import Function
from dshard.ops.batched import or_nothing
from dshard.rules.rule import Rule, linear
from dshard.torch_private import FakeTensorMode, OpOverload

_BACKWARD = torch.ops.aten.convolution_backward.default


def _terms(call: Call) -> tuple[str, str, str, str]:
    """The terms of input, weight, bias and output: with several groups, these are the major part of the channels."""
    if not call.shapes[call.func is _BACKWARD][1]:  # then torch gives the output no channels, either
        return "n i [...]", "[o] i [...]", "[o]", "n [] [...]"
    inner, outer = ("(g [i])", "(g [o])") if call.argument("groups") > 1 else ("i", "o")
    weight = f"{inner} o" if call.argument("transposed") else f"{outer} i"
    return f"n {inner} [...]", f"{weight} [...]", outer, f"n {outer} [...]"


def _with_sizes(call: Call, x: int, rule: Rule) -> Rule:
    """The rule with the sizes of merged factors; operand number `x` is the input, the next one the weight."""
    groups = call.argument("groups")
    if groups == 1 or not call.shapes[x][1]:
        return rule
    channels, weight = call.shapes[x][1], call.shapes[x + 1]
    per_output = weight[1] if call.argument("transposed") else weight[0] // groups
    return replace(rule, sizes=(("g", groups), ("i", channels // groups), ("o", per_output)))


def convolution(call: Call) -> Rule:
    """Batch, and channels or groups of them, may be sharded; sharded input channels leave a partial sum."""
    x, weight, bias, out = _terms(call)
    passes = linear(0, 1) if len(call.specs) == 2 else ()
    return _with_sizes(call, 0, call.rule(f"{x}, {weight}, *{bias} -> {out}", passes=passes))


def convolution_backward(call: Call) -> Rule:
    """Batch, and channels or groups of them, may be sharded; a sharded batch leaves the weight's gradient partial."""
    x, weight, bias, out = _terms(call)
    gradients = zip((x, weight, bias), call.argument("output_mask"), strict=True)
    outputs = ", ".join(term for term, is_needed in gradients if is_needed)
    return _with_sizes(call, 1, call.rule(f"{out}, {x}, {weight} -> {outputs}", passes=linear(0)))


def forward_kernel(call: RankCall) -> LocalOp:
    """A kernel for the groups that this rank holds; the first rank that shards the input channels adds the bias."""
    groups, adds = _groups(call, 0), call.is_first("i")
    return lambda x, weight, bias, *rest: call.func(x, weight, bias if adds else None, *rest[:-1], groups)


def backward_kernel(call: RankCall) -> LocalOp:
    """A backward kernel: the first of the ranks that shard the input channels computes the gradient of the bias."""
    groups, adds = _groups(call, 1), call.is_first("i")

    def run(grad: Tensor, x: Tensor, weight: Tensor, bias: list[int] | None, *rest: Any) -> Any:
        *rest_, _, mask = rest
        sizes = [grad.shape[1]] if bias else None
        if not grad.numel() or not x.numel() or not weight.numel():
            outputs = grad.shape[1] if call.shapes[1][1] else bias or 0
            zeros = (torch.zeros_like(x), torch.zeros_like(weight), grad.new_zeros(outputs))
            empty = [depending_on(t, (grad, x, weight)) for t in zeros]
            return tuple(t if is_needed else None for t, is_needed in zip(empty, mask, strict=True))
        gradients = call.func(grad, x, weight, sizes, *rest_, groups, mask)
        return gradients if adds or gradients[2] is None else (*gradients[:2], torch.zeros_like(gradients[2]))

    return run


def _groups(call: RankCall, x: int) -> int:
    """The groups that the rank at `coordinate` has."""
    groups: int = call.argument("groups")
    channels = call.shapes[x][1]
    if groups == 1 or not channels:
        return groups
    return groups * len(call.held(1, x)) // channels


_FORWARD = torch.ops.aten.convolution.default


def _in_memory_like(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The meta form of convolution, with channels last in memory where torch's kernels have them."""
    out: Tensor = _FORWARD(x, weight, *rest)
    last = _LAST.get(x.dim())
    if last is None or not any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (x, weight)):
        return out
    if x.dim() == 4 or torch.cuda.is_available():  # those of cuDNN, too
        return out.contiguous(memory_format=last)
    with FakeTensorMode():  # it chooses the kernel by sizes and dtype, as the processor does
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu") for t in (x, weight)]
        strides = _FORWARD(*fakes, None, *rest[1:]).stride()
    return out.new_empty_strided(out.shape, strides)


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By dims, the memory format in which channels are last."""

META: dict[OpOverload, Function] = {_FORWARD: _in_memory_like}

RULES: dict[str, Operator] = {
    "aten::convolution": Operator(convolution, or_nothing(forward_kernel), check=check_convolution),
    "aten::convolution_backward": Operator(convolution_backward, backward_kernel),
}
