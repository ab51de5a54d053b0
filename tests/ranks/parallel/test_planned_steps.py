"""What a plan says is what a step does on real ranks: what each call sends in each pass, and the seconds of it all."""

from __future__ import annotations

import pytest
from helpers.default_cases import one_way_each
from helpers.planned_steps import FAMILIES, differences, planned_step, ran_step

from dshard.testing import RankPool, rank_pool


def does_what_is_planned(pool: RankPool, family: str, shape: tuple[int, ...]) -> None:
    plan, sent, seconds, beside = planned_step(family, shape)

    steps = pool.run(ran_step, plan, family, timeout=180.0)
    assert sent
    assert differences(sent, beside, *[ran.sent for ran in steps]) == []
    busiest = max(steps, key=lambda ran: ran.seconds.work).seconds
    assert busiest.work == pytest.approx(seconds.work, rel=0.02)
    assert busiest.hidden == pytest.approx(seconds.hidden, rel=0.05)
    for ran in steps:
        assert ran.seconds.sent == pytest.approx(seconds.sent, rel=0.02)
        assert ran.rehearsed == ran.begun != []


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "shape"), one_way_each(FAMILIES, [(4,), (2, 2)], every=6))
def test_a_step_does_what_is_planned(ranks: RankPool, family: str, shape: tuple[int, ...]) -> None:
    does_what_is_planned(ranks, family, shape)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_eight_ranks_does_what_is_planned(family: str, shape: tuple[int, ...]) -> None:
    with rank_pool(8) as pool:
        does_what_is_planned(pool, family, shape)
