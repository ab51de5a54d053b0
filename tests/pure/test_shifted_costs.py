"""Shifts of costs: the bound is one, for all choices and for those with a value, and exact where tables form a row."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_eliminate import Problem, total
from test_eliminate import problems as random_tables
from torch import Tensor

from dshard.planning.deadline import Deadline, TimeIsOver
from dshard.planning.eliminate import NamedTable, elimination_order, solve
from dshard.planning.shifted_costs import ShiftedCosts, Spread


def spread(tables: dict[object, Tensor]) -> dict[object, Spread]:
    return {name: Spread(x, tuple([torch.arange(n) for n in x.shape])).compact() for name, x in tables.items()}


def finite(problem: Problem) -> Problem:
    sizes, factors, tables = problem
    return sizes, factors, {name: x.clamp(max=10.0) for name, x in tables.items()}


def shifted(problem: Problem) -> ShiftedCosts:
    sizes, factors, tables = problem
    return ShiftedCosts(len(sizes), factors, spread(tables))


@given(random_tables().map(finite), st.integers(0, 3))
def test_no_choice_has_a_smaller_sum_than_the_bound(problem: Problem, sweeps: int) -> None:
    sizes, factors, tables = problem
    choices = list(product(*map(range, sizes)))
    sums = [total(factors, tables, choice) for choice in choices]
    costs = shifted(problem)
    trivial = costs.bound
    for _ in range(sweeps):
        costs.improve()

    assert trivial <= costs.bound + 1e-9
    assert costs.bound <= min(sums) + 1e-9
    assert total(factors, tables, costs.choice) >= min(sums)
    uses, shared = costs.uses, costs.shared()
    assert [total(uses, shared, choice) for choice in choices] == pytest.approx(sums)
    for variable, excess in costs.excess().items():
        for value in range(sizes[variable]):
            with_value = min(x for x, choice in zip(sums, choices, strict=True) if choice[variable] == value)
            assert costs.bound + float(excess[value]) <= with_value + 1e-9


@given(random_tables().map(finite), st.integers(0, 3), st.floats(-0.5, 1.0))
def test_shifts_stay_valid_where_values_are_dropped_and_tables_grow(problem: Problem, which: int, more: float) -> None:
    sizes, factors, tables = problem
    costs = shifted(problem)
    costs.improve()
    width = sum(isinstance(name, int) for name in tables)
    alive = [torch.arange(int(i == which and n > 1), n) for i, n in enumerate(sizes[:width])]
    grown = {name: x + more * (x > 0.5) for name, x in tables.items()}
    of = {name: [name] if isinstance(name, int) else [i % width for i in name] for name in tables}  # type: ignore[attr-defined]
    costs.replace({name: Spread(x, tuple([alive[i] for i in of[name]])).compact() for name, x in grown.items()})
    kept = list(product(*[own.tolist() for own in alive * (len(sizes) // width)]))
    sums = [total(factors, grown, choice) for choice in kept]

    assert costs.bound <= min(sums) + 1e-9
    costs.improve()
    assert costs.bound <= min(sums) + 1e-9
    chosen = [int(alive[v % width][i]) for v, i in enumerate(costs.choice)]
    assert total(factors, grown, tuple(chosen)) >= min(sums) - 1e-9


@given(st.integers(2, 6), st.integers(2, 4), st.integers(0, 1000))
def test_of_a_chain_the_bound_is_the_least_sum(length: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tables: dict[object, Tensor] = {v: torch.rand(size, generator=generator).double() for v in range(length)}
    tables |= {(v, v + 1): torch.rand(size, size, generator=generator).double() for v in range(length - 1)}
    factors = [NamedTable(v, (v,)) for v in range(length)]
    factors += [NamedTable((v, v + 1), (v, v + 1)) for v in range(length - 1)]
    costs = shifted(([size] * length, factors, tables))
    costs.improve()
    least = min(total(factors, tables, choice) for choice in product(range(size), repeat=length))

    assert costs.bound == pytest.approx(least)
    assert total(factors, tables, costs.choice) == pytest.approx(least)


def test_shifts_of_equal_blocks_are_worked_out_once() -> None:
    """In a row of a thousand blocks hardly more is worked out than in one of a hundred, and the bound is exact."""

    def costs(copies: int) -> ShiftedCosts:
        generator = torch.Generator().manual_seed(0)
        tables: dict[object, Tensor] = {("own", i): torch.rand(4, generator=generator).double() for i in range(3)}
        tables |= {("to", i): torch.rand(4, 4, generator=generator).double() for i in range(3)}
        factors = [NamedTable(("own", v % 3), (v,)) for v in range(3 * copies)]
        factors += [NamedTable(("to", v % 3), (v, v + 1)) for v in range(3 * copies - 1)]
        found = ShiftedCosts(3 * copies, factors, spread(tables))
        found.improve()
        assert found.bound == pytest.approx(solve(elimination_order([4] * (3 * copies), factors), tables).bound)
        return found

    assert len(costs(1000).known) < 2 * len(costs(100).known)


def test_rows_that_are_alike_are_one() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    own = Spread(table, (torch.tensor([2, 0, 2]), torch.tensor([1]))).compact()

    assert own.entries.tolist() == [[2.0], [6.0]]
    assert own.whole().tolist() == [[6.0], [2.0], [6.0]]


def test_shifts_are_given_up_at_a_deadline() -> None:
    factors = [NamedTable("own", (0,)), NamedTable("own", (1,)), NamedTable("pair", (0, 1))]
    costs = shifted(([2, 2], factors, {"own": torch.zeros(2).double(), "pair": torch.zeros(2, 2).double()}))

    with pytest.raises(TimeIsOver):
        costs.improve(Deadline(0))
