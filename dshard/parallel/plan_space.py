"""All plans of a traced step on a mesh, from which plans with other layouts are chosen by the planner's prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log10
from time import process_time
from typing import TypeAlias

from dshard.errors import StrategyError
from dshard.layout import Layout, layout_of
from dshard.parallel.plan_blocks import block_of, folded
from dshard.parallel.plan_limits import parameters_like, unknown_name, with_pins
from dshard.parallel.plan_values import ModelPlan, Pins, Placements, PlanPart, RunnerUp, Search
from dshard.parallel.whole_plan import as_plan
from dshard.planning.plan_step import CLOSE, StepPlan, plan_step
from dshard.planning.step_tables import StepTables, Weights

Named: TypeAlias = Mapping[str, Mapping[str, Placements]]
"""Strategies by name, with the placements that each gives parameters."""
SOON = 0.3
"""Seconds of the processor after which no other alternative is tried."""
QUICK = 4
"""Eliminations for what the alternatives of a plan take, and the alternatives of a block that are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedSpace:
    """The plans of a traced step, by the weights by which one of them was chosen, with the weighted sum `total`.

    That is None of a strategy by name: it is found if need be, as the least of plans that store parameters as it does.
    `own` are the tables by which the plan was found, perhaps of fewer plans than `tables`. `names` has the first name
    of each parameter by all of its names.
    """

    tables: StepTables
    own: StepTables
    weights: Weights
    total: float | None
    names: Mapping[str, str]
    named: Named

    def edited(self, plan: ModelPlan, pins: Pins) -> ModelPlan:
        """The cheapest plan of the step with these layouts, and those that were pinned before."""
        begin, own = process_time(), self.tables
        limits = replace(with_pins(own.limits, own.graph, own.mesh, pins, self.names), alike=())
        if (limits.read, limits.alike) != (own.limits.read, own.limits.alike):  # which candidates calls have
            tables = StepTables(own.graph, own.mesh, own.topology, limits)
        else:
            tables = own.pinned(limits.parameters)
        chosen = plan_step(tables, self.weights)
        space = replace(self, tables=tables, own=tables, total=chosen.total)
        spent = process_time() - begin
        return self._made(plan, chosen, Search(chosen.seconds, chosen.least(), assignments(tables), spent, space=space))

    def runner_up(self, plan: ModelPlan, pattern: str) -> RunnerUp:
        """The cheapest plan in which the parameters that match lie otherwise than in `plan`."""
        own, present = self.tables, stored(self.tables, plan)
        matching = [name for name in parameters_like(pattern, self.names) if name in present]
        if not matching:
            raise unknown_name("runner_up", pattern, present)
        limits = {name: own.limits.stored(name)._replace(never=present[name]) for name in matching}
        pinned = [name for name in matching if limits[name].only is not None]
        if pinned:
            raise StrategyError(f"runner_up: {pinned[0]!r} is pinned, so it lies nowhere else: ask without that")
        chosen = plan_step(own.pinned(limits), self.weights)
        return RunnerUp(self._made(plan, chosen, None), chosen.total - self._total(plan))

    def as_named(self, plan: ModelPlan, parameters: Sequence[str]) -> tuple[str, float] | None:
        """The cheapest strategy by name for these parameters that is not theirs, and how many seconds more it takes."""
        present = {name: layout for name, layout in stored(self.tables, plan).items() if name in parameters}
        ways = dict[tuple[Layout, ...], str]()
        for name, placements in self.named.items():
            ways.setdefault(tuple([Layout(each.mesh, placements[p]) for p, each in present.items()]), name)
        ways.pop(tuple(present.values()), None)
        sums, begin = list[tuple[str, float]](), process_time()
        total = self._total(plan) if ways and present else 0.0
        for layouts, name in [*ways.items()][:QUICK] if present else ():
            pinned = self.own.pinned(dict(zip(present, layouts, strict=True)))
            sums.append((name, plan_step(pinned, self.weights, passes=QUICK).total - total))
            if sums[-1][1] < -CLOSE * total or process_time() - begin > SOON:
                break
        best = min(sums, key=lambda each: each[1], default=None)
        return None if best is None or best[1] < -CLOSE * total else best

    def _total(self, plan: ModelPlan) -> float:
        if self.total is not None:
            return self.total
        return plan_step(self.tables.pinned(stored(self.tables, plan)), self.weights, passes=QUICK).total

    def _made(self, plan: ModelPlan, chosen: StepPlan, search: Search | None) -> ModelPlan:
        made = as_plan(self.tables.graph, chosen, self.tables.mesh)
        return replace(made, search=search, precision=plan.precision, groups=plan.groups, ndim=plan.ndim)


def assignments(tables: StepTables) -> float:
    """The decimal logarithm of the number of choices of a candidate for each variable."""
    return sum([log10(len(tables.domains[domain])) for domain in tables.domain_of])


def stored(tables: StepTables, plan: ModelPlan) -> dict[str, Layout]:
    """The layouts of a plan's parameters that some call reads."""
    values = tables.graph.parameters()
    return {value.name: layout_of(tables.mesh, plan.parameters[value.name], len(value.shape)) for value in values}


def named_parts(plan: ModelPlan, named: Named) -> tuple[PlanPart, ...]:
    """For the blocks of a model, folded, the strategies by name whose layouts their modules have.

    The fewest that do are named, the first of those that agree; modules that lie as in none are "planned".
    """
    blocks = dict[str, dict[str, Placements]]()
    for name, placements in plan.parameters.items():
        block = block_of(name)
        module = f"{block.path}.{block.number}".lstrip(".") if block else name.rpartition(".")[0]
        blocks.setdefault(module, {})[name] = placements
    keys = {module: tuple(own.values()) for module, own in blocks.items()}
    return tuple([PlanPart(tuple(own), _named_part(blocks[own[0]], named)) for own in folded(keys).values()])


def _named_part(own: Mapping[str, Placements], named: Named) -> str:
    """The names for one block, by its modules if it has several."""
    left, names = dict(own), dict[str, list[str]]()
    while left:
        agree = {name: [p for p, placements in left.items() if laid[p] == placements] for name, laid in named.items()}
        best = max(agree, key=lambda name: len(agree[name]), default="")
        if not best or not agree[best]:
            names["planned"] = [*left]
            break
        names[best] = agree[best]
        left = {name: placements for name, placements in left.items() if name not in names[best]}
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{name}: {' '.join(_short(own))}" for name, own in names.items())


def _short(parameters: Sequence[str]) -> dict[str, None]:
    """The names of parameters' modules within their block."""
    rests = [(block.rest if block else name) for name in parameters for block in [block_of(name)]]
    return dict.fromkeys([rest.rpartition(".")[0] or rest for rest in rests])
