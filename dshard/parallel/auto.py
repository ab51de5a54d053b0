"""The cheapest plan for a model: all strategies on all unfoldings of a mesh, and mixtures, priced by a traced step.

The cheapest layout of one operator may lead to an expensive one for the next, so layouts of a block are chosen
together. A model is cut into blocks after each addition to the residual stream; each block may follow a strategy of its
own. The sequence of strategies is a shortest path: a node is a block under a strategy, weighted by its communication
forward and backward; an edge redistributes the residual stream and its gradient from one layout to the next. The path
is then traced as a whole, and taken only if it is cheaper than every strategy by itself.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import prod
from time import perf_counter

from dshard.core.context import planning_context
from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.plan_values import Cost, Placements, Plan, PlanOptions
from dshard.parallel.roles import Roles
from dshard.parallel.strategies import STRATEGIES, axes_of, fitted_roles, lay_out
from dshard.redistribute import plan as plan_moves
from dshard.rules.matmul_loops import Schedule
from dshard.tables import human_bytes
from dshard.validate import as_number

PATIENCE = 1.0
"""Seconds of a search that need no sign of life."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Request the cheapest plan in which a rank holds at most `memory` bytes, as the plan reports them."""

    memory: int | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            as_number(self.memory, "memory", StrategyError)


def cheapest(mesh: Mesh, roles: Roles, auto: Auto, options: PlanOptions, price: Callable[[Plan], Cost]) -> Plan:
    """The plan of the fewest seconds, by `price`, that fits in memory.

    A mesh of one axis is also unfolded into two axes in every way; other meshes are not.
    """

    shows = _progress()

    def priced(plan: Plan) -> Plan:
        plan = options.of(plan)
        shows(plan.strategy)
        return replace(plan, cost=price(plan))

    plans = [priced(plan) for unfolded in unfoldings(mesh) for plan in uniform(roles, unfolded)]
    for unfolded in unfoldings(mesh):
        mixed = mixture(roles, [plan for plan in plans if plan.mesh == unfolded])
        if mixed is not None:
            plans.append(priced(mixed))
    shows("")
    fitting = [plan for plan in plans if auto.memory is None or _cost(plan).memory.total <= auto.memory]
    if not fitting:
        least = min(plans, key=lambda plan: _cost(plan).memory.total)
        raise StrategyError(
            f"no plan on {mesh.size} ranks holds at most {human_bytes(auto.memory or 0)}: {least.strategy!r} on "
            f"({least.mesh}) needs the least, {human_bytes(_cost(least).memory.total)}; "
            "use more ranks or a smaller batch"
        )
    return min(fitting, key=lambda plan: _cost(plan).seconds)


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


def _cost(plan: Plan) -> Cost:
    assert plan.cost is not None
    return plan.cost


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


def mixture(roles: Roles, plans: Sequence[Plan]) -> Plan | None:
    """The plan with the cheapest sequence of strategies over the blocks; None if one strategy serves all."""
    blocks = roles.blocks
    if len(blocks) < 2 or len(plans) < 2:
        return None
    best = [[_seconds(plan, blocks[0]) for plan in plans]]
    previous: list[list[int]] = []
    for block, before in zip(blocks[1:], blocks, strict=False):
        steps = [[best[-1][i] + _between(roles, before, p, q) for i, p in enumerate(plans)] for q in plans]
        previous.append([min(range(len(plans)), key=row.__getitem__) for row in steps])
        best.append([min(row) + _seconds(plan, block) for row, plan in zip(steps, plans, strict=True)])
    path = [min(range(len(plans)), key=best[-1].__getitem__)]
    for row in reversed(previous):
        path.append(row[path[-1]])
    picked = [plans[i] for i in reversed(path)]
    return None if len({id(plan) for plan in picked}) == 1 else _joined(roles, picked)


def _seconds(plan: Plan, block: tuple[str, ...]) -> float:
    inside = set(block)
    return sum(move.seconds for move in _cost(plan).moves if move.module in inside)


def _between(roles: Roles, block: tuple[str, ...], p: Plan, q: Plan) -> float:
    """Seconds to redistribute the residual stream after `block` from plan `p` to `q`, and its gradient back."""
    last = roles.outputs.get(block[-1])
    if last is None or p is q:
        return 0.0
    src, dst = (Layout(plan.mesh, plan.outputs[block[-1]]) for plan in (p, q))
    topology = planning_context().topology_of(p.mesh)
    return sum(plan_moves(a, b, last.shape, last.itemsize, topology).seconds for a, b in ((src, dst), (dst, src)))


def _joined(roles: Roles, picked: Sequence[Plan]) -> Plan:
    """The plan that takes each block from the plan picked for it."""
    parameters: dict[str, Placements] = {}
    outputs: dict[str, Placements] = {}
    products: dict[str, Schedule] = {}
    gathers: dict[str, tuple[str, ...]] = {}
    for block, plan in zip(roles.blocks, picked, strict=True):
        inside = set(block)
        parameters |= {name: p for name, p in plan.parameters.items() if name.rpartition(".")[0] in inside}
        outputs |= {name: p for name, p in plan.outputs.items() if name in inside}
        products |= {name: p for name, p in plan.products.items() if name in inside}
        gathers |= {name: p for name, p in plan.gathers.items() if name.rpartition(".")[0] in inside}
    first = picked[0]
    counts = Counter(plan.strategy for plan in picked)
    name = ", ".join(f"{strategy} ({n} block{'s' if n > 1 else ''})" for strategy, n in counts.items())
    parameters = {own: parameters.get(own, placements) for own, placements in first.parameters.items()}
    gathered = tuple(axis for axis in first.mesh.names if all(axis in plan.gathered for plan in picked))
    attention = first.attention if all(plan.attention == first.attention for plan in picked) else None
    return Plan(
        *(name, first.mesh, parameters, first.batch, outputs, products, first.shared),
        gathered=gathered,
        attention=attention,
        gathers=gathers,
    )
