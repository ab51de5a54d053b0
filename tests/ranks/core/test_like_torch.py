"""Programs for distributed tensors that hold with torch's own DTensor hold with dshard's, on the same ranks."""

from __future__ import annotations

import helpers.dtensor_modules
import helpers.dtensor_operators  # noqa: F401  # their programs
import pytest
import torch
from helpers.default_cases import one_in
from helpers.dtensor_programs import LIBRARIES, PROGRAMS

from dshard.testing import RankPool


def run(library: str, name: str) -> str:
    torch.set_num_threads(1)
    PROGRAMS[name](LIBRARIES[library])
    return "held"


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", one_in(4, PROGRAMS))
@pytest.mark.parametrize("library", [pytest.param("torch", marks=pytest.mark.thorough), "dshard"])
def test_a_program_for_distributed_tensors_holds(ranks: RankPool, library: str, name: str) -> None:
    assert ranks.run(run, library, name, timeout=120.0) == ["held"] * 4
