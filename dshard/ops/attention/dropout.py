"""Attention with dropout: operators on tensors in the layouts of its loops, which then communicate nothing.

torch's kernels would draw another mask on each rank. Here the mask is drawn as for any dropout, the same on every mesh,
for the scores of a rank's loops. Rings, and loop k outside of graphs, draw it for blocks of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from dshard.autograd.crossing import redistribute
from dshard.core.signature import Kwargs
from dshard.core.wrapper import Wrapper
from dshard.layout import Shape
from dshard.ops.attention.attention_choice import AttentionChoice
from dshard.ops.matmul.functions import MatmulFunction, matmul_of
from dshard.ops.matmul.options import MatmulOptions
from dshard.ops.small_reductions import reduce_statistics
from dshard.rules.attention_loops import leading_dims
from dshard.rules.expand import Row
from dshard.rules.rule import Rule, linear
from dshard.rules.rule_notation import parse_rule


def attention_with_dropout(
    choice: AttentionChoice, drop: Callable[[Tensor], Tensor], tensors: Sequence[Wrapper], kwargs: Kwargs
) -> Wrapper:
    """Attention of query, key, value and perhaps a mask, by the loops of a choice.

    `drop` drops weights. A query that sees no key at all gets zeros.
    """
    strategy, options, end = choice.strategy, choice.options, choice.result.layout
    operands: list[Tensor] = [
        redistribute(x, layout, "attention") for x, layout in zip(tensors, strategy.inputs, strict=True)
    ]
    query, key, value, *masks = operands
    if options.gqa and query.shape[-3] != key.shape[-3]:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    factor = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    loops = MatmulOptions(among=(tuple(frozenset[Row]({row}) for row in strategy.rows),))
    scores = _product("q d, d k -> q k", query * factor, key.transpose(-2, -1), loops)
    if options.causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -inf)
    for mask in masks:
        scores = scores.masked_fill(mask.logical_not(), -inf) if mask.dtype == torch.bool else scores + mask
    if scores._spec.layout.axes_of(scores.dim() - 1):
        weights, total = _exponentials(scores)
        out = _product("q k, k e -> q e", drop(weights), value, loops) / total
        return redistribute(out, end, "attention")
    weights = scores.softmax(-1)
    if masks:
        weights = weights.masked_fill((scores == -inf).all(-1, keepdim=True), 0.0)
    return redistribute(_product("q k, k e -> q e", drop(weights), value, loops), end, "attention")


def _product(loops: str, a: Tensor, b: Tensor, options: MatmulOptions) -> Any:
    """One of the two matmuls of attention, whose factors are its loops."""

    def rule(*shapes: Shape) -> Rule:
        lead = leading_dims(a.dim())
        terms, out = loops.split(" -> ")
        left, right = terms.split(", ")
        return parse_rule(f"{lead} {left}, {lead} {right} -> {lead} {out}", shapes, passes=linear(0, 1), loops=True)

    return matmul_of(MatmulFunction("matmul", torch.matmul, rule, loops), (a, b), options)


def _exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The exponentials of scores whose keys are sharded, and their sum over each row."""
    most = reduce_statistics(scores.detach().amax(-1, keepdim=True), "attention")
    weights = (scores - most.masked_fill(most == -inf, 0.0)).exp()
    total = reduce_statistics(weights.sum(-1, keepdim=True), "attention")
    return weights, total.masked_fill(total == 0, 1.0)
