"""Operators that a function calls, each with its candidates, priced anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    stack: list[Decision] = []

    @contextmanager
    def record(decision: Decision) -> Iterator[None]:
        if not stack:
            mesh = decision.operands[0].layout.mesh
            calls.append(_Call(decision, planning_context().why_topology(mesh), user_line()))
        elif not decision.explicit or stack[-1].explicit:  # else it runs the plans of the decision around it
            calls[-1].within.append(decision)
        stack.append(decision)
        try:
            yield
        finally:
            stack.pop()

    with observing(record):
        function(*args, **kwargs)
    known = {key: explanation(*key) for key in dict.fromkeys(call.key() for call in calls)}
    return Report(tuple(replace(known[call.key()], line=call.line) for call in calls))


@dataclass(slots=True)
class _Call:
    """One operator that was called, and what was decided within it: by an alternative, or by a write."""

    decision: Decision
    topology_why: str
    line: str
    within: list[Decision] = field(default_factory=list)

    def key(self) -> tuple[Decision, str, tuple[Decision, ...]]:
        return self.decision, self.topology_why, tuple(self.within)


def explanation(decision: Decision, topology_why: str, within: tuple[Decision, ...] = ()) -> Explanation:
    """The candidates of one decision, priced again, and why the chosen one was taken."""
    topology, ruled = decision.topology, _ruled(decision)
    if decision.strategy is not None:
        chosen = _with(_chosen(decision, ruled), within)
        every = tuple(chosen if strategy == decision.strategy else priced for strategy, priced in ruled.items())
        every = every if chosen in every else (chosen, *every)
        why = why_chosen(chosen, every)
    else:
        chosen = crossing_candidate(decision.crossing) if decision.crossing is not None else _moving(decision, within)
        every = tuple(sorted((chosen, *ruled.values()), key=lambda priced: priced.seconds))
        why = "asked for" if decision.explicit else _why_instead(decision, tuple(ruled.values()))
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


def _ruled(decision: Decision) -> dict[Strategy, Candidate]:
    """The candidates of the operator's rule, from cheapest to dearest."""
    rule, operands, outputs, topology = decision.rule, decision.operands, decision.outputs, decision.topology
    if rule is None:
        return {}
    found = sorted(strategies(rule, operands, outputs, topology, decision.wanted), key=lambda s: (s.seconds, s.moves))
    return {strategy: candidate(rule, strategy, operands, outputs, topology) for strategy in found}


def _chosen(decision: Decision, ruled: dict[Strategy, Candidate]) -> Candidate:
    rule, strategy = decision.rule, decision.strategy
    assert rule is not None
    assert strategy is not None
    found = ruled.get(strategy)
    if found is None:
        found = candidate(rule, strategy, decision.operands, decision.outputs, decision.topology)
    return found if decision.bias is None else _moved(found, [figures_of(decision.bias, decision.outputs[0][1])])


def _why_instead(decision: Decision, ruled: tuple[Candidate, ...]) -> str:
    if not decision.alternative:
        return decision.why
    if not ruled:
        return "the only candidate"
    seconds = f"{ruled[0].seconds * 1e6:.1f} us"
    return f"in place of the rule, whose cheapest candidate, {ruled[0].name}, would take {seconds}"


def _moving(decision: Decision, within: tuple[Decision, ...]) -> Candidate:
    """An operator that only moves data, or the alternative that runs in place of a rule."""
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
    return _with(_exchanging(alone, decision), within)


def _with(found: Candidate, within: tuple[Decision, ...]) -> Candidate:
    """A candidate and what is moved, sent and computed by the decisions made within it."""
    for decision in within:
        found = _moved(found, [figures_of(plan, itemsize) for plan, itemsize in decision.moves()])
        if decision.strategy is not None:
            found = replace(found, compute_seconds=found.compute_seconds + decision.strategy.compute)
        found = _exchanging(found, decision)
    return found


def _moved(found: Candidate, moves: list[Moved]) -> Candidate:
    """A candidate and redistributions beside its own."""
    return replace(
        found,
        bytes_moved=found.bytes_moved + sum(move.nbytes for move in moves),
        messages=found.messages + sum(move.messages for move in moves),
        peak_bytes=found.peak_bytes + sum(move.after for move in moves),
        gather_seconds=found.gather_seconds + sum(move.plan.seconds for move in moves),
        steps=(*found.steps, *(step for move in moves for step in move.steps)),
    )


def _exchanging(found: Candidate, decision: Decision) -> Candidate:
    """A candidate and what a decision sends beside its plans."""
    mesh = decision.operands[0].layout.mesh
    nbytes = sum(sent.nbytes for sent in decision.exchanges)
    peers = [prod(mesh.shape[mesh.axis(name)] for name in sent.axis.split(",")) - 1 for sent in decision.exchanges]
    return replace(
        found,
        bytes_moved=found.bytes_moved + nbytes,
        messages=found.messages + sum(peers),
        peak_bytes=found.peak_bytes + nbytes,
        gather_seconds=found.gather_seconds + sum(sent.seconds for sent in decision.exchanges),
        steps=(*found.steps, *(f"{s.collective}  {s.axis}  {human_bytes(s.nbytes)}" for s in decision.exchanges)),
    )
