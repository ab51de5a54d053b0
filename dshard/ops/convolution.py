"""Convolutions: batch, channels, and groups of channels if there are several, may be sharded; positions may not.

Sharded input channels leave the output partial; one rank adds the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dshard.core.call import Call, LocalOp, Operator, out_local_shape
from dshard.mesh import Coordinate
from dshard.rules.rule import Rule, Term, linear
from dshard.rules.strategy import Strategy

TERM = tuple[Term, Term, Term, Term]


def _terms(call: Call, x: int) -> TERM:
    """The terms of input, weight, bias and output; operand number `x` is the input, the next one the weight."""
    inner, outer = (("g", "i"), ("g", "o")) if call.argument("groups") > 1 else (("i",), ("o",))
    spatial: Term = ((),) * (len(call.shapes[x]) - 2)
    weight: Term = (inner, ("o",)) if call.argument("transposed") else (outer, ("i",))
    return (("n",), inner, *spatial), (*weight, *spatial), (outer,), (("n",), outer, *spatial)


def _grouped(call: Call, x: int, inputs: tuple[Term, ...], outputs: tuple[Term, ...], **more: Any) -> Rule:
    groups = call.argument("groups")
    if groups == 1:
        return Rule(inputs, outputs, **more)
    weight = call.shapes[x + 1]
    per_input = call.shapes[x][1] // groups
    per_output = weight[1] if call.argument("transposed") else weight[0] // groups
    sizes = (("g", groups), ("i", per_input), ("o", per_output))
    return Rule(inputs, outputs, frozenset({"i", "o"}), sizes=sizes, **more)


def convolution(call: Call) -> Rule:
    """Input, weight and perhaps bias -> output."""
    x, weight, bias, out = _terms(call, 0)
    if len(call.specs) == 3:
        return _grouped(call, 0, (x, weight, bias), (out,))
    return _grouped(call, 0, (x, weight), (out,), passes=linear(0, 1))


def convolution_backward(call: Call) -> Rule:
    """Output gradient, input and weight -> the gradients wanted of input, weight and bias."""
    x, weight, bias, out = _terms(call, 1)
    outputs = tuple(
        term for term, wanted in zip((x, weight, bias), call.argument("output_mask"), strict=True) if wanted
    )
    return _grouped(call, 1, (out, x, weight), outputs, passes=linear(0))


def forward_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A kernel of the groups that this rank holds; the first rank that shards the input channels adds the bias."""
    shape, groups = out_local_shape(call, strategy, coordinate), _groups(call, strategy, coordinate, 0)
    adds = _is_first(strategy, coordinate)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        if not x.numel() or not weight.numel():
            return x.new_zeros(shape)
        out: Tensor = call.func(x, weight, bias if adds else None, *rest[:-1], groups)
        return out

    return run


def backward_kernel(call: Call, strategy: Strategy, coordinate: Coordinate) -> LocalOp:
    """A backward kernel: the first of the ranks that shard the input channels has the gradient of the bias."""
    groups, adds = _groups(call, strategy, coordinate, 1), _is_first(strategy, coordinate)

    def run(grad: Tensor, x: Tensor, weight: Tensor, bias: list[int] | None, *rest: Any) -> Any:
        *rest_, _, mask = rest
        sizes = [grad.shape[1]] if bias else None
        if not grad.numel() or not x.numel() or not weight.numel():
            zeros = (torch.zeros_like(x), torch.zeros_like(weight), grad.new_zeros(grad.shape[1]))
            return tuple(t if wanted else None for t, wanted in zip(zeros, mask, strict=True))
        gradients = call.func(grad, x, weight, sizes, *rest_, groups, mask)
        return gradients if adds or gradients[2] is None else (*gradients[:2], torch.zeros_like(gradients[2]))

    return run


def _is_first(strategy: Strategy, coordinate: Coordinate) -> bool:
    return all(row != "i" or coordinate[axis] == 0 for axis, row in enumerate(strategy.rows))


def _groups(call: Call, strategy: Strategy, coordinate: Coordinate, x: int) -> int:
    """The groups that the rank at `coordinate` has."""
    groups: int = call.argument("groups")
    channels = call.shapes[x][1]
    if groups == 1 or not channels:
        return groups
    return groups * len(strategy.inputs[x].dim_range(1, channels, coordinate)) // channels


RULES: dict[str, Operator] = {
    "aten::convolution": Operator(convolution, forward_kernel),
    "aten::convolution_backward": Operator(convolution_backward, backward_kernel),
}
