"""Plans of a model by named strategies on all foldings of some devices, priced: what people compare, fastest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple

from torch import nn

from dshard.core.context import use_topology
from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.notebook import Tabled
from dshard.ops.matmul.options import use_strategy
from dshard.parallel.auto import Auto, PlanSearch
from dshard.parallel.factors import ModelTrace, trace_factors
from dshard.parallel.gather_groups import blocks_of
from dshard.parallel.model_plan import plan_by_name, step_graph
from dshard.parallel.plan_values import ModelPlan, PlanOptions
from dshard.parallel.precision import Precision
from dshard.parallel.reachable_state import ReachableState
from dshard.parallel.roles import FeatureKind, Roles, roles_of
from dshard.parallel.step_price import StepPrices
from dshard.parallel.strategies import STRATEGIES, axes_of
from dshard.parallel.whole_plan import PLANNED
from dshard.planning.deadline import Deadline
from dshard.planning.step_tables import MOMENTS, StepTables
from dshard.routing import Routing
from dshard.tables import human_bytes, text_table
from dshard.topology import Topology
from dshard.validate import as_int, as_number

Progress = Callable[[int, int], object]
"""Called with the number of plans that are done, and their total."""
HEADINGS = ("", "strategy", "mesh", "seconds", "MFU", "memory", "network s", "hidden s", "received")


class RankedPlan(NamedTuple):
    """A plan with its cost, and its mesh, which is to be given to `parallelize` with its strategy."""

    plan: ModelPlan
    mesh: Mesh

    def data(self) -> dict[str, Any]:
        """What `parallelize(model, mesh, Path(...))` reads, as JSON values."""
        if self.plan.strategy == PLANNED or self.plan.routing is not None:
            return self.plan.data()
        mesh = {"shape": list(self.mesh.shape), "names": list(self.mesh.names)}
        return {"strategy": self.plan.strategy, "mesh": mesh}


@dataclass(frozen=True, slots=True, repr=False)
class PlanTable(Tabled):
    """Priced plans of a model on some devices: those that fit, the fastest first, then the others, the smallest first.

    Attributes:
        plans: With their costs; of plans that cost and hold the same, the first alone.
        summary: What the model is.
        memory: Bytes of each device, None where they are not known.
        flops: Operations of a step of the model, on however many devices.
        topology: That the plans are priced on, with rates as devices reach them.
        peak: Operations per second that the maker states for a device.
        skipped: Plans that are not priced, as weights and their optimiser's moments alone do not fit.
        left: Plans that are not priced, as the time was over.
    """

    plans: tuple[RankedPlan, ...]
    summary: str
    memory: float | None
    flops: float
    topology: Topology
    peak: float
    skipped: int = 0
    left: int = 0

    def fits(self, plan: ModelPlan) -> bool:
        """Whether a device has the memory for the plan."""
        return self.memory is None or plan.cost.memory.total <= self.memory

    def mfu(self, plan: ModelPlan) -> float:
        """The share of all devices' operations per second that a step of the plan achieves (model FLOPs utilisation).

        Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B.
        """
        return self.flops / (self.peak * plan.mesh.size * plan.cost.seconds) if plan.cost.seconds else 0.0

    def rows(self) -> list[list[str]]:
        """A row for each plan: cells under `HEADINGS`, of which the first is "-" where it does not fit."""
        return [
            [
                "" if self.fits(plan) else "-",
                plan.strategy,
                str(mesh),
                f"{plan.cost.seconds:.4g}",
                f"{self.mfu(plan):.1%}",
                human_bytes(plan.cost.memory.total),
                f"{plan.cost.communication:.3g}",
                f"{plan.cost.hidden:.3g}",
                human_bytes(plan.cost.nbytes),
            ]
            for plan, mesh in self.plans
        ]

    def __str__(self) -> str:
        return f"{self.summary}\n{text_table(HEADINGS, self.rows())}"


def plan_table(
    model: nn.Module,
    devices: int,
    topology: Topology,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    strategies: Sequence[str] = (),
    memory: float | None = None,
    precision: Precision | None = None,
    routing: Routing | None = None,
    efficiency: float = 1.0,
    dtype: str = "",
    seconds: float = inf,
    progress: Progress | None = None,
) -> PlanTable:
    """Plans of `model` for a batch, by the `strategies` on all foldings of `devices`; by default those that are common.

    "planned" is one of these: the cheapest layouts of all tensors together that keep the limit of `memory`, searched in
    at most half of the time. Each is priced as `plan_model` prices it. Devices reach `efficiency` of the stated rate of
    `dtype` in matmuls. After `seconds` of the processor no other plan is begun; at least one is priced.

    Raises:
        StrategyError: no strategy fits the devices, or one that is not known.
        LayoutError: a step that does not run without data.
    """
    deadline, options = Deadline(seconds), PlanOptions(precision, None)
    devices = as_int(devices, "devices", StrategyError, least=1)
    efficiency = as_number(efficiency, "efficiency", StrategyError)
    memory = topology.device.memory if memory is None else memory
    peak = topology.flops(dtype)
    topology = with_efficiency(topology, efficiency)
    done, turns = list[RankedPlan](), list[RankedPlan | None]()
    within, begun = _within_host(topology, devices), 0
    with use_topology(topology), use_strategy(routing=routing):
        reached = ReachableState(model, args, kwargs)
        model_trace = trace_factors(model, args, kwargs, reached)
        roles, prices = roles_of(model_trace), StepPrices(model, args, kwargs, reached, model_trace)
        names = [name for name in strategies if name != PLANNED]
        laid = [*_candidates(roles, devices, within, names)] if names or not strategies else []
        tried = [each for each in laid if memory is None or _state_bytes(model, each.plan) <= memory]
        tried = tried or sorted(laid, key=lambda each: _state_bytes(model, each.plan))
        flops = prices(options.of(plan_by_name(roles, "data", Mesh((1,), ("x",)))[0])).flops
        turns += tried
        turns[1:1] = [None] if PLANNED in strategies or not strategies else []
        for each in turns:
            if done and not deadline.left():
                break
            if progress is not None:
                progress(begun, len(turns))
            if each is not None:
                plan = options.of(each.plan)
                done.append(RankedPlan(replace(plan, cost=prices(plan)), each.mesh))
            elif (graph := step_graph(model_trace.step, model, tuple(args), kwargs, reached, precision)) is not None:
                left = max(1e-9, deadline.left() / 2)
                search = PlanSearch(Auto(memory, seconds=left), options, prices, graph)
                done += _planned(search, StepTables(graph, _outer_inner(devices, within), topology))
            begun += 1
    summary, skipped, left = model_summary(model, model_trace, roles), len(laid) - len(tried), len(turns) - begun
    return ranked(PlanTable(tuple(done), summary, memory, flops, topology, peak, skipped, left), PLANNED in strategies)


def ranked(table: PlanTable, keeps_planned: bool = False) -> PlanTable:
    """The table with one of its plans that are alike, the fastest that fit first, then the smallest of the others.

    A planned one that takes and holds more than one by name is left out unless the table `keeps_planned` ones.
    """
    plans = table.plans
    if not keeps_planned:
        plans = tuple(x for x in plans if x.plan.strategy != PLANNED or not any(_is_dearer(x, by) for by in plans))
    table = replace(table, plans=plans)
    alike: dict[tuple[str, ...], RankedPlan] = {}
    for each, row in zip(table.plans, table.rows(), strict=True):
        alike.setdefault((row[0], *row[3:]), each)
    fitting = [each for each in alike.values() if table.fits(each.plan)]
    others = [each for each in alike.values() if not table.fits(each.plan)]
    fitting.sort(key=lambda each: each.plan.cost.seconds)
    others.sort(key=lambda each: each.plan.cost.memory.total)
    return replace(table, plans=(*fitting, *others))


def _is_dearer(each: RankedPlan, other: RankedPlan) -> bool:
    """Whether a plan takes more seconds than another and holds more, too."""
    own, by = each.plan.cost, other.plan.cost
    return own.seconds > by.seconds and own.memory.total > by.memory.total


def _planned(search: PlanSearch, tables: StepTables) -> list[RankedPlan]:
    """The cheapest plan of those that choose all layouts together, or where none fits the smallest."""
    search.add_planned(tables)
    smallest = min(search.priced, key=lambda each: each.plan.cost.memory.total)
    plan = search.certified(search.best() or smallest, {}, ())
    return [RankedPlan(plan, plan.mesh)]


def _outer_inner(devices: int, within: int) -> Mesh:
    """A mesh of two axes: hosts and the devices of one, or two factors of one host's that are as even as may be."""
    outer = [n for n in range(1, devices + 1) if devices % n == 0 and (n * n <= devices or n * within == devices)]
    size = devices // within if devices // within in outer[1:] else max(n for n in outer if n * n <= devices)
    return Mesh((size, devices // size), ("outer", "inner")) if size > 1 else Mesh((devices,), ("all",))


def with_efficiency(topology: Topology, efficiency: float) -> Topology:
    """The topology whose devices reach this share of their rates."""
    if efficiency == 1.0:
        return topology
    device = topology.device
    return replace(topology, device=replace(device, flops=tuple((d, rate * efficiency) for d, rate in device.flops)))


def _within_host(topology: Topology, devices: int) -> int:
    """The ranks within one unit of the outermost level of the network."""
    inside = prod(layer.ranks or 1 for layer in topology.layers[1:])
    return inside if len(topology.layers) > 1 else topology.layers[0].ranks or devices


def _state_bytes(model: nn.Module, plan: ModelPlan) -> int:
    """Bytes of the parameters of the first rank, their gradients and moments: no step holds less."""
    parameters = [(Layout(plan.mesh, plan.parameters[name]), x) for name, x in model.named_parameters()]
    return sum([layout.local_numel(x.shape) * x.itemsize for layout, x in parameters]) * (2 + MOMENTS)


# -- candidates

COMMON: tuple[tuple[str, str], ...] = (
    ("expert", "one"),
    ("fsdp x expert", "experts"),
    ("fsdp", "one"),
    ("fsdp x megatron-sp", "host"),
    ("data x megatron", "host"),
    ("data", "one"),
    ("expert x megatron", "host"),
    ("data x fsdp", "inner"),
    ("fsdp x megatron", "host"),
    ("fsdp x context", "rows"),
    ("fsdp x ulysses", "rows"),
)
"""What is compared unless strategies are named, in the order in which it is priced, and the sizes of the inner axis."""


def _candidates(roles: Roles, devices: int, within: int, strategies: Sequence[str]) -> Iterator[RankedPlan]:
    """The plans to be priced, the first of each strategy before the second of any.

    Raises:
        StrategyError: there are none; a strategy that was asked for by name and is not known.
    """
    named = [(name, "any") for name in strategies] or COMMON
    folded = [(name, [*_foldings(devices, within, roles, name, kind)]) for name, kind in named]
    why, found = "", False
    for turn in range(max(len(meshes) for _, meshes in folded)):
        for name, meshes in folded:
            if turn >= len(meshes):
                continue
            mesh = meshes[turn]
            axes = axes_of(name, mesh)
            ways = prod(n for axis, n in zip(axes, mesh.shape, strict=True) if axis.batch)
            if roles.rows % ways:
                why = why or f"a batch of {roles.rows} rows does not divide among the {ways} ranks that share it"
                continue
            try:
                plan, idle = plan_by_name(roles, name, mesh)
            except StrategyError as error:
                why = str(error)
                continue
            if not idle:
                found = True
                yield RankedPlan(plan, plan.mesh)
    if not found:
        raise StrategyError(f"no strategy fits {devices} devices: {why or 'they have no such folding'}")


def _foldings(devices: int, within: int, roles: Roles, name: str, kind: str) -> Iterator[Mesh]:
    """The meshes on which a strategy is tried, the most usual first; axes that send most lie within hosts."""
    axes = [axis.name for axis in axes_of(name, Mesh((1,) * _ndim(name)))]
    names = tuple(f"{axis}{i}" if axes.count(axis) > 1 else axis for i, axis in enumerate(axes))
    if len(axes) == 1:
        yield Mesh((devices,), names)
        return
    divisors = [n for n in range(2, devices) if devices % n == 0]
    usual = min((n for n in divisors if n >= within), default=0)
    sizes = {
        "host": [n for n in reversed(divisors) if n <= within],
        "inner": [n for n in divisors if n == usual],
        "experts": [n for n in divisors if n >= min(within, 8)],
        "rows": [n for n in divisors if roles.rows % devices and roles.rows % (devices // n) == 0][:1],
        "any": divisors,
    }[kind]
    for size in sizes:  # further axes share what is outside in all ways
        shares = product([1, *divisors, devices], repeat=len(axes) - 1)
        yield from (Mesh((*outer, size), names) for outer in shares if prod(outer) * size == devices)


def _ndim(strategy: str) -> int:
    return sum(len(STRATEGIES.get(part, ())) for part in strategy.split(" x ")) or 1


def model_summary(model: nn.Module, model_trace: ModelTrace, roles: Roles) -> str:
    """The layers, parameters and experts of a model, such as "32 layers, gated, 6.74 B parameters"."""
    words = [f"{sum(1 for _ in blocks_of(model))} layers"]
    words += ["gated"] * _is_gated(model_trace, roles)
    words += [human_count(sum(p.numel() for p in model.parameters()))]
    if model_trace.experts.experts:
        experts = model_trace.experts
        words.append(f"experts {_size(model_trace, experts.experts)} of which {_size(model_trace, experts.each)}")
    return ", ".join(words)


def human_count(parameters: int) -> str:
    """A number of parameters.

    >>> human_count(6_738_415_616), human_count(124_439_808)
    ('6.74 B parameters', '124.4 M parameters')
    """
    if parameters >= 10**9:
        return f"{parameters / 1e9:.2f} B parameters"
    return f"{parameters / 1e6:.1f} M parameters" if parameters >= 10**6 else f"{parameters:,} parameters"


def _size(model_trace: ModelTrace, classes: set[int]) -> int:
    """The size of the dims of these classes; 1 where there are none."""
    return max((dim.size for dim, _ in model_trace.parts if dim.group in classes), default=1)


def _is_gated(model_trace: ModelTrace, roles: Roles) -> bool:
    """Whether inner features, other than heads, that a matmul contracts are made of two matmuls, or packed parts."""
    made = Counter[int | None]()
    for use in model_trace.uses if not model_trace.experts.inner else ():
        for i in use.left:
            made[model_trace.parameters[use.parameter][i].group] += model_trace.packed.get(
                model_trace.parameters[use.parameter][i], 1
            )
    contracted = (
        model_trace.parameters[use.parameter][i].group
        for use in model_trace.uses
        for i in use.summed
        if (role := roles.parameters[use.parameter][i]).kind is FeatureKind.INNER and role.units == role.size
    )
    packed = any(dim.group in model_trace.experts.inner and parts == 2 for dim, parts in model_trace.packed.items())
    return packed or any(made[group] > 1 for group in contracted)
