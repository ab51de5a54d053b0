"""Programs that tutorials teach, parallelized by one line and with nothing else changed, equal one device.

Their targets, masks, noise and indices are plain tensors, alike on all ranks: numbers that they log and parameters that
they end with are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.default_cases import one_way_each
from helpers.taught_losses import LOSSES
from helpers.taught_methods import METHODS
from helpers.user_loops import LayOut
from torch import Tensor, nn

import dshard
from dshard.comm import plain
from dshard.testing import RankPool

PROGRAMS: dict[str, Callable[[LayOut], Iterator[Any]]] = {each.__name__: each for each in (*LOSSES, *METHODS)}
MESHES: dict[str, tuple[int, ...]] = {
    "data": (4,),
    "fsdp": (4,),
    "megatron": (4,),
    "data x megatron": (2, 2),
    "fsdp x megatron": (2, 2),
    "auto": (2, 2),
}


def logged(value: Any) -> list[float]:
    """The numbers that a program has logged, however nested."""
    if isinstance(value, tuple | list):
        return [number for each in value for number in logged(each)]
    return [float(value.item() if isinstance(value, Tensor) else value)]


def outcome(name: str, parallelize: Callable[..., object]) -> tuple[list[list[float]], list[Tensor]]:
    """What a program logs, and the parameters of its models in the end, in double precision."""
    models: list[nn.Module] = []

    def lay_out(model: nn.Module, *example: object) -> None:
        models.append(model)
        parallelize(model, *example)

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
        expected, wanted = outcome(name, lambda model, *example: None)
    shape = MESHES[strategy]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    found, parameters = outcome(name, lambda model, *example: dshard.parallelize(model, mesh, strategy, *example))
    assert [len(row) for row in found] == [len(row) for row in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-8, abs=1e-9)
    for p, q in zip(parameters, wanted, strict=True):
        assert isinstance(p, dshard.DTensor)
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-7, atol=1e-9)
    return len(found)


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "strategy"), one_way_each(PROGRAMS, list(MESHES)))
def test_a_taught_program_equals_one_device(ranks: RankPool, name: str, strategy: str) -> None:
    assert min(ranks.run(program_equals_one_device, name, strategy, timeout=120.0)) > 0
