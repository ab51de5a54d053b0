"""Generated training loops under plans that are drawn at random compute what one device does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from helpers.planned_programs import PLANS, Program, generated, outcome

COUNTED = ("equal", "not planned", "refused by torch")


def failures(programs: Iterable[Program], run: Callable[[Program], tuple[str, str]], cases: Counter[str]) -> list[str]:
    """The programs that compute something else, raise, or are told of calls that their plans have."""
    failed = []
    for program in programs:
        word, text = run(program)
        cases[f"planned programs: {word}"] += 1
        if word not in COUNTED:
            failed.append(f"{word}: {text}\n{program}")
    return failed


@pytest.mark.parametrize("seed", [4, 24, 32])
def test_a_planned_program_computes_what_one_device_does(seed: int, cases_run: Counter[str]) -> None:
    failed = failures([generated(seed)], outcome, cases_run)
    assert not failed, "\n\n".join(failed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 250, 10))
def test_many_planned_programs_compute_what_one_device_does(first: int, cases_run: Counter[str]) -> None:
    drawn = (replace(generated(seed), draw=draw) for seed in range(first, first + 10) for draw in range(PLANS))
    failed = failures(drawn, outcome, cases_run)
    assert not failed, "\n\n".join(failed)


def test_a_seed_is_a_program() -> None:
    assert all(generated(seed) == generated(seed) for seed in range(3))
