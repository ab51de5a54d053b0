"""`explain`: the operators that a function calls, each with its candidates, priced again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dshard.comm.user_code import user_line
from dshard.core.context import planning_context
from dshard.core.observe import Decision, observing
from dshard.core.signature import Function
from dshard.explain.candidates import (
    MoveCost,
    add_moves,
    candidate,
    candidate_of_moves,
    exchange_costs,
    redistribution_cost,
    reshard_cost,
    rule_candidates,
)
from dshard.explain.report_values import Candidate, Explanation, Report, why_chosen
from dshard.rules.strategy import Strategy, StrategyChoice
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
