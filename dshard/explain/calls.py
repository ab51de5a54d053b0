"""Operators that a function calls, each with its candidates, priced anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dshard.explain.price import candidate, crossing_candidate, figures_of
from dshard.explain.values import Candidate, Explanation, Report, why_chosen
from dshard.ops.observe import Decision, observing
from dshard.ops.settings import current
from dshard.ops.strategy import strategies
from dshard.ops.where import user_line
from dshard.validate import check_callable


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `function(*args, **kwargs)` and explain each operator on distributed tensors that it called.

    On a pure `Mesh`, with local tensors on the meta device, everything is planned and nothing is sent or computed.

    Raises:
        ArgumentError: nothing that can be called.
    """
    check_callable(function, "explain", "give a function and its arguments, as in explain(torch.matmul, x, w)")
    decisions: list[tuple[Decision, str, str]] = []
    depth = [0]

    @contextmanager
    def record(decision: Decision) -> Iterator[None]:
        if not depth[0]:
            mesh = decision.operands[0].layout.mesh
            decisions.append((decision, current().why_topology(mesh), user_line()))
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    with observing(record):
        function(*args, **kwargs)
    known = {key: explanation(*key) for key in dict.fromkeys((decision, why) for decision, why, _ in decisions)}
    return Report(tuple(replace(known[decision, why], line=line) for decision, why, line in decisions))


def explanation(decision: Decision, topology_why: str) -> Explanation:
    """The candidates of one decision, priced again, and why the chosen one was taken."""
    topology = decision.topology
    operands = tuple(f"[{o.layout}] {tuple(o.shape)}" for o in decision.operands)
    if decision.rule is None or decision.strategy is None:
        only = _moving(decision) if decision.crossing is None else crossing_candidate(decision.crossing)
        why = "asked for" if decision.explicit else "no rule: every rank computes all of it"
        return Explanation(decision.op, operands, "", topology.name, str(topology), topology_why, (only,), 1, only, why)
    rule, outputs = decision.rule, decision.outputs
    priced = sorted(
        strategies(rule, decision.operands, outputs, topology, decision.wanted), key=lambda s: (s.seconds, s.moves)
    )
    candidates = {strategy: candidate(rule, strategy, decision.operands, outputs, topology) for strategy in priced}
    chosen = candidates.get(decision.strategy) or candidates[priced[0]]
    every = tuple(candidates.values())
    return Explanation(
        decision.op,
        operands,
        str(rule),
        topology.name,
        str(topology),
        topology_why,
        every,
        len(every),
        chosen,
        why_chosen(chosen, every),
        panels=decision.panels(),
        run_in=decision.run_in,
    )


def _moving(decision: Decision) -> Candidate:
    """An operator that only moves data."""
    pairs = zip(decision.plans, decision.operands, strict=True)
    moves = [figures_of(plan, operand.itemsize) for plan, operand in pairs]
    return Candidate(
        decision.op,
        ", ".join(f"{move.plan.src} -> {move.plan.dst}" for move in moves),
        sum(move.nbytes for move in moves),
        sum(move.messages for move in moves),
        sum(move.peak for move in moves),
        sum(move.plan.seconds for move in moves),
        0.0,
        0.0,
        0.0,
        None,
        False,
        tuple(step for move in moves for step in move.steps),
    )
