"""Strategies of an operator: the layouts in which it runs, with their price, and what may be required of them."""

from __future__ import annotations

from dataclasses import dataclass

from dshard.cost import PlannedCollective
from dshard.layout import Layout
from dshard.placements import Partial, Replicate
from dshard.rules.expand import Allowed, Order, Row


@dataclass(frozen=True, slots=True)
class Constraints:
    """Requirements on a strategy beyond its operands: layouts, gradients, and the rows allowed.

    `keep`: the layout in which the first operand and output should stay. `result`: the layout required of the first
    output. `gradients`: which operands get a gradient, so that the backward pass counts; `kept`: of which the
    redistributed copy is kept for it. `among`: the rows that each mesh axis may have, in alternatives. `reduced`: for
    each mesh axis the placement of a sum that a matmul leaves partial there: P, R, or sharded over the dim of loop m or
    n. `returned`: the layout whose shards the first output takes again, where the strategy has others or a sum there.
    """

    keep: Layout | None = None
    result: Layout | None = None
    gradients: tuple[bool, ...] = ()
    kept: tuple[bool, ...] = ()
    among: tuple[Allowed, ...] | None = None
    reduced: tuple[str, ...] | None = None
    returned: Layout | None = None


ANY = Constraints()


@dataclass(frozen=True, slots=True)
class Strategy:
    """The layouts in which an operator runs locally, the row of each mesh axis, and the priced seconds.

    `gather` seconds redistribute the operands, `compute` is the local work, `reduce` redistributes the outputs, partial
    ones among them, to `ends`; `backward` is all of the backward pass, where it counts. Of a reduction that the
    operator begins only the bytes are charged, for it may be completed together with others, except for matmuls; one
    that is merely passed on is charged in full, for every use would complete it anew. A partial output is charged the
    cheapest reduction, and an output sharded along a mesh axis on which all operands are replicated is charged its
    gather: there, work is sharded only where that pays by itself. `gradients` are the layouts in which the local
    backward pass of an operator that is linear in what it reduces gives the operands' gradients.

    An alternative to the rule has a `name`, and sends `exchanges` while it runs, which are part of `gather`.
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

    @property
    def seconds(self) -> float:
        """The total: gather, compute, reduce and backward."""
        return self.gather + self.compute + self.reduce + self.backward

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    def __hash__(self) -> int:
        return hash((self.inputs, self.outputs, self.rows))


def completed_layout(layout: Layout) -> Layout:
    """The layout with every partial placement replaced by replicated."""
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements)
    return Layout(layout.mesh, placements, layout.order)
