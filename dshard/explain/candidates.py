"""Bytes, messages and memory of candidates, from their redistributions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from dshard.explain.report_values import Candidate
from dshard.layout import Layout, Shape
from dshard.placements import Shard
from dshard.redistribute import Plan, describe, plan
from dshard.reshard import ReshardPlan
from dshard.rules.expand import Operand, Row
from dshard.rules.matmul_bound import matmul_lower_bound
from dshard.rules.rule import PassThrough, Rule, factor_sizes
from dshard.rules.strategy import Strategy
from dshard.topology import Topology

Outputs = tuple[tuple[Shape, int], ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """A redistribution with the busiest rank's bytes and messages, and the first rank's bytes before and after."""

    plan: Plan
    nbytes: int
    messages: int
    before: int
    after: int
    steps: tuple[str, ...]

    @property
    def peak(self) -> int:
        """Bytes of source and result together, or of the source where nothing moves."""
        return self.before + (self.after if self.plan.src != self.plan.dst else 0)


@lru_cache(maxsize=8192)
def moved(src: Layout, dst: Layout, shape: Shape, itemsize: int, topology: Topology) -> Moved:
    """The cheapest redistribution from `src` to `dst`, with its figures."""
    return figures_of(plan(src, dst, shape, itemsize, topology), itemsize)


def figures_of(redistribution: Plan, itemsize: int) -> Moved:
    """The figures of a plan: bytes received, messages, bytes held."""
    return Moved(
        redistribution,
        redistribution.busiest() * itemsize,
        redistribution.messages(),
        redistribution.src.local_numel(redistribution.shape) * itemsize,
        redistribution.dst.local_numel(redistribution.shape) * itemsize,
        tuple(_steps(redistribution)),
    )


def candidate(
    rule: Rule, strategy: Strategy, operands: tuple[Operand, ...], outputs: Outputs, topology: Topology
) -> Candidate:
    """One strategy with its bytes, messages and memory; outputs that it leaves partial are completed."""
    moves = [
        moved(o.layout, layout, o.shape, o.itemsize, topology)
        for o, layout in zip(operands, strategy.inputs, strict=True)
    ]
    ends = [
        moved(layout, end, shape, itemsize, topology)
        for (shape, itemsize), layout, end in zip(outputs, strategy.outputs, strategy.ends, strict=True)
    ]
    return combined(
        name_of(strategy.rows, operands[0].layout.mesh.names),
        str(strategy),
        (strategy.gather, strategy.compute, strategy.reduce, strategy.backward),
        moves,
        ends,
        product_bound(rule, operands, outputs),
        once((*(move.plan.src for move in moves), *(move.plan.dst for move in ends))),
    )


def combined(
    name: str,
    placements: str,
    seconds: tuple[float, float, float, float],
    moves: Sequence[Moved],
    ends: Sequence[Moved],
    bound: float | None,
    one_copy: bool,
) -> Candidate:
    """A candidate that redistributes its operands before the local work, and its outputs after it."""
    every = (*moves, *ends)
    nbytes = sum(move.nbytes for move in every)
    return Candidate(
        name,
        placements,
        nbytes,
        sum(move.messages for move in every),
        sum(move.peak for move in every),
        *seconds,
        nbytes / bound if bound else None,
        one_copy,
        tuple(step for move in every for step in move.steps),
    )


def crossing_candidate(reshard: ReshardPlan) -> Candidate:
    """A plan to another mesh; bytes and messages are those of the busiest rank."""
    messages = dict.fromkeys(reshard.ranks, 0)
    for chain in reshard.chains:
        for _, receiver in chain.hops:
            messages[receiver] += chain.chunks
    around = [figures_of(plan, reshard.itemsize) for plan in (reshard.first, reshard.last) if plan is not None]
    held = (reshard.src.local_numel(reshard.shape) + reshard.dst.local_numel(reshard.shape)) * reshard.itemsize
    return Candidate(
        "reshard",
        f"{reshard.src} -> {reshard.dst}",
        max(map(reshard.received, reshard.ranks)) * reshard.itemsize + sum(move.nbytes for move in around),
        max(messages.values()) + sum(move.messages for move in around),
        held + sum(move.after for move in around),
        reshard.seconds,
        0.0,
        0.0,
        0.0,
        None,
        False,
        tuple(reshard.steps()),
    )


def product_bound(rule: Rule, operands: Sequence[Operand], outputs: Outputs) -> float | None:
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
    """The name of a candidate: what each mesh axis does; "whole" where none shards the work."""
    words = {axis: "pending" if isinstance(row, PassThrough) else row for axis, row in zip(names, rows, strict=True)}
    return " ".join(f"{axis}:{word}" for axis, word in words.items() if word is not None) or "whole"


def once(layouts: Iterable[Layout]) -> bool:
    """Whether tensors of these layouts have each element on one rank alone."""
    return all(
        isinstance(placement, Shard) or n == 1
        for layout in layouts
        for placement, n in zip(layout.placements, layout.mesh.shape, strict=True)
    )


def _steps(redistribution: Plan) -> Iterator[str]:
    for step, layout in zip(redistribution.steps, redistribution.layouts(), strict=True):
        yield "  ".join(describe(step, layout))
