"""The cheapest layouts of all tensors of a step together, and a bound that says how far from it they may be.

The least weighted sum of tables of bounds is a lower bound. The moves that its choice makes are priced exactly, which
makes that choice an upper bound, and the tables a little less wrong; candidates that no choice up to the upper bound
has are dropped; and so on, until both bounds agree. At each moment there are the best choice so far and the bound.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from dshard.layout import Layout
from dshard.planning.call_candidates import CallCandidate
from dshard.planning.collector import uncollected
from dshard.planning.deadline import ENDLESS, Deadline, TimeIsOver
from dshard.planning.eliminate import LIMIT, EliminationOrder, Solution, elimination_order, solve
from dshard.planning.step_tables import Parts, StepTables, Weights
from dshard.torch_private import no_functions

EVEN = Weights()
"""All seconds count, and no bytes."""
CLOSE = 1e-9
"""Bounds that differ by this part of themselves are equal."""
SMALLEST, LARGEST = 1_200_000, 8 * LIMIT
"""The most entries of a table at first, and where smaller ones tell no more."""
GROWTH = 4
"""By this factor tables may be larger where a pass brought the bounds less than half as near to each other."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A candidate for each call, and the layout in which each parameter is stored, by the number of its value.

    `parts` are those of the choice; the sum by `weights` is at least `bound` for any choice. `prices` is how many moves
    were priced exactly, and `passes` the number of eliminations.
    """

    calls: tuple[CallCandidate, ...]
    parameters: dict[int, Layout]
    weights: Weights
    parts: Parts
    bound: float
    prices: int
    passes: int

    @property
    def total(self) -> float:
        """The weighted sum of the choice."""
        return self.weights.of(self.parts)

    @property
    def seconds(self) -> float:
        """The weighted sum without bytes."""
        return self.weights._replace(memory=0.0).of(self.parts)

    def least(self, held: float | None = None) -> float:
        """What any choice that holds at most `held` bytes takes: Lagrange's bound.

        By default one whose bytes cost no more than those of this choice.
        """
        return self.bound - (self.total - self.seconds if held is None else self.weights.memory * held)

    @property
    def certificate(self) -> float:
        """How many times the least possible seconds this choice takes at most: 1 if no other takes less.

        Where bytes have a price, it is compared with those that hold no more.
        """
        least = self.least()
        return self.seconds / least if least > 0 else 1.0 if self.seconds <= 0 else inf


def plan_step(
    tables: StepTables,
    weights: Weights = EVEN,
    *,
    deadline: Deadline = ENDLESS,
    passes: int = 100,
    most: float = inf,
) -> StepPlan:
    """The plan of the least weighted sum, or the best that is found by the deadline, or in so many passes.

    There is always a first pass, with small tables; the others are given up when the deadline comes.
    Plans whose sum is above `most` are not looked for: if there is no other, it is any, and the bound is `most`.
    """
    with uncollected(), no_functions():  # such as those that make tensors on another device
        return _planned(tables, weights, (deadline, passes), most)


def _planned(tables: StepTables, weights: Weights, limits: tuple[Deadline, int], most: float) -> StepPlan:
    (deadline, passes), limit = limits, SMALLEST
    alive = [torch.arange(len(domain)) for domain in tables.domains]
    bound, least, gap, best = 0.0, inf, inf, tuple[int, ...]()
    parts, prices, count = Parts(), 0, 0
    order: EliminationOrder | None = None
    ordered: tuple[list[int], int] = [], 0
    while True:
        try:
            until = deadline if best else ENDLESS
            until.check()
            sizes = [len(alive[domain]) for domain in tables.domain_of]
            if order is None or not (order.is_exact or ordered == (sizes, limit)):
                order, ordered = elimination_order(sizes, tables.uses, limit), (sizes, limit)
            solution = solve(order, tables.tables(weights, alive), until)
            bound, count = max(bound, solution.bound), count + 1
            choice = tuple([int(alive[d][i]) for d, i in zip(tables.domain_of, solution.choice, strict=True)])
            own, new = tables.price(choice, weights)
            prices += new
            if weights.of(own) < least:
                least, best, parts = weights.of(own), choice, own
            if bound > most or least - bound <= CLOSE * least or count >= passes:
                break
            dropped = _drop(tables, alive, solution, min(least, most), deadline)
            del solution  # with its tables, before the next one has its own
        except TimeIsOver:
            break
        if not new and not dropped and (order.is_exact or limit >= LARGEST):
            break
        if not order.is_exact and min(least, most) - bound > gap / 2:
            limit = min(GROWTH * limit, LARGEST)
        gap = min(least, most) - bound
    calls = [tables.domains[tables.domain_of[call.number]][best[call.number]] for call in tables.graph.calls]
    stored = tables.stored(best, weights)
    bound = min(bound, most)  # those above were dropped
    return StepPlan(tuple(calls), stored, weights, parts, bound, prices, count)  # type: ignore[arg-type]


def _drop(tables: StepTables, alive: list[Tensor], solution: Solution, least: float, deadline: Deadline) -> int:
    """Drop candidates that no choice with at most this sum has, price what the others may need; how many are gone."""
    excess: dict[int, Tensor] = {}
    for variable, own in solution.excess(deadline).items():
        domain = tables.domain_of[variable]
        excess[domain] = torch.minimum(excess[domain], own) if domain in excess else own
    tables.price_likely(alive, excess, least * (1 + CLOSE) - solution.bound, deadline)
    dropped = 0
    for domain, own in excess.items():
        kept = solution.bound + own <= least * (1 + CLOSE)
        dropped += len(kept) - int(kept.sum())
        alive[domain] = alive[domain][kept]
    return dropped
