"""Programs that change something between steps do rehearsed what they do by Python alone: each step, to the bit."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.changing_programs import CHANGES, STEPS, Program, generated, outcomes_on
from helpers.default_cases import one_in

from dshard.testing import RankPool, rank_pool

BLOCKS = (
    "x = x + F.linear(F.relu(F.linear(F.layer_norm(x, (d,), P(d), P(d)), P(f, d), P(f))), P(d, f), P(d))",
    "q, k, v = heads(x @ P(d, 3 * d)); x = x + joined(attend(q, k, v, is_causal=True)) @ P(d, d)",
)


def different(pool: RankPool, programs: list[Program], cases: Counter[str]) -> list[str]:
    """The programs of which a step differs, and how; programs by the calls that were answered are counted."""
    found = []
    for program, (text, calls, answered) in zip(programs, outcomes_on(pool, programs), strict=True):
        cases["changing programs"] += 1
        cases["calls of rehearsed models"] += calls
        cases["of these answered"] += answered
        if text:
            found.append(f"{program}\n{text}")
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", one_in(2, [2, 1]))
def test_steps_are_those_of_python_alone(ranks: int, cases_run: Counter[str]) -> None:
    programs = [generated(seed) for seed in range(4)]
    assert not different(rank_pool(ranks), programs, cases_run)


@pytest.mark.ranks
def test_calls_of_one_rank_alone_hang_nobody(cases_run: Counter[str]) -> None:
    programs = [generated(seed, apart=True) for seed in range(2)]
    assert not different(rank_pool(2), programs, cases_run)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.thorough
def test_each_change_in_a_transformer(name: str, cases_run: Counter[str]) -> None:
    """Once while it is recorded, once while it is derived, and once warm, under each of two plans."""
    programs = [
        Program(step, plan, BLOCKS, 0.1, True, ((step, name),)) for plan in ("data", "megatron") for step in (1, 2, 5)
    ]
    for ranks in (1, 2):
        assert not different(rank_pool(ranks), programs, cases_run)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_many_programs_are_those_of_python_alone(first: int, ranks: int, cases_run: Counter[str]) -> None:
    programs = [generated(seed) for seed in range(first + 1000 * ranks, first + 1000 * ranks + 100)]
    assert not different(rank_pool(ranks), programs, cases_run)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_calls_of_one_rank_alone_hang_nobody_in_many_programs(first: int, cases_run: Counter[str]) -> None:
    programs = [generated(seed, apart=True) for seed in range(first, first + 100)]
    assert not different(rank_pool(2), programs, cases_run)


@pytest.mark.ranks
def test_warm_steps_are_answered() -> None:
    """All but the first, and the one that is recorded; else the other tests say nothing."""
    programs = [Program(0, plan, BLOCKS, 0.1, False, ()) for plan in ("data", "megatron")]
    assert [each[1:] for each in outcomes_on(rank_pool(1), programs)] == [(STEPS, STEPS - 2)] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("step", one_in(2, range(4)))
def test_models_are_answered_after_an_exception_in_another(step: int) -> None:
    programs = [Program(0, "data", BLOCKS, 0.0, False, changes) for changes in (((step, "an exception"),), ())]
    assert outcomes_on(rank_pool(1), programs)[1][1:] == (STEPS, STEPS - 2)


def test_a_seed_is_a_program() -> None:
    assert all(generated(seed) == generated(seed) for seed in range(3))
