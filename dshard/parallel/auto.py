"""The cheapest plan for a model: layouts of all its tensors chosen together, beside strategies by name.

The cheapest layout of one operator may lead to an expensive one for the next. `dshard.planning` chooses the layouts of
a step together, by prices of its calls and of the moves between them. The plans that it makes are traced as they run,
and so is each strategy by name that may be as cheap: the least that any plan with its parameters takes by the same
prices says which may. So what is taken is the cheapest of all that were traced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, permutations, product
from math import inf, prod, sqrt
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

from dshard.comm import plain
from dshard.core.context import planning_context
from dshard.errors import StrategyError
from dshard.layout import Layout, layout_of
from dshard.mesh import Mesh
from dshard.parallel.plan_blocks import folded
from dshard.parallel.plan_limits import check_pins, checked_words, limits_of, on_finer, refined_axes
from dshard.parallel.plan_space import TracedSpace, assignments, named_parts, stored
from dshard.parallel.plan_values import Cost, ModelPlan, Pins, PlanOptions, Search, Tried
from dshard.parallel.roles import Roles
from dshard.parallel.strategies import STRATEGIES, axes_of, fitted_roles, lay_out
from dshard.parallel.whole_plan import as_plan
from dshard.planning.call_candidates import AxisGroups
from dshard.planning.deadline import ENDLESS, Deadline, TimeIsOver
from dshard.planning.plan_step import StepPlan, plan_step
from dshard.planning.step_graph import StepGraph
from dshard.planning.step_limits import FREE, StepLimits
from dshard.planning.step_tables import MOMENTS, StepTables, Weights, local_bytes
from dshard.planning.uncollected import uncollected
from dshard.redistribute.axis_roles import step_terms
from dshard.routing import Routing
from dshard.tables import human_bytes
from dshard.topology import Topology
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
NAMED = 16
"""The most strategies by name that are traced beside plans that choose all layouts together."""
MOST = 32
"""The most plans of a search that are noted."""
AXES = 3
"""A mesh is unfolded into at most so many axes."""
GAIN = 1e-3
"""A finer mesh counts if it may save this part of the least by the prices of the planner on coarser ones."""
CHEAP, HALVED = 256.0, 3
"""A byte is tried from this part of the price that makes memory as dear as time, to as many times it; then between."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Request the cheapest plan in which a rank holds at most `memory` bytes, as the plan reports them.

    Layers of experts are priced for tokens that spread as `routing` says: evenly, where it is None. After `seconds` of
    the processor nothing new is tried; there is always a plan, with a bound. `pins` are layouts, in the notation in
    which they are printed or as placements, by names or patterns of parameters, and of modules, whose outputs are read
    so. `forbid` says for mesh axes what they may not shard: "batch", "sequence", "features" or "experts" in the work of
    operators, "parameters" where these are stored.

    >>> Auto(memory=80e9, pins={"head.weight": "x:S(0) y:R"}, forbid={"y": "sequence"}).forbid
    {'y': frozenset({'sequence'})}

    Raises:
        StrategyError: a limit that is no number, pins or words that are none.
    """

    memory: float | None = None
    routing: Routing | None = None
    seconds: float = 10.0
    pins: Pins = field(default_factory=dict)
    forbid: Mapping[str, str | Iterable[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.routing is not None:
            check_type(self.routing, Routing, "routing", "give a dshard.Routing, such as Routing.zipf(1.0)")
        if self.memory is not None:
            as_number(self.memory, "memory", StrategyError)
        as_number(self.seconds, "seconds", StrategyError, infinite=True)
        check_pins(self.pins)
        object.__setattr__(self, "forbid", checked_words(self.forbid))

    def allows(self, plan: ModelPlan) -> bool:
        """Whether a priced plan is within the limit of memory."""
        return self.memory is None or plan.cost.memory.total <= self.memory


class Priced(NamedTuple):
    """A plan with its cost; of one whose layouts were all chosen together, where and how that was done."""

    plan: ModelPlan
    tables: StepTables | None = None
    chosen: StepPlan | None = None


class PlanSearch:
    """A search for the cheapest plan, by `price`: what was priced so far, until the time is over."""

    def __init__(
        self, auto: Auto, options: PlanOptions, price: Callable[[ModelPlan], Cost], graph: StepGraph | None
    ) -> None:
        self.auto, self.options, self.trace, self.graph = auto, options, price, graph
        self.deadline = Deadline(auto.seconds)
        self.shows = _progress()
        self.priced: list[Priced] = []
        self.solved: list[tuple[tuple[Mesh, AxisGroups], StepPlan]] = []
        self.spaces: dict[Mesh, StepTables] = {}

    def is_over(self) -> bool:
        """Whether there is a plan, and no time for another one."""
        return bool(self.priced) and not self.deadline.left()

    def price(self, plan: ModelPlan, tables: StepTables | None = None, chosen: StepPlan | None = None) -> ModelPlan:
        """Price a plan, which is then one of the search."""
        plan = self.options.of(plan)
        self.shows(plan.strategy)
        plan = replace(plan, cost=self.trace(plan))
        self.priced.append(Priced(plan, tables, chosen))
        return plan

    def best(self) -> Priced | None:
        """The cheapest plan that is within the limit of memory."""
        fitting = [each for each in self.priced if self.auto.allows(each.plan)]
        return min(fitting, key=lambda each: each.plan.cost.seconds, default=None)

    def tables(self, graph: StepGraph, limits: StepLimits, mesh: Mesh, rows: int) -> Iterator[StepTables]:
        """The tables of the step on a mesh for which there is time, those of the fewest plans first.

        On the first mesh there are always some: without time for all plans, those of plans that use mesh axes alike.
        Where there are more than `AXES`, the plans of each two groups of axes come before all plans, whose best choice
        is hard to find; one group where there is time for nothing else, and a batch of so many `rows` divides among all
        ranks. Where there are limits, which may leave no such plan, these are always those of all plans.
        """
        topology = planning_context().topology_of(mesh)

        def tables(alike: AxisGroups, deadline: Deadline) -> StepTables:
            return StepTables(graph, mesh, topology, replace(limits, alike=alike), deadline)

        if self.solved or limits != FREE or mesh.ndim == 1:
            with suppress(TimeIsOver):
                yield tables((), self.deadline if self.solved else ENDLESS)
            return
        begin, pairs, made = self.deadline.spent(), _two_groups(mesh), False
        coarse = tables(pairs[0] if rows % mesh.size else (tuple(range(mesh.ndim)),), ENDLESS)
        of_all = (self.deadline.spent() - begin) * coarse.growth()
        every = [()] if of_all < self.deadline.left() else []
        with suppress(TimeIsOver):
            for alike in [*(pairs if mesh.ndim > AXES or not every else []), *every]:
                yield coarse if alike == coarse.limits.alike else tables(alike, self.deadline)
                made = True
        if not made:
            yield coarse

    def add_planned(self, tables: StepTables) -> None:
        """Price plans that choose all layouts together, with bytes as dear as it takes to keep the limit of memory."""
        known: list[tuple[ModelPlan, ModelPlan]] = []
        self.spaces[tables.mesh] = tables  # those of most plans are the last

        def planned(weights: Weights) -> ModelPlan | None:
            most = self.most(weights)
            chosen = plan_step(tables, weights, deadline=self.deadline, most=most)
            self.solved.append(((tables.mesh, tables.limits.alike), chosen))
            if chosen.total > most:  # a plan on a coarser mesh, which is one on this mesh, too, is as cheap
                return None
            made = as_plan(tables.graph, chosen, tables.mesh)
            for alike, plan in known:
                if alike == made:
                    return plan
            known.append((made, self.price(made, tables, chosen)))
            return known[-1][1]

        def fits(plan: ModelPlan | None) -> bool:
            return plan is None or self.auto.allows(plan)

        planned(BESIDE)
        if self.is_over():
            return
        plan = planned(WAITED)
        if plan is None or self.auto.allows(plan):
            return
        parameters = plan.cost.memory.parameters + plan.cost.memory.optimizer
        even = plan.cost.seconds / max(1, parameters)
        low = high = even / CHEAP
        saved = plan.cost.memory.saved_share
        while not fits(plan := planned(WAITED._replace(memory=high, saved=saved))):
            if self.is_over() or high > even * CHEAP:
                return
            low, high = high, high * 4
            saved = saved if plan is None else plan.cost.memory.saved_share
        for _ in range(HALVED if low < high else 0):
            if self.is_over():
                return
            middle = sqrt(low * high)
            own = planned(WAITED._replace(memory=middle, saved=saved))
            low, high = (low, middle) if fits(own) else (middle, high)

    def least(self, tables: StepTables, plan: ModelPlan, known: dict[tuple[Layout, ...], float]) -> float:
        """What a strategy by name takes at least, or a sum that is too dear, `known` by the layouts of parameters.

        That is the bound of plans that store parameters as it does, mostly moved beside work.
        """
        laid = tuple(stored(tables, plan).values())
        if laid not in known:
            best = self.best()
            most = inf if best is None else MARGIN * best.plan.cost.seconds
            pinned = tables.pinned(stored(tables, plan))
            known[laid] = plan_step(pinned, BESIDE, deadline=self.deadline, passes=PASSES, most=most).bound
        return known[laid]

    def add_named(self, named: Sequence[tuple[float, ModelPlan]], mesh: Mesh, most: float) -> None:
        """Price strategies by name, each with what it takes at least, that may be the cheapest: `most` or the first.

        What a strategy stores says little of what it sends, so those of all axes of `mesh` alike are the first; then
        those come that mix the cheapest of these.
        """
        known = {(each.strategy, each.mesh) for each, _, _ in self.priced}
        waiting = [each for each in named if (each[1].strategy, each[1].mesh) not in known]
        for tried in count(len(named) - len(waiting)):
            best = self.best()
            if self.is_over() or (best is not None and tried >= most):
                break
            if best is not None:
                waiting = [each for each in waiting if each[0] <= MARGIN * best.plan.cost.seconds]
            if not waiting:
                break
            of_alike = self._of_alike()
            ranks = [_promise(*each, mesh, of_alike) for each in waiting]
            self.price(waiting.pop(ranks.index(min(ranks)))[1])

    def _of_alike(self) -> dict[str, float]:
        """The seconds of strategies that are on all axes of their mesh, by the name of one."""
        found = dict[str, float]()
        for plan, _, _ in self.priced:
            own = {*plan.strategy.split(" x ")}
            if len(own) == 1:
                name = own.pop()
                found[name] = min(plan.cost.seconds, found.get(name, inf))
        return found

    def most(self, weights: Weights) -> float:
        """What a plan on a finer mesh must take less than, to count; no limit where memory has one."""
        totals = [chosen.total for _, chosen in self.solved if chosen.weights == weights]
        return inf if self.auto.memory is not None else min(totals, default=inf) * (1 - GAIN)

    def bound(self, weights: Weights, held: float) -> float:
        """What each plan that holds so many bytes takes at least, of all that were searched, by these weights."""
        bounds = dict[tuple[Mesh, AxisGroups], float]()
        for space, chosen in self.solved:
            if space[1] and not self.spaces[space[0]].limits.alike:  # its plans are among those of the other
                continue
            if chosen.weights.beside == weights.beside and (held or not chosen.weights.memory):
                bounds[space] = max(bounds.get(space, 0.0), chosen.least(held))
        return min(bounds.values(), default=0.0)

    def result(self, names: Mapping[str, str], named: Sequence[tuple[float, ModelPlan]]) -> ModelPlan:
        """The cheapest plan, with what is known of the others.

        `named` are strategies by name on all meshes, each with what it takes at least.

        Raises:
            StrategyError: none is within the limit of memory.
        """
        self.shows("")
        best = self.best()
        if best is None:
            raise self._none_fits()
        return self.certified(best, names, named)

    def certified(
        self, priced: Priced, names: Mapping[str, str], named: Sequence[tuple[float, ModelPlan]]
    ) -> ModelPlan:
        """A plan with what is known of the others: a bound, what was tried, and the space of its step."""
        (plan, own, chosen), tables = priced, self.spaces.get(priced.plan.mesh)
        if tables is None:
            return plan
        own = own or tables
        if tables.limits.alike:  # and those of other plans have other axes that are
            tables = own
        laid = {each.strategy: each.parameters for _, each in named if each.mesh == plan.mesh}
        weights, held = (BESIDE, 0.0) if chosen is None else (chosen.weights, chosen.parts.memory)
        return replace(
            plan,
            search=Search(
                plan.cost.seconds if chosen is None else chosen.seconds,
                self.bound(weights, held),
                assignments(tables),
                self.deadline.spent(),
                len({mesh for (mesh, _), _ in self.solved}),
                self._tried(named)[:MOST],
                named_parts(plan, laid),
                bool(tables.limits.alike),
                TracedSpace(tables, own, weights, None if chosen is None else chosen.total, names, laid),
            ),
        )

    def _tried(self, named: Sequence[tuple[float, ModelPlan]]) -> tuple[Tried, ...]:
        """What was priced, the fastest first, and then the bounds of strategies by name that were not."""
        traced = [Tried(p.strategy, str(p.mesh), p.cost.seconds) for p, _, _ in self.priced if self.auto.allows(p)]
        known = {(each.strategy, each.mesh) for each in traced}
        bounds = [Tried(p.strategy, str(p.mesh), least, is_bound=True) for least, p in named if least > 0]
        rest = [each for each in bounds if (each.strategy, each.mesh) not in known]
        return tuple([each for part in (traced, rest) for each in sorted(part, key=lambda each: each.seconds)])

    def _none_fits(self) -> StrategyError:
        """The error where no plan keeps the limit of memory: the least of any, and what takes most of that."""
        least = min(self.priced, key=lambda each: each.plan.cost.memory.total)
        plan, held = least.plan, ""
        if self.graph is not None:
            tensors = [f"{name} ({human_bytes(nbytes)})" for name, nbytes in largest_held(least, self.graph)]
            held = f", most of it for {', '.join(tensors)}"
        return StrategyError(
            f"no plan on {plan.mesh.size} ranks holds at most {human_bytes(self.auto.memory or 0)}: {plan.strategy!r} "
            f"on ({plan.mesh}) needs the least, {human_bytes(plan.cost.memory.total)}{held}; use more ranks or a "
            f"smaller batch{', or give up one of these' if held else ''}"
        )


def largest_held(priced: Priced, graph: StepGraph) -> list[tuple[str, int]]:
    """The three tensors, of blocks that are alike together, that take most bytes of a rank.

    Parameters have their gradients and moments with them; of modules the largest result counts.
    """
    plan, _, chosen = priced
    parameters = dict[str, int]()
    for value in graph.parameters():
        layout = layout_of(plan.mesh, plan.parameters[value.name], len(value.shape))
        parameters[value.name] = local_bytes(value, layout) * (1 + (1 + MOMENTS) * value.needs_grad)
    results = dict[str, int]()
    for call, candidate in zip(graph.calls, chosen.calls, strict=True) if chosen is not None else ():
        made = sum(map(local_bytes, call.results, candidate.outputs))
        results[call.module] = max(results.get(call.module, 0), made)
    held = [(name, sum([parameters[each] for each in own])) for name, own in folded(parameters).items()]
    held += [
        (f"results of {name or 'the model'}", sum([results[each] for each in own]))
        for name, own in folded(results).items()
    ]
    return sorted(held, key=lambda each: -each[1])[:3]


@plain()
@disable_modes()
@uncollected()
def cheapest(
    mesh: Mesh,
    roles: Roles,
    auto: Auto,
    options: PlanOptions,
    price: Callable[[ModelPlan], Cost],
    graph: StepGraph | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> ModelPlan:
    """The plan of the fewest seconds, by `price`, that fits in memory.

    `graph` is that of the model's step; without one only strategies by name are considered, and they are not where
    there are pins. `names` has the first name of each parameter by all of its names. The mesh is also unfolded in every
    way into up to three axes that costs something else, coarse meshes first, and further where that saved something;
    there strategies by name have at most two axes.

    Raises:
        StrategyError: none fits in memory; a pin that cannot be met, or a step that does not run without data.
        LayoutError, MeshError: pins and words of names that are none.
    """
    limited = _is_limited(auto, graph)
    search = PlanSearch(auto, options, price, graph)
    named = list[tuple[float, ModelPlan]]()
    worth = dict[Mesh, bool]()
    for unfolded in unfoldings(mesh):
        if search.is_over():
            break
        if not _is_tried(unfolded, mesh, worth):
            continue
        plans = _by_name(roles, unfolded, mesh)
        if unfolded == mesh and not limited:
            for first in islice(plans, 1):  # the planner may take all of the time
                search.price(first)
                plans = chain([first], plans)
        tables = None
        if graph is not None:
            limits = _limits(graph, mesh, unfolded, auto, names)
            for tables in search.tables(graph, limits, unfolded, roles.rows):
                search.add_planned(tables)
            if tables is None:
                break
        worth[unfolded] = tables is None or any(x.tables and x.plan.mesh == unfolded for x in search.priced)
        bounds = dict[tuple[Layout, ...], float]()
        for plan in plans:
            is_over = search.is_over()
            if tables is None or tables.limits.alike or limited or is_over:  # or bounds of these plans are not known
                named.append((0.0, plan))
                if is_over:
                    break
                continue
            named.append((search.least(tables, plan, bounds), plan))
            if unfolded == mesh and _is_of_alike(plan.strategy, mesh.ndim):  # before the time goes to bounds of others
                search.add_named(named, mesh, NAMED)
        if unfolded == mesh and tables is not None and not limited:  # before it goes to finer meshes
            search.add_named(named, mesh, NAMED)
    named.sort(key=lambda each: each[0])
    if not limited:
        search.add_named(named, mesh, inf if graph is None else NAMED)
    return search.result(names, named)


def _is_limited(auto: Auto, graph: StepGraph | None) -> bool:
    """Whether there are pins or words, which strategies by name do not keep."""
    limited = bool(auto.pins or auto.forbid)
    if limited and graph is None:
        raise StrategyError(
            "pins and forbid are of layouts chosen together, which takes a step that runs without data, and this one "
            "does not: leave them out, or place parameters by name"
        )
    return limited


def _promise(least: float, plan: ModelPlan, mesh: Mesh, of_alike: Mapping[str, float]) -> tuple[int, float]:
    """The place of a strategy by name among those to try: a mixture takes about the mean of what it mixes."""
    if plan.mesh == mesh and _is_of_alike(plan.strategy, mesh.ndim):
        return 0, least
    known = [of_alike[part] for part in plan.strategy.split(" x ") if part in of_alike]
    return (1, sum(known) / len(known)) if known else (2, least)


def _by_name(roles: Roles, unfolded: Mesh, mesh: Mesh) -> Iterator[ModelPlan]:
    """The strategies by name on a mesh that `mesh` unfolds to, those of all axes alike first."""
    if unfolded.ndim > max(2, mesh.ndim):
        return iter(())
    return uniform(roles, unfolded, lambda name: unfolded == mesh and _is_of_alike(name, mesh.ndim))


def _is_of_alike(name: str, axes: int) -> bool:
    """Whether a strategy uses so many mesh axes alike, by its name."""
    parts = name.split(" x ")
    return len(parts) == axes and len({*parts}) == 1


def _two_groups(mesh: Mesh) -> list[AxisGroups]:
    """The mesh axes in two groups, in order of the ranks of the larger one; axes alone are in none."""
    axes = tuple(range(mesh.ndim))
    ways = sorted(range(1, mesh.ndim), key=lambda n: max(prod(mesh.shape[:n]), prod(mesh.shape[n:])))
    return [tuple([group for group in (axes[:n], axes[n:]) if len(group) > 1]) for n in ways]


def _limits(graph: StepGraph, mesh: Mesh, unfolded: Mesh, auto: Auto, names: Mapping[str, str]) -> StepLimits:
    """The limits of a search on a mesh that `mesh` unfolds to."""
    words: Any = auto.forbid
    limits = limits_of(graph, mesh, auto.pins, words, names)  # in the user's words
    if unfolded != mesh:
        limits = limits_of(graph, unfolded, *on_finer(mesh, auto.pins, words, unfolded), names)
    return limits


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


def unfoldings(mesh: Mesh, most: int = AXES) -> Iterator[Mesh]:
    """The mesh itself, and every mesh of at most so many axes in which some of its axes are several, coarse ones first.

    >>> [str(mesh) for mesh in unfoldings(Mesh((4,), ("x",)))]
    ['x=4', 'x0=2 x1=2']
    >>> [mesh.shape for mesh in unfoldings(Mesh((2, 8), ("x", "y")))]
    [(2, 8), (2, 2, 4), (2, 4, 2)]
    """
    ways = product(*[list(_factored(size, most - mesh.ndim + 1)) for size in mesh.shape])
    for sizes in sorted(ways, key=lambda way: sum(map(len, way))):
        finer = mesh
        for name, into in zip(mesh.names, sizes, strict=True):
            if len(into) > 1:
                stem = name
                while any(f"{stem}{i}" in mesh.names for i in range(most)):
                    stem += "_"
                finer = finer.unfolded(name, {f"{stem}{i}": size for i, size in enumerate(into)})
        if finer.ndim <= max(most, mesh.ndim):
            yield finer


def _is_tried(unfolded: Mesh, mesh: Mesh, worth: dict[Mesh, bool]) -> bool:
    """Whether to look at a mesh that `mesh` unfolds to, given which of those before were `worth` it.

    One is if a mesh was of which it is the next finer one, unless it is one of those with axes in another order: that
    costs the same, as links are as fast, and the largest part of a tensor is as large, in each order.
    """
    coarser = [each.shape for each, is_worth in worth.items() if is_worth and each.ndim + 1 == unfolded.ndim]
    if unfolded != mesh and not any(refined_axes(shape, unfolded.shape) for shape in coarser):
        return False
    topology = planning_context().topology_of(mesh)
    alike = next((each for each in worth if _is_reordered(unfolded, each, mesh, topology)), None)
    if alike is not None:
        worth[unfolded] = worth[alike]
    return alike is None


def _is_reordered(finer: Mesh, other: Mesh, mesh: Mesh, topology: Topology) -> bool:
    """Whether two meshes to which `mesh` unfolds have the same axes in another order, and the same network."""
    own, its = (refined_axes(mesh.shape, each.shape) or () for each in (finer, other))
    if [*map(len, own)] != [*map(len, its)]:
        return False
    terms, others = step_terms(finer, topology), step_terms(other, topology)
    for ways in product(*map(permutations, its)):
        to = dict(zip(chain(*own), chain(*ways), strict=True))
        has_sizes = all(finer.shape[a] == other.shape[b] for a, b in to.items())
        if has_sizes and all(others[frozenset([to[a] for a in axes])] == each for axes, each in terms.items()):
            return True
    return False


def _factored(n: int, most: int) -> Iterator[tuple[int, ...]]:
    """The number itself, and in every order its factorings into at most so many factors above 1."""
    yield (n,)
    for first in range(2, n if most > 1 else 0):
        if n % first == 0:
            yield from ((first, *rest) for rest in _factored(n // first, most - 1))


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


def uniform(roles: Roles, mesh: Mesh, is_first: Callable[[str], bool] = lambda name: False) -> Iterator[ModelPlan]:
    """The plans in which all blocks follow one strategy, without strategies that the model's heads do not allow.

    Those whose names are to be first come first.

    Sequences are sharded only if rows do not divide among the ranks: sharded rows send less, as attention then moves
    nothing, and the rest is the same.
    """
    for name in sorted(names(mesh.ndim, roles.has_experts), key=lambda name: not is_first(name)):
        axes = axes_of(name, mesh)
        of_tokens = [size for axis, size in zip(axes, mesh.shape, strict=True) if axis.batch or axis.sequence]
        if any(axis.sequence for axis in axes) and roles.rows % prod(of_tokens) == 0:
            continue
        try:
            fitting = fitted_roles(roles, axes, mesh)
        except StrategyError:
            continue
        yield lay_out(fitting, name, axes, mesh)
