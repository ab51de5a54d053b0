"""Elimination beside programs that scipy solves, integer and linear: of any tables, and of those of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isinf
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from test_eliminate import Problem
from test_eliminate import problems as random_tables
from test_plan_step import problems as steps
from torch import Tensor

from dshard.planning.eliminate import NamedTable, elimination_order, solve
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables, Weights


def least(sizes: Sequence[int], factors: Sequence[NamedTable], tables: Mapping[Any, Tensor], integral: bool) -> float:
    """The least sum of tables, as a program over a weight for each value of a variable and each entry of a table.

    The weights of a variable's values add up to 1, and those of entries that have a value to the weight of that.
    """
    begin = [0, *np.cumsum(sizes)]
    costs, entries = [0.0] * int(begin[-1]), list[tuple[int, int, float]]()
    right = [1.0] * len(sizes)
    entries += [(v, int(begin[v]) + i, 1.0) for v, n in enumerate(sizes) for i in range(n)]
    for name, variables in factors:
        table = tables[name]
        first = len(right)
        rows = {(v, i): first + j for j, (v, i) in enumerate((v, i) for v in variables for i in range(sizes[v]))}
        right += [0.0] * len(rows)
        entries += [(row, int(begin[v]) + i, -1.0) for (v, i), row in rows.items()]
        for at in np.ndindex(*table.shape):
            entries += [(rows[v, i], len(costs), 1.0) for v, i in zip(variables, at, strict=True)]
            costs.append(float(table[at]))
    row, column, value = zip(*entries, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(right), len(costs)))
    solved = milp(
        [0.0 if isinf(cost) else cost for cost in costs],
        integrality=np.full(len(costs), int(integral)),
        bounds=Bounds(0, [0.0 if isinf(cost) else 1.0 for cost in costs]),
        constraints=LinearConstraint(matrix.tocsr(), right, right),
        options={"mip_rel_gap": 0.0},
    )
    return inf if solved.status == 2 else float(solved.fun)


@settings(max_examples=50)
@given(random_tables())
def test_elimination_and_an_integer_program_agree(problem: Problem) -> None:
    sizes, factors, tables = problem
    solution = solve(elimination_order(sizes, factors), tables)

    assert solution.bound == pytest.approx(least(sizes, factors, tables, integral=True), abs=1e-7)
    assert least(sizes, factors, tables, integral=False) <= solution.bound + 1e-7


@settings(max_examples=50)
@given(steps(most=10**6))
def test_an_integer_program_finds_no_better_plan_of_a_step(problem: tuple[StepTables, Weights]) -> None:
    tables, weights = problem
    plan = plan_step(tables, weights)  # prices what the best choice touches
    sizes = [len(tables.domains[domain]) for domain in tables.domain_of]
    alive = [torch.arange(len(domain)) for domain in tables.domains]
    scale = weights.of(plan.parts) or 1.0
    own = {name: table.whole() / scale for name, table in tables.compact(weights, alive).items()}

    assert least(sizes, tables.uses, own, integral=True) == pytest.approx(1.0, rel=1e-6)
    assert least(sizes, tables.uses, own, integral=False) <= 1 + 1e-6  # in a few steps of a tied layer 1 % less
