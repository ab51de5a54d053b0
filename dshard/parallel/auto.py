"""The cheapest plan for a model: layouts of all its tensors chosen together, beside strategies by name.

The cheapest layout of one operator may lead to an expensive one for the next. `dshard.planning` chooses the layouts of
a step together, by prices of its calls and of the moves between them. The plans that it makes are traced as they run,
and so is each strategy by name that may be as cheap: the least that any plan with its parameters takes by the same
prices says which may. So what is taken is the cheapest of all that were traced.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from math import inf, prod, sqrt
from time import perf_counter

from dshard.comm import plain
from dshard.core.context import planning_context
from dshard.errors import StrategyError
from dshard.layout import layout_of
from dshard.mesh import Mesh
from dshard.parallel.plan_values import Cost, Plan, PlanOptions
from dshard.parallel.roles import Roles
from dshard.parallel.strategies import STRATEGIES, axes_of, fitted_roles, lay_out
from dshard.parallel.whole_plan import as_plan
from dshard.planning.plan_step import plan_step
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_tables import StepTables, Weights
from dshard.routing import Routing
from dshard.tables import human_bytes
from dshard.torch_private import disable_modes
from dshard.validate import as_number, check_type

PATIENCE = 1.0
"""Seconds of a search that need no sign of life."""
WAITED = Weights(beside=1.0)
"""Moves of parameters count in full, as if nothing ran beside work."""
BESIDE = Weights(beside=0.3)
"""Moves of parameters mostly run beside work: what remains are those of the first and last blocks."""
MARGIN = 1.05
"""A strategy by name may be cheaper than its least by the prices of the planner says, by this factor."""
PASSES = 4
"""Eliminations for the lower bound of a strategy by name."""
NAMED = 8
"""The most strategies by name that are traced beside plans that choose all layouts together."""
ALIKE = 2
"""How many strategies that store parameters alike are tried before others."""
CHEAP, HALVED = 256.0, 3
"""A byte is tried from this part of the price that makes memory as dear as time, to as many times it; then between."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Request the cheapest plan in which a rank holds at most `memory` bytes, as the plan reports them.

    Layers of experts are priced for tokens that spread as `routing` says: evenly, where it is None.
    """

    memory: int | None = None
    routing: Routing | None = None

    def __post_init__(self) -> None:
        if self.routing is not None:
            check_type(self.routing, Routing, "routing", "give a dshard.Routing, such as Routing.zipf(1.0)")
        if self.memory is not None:
            as_number(self.memory, "memory", StrategyError)

    def allows(self, plan: Plan) -> bool:
        """Whether a priced plan is within the limit."""
        return self.memory is None or plan.cost.memory.total <= self.memory


@plain()
@disable_modes()
def cheapest(
    mesh: Mesh,
    roles: Roles,
    auto: Auto,
    options: PlanOptions,
    price: Callable[[Plan], Cost],
    graph: StepGraph | None = None,
) -> Plan:
    """The plan of the fewest seconds, by `price`, that fits in memory.

    `graph` is that of the model's step; without one only strategies by name are considered. A mesh of one axis is also
    unfolded into two axes in every way; other meshes are not.
    """
    shows = _progress()
    plans: list[Plan] = []

    def priced(plan: Plan) -> Plan:
        plan = options.of(plan)
        shows(plan.strategy)
        plans.append(replace(plan, cost=price(plan)))
        return plans[-1]

    named: list[tuple[int, float, Plan]] = []
    for unfolded in unfoldings(mesh):
        tables = None if graph is None else StepTables(graph, unfolded, planning_context().topology_of(unfolded))
        if tables is not None:
            _add_planned(tables, auto, priced)
        alike = Counter[str]()  # plans that store parameters alike, whose least is the same
        for plan in uniform(roles, unfolded):
            stored = str(sorted(plan.parameters.items()))
            named.append((alike[stored] // ALIKE, 0.0 if tables is None else least_of(tables, plan), plan))
            alike[stored] += 1
    for tried, (_, least, plan) in enumerate(sorted(named, key=lambda each: each[:2])):
        best = min([each.cost.seconds for each in plans if auto.allows(each)], default=inf)
        if best < inf and graph is not None and tried >= NAMED:
            break
        if least <= MARGIN * best:
            priced(plan)
    shows("")
    fitting = [plan for plan in plans if auto.allows(plan)]
    if not fitting:
        smallest = min(plans, key=lambda plan: plan.cost.memory.total)
        raise StrategyError(
            f"no plan on {mesh.size} ranks holds at most {human_bytes(auto.memory or 0)}: {smallest.strategy!r} on "
            f"({smallest.mesh}) needs the least, {human_bytes(smallest.cost.memory.total)}; "
            "use more ranks or a smaller batch"
        )
    return min(fitting, key=lambda plan: plan.cost.seconds)


def _add_planned(tables: StepTables, auto: Auto, priced: Callable[[Plan], Plan]) -> None:
    """Price plans that choose all layouts together, with bytes as dear as it takes to keep the limit of memory."""
    known: list[tuple[Plan, Plan]] = []

    def planned(weights: Weights) -> Plan:
        chosen = plan_step(tables, weights)
        made = as_plan(tables.graph, chosen, tables.mesh)
        for alike, plan in known:
            if alike == made:
                return plan
        known.append((made, priced(replace(made, certificate=chosen.certificate))))
        return known[-1][1]

    planned(BESIDE)
    plan = planned(WAITED)
    if auto.allows(plan):
        return
    parameters = plan.cost.memory.parameters + plan.cost.memory.optimizer
    low = high = plan.cost.seconds / max(1, parameters) / CHEAP
    while not auto.allows(planned(WAITED._replace(memory=high))):
        if high > plan.cost.seconds / max(1, parameters) * CHEAP:
            return
        low, high = high, high * 4
    for _ in range(HALVED if low < high else 0):
        middle = sqrt(low * high)
        low, high = (low, middle) if auto.allows(planned(WAITED._replace(memory=middle))) else (middle, high)


def least_of(tables: StepTables, plan: Plan) -> float:
    """A lower bound on the weighted seconds of plans that store parameters as `plan` does, mostly moved beside work."""
    ndims = {value.name: len(value.shape) for value in tables.graph.parameters()}
    stored = {name: layout_of(tables.mesh, plan.parameters[name], ndim) for name, ndim in ndims.items()}
    return plan_step(tables.pinned(stored), BESIDE, passes=PASSES).bound


def _progress() -> Callable[[str], None]:
    """A function that tells the terminal of rank 0 what is priced, once the search takes longer; "" ends it."""
    begin, numbers = perf_counter(), count()
    is_shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"

    def show(strategy: str) -> None:
        done = next(numbers)
        if is_shown and perf_counter() - begin > PATIENCE:
            text = f"auto: {done} plans priced, {strategy[:60]}" if strategy else ""
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    return show


def unfoldings(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh itself, and if it has one axis, every mesh in which that axis is two.

    >>> [str(mesh) for mesh in unfoldings(Mesh((4,), ("x",)))]
    ['x=4', 'x0=2 x1=2']
    """
    yield mesh
    if mesh.ndim == 1:
        name, n = mesh.names[0], mesh.size
        for outer in range(2, n):
            if n % outer == 0:
                yield mesh.unfolded(name, {f"{name}0": outer, f"{name}1": n // outer})


def names(axes: int, experts: bool = False) -> Iterator[str]:
    """Names of all combinations of strategies that use `axes` mesh axes, of those for experts if there are `experts`.

    >>> list(names(1))
    ['data', 'fsdp', 'megatron', 'megatron-sp', 'context', 'ulysses']
    """
    for name, parts in STRATEGIES.items():
        if not experts and any(part.experts for part in parts):
            continue
        if len(parts) == axes:
            yield name
        elif len(parts) < axes:
            yield from (f"{name} x {rest}" for rest in names(axes - len(parts), experts))


def uniform(roles: Roles, mesh: Mesh) -> Iterator[Plan]:
    """The plans in which all blocks follow one strategy, without strategies that the model's heads do not allow.

    Sequences are sharded only if rows do not divide among the ranks: sharded rows send less, as attention then moves
    nothing, and the rest is the same.
    """
    for name in names(mesh.ndim, roles.has_experts):
        axes = axes_of(name, mesh)
        of_tokens = [size for axis, size in zip(axes, mesh.shape, strict=True) if axis.batch or axis.sequence]
        if any(axis.sequence for axis in axes) and roles.rows % prod(of_tokens) == 0:
            continue
        try:
            fitting = fitted_roles(roles, axes, mesh)
        except StrategyError:
            continue
        yield lay_out(fitting, name, axes, mesh)
