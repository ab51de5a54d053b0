"""The candidates of a call in a traced step: the expansions of its rule over all rows of every mesh axis.

By itself an operator is sharded only along axes that shard an operand already (`rules.expand.expansions`). A plan of
the whole step decides what its operands are sharded along, so that here every factor may be on every axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from dshard.core.context import use_topology
from dshard.core.spec import specs_of
from dshard.layout import Layout, placed, replicated
from dshard.mesh import Mesh
from dshard.ops.experts.experts_call import run_experts
from dshard.ops.experts.experts_choice import ExpertsCandidates
from dshard.ops.matmul.options import use_strategy
from dshard.placements import Partial, Replicate, Shard
from dshard.planning.deadline import ENDLESS, Deadline
from dshard.planning.local_seconds import ExecutedCall, executed, local_seconds, run_by_executor
from dshard.planning.step_graph import GraphCall, OperandSlot, given_layout, is_copy
from dshard.routing import Routing
from dshard.rules.expand import Expansion, Operand, Order, Row, expand, sizes_of
from dshard.rules.expert_loops import OPERANDS, UNIFORM, ExpertLoop, ExpertLoops
from dshard.rules.rule import PassThrough, Rule
from dshard.rules.strategy import Strategy
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class CallCandidate:
    """A way to run a call: the layouts of its operands, its results, and its operands' gradients.

    The gradients of its results are brought to `cotangents`, without them to those of the layouts of the results.
    `work` are the seconds of its local work and `exchanges` those of what it sends by itself, forward and backward.
    `name` is that of an alternative to the rule, "" if it is none; `rows` of a layer of experts are its loops. `saved`
    are the bytes that it leaves on a rank for the backward pass, beside operands and results.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    rows: tuple[Row, ...]
    name: str
    work: float
    exchanges: float
    saved: int
    cotangents: tuple[Layout, ...] = ()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of its operands and results."""
        return *self.inputs, *self.outputs

    def cotangent(self, result: int) -> Layout:
        """The layout to which the gradient of a result is brought."""
        return self.cotangents[result] if self.cotangents else self.outputs[result].cotangent()

    @property
    def seconds(self) -> float:
        """The seconds of the work, and of what is sent within the call."""
        return self.work + self.exchanges


def candidates(
    call: GraphCall, mesh: Mesh, topology: Topology, alike: AxisGroups = (), deadline: Deadline = ENDLESS
) -> tuple[CallCandidate, ...]:
    """The candidates of a call on a mesh: of those with the same layouts the cheapest.

    Mesh axes of a group have the same row, in the rule itself, whose alternatives are left out, then: most of the time
    goes to these.

    Raises:
        TimeIsOver: the deadline came first.
    """
    given = given_layout(call)
    if given is not None:
        rows: tuple[Row, ...] = (None,) * mesh.ndim
        return (CallCandidate((given,), (given,), (given.cotangent(),), rows, "", 0.0, 0.0, 0),)
    best: dict[tuple[tuple[Layout, ...], ...], CallCandidate] = {}
    for candidate in _all(call, mesh, topology, alike):
        deadline.check()
        key = (candidate.inputs, candidate.outputs, candidate.gradients, candidate.cotangents)
        if key not in best or candidate.seconds < best[key].seconds:
            best[key] = candidate
    return tuple(best.values())


def _all(call: GraphCall, mesh: Mesh, topology: Topology, alike: AxisGroups) -> Iterator[CallCandidate]:
    if call.rule.chosen is not None:
        for strategy, loops, (local, _, sent, outputs, _) in expert_candidates(call, mesh, topology, alike):
            ends = (strategy.inputs, outputs, strategy.gradients)
            yield CallCandidate(*ends, loops, "", local.both, sent, local.saved)
        return
    packed = () if call.packed is None else (("", call.packed),)
    for name, rule in (("", call.rule), *packed, *(() if alike else call.alternatives)):
        yield from _expansions(call, name, rule, mesh, topology, alike)


def _expansions(
    call: GraphCall, name: str, rule: Rule, mesh: Mesh, topology: Topology, alike: AxisGroups
) -> Iterator[CallCandidate]:
    whole = replicated(mesh)
    operands = tuple([Operand(whole, value.shape, value.itemsize) for value in call.operands])
    outputs = tuple([(value.shape, value.itemsize) for value in call.results])
    sizes = sizes_of(rule, operands, outputs)
    beyond = _factors(rule) - _factors(call.rule)
    in_blocks = {n for term in (*rule.inputs, *rule.outputs) for dim in term if {*dim[:1]} & rule.blocks for n in dim}
    for rows in on_axes(_rows(call, rule, sizes), mesh.ndim, alike):
        order = _order(rows)
        if any(sizes[factor] < prod(mesh.shape[axis] for axis in axes) for factor, axes in order.items()):
            continue
        if (name and beyond.isdisjoint(order)) or (in_blocks and in_blocks.isdisjoint(order)):
            continue
        expansion = expand(rule, operands, rows, order, sizes)
        if expansion is None:
            continue
        results, sent = expansion.outputs, 0.0
        if name or any(not shape for shape, _ in outputs):  # it sends something by itself, or completes a number
            local, _, sent, results, _ = executed(call, expansion.inputs, topology, rows)
        else:
            local = local_seconds(call, expansion, topology)
        gradients = expansion.gradients
        if call.name in ("linear", "addmm") and len(gradients) > 2:  # nothing of a bias is in the sum of a matmul
            gradients = (*gradients[:2], *_of_bias(rule, expansion, gradients[2:]))
        own = (rows, name, local.both, sent, local.saved)
        yield CallCandidate(expansion.inputs, results, gradients, *own)
        if is_copy(call):
            for sums in _partial(expansion.gradients[0], rows, alike):
                yield CallCandidate(expansion.inputs, results, (sums,), *own, (sums,))


def _of_bias(rule: Rule, expansion: Expansion, gradients: Sequence[Layout]) -> Iterator[Layout]:
    """Gradients of what is added to a result: partial sums where the gradient of that has shards that they have not."""
    factors = {name for dim in rule.outputs[0] for name in dim}
    for layout in gradients:
        for axis, row in enumerate(expansion.rows):
            if isinstance(row, str) and row not in factors and axis in layout.partial_axes():
                layout = layout.replace(axis, Replicate())
        yield layout


def _partial(gradient: Layout, rows: Sequence[Row], alike: AxisGroups) -> Iterator[Layout]:
    """The layouts of gradients that pass through a copy as partial sums on axes that do nothing: they are added."""
    idle = [axis for axis, row in enumerate(rows) if row is None]
    for axes in (each for n in range(1, len(idle) + 1) for each in combinations(idle, n)):
        if are_alike(dict.fromkeys(axes, Partial()), alike):
            yield placed(gradient, axes, Partial())


def _factors(rule: Rule) -> set[str]:
    """The factors that a mesh axis may shard."""
    return {name for term in (*rule.inputs, *rule.outputs) for dim in term for name in dim} - rule.unsharded


def _rows(call: GraphCall, rule: Rule, sizes: dict[str, int]) -> list[Row]:
    """The rows of one axis: none, each factor, and sums that pass through of operands that the step itself made."""
    names = [name for term in (*rule.inputs, *rule.outputs) for dim in term for name in dim]
    rows: list[Row] = [None, *dict.fromkeys([n for n in names if n not in rule.unsharded and sizes.get(n, 1) > 1])]
    made = {i for i, value in enumerate(call.operands) if value.kind == "made"}
    return [*rows, *[PassThrough(p.operands, ("sum",)) for p in rule.passes if "sum" in p.ops and p.operands <= made]]


def _order(rows: Sequence[Row]) -> Order:
    order: Order = {}
    for axis, row in enumerate(rows):
        if isinstance(row, str):
            order[row] = (*order.get(row, ()), axis)
    return order


# -- of a layer of experts: its static loops, and the ragged form along mesh axes


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


# -- mesh axes that a plan uses alike: the choices of a call are powers of their number, so there are far fewer

T = TypeVar("T")
AxisGroups: TypeAlias = tuple[tuple[int, ...], ...]
"""Groups of mesh axes that are used alike; axes in none of them are used each by itself."""


def on_axes(each: Sequence[T], ndim: int, alike: AxisGroups = ()) -> Iterator[tuple[T, ...]]:
    """One of these for each mesh axis, for all axes of a group the same.

    >>> ["".join(way) for way in on_axes("ab", 3, ((0, 2),))]
    ['aaa', 'aba', 'bab', 'bbb']
    """
    leader = [next((group[0] for group in alike if axis in group), axis) for axis in range(ndim)]
    leaders = sorted({*leader})
    for way in product(each, repeat=len(leaders)):
        own = dict(zip(leaders, way, strict=True))
        yield tuple([own[axis] for axis in leader])


def are_alike(of_axes: Mapping[int, object], alike: AxisGroups) -> bool:
    """Whether all axes of each group have the same, or none has anything."""
    return all(len({of_axes.get(axis) for axis in group}) == 1 for group in alike)
