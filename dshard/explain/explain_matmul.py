"""`explain_matmul`: a matmul of given sizes on a mesh that need not exist, by every schedule, priced.

Each mesh axis takes one loop, m, n or k. The tensor without that loop moves there: an operand is stored replicated, or
sharded and gathered; the result is reduced to replicated or sharded, or left partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from dshard.caches import cached
from dshard.core.context import planning_context
from dshard.cost import work_seconds
from dshard.errors import LayoutError, MeshError, ShapeError
from dshard.explain.explain_calls import MoveCost, candidate_of_moves, redistribution_cost, rule_candidates, stored_once
from dshard.explain.report_values import Candidate, Explanation, why_chosen
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.ops.matmul.panel_executor import PlannedMatmul
from dshard.ops.matmul.panel_price import in_panels
from dshard.ops.matmul.rules import matmul_rule
from dshard.redistribute import Plan, plan
from dshard.rules.communication_bounds import matmul_lower_bound
from dshard.rules.expand import Operand
from dshard.rules.matmul_loops import ORDERED, STORAGES, STRATEGIES, Schedule, schedules, stored_layout
from dshard.rules.strategy import Question
from dshard.rules.strategy_choice import choose
from dshard.topology import Topology
from dshard.topology.network import check_topology
from dshard.validate import as_int, check_type


class MatmulCase(NamedTuple):
    """A matmul to explain: the sizes of `m x k @ k x n`, the mesh, dtype and topology."""

    m: int
    k: int
    n: int
    mesh: Mesh
    dtype: torch.dtype
    topology: Topology

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape]:
        """The shapes of both operands and of the result."""
        return (self.m, self.k), (self.k, self.n), (self.m, self.n)


LEGEND = (
    "m, n, k: the loop that a mesh axis splits; m[B:k]: B is stored split over k there, and gathered; "
    "k[C:n]: the product is reduced to parts of n; k[C:P]: it is left partial, and charged its cheapest completion"
)
MOST_AXES = 5
"""Mesh axes of which all schedules are priced; each axis has ten."""
_MOVING = {"m": "B", "n": "A", "k": "C"}
_LOOPS = "nmk"
"""The loops whose mesh axes move A, B and C."""

Plans: TypeAlias = tuple[Plan, Plan, Plan]
ScheduleKey: TypeAlias = tuple[tuple[str, str], ...]


class TensorPlan(NamedTuple):
    """The redistribution of one tensor, its stored layout as text, and whether each element is stored once."""

    plan: Plan
    move: MoveCost
    text: str
    once: bool


def explain_matmul(
    m: int,
    k: int,
    n: int,
    mesh: Mesh,
    topology: Topology | None = None,
    *,
    a: Layout | None = None,
    b: Layout | None = None,
    dtype: torch.dtype = torch.bfloat16,
    one_copy: bool = False,
) -> Explanation:
    """The candidates for multiplying `m` x `k` by `k` x `n` on `mesh`, the cheapest first. No processes, no tensors.

    With the layouts `a` and `b` of the operands: the candidates of `a @ b`. Without them: every `Schedule` of the mesh
    and its operand layouts; with `one_copy`, only schedules in which each tensor is stored once. The default `topology`
    is the one in use. Seconds are of the forward pass.

    Raises:
        MeshError: every schedule of more than `MOST_AXES` mesh axes.
        LayoutError: only one of `a` and `b`, or one that does not fit.
        ShapeError: a size below one.
        TopologyError: the topology has fewer ranks.
    """
    check_type(mesh, Mesh, "the mesh of a product", "give a dshard.Mesh, such as Mesh((2, 4))", MeshError)
    m, k, n = (as_int(size, "a size of a product", ShapeError) for size in (m, k, n))
    check_type(dtype, torch.dtype, "dtype", "give one of torch's, such as torch.bfloat16")
    if topology is not None:
        check_topology(topology)
    for layout, shape in (a, (m, k)), (b, (k, n)):
        if layout is not None:
            _check_layout(layout, shape, mesh)
    if min(m, k, n) < 1:
        raise ShapeError(f"a product of {m} x {k} by {k} x {n}: all sizes must be above zero")
    why = planning_context().why_topology(mesh) if topology is None else "as given"
    matmul = MatmulCase(m, k, n, mesh, dtype, planning_context().topology_of(mesh) if topology is None else topology)
    if a is None and b is None:
        if mesh.ndim > MOST_AXES:
            raise MeshError(
                f"the mesh ({mesh}) has {10**mesh.ndim:,} schedules: give the layouts of both operands, or join axes, "
                f"to at most {MOST_AXES}"
            )
        plans = {priced: each for priced, each in _schedule_candidates(matmul) if priced.one_copy or not one_copy}
        candidates = sorted(plans, key=lambda c: (c.seconds, c.bytes_moved, c.peak_bytes, "P" in c.name, c.name))
        return _explanation(matmul, why, ("A", "B"), candidates, candidates[0], plans[candidates[0]])
    if a is None or b is None:
        raise LayoutError(f"only the layout of {'b' if a is None else 'a'} is given: give both, or neither to search")
    return _explanation(matmul, why, (f"A [{a}]", f"B [{b}]"), *_candidates_of(matmul, a, b))


def _check_layout(layout: Layout, shape: tuple[int, int], mesh: Mesh) -> None:
    way_out = "give a dshard.Layout, as read_layout(text, mesh) makes it"
    check_type(layout, Layout, "the layout of an operand", way_out, LayoutError)
    if layout.mesh != mesh:
        raise LayoutError(f"the operand [{layout}] lies on ({layout.mesh}), the product on ({mesh}): give one mesh")
    layout.check(shape)


def _explanation(
    matmul: MatmulCase,
    why: str,
    operands: tuple[str, str],
    candidates: list[Candidate],
    chosen: Candidate,
    plans: Plans,
) -> Explanation:
    dtype, topology = matmul.dtype, matmul.topology
    described = tuple(
        f"{name} {shape} {str(dtype).removeprefix('torch.')} on {matmul.mesh}"
        for name, shape in zip(operands, matmul.shapes[:2], strict=True)
    )
    rule = matmul_rule(*matmul.shapes[:2])
    panels = in_panels(PlannedMatmul(rule, plans, dtype, topology))
    reason = why_chosen(chosen, candidates)
    return Explanation(
        *("matmul", described, str(rule), topology.name, str(topology), why),
        *(tuple(candidates), len(candidates), chosen, reason),
        panels=panels,
    )


def _candidates_of(matmul: MatmulCase, a: Layout, b: Layout) -> tuple[list[Candidate], Candidate, Plans]:
    """The candidates for operands of layouts `a` and `b`, the chosen one, and its plans."""
    itemsize, (shape_a, shape_b, shape) = matmul.dtype.itemsize, matmul.shapes
    operands, outputs = (Operand(a, shape_a, itemsize), Operand(b, shape_b, itemsize)), ((shape, itemsize),)
    choice = choose(Question(matmul_rule(shape_a, shape_b), operands, outputs, matmul.topology))
    candidates, chosen = rule_candidates(choice), choice.strategy
    ends = ((a, chosen.inputs[0]), (b, chosen.inputs[1]), (chosen.outputs[0], chosen.ends[0]))
    first, second, end = (
        plan(src, dst, shape, itemsize, matmul.topology) for (src, dst), shape in zip(ends, matmul.shapes, strict=True)
    )
    return list(candidates.values()), candidates[chosen], (first, second, end)


def _schedule_candidates(matmul: MatmulCase) -> Iterator[tuple[Candidate, Plans]]:
    """A candidate for every schedule of the mesh, with its operand layouts and the plans of A, B and C."""
    bound = matmul_lower_bound(matmul.m, matmul.k, matmul.n, matmul.mesh.size) * matmul.dtype.itemsize
    known_plans: tuple[dict[ScheduleKey, TensorPlan], ...] = ({}, {}, {})
    work: dict[tuple[str, ...], float] = {}
    for schedule in schedules(matmul.mesh.ndim):
        tensors: list[TensorPlan] = []
        for tensor, known in enumerate(known_plans):
            key = _schedule_key(schedule, tensor)
            if key not in known:
                known[key] = _tensor_plan(matmul, schedule, tensor)
            tensors.append(known[key])
        a, b, end = (each.move for each in tensors)
        if schedule.loops not in work:
            work[schedule.loops] = _compute(matmul, schedule, a, b, end)
        candidate = candidate_of_moves(
            _name(schedule, matmul.mesh),
            f"{tensors[0].text}, {tensors[1].text} -> {tensors[2].text}",
            (a, b, end),
            (a.seconds + b.seconds, work[schedule.loops], end.seconds, 0.0),
            bound,
            all(each.once for each in tensors),
        )
        yield candidate, (tensors[0].plan, tensors[1].plan, tensors[2].plan)


def _schedule_key(schedule: Schedule, tensor: int) -> ScheduleKey:
    """The part of a schedule on which one tensor depends: its storage only on the axes that move it."""
    moving = _LOOPS[tensor]
    pairs = zip(schedule.loops, schedule.stored, strict=True)
    return tuple([(loop, stored if loop == moving else "") for loop, stored in pairs])


def _tensor_plan(matmul: MatmulCase, schedule: Schedule, tensor: int) -> TensorPlan:
    """The redistribution of A, B or C between its stored layout and the one in which the ranks multiply."""
    mesh, loops = matmul.mesh, schedule.loops
    stored = stored_layout(mesh, loops, schedule.stored, tensor)
    local_layout = stored_layout(mesh, loops, tuple("P" if loop == "k" else "R" for loop in loops), tensor)
    shape, itemsize = (matmul.shapes[tensor], matmul.dtype.itemsize)
    pairs = [(stored, local_layout)]
    if tensor == 2:  # each partial sum is reduced, in every combination of replicated and sharded
        storages = product(*(STORAGES["k"][1:] if where == "P" else (where,) for where in schedule.stored))
        pairs = [(local_layout, stored_layout(mesh, loops, completed, tensor)) for completed in storages]
    plans = [plan(src, dst, shape, itemsize, matmul.topology) for src, dst in pairs]
    least = min(plan.seconds for plan in plans)
    cheapest = min((plan for plan in plans if plan.seconds == least), key=Plan.busiest)
    return TensorPlan(cheapest, redistribution_cost(cheapest, itemsize), str(stored), stored_once((stored,)))


def _name(schedule: Schedule, mesh: Mesh) -> str:
    """The name of a schedule: each mesh axis as the legend says, then the strategy of `use_strategy`, if there is one.

    >>> _name(Schedule(("m", "n"), ("k", "R")), Mesh((2, 2), ("x", "y")))
    'x:m[B:k] y:n'
    >>> _name(Schedule(("m", "n"), ("k", "k")), Mesh((2, 2), ("x", "y")))
    'x:m[B:k] y:n[A:k] (summa)'
    """
    words = [
        f"{axis}:{loop}" if stored == "R" else f"{axis}:{loop}[{_MOVING[loop]}:{stored}]"
        for axis, loop, stored in zip(mesh.names, schedule.loops, schedule.stored, strict=True)
    ]
    strategy = _strategy_names().get((schedule.loops, schedule.stored))
    return " ".join(words if strategy is None else [*words, f"({strategy})"])


@cached("explanations", 1)
def _strategy_names() -> dict[tuple[tuple[str, ...], tuple[str, ...]], str]:
    """Names of strategies by loops and storage, for any order of the axes."""
    names: dict[tuple[tuple[str, ...], tuple[str, ...]], str] = {}
    for name, row in STRATEGIES.items():
        axes = range(len(row.roles))
        for order in [tuple(axes)] if name in ORDERED else permutations(axes):
            loops = tuple(row.schedule.loops[axis] for axis in order)
            names.setdefault((loops, tuple(row.schedule.stored[axis] for axis in order)), name)
    return names


def _compute(matmul: MatmulCase, schedule: Schedule, a: MoveCost, b: MoveCost, c: MoveCost) -> float:
    """Seconds of the local matmul."""
    sizes = tuple(zip(matmul.mesh.shape, schedule.loops, strict=True))
    ranks = {counted: prod(n for n, loop in sizes if loop == counted) for counted in _MOVING}
    local = [-(-getattr(matmul, loop) // n) for loop, n in ranks.items()]
    dtype = str(matmul.dtype).removeprefix("torch.")
    return work_seconds(2.0 * prod(local), a.after + b.after + c.before, matmul.topology, dtype)
