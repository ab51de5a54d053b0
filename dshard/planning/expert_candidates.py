"""The candidates of a layer of experts in a traced step: its static loops, and the ragged form along mesh axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.core.context import use_topology
from dshard.core.spec import specs_of
from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.ops.experts.experts_call import run_experts
from dshard.ops.experts.experts_choice import ExpertsCandidates
from dshard.ops.matmul.options import use_strategy
from dshard.placements import Shard
from dshard.planning.alike_axes import AxisGroups, on_axes
from dshard.planning.local_seconds import ExecutedCall, run_by_executor
from dshard.planning.step_graph import GraphCall, OperandSlot
from dshard.routing import Routing
from dshard.rules.expand import Operand, Row, expand, sizes_of
from dshard.rules.expert_loops import OPERANDS, UNIFORM, ExpertLoop, ExpertLoops
from dshard.rules.strategy import Strategy
from dshard.topology import Topology


class _AxisLoop(NamedTuple):
    """The loop of one mesh axis, the factor that it shards, and that along which tokens stay sharded."""

    loop: ExpertLoop | None
    row: Row = None
    tokens: str = ""


def expert_candidates(
    call: GraphCall, mesh: Mesh, topology: Topology, alike: AxisGroups = ()
) -> Iterator[tuple[Strategy, ExpertLoops, ExecutedCall]]:
    """The strategies of a call of a layer of experts, each with its loops, and with what the executor does for it."""
    routing = call.rule.chosen.routing if call.rule.chosen is not None else UNIFORM
    needed = tuple([value.needs_grad for value in call.operands])
    tensors = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in call.operands]
    best = dict[tuple[Layout, ...], tuple[Strategy, ExpertLoops]]()
    with use_topology(topology), use_strategy(routing=routing):
        for loops, layouts in _layouts(call, mesh, alike):
            specs = specs_of(layouts, tensors, torch.device("meta"))
            strategy = ExpertsCandidates(call.rule, specs, loops, needed, may_ask=True).choice().strategy
            is_first = layouts not in best or strategy.seconds < best[layouts][0].seconds
            if strategy.inputs == layouts and is_first:
                best[layouts] = strategy, loops
        for strategy, loops in best.values():
            yield strategy, loops, run_by_executor(_with_loops(call, loops, routing), strategy.inputs, topology)


def _layouts(call: GraphCall, mesh: Mesh, alike: AxisGroups) -> Iterator[tuple[ExpertLoops, tuple[Layout, ...]]]:
    """Loops for all mesh axes, and the layouts of the operands."""
    rule, whole = call.rule, replicated(mesh)
    operands = tuple([Operand(whole, value.shape, value.itemsize) for value in call.operands])
    sizes = sizes_of(rule, operands, [(value.shape, value.itemsize) for value in call.results])
    tokens = {factor: dim for dim, term in enumerate(rule.inputs[0][:-1]) for factor in term}
    kinds = [_AxisLoop(None), _AxisLoop("e", "e"), *[_AxisLoop("t", each) for each in tokens]]
    kinds += [_AxisLoop("f", "f")] if "f" in sizes and "f" not in rule.unsharded else []
    kinds += [_AxisLoop(loop, "e", each) for loop in ("ragged", "hop") for each in tokens]
    for axes in on_axes(kinds, mesh.ndim, alike):
        split = [each.loop for each in axes if each.row == "e"]
        if "hop" in split and {*split[1:]} != {"ragged"}:  # hosts, and ranks within them
            continue
        ways = {name: tuple([i for i, each in enumerate(axes) if name in (each.row, each.tokens)]) for name in sizes}
        if any(sizes[name] < prod(mesh.shape[axis] for axis in own) for name, own in ways.items()):
            continue
        rows = tuple([each.row for each in axes])
        order = {name: own for name in ways if (own := tuple([i for i, row in enumerate(rows) if row == name]))}
        expansion = expand(rule, operands, rows, order, sizes)
        if expansion is not None:
            shards = {axis: Shard(tokens[each.tokens]) for axis, each in enumerate(axes) if each.tokens}
            inputs = [_sharded(x, shards) if i < OPERANDS else x for i, x in enumerate(expansion.inputs)]
            yield tuple([each.loop for each in axes]), tuple(inputs)


def _sharded(layout: Layout, shards: dict[int, Shard]) -> Layout:
    return Layout(layout.mesh, tuple([shards.get(axis, own) for axis, own in enumerate(layout.placements)]))


def _with_loops(call: GraphCall, loops: ExpertLoops, routing: Routing) -> GraphCall:
    """The call as a program makes it, by these loops."""
    text = call.arguments[0][OPERANDS + 1]
    slots = map(OperandSlot, range(len(call.operands)))
    asked = (text, loops)
    signature = (call.signature, loops, routing)
    return replace(call, function=_called, arguments=((asked, *slots), {}), signature=signature)


def _called(asked: tuple[str, ExpertLoops], *tensors: Tensor) -> Any:
    text, loops = asked
    return run_experts(_no_body, tensors, text, loops)


def _no_body(rows: Tensor, ends: Tensor, *parameters: Tensor) -> Tensor:
    raise AssertionError("experts without data run no body")
