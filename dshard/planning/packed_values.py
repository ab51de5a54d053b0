"""Values of a step that are split into equal parts, and so may be sharded in blocks, one for each part.

A projection to query, key and value is one matmul, whose result is split into three. Sharded in ranges, the parts would
have to be exchanged; in three blocks nothing is sent. Which values are such is known where they are split; the calls
that make these may have their operands in blocks, too, up to the parameter.

Design: docs/design/0027-blocks.md
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from dshard.core.call import Call
from dshard.core.spec import contiguous_spec
from dshard.core.trees import replace_leaves
from dshard.dispatch.registry import find
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Shard
from dshard.planning.step_graph import GraphCall, OperandSlot, StepGraph
from dshard.rules.cut_factors import rule_in_blocks
from dshard.rules.expand import blocks_of
from dshard.rules.rule import Rule, factor_sizes
from dshard.torch_private import OpOverload

_ALONE = Mesh((1,), ("one",))


def with_packed_values(graph: StepGraph) -> StepGraph:
    """The graph in which calls that lead to equal parts have rules of blocks, too."""
    blocks, packed = dict[int, Mapping[int, int]](), dict[int, GraphCall]()
    for call in reversed(graph.calls):
        of_results = tuple([tuple(blocks.get(value.number, {}).items()) for value in call.results])
        rule = _in_blocks(call, [dict(each) for each in of_results]) if any(of_results) else _of_parts(call)
        if rule is None or rule is call.rule:
            continue
        packed[call.number] = replace(call, packed=rule, signature=(call.signature, of_results))
        shapes = [value.shape for value in (*call.operands, *call.results)]
        sizes = dict(rule.sizes) | factor_sizes((*rule.inputs, *rule.outputs), shapes, rule)
        for term, value in zip(rule.inputs, call.operands, strict=True):
            own = {dim: n for dim, n in enumerate(blocks_of(rule, term, sizes)) if n > 1}
            if own:
                blocks.setdefault(value.number, own)
    return replace(graph, calls=tuple([packed.get(call.number, call) for call in graph.calls]))


def _in_blocks(call: GraphCall, of_results: list[dict[int, int]]) -> Rule | None:
    """The rule of a call whose results are in blocks, if the executor takes its operands in blocks."""
    op = find(call.function) if isinstance(call.function, OpOverload) else None
    is_matmul = op is None and call.rule.loops and call.kernel is None
    if not is_matmul and (op is None or (op.kernel is not None and not op.blocks)):
        return None
    ends = zip(call.rule.outputs, call.results, of_results, strict=True)
    return rule_in_blocks(call.rule, [(term, value.shape, blocks) for term, value, blocks in ends])


def _of_parts(call: GraphCall) -> Rule | None:
    """The rule of a call that splits its operand, in blocks, into equal parts; None of any other."""
    n, shapes, function = len(call.results), {value.shape for value in call.results}, call.function
    if len(call.operands) != 1 or n < 2 or len(shapes) > 1 or not isinstance(function, OpOverload):
        return None
    op = find(function)
    if op is None or not op.blocks:
        return None
    (x,), (shape,) = call.operands, shapes
    if len(shape) != len(x.shape):  # as of `max` and `unbind`, whose results are no parts
        return None
    dims = [dim for dim, (size, part) in enumerate(zip(x.shape, shape, strict=True)) if size == n * part > 0]
    if len(dims) != 1:
        return None
    layout = Layout(_ALONE, (Shard(dims[0], blocks=n),))
    spec = contiguous_spec(layout, x.shape, x.dtype, torch.device("meta"))
    args, kwargs = replace_leaves(call.arguments, lambda leaf: spec if isinstance(leaf, OperandSlot) else leaf)
    outs = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in call.results]
    rule = op.rule(Call(function, args, kwargs, (spec,), tuple(outs)))
    return rule_in_blocks(rule, [(rule.inputs[0], x.shape, layout.blocks)])
