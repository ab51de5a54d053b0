"""Whole programs as people write them, parallelized by one line and with nothing else changed, equal one device.

Their targets, masks, noise and indices are plain tensors, alike on all ranks. What they log, and the parameters that
they end with, are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from helpers import taught_losses, taught_methods
from helpers.default_cases import one_in, one_way_each
from helpers.user_loops import LOOPS, LayOut
from helpers.user_methods import METHODS
from helpers.user_models import MODELS
from helpers.user_objectives import OBJECTIVES
from helpers.user_values import VALUES
from torch import Tensor, nn

import dshard
from dshard.comm import plain
from dshard.testing import RankPool

Program = Callable[[LayOut], Iterator[Any]]


def by_name(*programs: Program) -> dict[str, Program]:
    return {program.__name__: program for program in programs}


USERS = by_name(*LOOPS, *MODELS, *OBJECTIVES, *VALUES, *METHODS)
TAUGHT = by_name(*taught_losses.LOSSES, *taught_methods.METHODS, taught_losses.in_arrays)
PROGRAMS = USERS | TAUGHT
MESHES: dict[str, tuple[int, ...]] = {
    "megatron": (4,),
    "fsdp": (4,),
    "fsdp x megatron": (2, 2),
    "data": (4,),
    "optimus": (2, 2),
    "megatron-sp": (4,),
    "data x megatron": (2, 2),
    "auto": (2, 2),
}
TAUGHT_WAYS = ("data", "fsdp", "megatron", "data x megatron", "fsdp x megatron")
LOOSE = {"scaled_autocast": 2e-2}  # in half precision


def logged(value: Any) -> list[float]:
    """The numbers that a program has logged, however nested."""
    if isinstance(value, tuple | list):
        return [number for each in value for number in logged(each)]
    return [float(value.item() if isinstance(value, Tensor) else value)]


def outcome(name: str, parallelize: Callable[..., object]) -> tuple[list[list[float]], list[Tensor]]:
    """What a program logs, and the parameters of its models in the end, in double precision."""
    models: list[nn.Module] = []

    def lay_out(model: nn.Module, *example: object) -> object:
        models.append(model)
        return parallelize(model, *example)

    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        values = [logged(value) for value in PROGRAMS[name](lay_out)]
    finally:
        torch.set_default_dtype(before)
    return values, [p.detach() for model in models for p in model.parameters()]


def program_equals_one_device(name: str, strategy: str) -> int:
    torch.set_num_threads(1)
    with plain():
        expected, wanted = outcome(name, lambda model, *example: model)
    shape = MESHES[strategy]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    found, parameters = outcome(name, lambda model, *example: dshard.parallelize(model, mesh, strategy, *example))
    assert [len(row) for row in found] == [len(row) for row in expected]
    rtol, atol = LOOSE.get(name, 1e-8), LOOSE.get(name, 1e-9)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rtol, abs=atol)
    for p, q in zip(parameters, wanted, strict=True):
        whole = p.full_tensor() if isinstance(p, dshard.DTensor) else p
        torch.testing.assert_close(whole, q, rtol=10 * rtol, atol=10 * atol)
    return len(found)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "strategy"), one_way_each(USERS, list(MESHES)[:-2], every=16))
def test_a_program_logs_what_one_device_logs(ranks: RankPool, name: str, strategy: str) -> None:
    assert min(ranks.run(program_equals_one_device, name, strategy, timeout=120.0)) > 2


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_under_the_cheapest_plan_logs_what_one_device_logs(ranks: RankPool, name: str) -> None:
    assert min(ranks.run(program_equals_one_device, name, "auto", timeout=600.0)) > 1


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", one_in(111, product(TAUGHT, TAUGHT_WAYS)), ids=" under ".join)
def test_a_taught_program_is_that_of_one_device(ranks: RankPool, case: tuple[str, str]) -> None:
    assert min(ranks.run(program_equals_one_device, *case, timeout=120.0)) > 1
