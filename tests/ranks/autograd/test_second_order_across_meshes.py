"""Second derivatives through a redistribution to another mesh: right where no rank is outside, refused elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dshard import MeshError, Replicate, Shard, distribute_tensor
from dshard.testing import RankPool

X = torch.arange(8, dtype=torch.float64)


def twice(here: list[int], there: list[int]) -> str | list[float] | None:
    """The derivative of the squared gradient of a sum of cubes, of which the cubes are made on another mesh."""
    first, second = DeviceMesh("cpu", here), DeviceMesh("cpu", there)
    if dist.get_rank() not in {*here, *there}:
        return None
    x = distribute_tensor(X, first, [Shard(0)]).requires_grad_()
    y = x.redistribute(second, [Shard(0)])
    is_there = dist.get_rank() in there
    cubes = y.pow(3) if is_there else y
    try:
        (g,) = torch.autograd.grad(cubes, x, torch.ones_like(cubes) if is_there else y, create_graph=True)
    except MeshError as error:
        return str(error)
    (out,) = torch.autograd.grad((g * g).sum(), x)
    return out.full_tensor().tolist()


def on_other_axes() -> list[float]:
    x = distribute_tensor(X, DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)]).requires_grad_()
    y = x.redistribute(DeviceMesh("cpu", [[0, 2], [1, 3]]), [Shard(0), Replicate()])
    (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad((g * g).sum(), x)[0].full_tensor().tolist()


@pytest.mark.ranks
def test_ranks_outside_a_mesh_refuse_second_derivatives_with_the_others(ranks: RankPool) -> None:
    for here, there in (([0, 1], [2, 3]), ([0, 1, 2], [1, 2, 3]), ([0, 1, 2, 3], [2, 3])):
        found = ranks.run(twice, here, there, timeout=60)
        told = [each for each in found if each is not None]
        assert all("of the same ranks" in str(each) for each in told), found
        assert len(told) == len({*here, *there})


@pytest.mark.ranks
def test_second_derivatives_through_another_mesh_of_the_same_ranks(ranks: RankPool) -> None:
    right = (36 * X**3).tolist()
    assert ranks.run(on_other_axes, timeout=60) == [right] * 4
    assert ranks.run(twice, [0, 1, 2, 3], [3, 1, 2, 0], timeout=60) == [right] * 4
