"""Generated training loops under plans that are drawn at random, on real ranks: none hangs, each learns alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from helpers.planned_programs import generated, outcome_on

from dshard.testing import RankPool


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 100, 5))
def test_planned_programs_compute_on_ranks_what_one_device_does(
    first: int, ranks: RankPool, cases_run: Counter[str]
) -> None:
    failed = []
    for seed in range(first, first + 5):
        program = replace(generated(seed), draw=seed % 8)
        word, text = outcome_on(ranks, program)
        cases_run[f"planned programs: {word}"] += 1
        if word not in ("equal", "not planned", "refused by torch"):
            failed.append(f"{word}: {text}\n{program}")
    assert not failed, "\n\n".join(failed)
