"""Bytes, messages and memory of candidates, from their plans and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from dshard.caches import cached
from dshard.cost import PlannedCollective
from dshard.explain.report_values import Candidate
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Shard
from dshard.redistribute import Plan, plan
from dshard.reshard import ReshardPlan
from dshard.rules.communication_bounds import attention_bytes_bound, matmul_lower_bound
from dshard.rules.expand import Operand, Row
from dshard.rules.expert_bound import experts_bytes_bound
from dshard.rules.rule import PassThrough, Rule, factor_sizes
from dshard.rules.strategy import Question, Strategy, StrategyChoice
from dshard.rules.strategy_choice import strategies
from dshard.tables import human_bytes


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The cost of one redistribution, or collective, in a candidate, with its steps in words.

    The busiest rank receives `nbytes`, in `messages` one after the other; the first holds bytes `before` and `after`.
    """

    seconds: float
    nbytes: int
    messages: int
    before: int
    after: int
    steps: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes of source and result together, or of the source if nothing is moved."""
        return self.before + (self.after if self.steps else 0)


@cached("explanations", 8192)
def redistribution_cost(moved: Plan, itemsize: int) -> MoveCost:
    """A redistribution on one mesh."""
    before, after = (layout.local_numel(moved.shape) * itemsize for layout in (moved.src, moved.dst))
    steps, loads = tuple(map("  ".join, moved.words())), moved.loads()
    nbytes, messages = sum(load.received for load in loads) * itemsize, sum(load.messages for load in loads)
    return MoveCost(moved.seconds, nbytes, messages, before, after, steps)


def reshard_cost(reshard: ReshardPlan) -> MoveCost:
    """A plan to another mesh; bytes and messages are those of the busiest rank."""
    messages = dict.fromkeys(reshard.ranks, 0)
    for chain in reshard.chains:
        for _, receiver in chain.hops:
            messages[receiver] += chain.chunks
    around = [redistribution_cost(plan, reshard.itemsize) for plan in (reshard.first, reshard.last) if plan is not None]
    before, after = (layout.local_numel(reshard.shape) * reshard.itemsize for layout in (reshard.src, reshard.dst))
    return MoveCost(
        reshard.seconds,
        max(map(reshard.received, reshard.ranks)) * reshard.itemsize + sum(move.nbytes for move in around),
        max(messages.values()) + sum(move.messages for move in around),
        before,
        after + sum(move.after for move in around),
        tuple(reshard.steps()),
    )


def exchange_costs(exchanges: Sequence[PlannedCollective], mesh: Mesh) -> list[MoveCost]:
    """The collectives that an operator runs beside its plans; a ring holds two buffers, for any number of messages."""
    sizes = sorted((sent.nbytes for sent in exchanges if sent.collective == "permute"), reverse=True)
    buffers, moves = sizes[:2], []
    for sent in exchanges:
        messages = prod(mesh.shape[mesh.axis(name)] for name in sent.axis.split(",")) - 1
        after = sent.nbytes
        if sent.collective == "permute":
            messages, after = 1, buffers.pop() if buffers else 0
        step = f"{sent.collective}  {sent.axis}  {human_bytes(sent.nbytes)}"
        moves.append(MoveCost(sent.seconds, sent.nbytes, messages, 0, after, (step,)))
    return moves


def rule_candidates(choice: StrategyChoice) -> dict[Strategy, Candidate]:
    """The candidates of an operator's rule, and the alternatives to it, from cheapest to most expensive."""
    priced = sorted((*strategies(choice.question), *choice.alternatives), key=lambda s: (s.seconds, s.moves))
    return {strategy: candidate(choice.question, strategy) for strategy in priced}


def candidate(question: Question, strategy: Strategy) -> Candidate:
    """One strategy with its bytes, messages and memory; outputs that it leaves partial are completed."""
    rule, operands, outputs, topology, _ = question
    mesh = operands[0].layout.mesh
    moves = [
        redistribution_cost(plan(o.layout, layout, o.shape, o.itemsize, topology), o.itemsize)
        for o, layout in zip(operands, strategy.inputs, strict=True)
    ]
    moves += exchange_costs(strategy.exchanges, mesh)
    moves += [
        redistribution_cost(plan(layout, end, shape, itemsize, topology), itemsize)
        for (shape, itemsize), layout, end in zip(outputs, strategy.outputs, strategy.ends, strict=True)
    ]
    priced = candidate_of_moves(
        strategy.name or name_of(strategy.rows, mesh.names),
        str(strategy),
        moves,
        (strategy.gather, strategy.compute, strategy.reduce, strategy.backward),
        matmul_bytes_bound(rule, operands)
        or attention_bytes_bound(rule, operands, outputs)
        or experts_bytes_bound(rule, operands),
        stored_once((*(o.layout for o in operands), *strategy.ends)),
    )
    return replace(priced, peak_bytes=priced.peak_bytes + strategy.held) if strategy.held else priced


def candidate_of_moves(
    name: str,
    placements: str,
    moves: Sequence[MoveCost],
    seconds: tuple[float, float, float, float],
    bound: float | None = None,
    one_copy: bool = False,
) -> Candidate:
    """A candidate with these moves; `seconds` to gather, to compute, to reduce, and of the backward pass."""
    nbytes, messages, steps = sum(move.nbytes for move in moves), sum(move.messages for move in moves), _steps(moves)
    peak, ratio = sum(move.peak for move in moves), nbytes / bound if bound else None
    return Candidate(name, placements, nbytes, messages, peak, *seconds, ratio, one_copy, steps)


def add_moves(base: Candidate, moves: Sequence[MoveCost]) -> Candidate:
    """The candidate `base` with further moves, after which it holds as much as before."""
    return replace(
        base,
        bytes_moved=base.bytes_moved + sum(move.nbytes for move in moves),
        messages=base.messages + sum(move.messages for move in moves),
        peak_bytes=base.peak_bytes + sum(move.after for move in moves),
        gather_seconds=base.gather_seconds + sum(move.seconds for move in moves),
        steps=(*base.steps, *_steps(moves)),
    )


def _steps(moves: Sequence[MoveCost]) -> tuple[str, ...]:
    return tuple([step for move in moves for step in move.steps])


def matmul_bytes_bound(rule: Rule, operands: Sequence[Operand]) -> float | None:
    """Bytes that some rank must receive in a matmul `m k, k n -> m n` without batch, or None for another operator."""
    if len(rule.inputs) != 2 or len(rule.outputs) != 1 or any(len(dim) != 1 for term in rule.inputs for dim in term):
        return None
    a, b, c = ({dim[0] for dim in term if dim} for term in (*rule.inputs, *rule.outputs))
    if a & b & c or not a & b:
        return None
    sizes = factor_sizes(rule.inputs, [o.shape for o in operands], rule)
    m, k, n = (prod(sizes[f] for f in factors) for factors in (a - b, a & b, b - a))
    return matmul_lower_bound(m, k, n, operands[0].layout.mesh.size) * operands[0].itemsize


def name_of(rows: tuple[Row, ...], names: tuple[str, ...]) -> str:
    """The name of a candidate: the row of each mesh axis, or "whole" if none shards the work."""
    words = {axis: "partial" if isinstance(row, PassThrough) else row for axis, row in zip(names, rows, strict=True)}
    return " ".join(f"{axis}:{word}" for axis, word in words.items() if word is not None) or "whole"


def stored_once(layouts: Iterable[Layout]) -> bool:
    """Whether tensors of these layouts have each element on one rank alone."""
    return all(
        isinstance(placement, Shard) or n == 1
        for layout in layouts
        for placement, n in zip(layout.placements, layout.mesh.shape, strict=True)
    )
