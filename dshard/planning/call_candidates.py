"""The candidates of a call in a traced step: the expansions of its rule over all rows of every mesh axis.

By itself an operator is sharded only along axes that shard an operand already (`rules.expand.expansions`). A plan of
the whole step decides what its operands are sharded along, so that here every factor may be on every axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from dshard.layout import Layout, replicated
from dshard.mesh import Mesh
from dshard.placements import Partial, Replicate
from dshard.planning.alike_axes import AxisGroups, are_alike, on_axes
from dshard.planning.deadline import ENDLESS, Deadline
from dshard.planning.expert_candidates import expert_candidates
from dshard.planning.local_seconds import executed, local_seconds
from dshard.planning.step_graph import GraphCall, given_layout, is_copy
from dshard.rules.expand import Expansion, Operand, Order, Row, expand, sizes_of
from dshard.rules.rule import PassThrough, Rule
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
            local, _, sent, results, _ = executed(call, expansion.inputs, topology)
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
        layout = gradient
        for axis in axes:
            layout = layout.replace(axis, Partial())
        if are_alike(dict.fromkeys(axes, Partial()), alike):
            yield layout


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
