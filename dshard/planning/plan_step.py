"""The cheapest layouts of all tensors of a step together, and a bound that says how far from it they may be.

The least weighted sum of tables of bounds is a lower bound. The moves that its choice makes are priced exactly, which
makes that choice an upper bound, and the tables a little less wrong; candidates that no choice up to the upper bound
has are dropped; and so on, until both bounds agree. At each moment there are the best choice so far and the bound.

Design: docs/design/0029-planning-the-whole.md
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from dshard.layout import Layout
from dshard.planning.call_candidates import CallCandidate
from dshard.planning.deadline import ENDLESS, Deadline, TimeIsOver
from dshard.planning.eliminate import LIMIT, EliminationOrder, Solution, elimination_order, solve
from dshard.planning.shifted_costs import ShiftedCosts, Spread
from dshard.planning.step_tables import Parts, StepTables, Weights
from dshard.planning.uncollected import uncollected
from dshard.torch_private import no_functions

EVEN = Weights()
"""All seconds count, and no bytes."""
CLOSE = 1e-9
"""Bounds that differ by this part of themselves are equal."""
QUICK, SLOW = 0.5, 0.01
"""Costs are shifted again where that took more than this part of what is between the bounds: the first, at first; and
at last, before tables are larger where they are cut."""
SMALLEST, LARGEST = 1_200_000, 8 * LIMIT
"""The most entries of a table at first, and where smaller ones tell no more."""
GROWTH, MOST = 4, 0.7
"""By how much tables may be larger, or shifts slower, where a pass left more than this part of what was between the
bounds."""


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
        search = _Search(tables, weights, most, passes, [torch.arange(len(domain)) for domain in tables.domains])
        with suppress(TimeIsOver):
            _narrow(search, deadline)
        calls = [tables.domains[tables.domain_of[call.number]][search.best[call.number]] for call in tables.graph.calls]
        stored, bound = tables.stored(search.best, weights), min(search.bound, most)  # those above were dropped
    return StepPlan(tuple(calls), stored, weights, search.parts, bound, search.prices, search.count)  # type: ignore[arg-type]


@dataclass(slots=True)
class _Search:
    """The candidates of each domain that are `alive`, a lower bound, and the best choice so far.

    `most` is what choices that are looked for take at most, `prices` the number of moves of choices that were priced,
    `count` that of bounds so far, of at most so many `passes`.
    """

    tables: StepTables
    weights: Weights
    most: float
    passes: int
    alive: list[Tensor]
    best: tuple[int, ...] = ()
    parts: Parts = field(default_factory=Parts)
    bound: float = 0.0
    prices: int = 0
    count: int = 0

    def sizes(self) -> list[int]:
        """The number of values of each variable."""
        return [len(self.alive[domain]) for domain in self.tables.domain_of]

    def compact(self) -> dict[Hashable, Spread]:
        """The tables of the candidates that are alive, for shifts."""
        return self.tables.compact(self.weights, self.alive)

    def price(self, found: Sequence[int]) -> int:
        """Price a choice exactly, of candidates that are alive; how many moves were not before."""
        choice = tuple([int(self.alive[d][i]) for d, i in zip(self.tables.domain_of, found, strict=True)])
        parts, new = self.tables.price(choice, self.weights)
        self.prices += new
        if not self.best or self.weights.of(parts) < self.weights.of(self.parts):
            self.best, self.parts, self.most = choice, parts, min(self.most, self.weights.of(parts))
        return new

    def is_open(self) -> bool:
        """Whether a choice that is looked for may be cheaper, and there may be another pass."""
        return not self.best or (self.most - self.bound > CLOSE * self.most and self.count < self.passes)

    def is_over(self, bound: float) -> bool:
        """Whether the bound of a pass was the last one."""
        self.bound, self.count = max(self.bound, bound), self.count + 1
        return not self.is_open()

    def drop(self, solution: Solution | ShiftedCosts, bound: float, deadline: Deadline) -> int:
        """Drop candidates that no choice that is looked for has; how many are gone."""
        excess: dict[int, Tensor] = {}
        for variable, own in solution.excess(deadline).items():
            domain = self.tables.domain_of[variable]
            excess[domain] = torch.minimum(excess[domain], own) if domain in excess else own
        kept = {domain: bound + own <= self.most * (1 + CLOSE) for domain, own in excess.items()}
        if not all(each.any() for each in kept.values()):  # by what was rounded, even the best choice has too much
            self.bound = self.most
            return 0
        before = sum(map(len, self.alive))
        for domain, each in kept.items():
            self.alive[domain] = self.alive[domain][each]
        return before - sum(map(len, self.alive))


def _narrow(search: _Search, deadline: Deadline) -> None:
    """Bring the bounds together by elimination of costs that are shifted before, until no table is cut."""
    costs = ShiftedCosts(len(search.tables.domain_of), search.tables.uses, search.compact())
    limit, quick, gap = SMALLEST, QUICK, inf
    order: EliminationOrder | None = None  # made after shifts alone: it takes as long as they, and they drop more
    while search.is_open():
        until = deadline if search.best else ENDLESS
        until.check()
        if order is None or not order.is_exact:
            if _shift(search, costs, quick, until):
                return
            order = elimination_order(search.sizes(), costs.uses, limit)
        solution = solve(order, costs.shared(), until)
        new = search.price(solution.choice)
        if search.is_over(solution.bound):
            return
        dropped = search.drop(solution, solution.bound, deadline)
        del solution  # with its tables, before the next one has its own
        if not new and not dropped and (order.is_exact or limit >= LARGEST):
            search.passes = search.count
            return
        if not order.is_exact and search.most - search.bound > MOST * gap:
            quick, limit = (quick / GROWTH, limit) if quick > SLOW else (quick, min(GROWTH * limit, LARGEST))
        gap = search.most - search.bound
        costs.replace(search.compact())


def _shift(search: _Search, costs: ShiftedCosts, quick: float, deadline: Deadline) -> bool:
    """Shift costs while that is quick, and drop candidates; whether the bound is the last one."""
    rise, bound = inf, costs.bound
    while rise == inf or rise > quick * (search.most - bound) > 0:
        costs.improve(deadline)
        raised = costs.bound
        rise, bound = raised - bound, raised
    new = search.price(costs.choice)
    if search.is_over(bound):
        return True
    if search.drop(costs, bound, deadline) or new:
        costs.replace(search.compact())
    return False
