"""`explain`: the operators that a function calls, each with its candidates: their bytes, messages, memory and price."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from dshard.caches import cached
from dshard.comm.user_code import user_line
from dshard.core.context import planning_context
from dshard.core.observe import Decision, observing
from dshard.core.signature import Function
from dshard.cost import PlannedCollective
from dshard.explain.report_values import Candidate, Explanation, Report, why_chosen
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Shard
from dshard.redistribute import Plan, plan
from dshard.reshard import ReshardPlan
from dshard.rules.communication_bounds import attention_bytes_bound, experts_bytes_bound, matmul_lower_bound
from dshard.rules.expand import Operand, Row
from dshard.rules.rule import PassThrough, Rule, factor_sizes
from dshard.rules.strategy import Question, Strategy, StrategyChoice
from dshard.rules.strategy_choice import strategies
from dshard.tables import human_bytes
from dshard.torch_private import TracingContext
from dshard.validate import check_callable


def explain(function: Function, *args: object, **kwargs: object) -> Report:
    """Run `function(*args, **kwargs)` and explain each operator on distributed tensors that it called.

    On a pure `Mesh`, with local tensors on the meta device, everything is planned and nothing is sent or computed.

    Raises:
        ArgumentError: a value that is not callable.
    """
    check_callable(function, "explain", "give a function and its arguments, as in explain(torch.matmul, x, w)")
    calls: list[_Call] = []

    def record(decision: Decision) -> None:
        if TracingContext.try_get() is not None:
            return  # torch compiles a function, such as a mask of its flex_attention, whose graph runs within a call
        if len(running) == 1:
            mesh = decision.operands[0].layout.mesh
            calls.append(_Call(decision, planning_context().why_topology(mesh), user_line()))
        elif any(outer.is_repeated for outer in running[:-1]):
            return  # it runs the plans of the decision around it, as below
        elif not decision.explicit or running[-2].explicit:
            calls[-1].within.append(decision)

    with observing(record) as running:
        function(*args, **kwargs)
    explanations = {key: explanation(*key) for key in dict.fromkeys(call.key() for call in calls)}
    return Report(tuple(replace(explanations[call.key()], line=call.line) for call in calls))


@dataclass(slots=True)
class _Call:
    """An operator that was called, and the decisions made while it ran, such as by a write."""

    decision: Decision
    topology_why: str
    line: str
    within: list[Decision] = field(default_factory=list)

    def key(self) -> tuple[Decision, str, tuple[Decision, ...]]:
        return self.decision, self.topology_why, tuple(self.within)


def explanation(decision: Decision, topology_why: str, within: tuple[Decision, ...] = ()) -> Explanation:
    """The candidates of one decision, priced again, and why one was chosen."""
    topology, choice = decision.topology, decision.choice
    if choice is not None:
        ruled = rule_candidates(choice)
        chosen = _add_decisions(_chosen_candidate(decision, choice, ruled), within)
        every = tuple(chosen if strategy == choice.strategy else priced for strategy, priced in ruled.items())
        every = every if chosen in every else (chosen, *every)
        in_place = decision.is_alternative and not all(each.name for each in ruled)
        why = _why_alternative(ruled) if in_place else why_chosen(chosen, every)
    else:
        chosen = _add_decisions(_without_strategy(decision), within)
        every = (chosen,)
        why = decision.reason
    return Explanation(
        decision.op,
        tuple(f"[{o.layout}] {tuple(o.shape)}" for o in decision.operands),
        "" if choice is None else str(choice.question.rule),
        topology.name,
        str(topology),
        topology_why,
        every,
        len(every),
        chosen,
        why,
        panels=decision.panels.costs(),
        run_in=decision.panels.run_in,
        transport=decision.panels.transport,
        collectives=tuple(sent for each in (decision, *within) for sent in each.collectives()),
    )


def _chosen_candidate(decision: Decision, choice: StrategyChoice, ruled: dict[Strategy, Candidate]) -> Candidate:
    chosen = ruled.get(choice.strategy) or candidate(choice.question, choice.strategy)
    bias = [] if decision.bias is None else [redistribution_cost(decision.bias, choice.question.outputs[0][1])]
    return add_moves(chosen, bias) if bias else chosen


def _why_alternative(ruled: dict[Strategy, Candidate]) -> str:
    first = next(priced for strategy, priced in ruled.items() if not strategy.name)
    return f"in place of the rule, whose cheapest candidate, {first.name}, would take {first.seconds * 1e6:.1f} us"


def _without_strategy(decision: Decision) -> Candidate:
    """The candidate of an operator that only redistributes."""
    name, crossing = decision.op, decision.crossing
    moves = [redistribution_cost(plan, itemsize) for plan, itemsize in decision.moves()]
    changes = [f"{plan.src} -> {plan.dst}" for plan, _ in decision.moves()]
    if crossing is not None:
        name, moves, changes = "reshard", [reshard_cost(crossing)], [f"{crossing.src} -> {crossing.dst}"]
    alone = candidate_of_moves(name, ", ".join(changes), moves, (sum(move.seconds for move in moves), 0.0, 0.0, 0.0))
    if not moves:
        alone = replace(alone, peak_bytes=sum(o.layout.local_numel(o.shape) * o.itemsize for o in decision.operands))
    return add_moves(alone, _exchanges(decision))


def _add_decisions(extended: Candidate, within: tuple[Decision, ...]) -> Candidate:
    """A candidate with the redistributions, collectives and work of the decisions made within it added."""
    for decision in within:
        moves = [redistribution_cost(plan, itemsize) for plan, itemsize in decision.moves()]
        compute = 0.0 if decision.strategy is None else decision.strategy.compute
        extended = add_moves(extended, [*moves, *_exchanges(decision)])
        extended = replace(extended, compute_seconds=extended.compute_seconds + compute)
    return extended


def _exchanges(decision: Decision) -> list[MoveCost]:
    """The collectives that a decision sends beside its plans."""
    return exchange_costs(decision.exchanges, decision.operands[0].layout.mesh)


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
