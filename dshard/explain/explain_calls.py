"""`explain`: the operators that a function calls, each with its candidates, priced again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from dshard.comm.user_code import user_line
from dshard.core.context import planning_context
from dshard.core.observe import Decision, observing
from dshard.explain.candidates import Moved, candidate, crossing_candidate, figures_of
from dshard.explain.report_values import Candidate, Explanation, Report, why_chosen
from dshard.rules.strategy import Strategy, strategies
from dshard.tables import human_bytes
from dshard.validate import check_callable


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `function(*args, **kwargs)` and explain each operator on distributed tensors that it called.

    On a pure `Mesh`, with local tensors on the meta device, everything is planned and nothing is sent or computed.

    Raises:
        ArgumentError: nothing that can be called.
    """
    check_callable(function, "explain", "give a function and its arguments, as in explain(torch.matmul, x, w)")
    calls: list[_Call] = []

    def record(decision: Decision) -> None:
        if len(running) == 1:
            mesh = decision.operands[0].layout.mesh
            calls.append(_Call(decision, planning_context().why_topology(mesh), user_line()))
        elif not decision.explicit or running[-2].explicit:  # else it runs the plans of the decision around it
            calls[-1].within.append(decision)

    with observing(record) as running:
        function(*args, **kwargs)
    explanations = {key: explanation(*key) for key in dict.fromkeys(call.key() for call in calls)}
    return Report(tuple(replace(explanations[call.key()], line=call.line) for call in calls))


@dataclass(slots=True)
class _Call:
    """One operator that was called, and the decisions made within it: by an alternative, or by a write."""

    decision: Decision
    topology_why: str
    line: str
    within: list[Decision] = field(default_factory=list)

    def key(self) -> tuple[Decision, str, tuple[Decision, ...]]:
        return self.decision, self.topology_why, tuple(self.within)


def explanation(decision: Decision, topology_why: str, within: tuple[Decision, ...] = ()) -> Explanation:
    """The candidates of one decision, priced again, and why the chosen one was taken."""
    topology, ruled = decision.topology, _rule_candidates(decision)
    if decision.strategy is not None:
        chosen = _add_decisions(_chosen_candidate(decision, ruled), within)
        every = tuple(chosen if strategy == decision.strategy else priced for strategy, priced in ruled.items())
        every = every if chosen in every else (chosen, *every)
        why = why_chosen(chosen, every)
    else:
        chosen = (
            crossing_candidate(decision.crossing)
            if decision.crossing is not None
            else _without_strategy(decision, within)
        )
        every = tuple(sorted((chosen, *ruled.values()), key=lambda priced: priced.seconds))
        why = "asked for" if decision.explicit else _why_alternative(decision, tuple(ruled.values()))
    return Explanation(
        decision.op,
        tuple(f"[{o.layout}] {tuple(o.shape)}" for o in decision.operands),
        "" if decision.rule is None else str(decision.rule),
        topology.name,
        str(topology),
        topology_why,
        every,
        len(every),
        chosen,
        why,
        panels=decision.panels(),
        run_in=decision.run_in,
        collectives=tuple(sent for each in (decision, *within) for sent in each.collectives()),
    )


def _rule_candidates(decision: Decision) -> dict[Strategy, Candidate]:
    """The candidates of the operator's rule, from cheapest to dearest."""
    rule, operands, outputs, topology = decision.rule, decision.operands, decision.outputs, decision.topology
    if rule is None:
        return {}
    priced = sorted(strategies(rule, operands, outputs, topology, decision.wanted), key=lambda s: (s.seconds, s.moves))
    return {strategy: candidate(rule, strategy, operands, outputs, topology) for strategy in priced}


def _chosen_candidate(decision: Decision, ruled: dict[Strategy, Candidate]) -> Candidate:
    rule, strategy = decision.rule, decision.strategy
    assert rule is not None
    assert strategy is not None
    chosen = ruled.get(strategy)
    if chosen is None:
        chosen = candidate(rule, strategy, decision.operands, decision.outputs, decision.topology)
    return chosen if decision.bias is None else _add_moves(chosen, [figures_of(decision.bias, decision.outputs[0][1])])


def _why_alternative(decision: Decision, ruled: tuple[Candidate, ...]) -> str:
    if not decision.alternative:
        return decision.why
    if not ruled:
        return "the only candidate"
    seconds = f"{ruled[0].seconds * 1e6:.1f} us"
    return f"in place of the rule, whose cheapest candidate, {ruled[0].name}, would take {seconds}"


def _without_strategy(decision: Decision, within: tuple[Decision, ...]) -> Candidate:
    """The candidate of an operator that only redistributes, or of an alternative that runs in place of a rule."""
    moves = [figures_of(plan, itemsize) for plan, itemsize in decision.moves()]
    held = 0 if moves else sum(o.layout.local_numel(o.shape) * o.itemsize for o in decision.operands)
    alone = Candidate(
        decision.alternative or decision.op,
        ", ".join(f"{move.plan.src} -> {move.plan.dst}" for move in moves),
        sum(move.nbytes for move in moves),
        sum(move.messages for move in moves),
        sum(move.peak for move in moves) + held,
        sum(move.plan.seconds for move in moves),
        0.0,
        0.0,
        0.0,
        None,
        False,
        tuple(step for move in moves for step in move.steps),
    )
    return _add_decisions(_add_exchanges(alone, decision), within)


def _add_decisions(extended: Candidate, within: tuple[Decision, ...]) -> Candidate:
    """A candidate with the redistributions, collectives and work of the decisions made within it added."""
    for decision in within:
        extended = _add_moves(extended, [figures_of(plan, itemsize) for plan, itemsize in decision.moves()])
        if decision.strategy is not None:
            extended = replace(extended, compute_seconds=extended.compute_seconds + decision.strategy.compute)
        extended = _add_exchanges(extended, decision)
    return extended


def _add_moves(base: Candidate, moves: list[Moved]) -> Candidate:
    """A candidate with further redistributions added."""
    return replace(
        base,
        bytes_moved=base.bytes_moved + sum(move.nbytes for move in moves),
        messages=base.messages + sum(move.messages for move in moves),
        peak_bytes=base.peak_bytes + sum(move.after for move in moves),
        gather_seconds=base.gather_seconds + sum(move.plan.seconds for move in moves),
        steps=(*base.steps, *(step for move in moves for step in move.steps)),
    )


def _add_exchanges(base: Candidate, decision: Decision) -> Candidate:
    """A candidate with the collectives added that a decision sends beside its plans."""
    mesh = decision.operands[0].layout.mesh
    nbytes = sum(sent.nbytes for sent in decision.exchanges)
    peers = [prod(mesh.shape[mesh.axis(name)] for name in sent.axis.split(",")) - 1 for sent in decision.exchanges]
    return replace(
        base,
        bytes_moved=base.bytes_moved + nbytes,
        messages=base.messages + sum(peers),
        peak_bytes=base.peak_bytes + nbytes,
        gather_seconds=base.gather_seconds + sum(sent.seconds for sent in decision.exchanges),
        steps=(*base.steps, *(f"{s.collective}  {s.axis}  {human_bytes(s.nbytes)}" for s in decision.exchanges)),
    )
