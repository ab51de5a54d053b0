"""Why an operator runs as it does: all candidates, what each moves and costs, and which was taken."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from dshard.layout import Shape
from dshard.ops.expand import Operand, Row
from dshard.ops.matmul.bound import matmul_lower_bound
from dshard.ops.observe import Decision, observing
from dshard.ops.rule import Pending, Rule, factor_sizes
from dshard.ops.strategy import Strategy, strategies
from dshard.redistribute import Plan, describe, plan
from dshard.tables import human_bytes, text_table
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run an operator, priced.

    `name` says what each mesh axis does; `placements` are the layouts of operands and outputs; `steps` all that is
    communicated, for the operands and to complete what is left pending. Bytes are those of the busiest rank;
    `bound_ratio` is `bytes_moved` over the communication lower bound of a product, where there is one.
    """

    name: str
    placements: str
    bytes_moved: int
    messages: int
    peak_bytes: int
    gather_seconds: float
    compute_seconds: float
    reduce_seconds: float
    bound_ratio: float | None
    steps: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.gather_seconds + self.compute_seconds + self.reduce_seconds


@dataclass(frozen=True, slots=True)
class Explanation:
    """One operator call: its operands, the candidates from cheapest to dearest, the chosen one, and why."""

    op: str
    operands: tuple[str, ...]
    rule: str
    topology: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    why: str

    def __str__(self) -> str:
        head = [f"{self.op}   on {self.topology}", *(f"  operand {operand}" for operand in self.operands)]
        header = [
            "",
            "axes",
            "layouts",
            "received",
            "messages",
            "peak",
            "gather us",
            "compute us",
            "reduce us",
            "x bound",
        ]
        rows = [_cells(candidate, candidate is self.chosen) for candidate in self.candidates]
        steps = [f"  {i}. {step}" for i, step in enumerate(self.chosen.steps, 1)] or ["  nothing is sent"]
        return "\n".join(
            [*head, text_table(header, rows), f"chosen: {self.chosen.name or 'whole'}, {self.why}", *steps]
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What `explain` found: one explanation for each operator that was called."""

    operators: tuple[Explanation, ...]

    @property
    def chosen(self) -> Candidate:
        """What was chosen for the first operator."""
        return self.operators[0].chosen

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The candidates of the first operator, from cheapest to dearest."""
        return self.operators[0].candidates

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps([asdict(operator) for operator in self.operators])

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.operators))


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Run `function(*args, **kwargs)` and explain each operator on distributed tensors that it called.

    On a pure `Mesh`, with local tensors on the meta device, everything is planned and nothing is sent or computed.
    """
    decisions: list[Decision] = []
    depth = [0]

    @contextmanager
    def record(decision: Decision) -> Iterator[None]:
        if not depth[0]:
            decisions.append(decision)
        depth[0] += 1
        try:
            yield
        finally:
            depth[0] -= 1

    with observing(record):
        function(*args, **kwargs)
    return Report(tuple(explanation(decision) for decision in decisions))


def explanation(decision: Decision) -> Explanation:
    """The candidates of one decision, priced again, and why the chosen one was taken."""
    operands = tuple(f"[{o.layout}] {tuple(o.shape)}" for o in decision.operands)
    if decision.rule is None or decision.strategy is None:
        moved = _moved(decision)
        why = "asked for" if decision.explicit else "no rule: every rank computes all of it"
        return Explanation(decision.op, operands, "", decision.topology.name, (moved,), moved, why)
    rule, outputs = decision.rule, decision.outputs
    found = sorted(
        strategies(rule, decision.operands, outputs, decision.topology, decision.wanted),
        key=lambda s: (s.seconds, s.moves),
    )
    candidates = {
        strategy: candidate(rule, strategy, decision.operands, outputs, decision.topology) for strategy in found
    }
    chosen = candidates.get(decision.strategy) or candidates[found[0]]
    why = _why(chosen, tuple(candidates.values()))
    return Explanation(
        decision.op, operands, str(rule), decision.topology.name, tuple(candidates.values()), chosen, why
    )


def candidate(
    rule: Rule,
    strategy: Strategy,
    operands: tuple[Operand, ...],
    outputs: tuple[tuple[Shape, int], ...],
    topology: Topology,
) -> Candidate:
    """One strategy with what it moves and holds."""
    moves = [
        (plan(o.layout, layout, o.shape, o.itemsize, topology), o.itemsize)
        for o, layout in zip(operands, strategy.inputs, strict=True)
    ]
    ends = [
        (plan(layout, end, shape, itemsize, topology), itemsize)
        for (shape, itemsize), layout, end in zip(outputs, strategy.outputs, strategy.ends, strict=True)
    ]
    nbytes = sum(moved.busiest() * itemsize for moved, itemsize in (*moves, *ends))
    bound = product_bound(rule, operands, outputs)
    return Candidate(
        _name(strategy.rows, operands[0].layout.mesh.names),
        str(strategy),
        nbytes,
        sum(moved.messages() for moved, _ in (*moves, *ends)),
        _peak(strategy, operands, outputs),
        strategy.gather,
        strategy.compute,
        strategy.reduce,
        nbytes / bound if bound else None,
        tuple(step for moved, _ in (*moves, *ends) for step in _steps(moved)),
    )


def product_bound(rule: Rule, operands: tuple[Operand, ...], outputs: tuple[tuple[Shape, int], ...]) -> float | None:
    """Bytes that some rank must receive in a product `m k, k n -> m n` without batch, or None for another operator."""
    if len(rule.inputs) != 2 or len(rule.outputs) != 1 or any(len(dim) != 1 for term in rule.inputs for dim in term):
        return None
    a, b, c = ({dim[0] for dim in term if dim} for term in (*rule.inputs, *rule.outputs))
    if a & b & c or not a & b:
        return None
    sizes = factor_sizes(rule.inputs, [o.shape for o in operands], rule)
    m, k, n = (prod(sizes[f] for f in factors) for factors in (a - b, a & b, b - a))
    return matmul_lower_bound(m, k, n, operands[0].layout.mesh.size) * operands[0].itemsize


def _why(chosen: Candidate, candidates: tuple[Candidate, ...]) -> str:
    if len(candidates) == 1:
        return "the only candidate"
    least = min(candidates, key=lambda c: c.bytes_moved)
    second = next(c for c in candidates if c is not chosen)
    text = f"the cheapest; {second.name or 'whole'} would take {_times(second.seconds, chosen.seconds)}"
    if least.bytes_moved < chosen.bytes_moved:
        text += f"; {least.name or 'whole'} would move fewer bytes, {human_bytes(least.bytes_moved)}, but take longer"
    return text


def _times(dearer: float, cheaper: float) -> str:
    return f"{dearer / cheaper:.2f}x as long" if cheaper else "longer"


def _name(rows: tuple[Row, ...], names: tuple[str, ...]) -> str:
    words = {axis: "pending" if isinstance(row, Pending) else row for axis, row in zip(names, rows, strict=True)}
    return " ".join(f"{axis}:{word}" for axis, word in words.items() if word is not None)


def _peak(strategy: Strategy, operands: tuple[Operand, ...], outputs: tuple[tuple[Shape, int], ...]) -> int:
    """Bytes that the first rank holds at once: operands as they lie, moved copies, outputs."""
    total = 0
    for operand, layout in zip(operands, strategy.inputs, strict=True):
        held = operand.layout.local_numel(operand.shape)
        copied = 0 if layout == operand.layout else layout.local_numel(operand.shape)
        total += (held + copied) * operand.itemsize
    return total + sum(
        layout.local_numel(shape) * itemsize
        for (shape, itemsize), layout in zip(outputs, strategy.outputs, strict=True)
    )


def _moved(decision: Decision) -> Candidate:
    pairs = list(zip(decision.plans, decision.operands, strict=True))
    nbytes = sum(moved.busiest() * operand.itemsize for moved, operand in pairs)
    peak = sum((p.src.local_numel(p.shape) + p.dst.local_numel(p.shape)) * o.itemsize for p, o in pairs)
    layouts = ", ".join(f"{moved.src} -> {moved.dst}" for moved, _ in pairs)
    seconds = sum(moved.seconds for moved, _ in pairs)
    messages = sum(moved.messages() for moved, _ in pairs)
    steps = tuple(step for moved, _ in pairs for step in _steps(moved))
    return Candidate(decision.op, layouts, nbytes, messages, peak, seconds, 0.0, 0.0, None, steps)


def _steps(moved: Plan) -> Iterator[str]:
    for step, layout in zip(moved.steps, moved.layouts(), strict=True):
        yield "  ".join(describe(step, layout))


def _cells(found: Candidate, is_chosen: bool) -> list[str]:
    seconds = (found.gather_seconds, found.compute_seconds, found.reduce_seconds)
    bound = "" if found.bound_ratio is None else f"{found.bound_ratio:.2f}"
    return [
        "*" if is_chosen else "",
        found.name or "whole",
        found.placements,
        human_bytes(found.bytes_moved),
        str(found.messages),
        human_bytes(found.peak_bytes),
        *(f"{s * 1e6:.1f}" for s in seconds),
        bound,
    ]
