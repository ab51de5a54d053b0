"""Strategies of an operator: the layouts in which it runs, with their price, and constraints on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dshard.caches import cached
from dshard.cost import PlannedCollective
from dshard.layout import Layout, Shape
from dshard.placements import Partial, Replicate
from dshard.rules.expand import Allowed, Operand, Order, Row
from dshard.rules.rule import Rule
from dshard.topology import Topology


@dataclass(frozen=True, slots=True)
class Constraints:
    """Requirements on a strategy beyond its operands: layouts, gradients, and the rows allowed.

    `keep`: the layout in which the first operand and output should stay. `result`: the required layout of the first
    output. `gradients`: whether each operand gets a gradient, so that the backward pass counts; `kept`: whether its
    redistributed copy is kept for that. `among`: alternatives, each with the rows that every mesh axis may have.
    `reduced`: for each mesh axis the placement of a sum that a matmul leaves partial there: P, R, or sharded over the
    dim of loop m or n. `returned`: the layout whose shards the first output gets back if the strategy has others.
    `once`: the outputs are read once, so that an operand which is partial, where no other is sharded, stays so.
    """

    keep: Layout | None = None
    result: Layout | None = None
    gradients: tuple[bool, ...] = ()
    kept: tuple[bool, ...] = ()
    among: tuple[Allowed, ...] | None = None
    reduced: tuple[str, ...] | None = None
    returned: Layout | None = None
    once: bool = False


ANY = Constraints()


class Question(NamedTuple):
    """A choice of a strategy to make: rule, operands, the global shape and itemsize of each output, prices."""

    rule: Rule
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[Shape, int], ...]
    topology: Topology
    constraints: Constraints = ANY


@dataclass(frozen=True, slots=True)
class Strategy:
    """The layouts in which an operator runs locally, the row of each mesh axis, and the priced seconds.

    `gather` seconds redistribute the operands, `compute` is the local work, `reduce` redistributes the outputs to
    `ends`; `backward` is all of the backward pass, if it counts. A new reduction, except of a matmul, is charged only
    its bytes, as it may be completed together with others; a partial operand that passes through is charged in full,
    as every use would complete it anew: in each output, but for pieces of it, which may be completed together. A
    partial output is charged the cheapest reduction, and an output sharded along a mesh axis on which all operands are
    replicated is charged its gather: there, work is sharded only if that pays by itself. `gradients` are the layouts of
    the operands' gradients from the local backward pass of an operator that is linear in its reduction.

    An alternative to the rule has a `name`, and sends `exchanges` while it runs, which are part of `gather`. `held` are
    the bytes of a tensor that each rank holds while it computes.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    rows: tuple[Row, ...]
    gradients: tuple[Layout, ...]
    ends: tuple[Layout, ...]
    order: Order
    gather: float = 0.0
    compute: float = 0.0
    reduce: float = 0.0
    backward: float = 0.0
    moves: int = 0
    name: str = ""
    exchanges: tuple[PlannedCollective, ...] = ()
    held: int = 0

    @property
    def seconds(self) -> float:
        """The total: gather, compute, reduce and backward."""
        return self.gather + self.compute + self.reduce + self.backward

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    def __hash__(self) -> int:
        return hash((self.inputs, self.outputs, self.rows))


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The question to a chooser of strategies, and its answer: an alternative to the rule, or one of its strategies.

    `alternatives` are those to the rule that apply.
    """

    question: Question
    strategy: Strategy
    alternatives: tuple[Strategy, ...] = ()


@cached("layouts", 65536)
def completed_layout(layout: Layout) -> Layout:
    """The layout with every partial placement replaced by replicated."""
    if not layout.partial_axes():
        return layout
    placements = tuple([Replicate() if isinstance(p, Partial) else p for p in layout.placements])
    return Layout(layout.mesh, placements, layout.order)
