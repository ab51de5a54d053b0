"""Whole programs as people write them, parallelized by one line: what they log is what one device logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.default_cases import one_way_each
from helpers.user_loops import LOOPS, LayOut
from helpers.user_methods import METHODS
from helpers.user_models import MODELS
from helpers.user_objectives import OBJECTIVES
from helpers.user_values import VALUES
from torch import Tensor

import dshard
from dshard.comm import plain
from dshard.testing import RankPool

PROGRAMS: dict[str, Callable[[LayOut], Iterator[Any]]] = {
    program.__name__: program for program in (*LOOPS, *MODELS, *OBJECTIVES, *VALUES, *METHODS)
}
MESHES: dict[str, tuple[int, ...]] = {
    "megatron": (4,),
    "fsdp": (4,),
    "fsdp x megatron": (2, 2),
    "data": (4,),
    "optimus": (2, 2),
    "megatron-sp": (4,),
    "auto": (2, 2),
}
LOOSE = {"scaled_autocast": 2e-2}  # in half precision


def logged(value: Any) -> list[float]:
    """The numbers that a program has logged, however nested."""
    if isinstance(value, tuple | list):
        return [number for each in value for number in logged(each)]
    return [float(value.item() if isinstance(value, Tensor) else value)]


def numbers_of(name: str, lay_out: LayOut) -> list[list[float]]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return [logged(value) for value in PROGRAMS[name](lay_out)]
    finally:
        torch.set_default_dtype(before)


def program_equals_one_device(name: str, strategy: str) -> int:
    torch.set_num_threads(1)
    with plain():
        expected = numbers_of(name, lambda model, *example: model)
    shape = MESHES[strategy]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    with dshard.implicit_replication():
        found = numbers_of(name, lambda model, *example: dshard.parallelize(model, mesh, strategy, *example))
    assert [len(row) for row in found] == [len(row) for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=LOOSE.get(name, 1e-8), abs=LOOSE.get(name, 1e-9))
    return len(found)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "strategy"), one_way_each(PROGRAMS, list(MESHES)[:-1]))
def test_a_program_logs_what_one_device_logs(ranks: RankPool, name: str, strategy: str) -> None:
    assert min(ranks.run(program_equals_one_device, name, strategy, timeout=120.0)) > 2


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_under_the_cheapest_plan_logs_what_one_device_logs(ranks: RankPool, name: str) -> None:
    assert min(ranks.run(program_equals_one_device, name, "auto", timeout=600.0)) > 2
