"""Programs with rehearsed modules give what they give by Python, to the bit."""

from __future__ import annotations

import pytest
from helpers.rehearsed_programs import PROGRAMS, run_program

from dshard.testing import RankPool

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "data": ((4,), ("dp",)),
    "fsdp": ((4,), ("dp",)),
    "megatron": ((4,), ("tp",)),
    "data x megatron": ((2, 2), ("dp", "tp")),
}
FEW = ("loss_outside", "kept_every_other_step", "dropout", "checkpointed", "one_rank_makes_an_extra_local_call")


@pytest.mark.ranks
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_by_python(ranks: RankPool, name: str) -> None:
    check(ranks, name, "data x megatron")


@pytest.mark.ranks
@pytest.mark.parametrize("plan", ["data", "fsdp", "megatron"])
@pytest.mark.parametrize("name", FEW)
def test_it_does_so_with_each_plan(ranks: RankPool, name: str, plan: str) -> None:
    check(ranks, name, plan)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", ["data", "fsdp", "megatron"])
@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {*FEW}))
def test_every_program_does_so_with_each_plan(ranks: RankPool, name: str, plan: str) -> None:
    check(ranks, name, plan)


def check(ranks: RankPool, name: str, plan: str) -> None:
    outcomes = ranks.run(run_program, name, plan, *MESHES[plan])

    assert [outcome.wrong for outcome in outcomes] == [[]] * 4
