"""Elimination: the least sum equals that of all choices, cut tables bound it, and alike parts are done once."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dshard.planning.deadline import Deadline, TimeIsOver
from dshard.planning.eliminate import NamedTable, _Orderer, elimination_order, solve

Problem = tuple[list[int], list[NamedTable], dict[object, Tensor]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Copies of a block in a row, with tables between the variables of a block and those of the next."""
    copies, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=width, max_size=width))
    within = [(i, j) for i in range(width) for j in range(i + 1, width)]
    between = [(i, j + width) for i in range(width) for j in range(width)]
    pairs = draw(st.lists(st.sampled_from([*within, *between]), unique=True, max_size=5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tables: dict[object, Tensor] = {i: torch.rand(n, generator=generator).double() for i, n in enumerate(sizes)}
    for i, j in pairs:
        tables[i, j] = torch.rand(sizes[i], sizes[j % width], generator=generator).double()
        if draw(st.booleans()) and tables[i, j].numel() > 1:
            tables[i, j][-1, -1] = inf  # a combination that is not allowed
    factors = [NamedTable(i, (copy * width + i,)) for copy in range(copies) for i in range(width)]
    for copy in range(copies):
        for i, j in pairs:
            if copy * width + j < copies * width:
                factors.append(NamedTable((i, j), (copy * width + i, copy * width + j)))
    return sizes * copies, factors, tables


def total(factors: list[NamedTable], tables: dict[object, Tensor], choice: tuple[int, ...]) -> float:
    return sum(float(tables[table][tuple([choice[v] for v in variables])]) for table, variables in factors)


@given(problems(), st.sampled_from([3, 10**6]))
def test_no_choice_has_a_smaller_sum(problem: Problem, limit: int) -> None:
    sizes, factors, tables = problem
    choices = list(product(*map(range, sizes)))
    sums = [total(factors, tables, choice) for choice in choices]
    order = elimination_order(sizes, factors, limit)
    solution = solve(order, tables)
    least = min(sums)
    if least == inf:
        assert not order.is_exact or solution.bound == inf
        return
    assert solution.bound <= least + 1e-12
    if order.is_exact:
        assert solution.bound == pytest.approx(least, abs=1e-12)
        assert total(factors, tables, solution.choice) == pytest.approx(least, abs=1e-12)
    assert order.is_exact or limit == 3
    for variable, excess in solution.excess().items():
        for value in range(sizes[variable]):
            with_value = min(each for each, choice in zip(sums, choices, strict=True) if choice[variable] == value)
            assert solution.bound + float(excess[value]) <= with_value + 1e-12


def test_variables_of_one_value_are_no_dims() -> None:
    """A tensor has at most 64 dims; a variable in the middle has a table with each of 100 others, of one value."""
    tables: dict[object, Tensor] = {i: torch.tensor([[float(i)], [100.0 - i]]).double() for i in range(101)}
    factors = [*(NamedTable(i, (0, 1 + i)) for i in range(100)), NamedTable(100, (101, 102))]
    tables[100] = torch.tensor([[7.0]]).double()
    solution = solve(elimination_order([2, *[1] * 102], factors), tables)
    assert (solution.bound, solution.choice[0]) == (99 * 50 + 7.0, 0)
    assert solution.excess()[0].tolist() == [0.0, 100.0]


def test_parts_of_a_cut_agree_on_their_variable() -> None:
    """Each part alone takes nothing for a value of the variable for which the other one takes 1."""
    tables: dict[object, Tensor] = {
        "first": torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64),
        "second": torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
    }
    factors = [NamedTable("first", (0, 1)), NamedTable("second", (0, 2))]
    order = elimination_order([2, 2, 2], [*factors, NamedTable("none", (1, 2))], 4)
    solution = solve(order, tables | {"none": torch.zeros(2, 2, dtype=torch.float64)})

    assert not order.is_exact
    assert solution.bound == 1.0


def test_alike_parts_of_a_cut_count_as_often_as_they_are_there() -> None:
    generator = torch.Generator().manual_seed(0)
    tables: dict[object, Tensor] = {
        name: torch.rand(2, 2, dtype=torch.float64, generator=generator) for name in ("twice", "once", "apart")
    }
    factors = [NamedTable("twice", (0, 1)), NamedTable("twice", (0, 2)), NamedTable("once", (1, 2))]
    factors += [NamedTable("apart", (3, 4))]
    order = elimination_order([2] * 5, factors, 3)
    solution = solve(order, tables)

    choices = list(product(range(2), repeat=5))
    sums = [total(factors, tables, choice) for choice in choices]
    assert not order.is_exact
    assert any(len({*cut}) < len(cut) for cut in order.cuts)
    assert solution.bound <= min(sums) + 1e-12
    for variable, excess in solution.excess().items():
        for value in range(2):
            own = min([each for each, choice in zip(sums, choices, strict=True) if choice[variable] == value])
            assert solution.bound + float(excess[value]) <= own + 1e-12


def test_alike_parts_are_one_node() -> None:
    """A row of a thousand equal blocks takes a few nodes more than a row of ten."""

    def nodes(copies: int) -> int:
        factors = [NamedTable("own", (v,)) for v in range(3 * copies)]
        factors += [NamedTable(("to", v % 3), (v, v + 1)) for v in range(3 * copies - 1)]
        return len(elimination_order([5] * (3 * copies), factors).nodes)

    assert nodes(1000) <= 5 * nodes(10)


def test_excess_tells_which_values_no_cheapest_choice_has() -> None:
    tables: dict[object, Tensor] = {
        "a": torch.tensor([0.0, 1.0], dtype=torch.float64),
        "ab": torch.tensor([[0.0, 2.0], [0.0, 0.0]], dtype=torch.float64),
    }
    factors = [NamedTable("a", (0,)), NamedTable("ab", (0, 1))]
    solution = solve(elimination_order([2, 2], factors), tables)
    assert (solution.bound, solution.choice) == (0.0, (0, 0))
    assert {v: excess.tolist() for v, excess in solution.excess().items()} == {0: [0.0, 1.0], 1: [0.0, 1.0]}


def test_the_effort_grows_with_the_number_of_blocks_that_share_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    cut = _Orderer._cut

    def counted(self: _Orderer, variable: int) -> object:
        seen.append(len(self.of[variable]))
        return cut(self, variable)

    monkeypatch.setattr(_Orderer, "_cut", counted)
    efforts = []
    for n in (64, 256):
        chain = [NamedTable("chain", (i, i + 1)) for i in range(n)]
        elimination_order([3] * (n + 2), [*chain, *[NamedTable("shared", (n + 1, i)) for i in range(n)]])
        efforts.append(sum(seen))
        seen.clear()

    assert efforts[1] < 6 * efforts[0]


def test_an_elimination_is_given_up_at_a_deadline() -> None:
    order = elimination_order([2, 2], [NamedTable("pair", (0, 1))])

    with pytest.raises(TimeIsOver):
        solve(order, {"pair": torch.zeros(2, 2).double()}, Deadline(0))
