"""Values of a step that are split into equal parts, and so may be sharded in blocks, one for each part.

A projection to query, key and value is one matmul, whose result is split into three. Sharded in ranges, the parts would
have to be exchanged; in three blocks nothing is sent. Which values are such is known where they are split, or where
`unbind` or indices take apart a dim that a view made of one of theirs; the calls that make these may have their
operands in blocks, too, up to the parameter.

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
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Shard
from dshard.planning.step_graph import GraphCall, OperandSlot, StepGraph, is_copy
from dshard.rules.cut_factors import rule_in_blocks
from dshard.rules.expand import blocks_of
from dshard.rules.rule import Rule, Term, factor_sizes
from dshard.torch_private import OpOverload

_ALONE = Mesh((1,), ("one",))
_OF_AN_INDEX = (torch.ops.aten.unbind.int, torch.ops.aten.select.int)


def with_packed_values(graph: StepGraph) -> StepGraph:
    """The graph in which calls that lead to equal parts have rules of blocks, too."""
    blocks, packed = dict[int, Mapping[int, int]](), dict[int, GraphCall]()
    for call in reversed(graph.calls):
        of_results = tuple([tuple(blocks.get(value.number, {}).items()) for value in call.results])
        rule = _in_blocks(call, [dict(each) for each in of_results]) if any(of_results) else _of_parts(call)
        taken = _taken(call)
        if taken is not None:
            blocks.setdefault(call.operands[0].number, {taken: call.operands[0].shape[taken]})
        if rule is None or rule is call.rule:
            continue
        shapes = [value.shape for value in (*call.operands, *call.results)]
        sizes = dict(rule.sizes) | factor_sizes((*rule.inputs, *rule.outputs), shapes, rule)
        of_operands = [_of_term(rule, term, sizes) for term in rule.inputs]
        for own, value in zip(of_operands, call.operands, strict=True):
            if own:
                blocks.setdefault(value.number, own)
        if any(
            n < value.shape[dim]
            for own, value in zip(of_operands, call.operands, strict=True)
            for dim, n in own.items()
        ):
            packed[call.number] = replace(call, packed=rule, signature=(call.signature, of_results))
    return replace(graph, calls=tuple([packed.get(call.number, call) for call in graph.calls]))


def _of_term(rule: Rule, term: Term, sizes: dict[str, int]) -> dict[int, int]:
    """The number of blocks of each dim that is in several; a factor by itself that is blocks has one for each index."""
    counts = [
        sizes[names[0]] if len(names) == 1 and names[0] in rule.blocks else n
        for names, n in zip(term, blocks_of(rule, term, sizes), strict=True)
    ]
    return {dim: n for dim, n in enumerate(counts) if n > 1}


def _in_blocks(call: GraphCall, of_results: list[dict[int, int]]) -> Rule | None:
    """The rule of a call whose results are in blocks, if the executor takes its operands in blocks."""
    op = find(call.function) if isinstance(call.function, OpOverload) else None
    is_matmul = op is None and call.rule.loops and call.kernel is None
    if not is_matmul and not is_copy(call) and (op is None or (op.kernel is not None and not op.blocks)):
        return None
    ends, each_alone = list[tuple[Term, Shape, dict[int, int]]](), set[str]()
    for term, value, blocks in zip(call.rule.outputs, call.results, of_results, strict=True):
        each_alone |= {name for dim, n in blocks.items() if n == value.shape[dim] for name in term[dim]}
        ends.append((term, value.shape, {dim: n for dim, n in blocks.items() if n < value.shape[dim]}))
    rule = rule_in_blocks(call.rule, ends)
    if not each_alone:
        return rule
    return replace(rule, blocks=rule.blocks | each_alone, unsharded=rule.unsharded | each_alone)


def _taken(call: GraphCall) -> int | None:
    """The dim of which each result of a call has one index, so that each is a block; None if there is none."""
    if call.function not in _OF_AN_INDEX:
        return None
    dim = call.arguments[0][1] if len(call.arguments[0]) > 1 else 0
    return int(dim) % len(call.operands[0].shape)


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
