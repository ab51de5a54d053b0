"""Redistribute several local tensors together: plans of one lane run as one collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import TypeAlias

from torch import Tensor

from dshard import comm
from dshard.core.context import planning_context
from dshard.core.moves import LocalRedistribution, local_redistribution, with_partials_reduced
from dshard.core.observe import NEEDED, OBSERVERS, Decision, Members, finish_observed, observed
from dshard.core.wrapper import Wrapper, wrap
from dshard.cost import planned_collective
from dshard.rules.expand import Operand
from dshard.rules.strategy import completed_layout

Ends: TypeAlias = list[Callable[[], Tensor]]
"""Functions, each of which waits for one result and returns it."""


def reduced_together(xs: Sequence[Wrapper], op: str) -> list[Tensor]:
    """The distributed tensors with their partial sums reduced: by one collective if all need the same."""
    moves = [local_redistribution(x._spec, completed_layout(x._spec.layout)) for x in xs]
    if any(comm.traced(x._local_tensor) for x in xs):
        return [with_partials_reduced(x, op) for x in xs]
    ends = begin_together(moves, [x._local_tensor for x in xs], op)
    return [wrap(end(), move.spec) for end, move in zip(ends, moves, strict=True)]


def begin_together(
    moves: Sequence[LocalRedistribution], local: list[Tensor], op: str, members: tuple[int, ...] = ()
) -> Ends:
    """Begin redistributions of several local tensors, one lane as one collective; the first use of a result waits.

    Local tensors of another dtype than the redistribution's are cast. `members` are the ids of the parameters whose
    values or gradients they are. The list `local` is emptied, so that tensors without other owners are freed once
    packed.
    """
    lanes = _lanes(moves)
    ends: dict[int, Callable[[], Tensor]] = {}
    parts = [[local[i] for i in together] for together in lanes]
    local.clear()
    for together, tensors in zip(lanes, parts, strict=True):
        some = [moves[i] for i in together]
        leaves_of = tuple(map(members.__getitem__, together)) if members else ()
        ends |= zip(together, begin_lane(some, tensors, op, leaves_of), strict=True)
    return [ends[i] for i in range(len(moves))]


def _lanes(moves: Sequence[LocalRedistribution]) -> list[list[int]]:
    """The positions of redistributions that begin as one, from the cache of the topology in use.

    Of a large tensor the copies into one buffer, or out of it, may take longer than a collective of its own to begin.
    """

    def make() -> list[list[int]]:
        lanes: defaultdict[object, list[int]] = defaultdict(list)
        for i, move in enumerate(moves):
            lanes[(move.lane, move.spec.dtype, move.spec.device) if move.gains_joined() else i].append(i)
        return [*lanes.values()]

    return planning_context().moves.of((_lanes, *moves), make)  # type: ignore[no-any-return]


def begin_lane(
    moves: Sequence[LocalRedistribution], local: list[Tensor], op: str, members: tuple[int, ...], own: bool = False
) -> Ends:
    """`begin_together` for redistributions of one lane; with `own` nobody else holds the local tensors."""
    if len(moves) == 1:
        move, tensor = moves[0], local.pop()
        if tensor.dtype is not move.spec.dtype:
            tensor = tensor.to(move.spec.dtype)
        if OBSERVERS and move.plan.steps:
            decision = replace(move.decision(op), why=_why(moves, members))
            return [partial(finish_observed, decision, observed(decision, move.begin_or_run, (tensor,)))]
        return [move.begin_or_run(tensor)]
    joined = _joined(moves)
    if not OBSERVERS:
        results = joined.begin_or_run(local, own)
    else:
        decision = decision_together(moves, op, members)
        begun = observed(decision, joined.begin_or_run, (local, own))
        results = comm.Once(partial(finish_observed, decision, begun))
    return [*map(partial, repeat(results), range(len(moves)))]


def run_alone(move: LocalRedistribution, local: Tensor, op: str, members: tuple[int, ...]) -> Tensor:
    """Run one redistribution to its end; `members` is the id of the parameter whose value or gradient it is."""
    if not OBSERVERS:
        return move(local)
    moved: Tensor = observed(replace(move.decision(op), why=_why([move], members)), move, (local,))
    return moved


def _joined(moves: Sequence[LocalRedistribution]) -> comm.Moving:
    """The redistributions as one, from the cache of the topology in use."""
    return planning_context().moves.of(  # type: ignore[no-any-return]
        tuple(moves), lambda: comm.joined(tuple([move.plan for move in moves]), moves[0].spec.dtype)
    )


def decision_together(moves: Sequence[LocalRedistribution], op: str, members: tuple[int, ...] = ()) -> Decision:
    """The decision to redistribute several tensors by one collective.

    `members` are the ids of parameters whose values or gradients they are: the user asked for their layouts.
    """
    sources = [move.source for move in moves]
    operands = tuple(Operand(source.layout, source.shape, source.itemsize) for source in sources)
    plans = tuple(move.plan for move in moves)
    mesh = plans[0].src.mesh
    topology = planning_context().topology_of(mesh)
    sent = tuple(
        planned_collective(kind, mesh, axes, elements * sources[0].itemsize, topology)
        for kind, axes, elements in comm.joined_received(plans)
    )
    return Decision(op, operands, topology, exchanges=sent, why=_why(moves, members))


def _why(moves: Sequence[LocalRedistribution], members: tuple[int, ...]) -> str | Members:
    pairs = zip(members, moves, strict=False)
    return Members(tuple((id_, move.plan.busiest() * move.spec.itemsize) for id_, move in pairs)) if members else NEEDED
