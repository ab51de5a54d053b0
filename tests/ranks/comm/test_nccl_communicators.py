"""How communicators are made under NCCL's contract: who has to take part, and that the library asks nobody else."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dshard import Replicate, Shard, distribute_tensor
from dshard.comm import bind, runtime_of
from dshard.mesh import Mesh
from dshard.testing import RankPool, nccl_contract
from dshard.testing.nccl_contract import RULES

pytestmark = pytest.mark.ranks
SPLITS = pytest.mark.skipif(
    torch.__version__.startswith("2.14"),
    reason="torch 2.14 splits from backends of C++ alone, and the contract is none",
)


def group_of_two(rank: int, *, local: bool) -> list[float]:
    """An all_reduce of ranks 0 and 1 in a group that is made by them alone, or by all ranks."""
    _bind_world()
    if local and rank > 1:
        return []
    group = dist.new_group([0, 1], use_local_synchronization=local)
    x = torch.ones(2)
    if rank < 2:
        dist.all_reduce(x, group=group)
    return x.tolist()


def group_of_a_mesh_of_two() -> list[float]:
    """A tensor on a mesh of two axes that has half of the ranks, gathered over both axes by these ranks alone."""
    _bind_world()
    rank = dist.get_rank()
    halves = [DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("a", "b")) for ranks in ([[0], [1]], [[2], [3]])]
    mesh = halves[rank // 2]
    if rank > 1:
        return []
    x = distribute_tensor(torch.arange(3.0), mesh, [Shard(0), Replicate()])
    out: list[float] = process_group_sum(bind(mesh)) + x.full_tensor().tolist()
    return out


def process_group_sum(mesh: Mesh) -> list[float]:
    """The sum of ones over the group along all axes of a mesh."""
    runtime = runtime_of(mesh)
    assert runtime is not None
    x = torch.ones(1)
    dist.all_reduce(x, group=runtime.group(mesh.names).process_group)
    return x.tolist()


def _bind_world() -> None:
    world: Any = dist.group.WORLD
    world.eager_connect_single_device(torch.device("cuda", 0))


def local_group() -> str:
    try:
        group_of_two(dist.get_rank(), local=True)
    except Exception as error:
        return str(error)
    return ""


def shared_group() -> list[float]:
    return group_of_two(dist.get_rank(), local=False)


@pytest.mark.thorough
@pytest.mark.skipif(
    len(signature(distributed_c10d._get_split_source).parameters) > 1,
    reason="from torch 2.15 on a world is split for a backend that names the device of both: here there is no CUDA",
)
@SPLITS
def test_a_group_of_its_ranks_alone_is_split_from_a_world_with_a_device() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_CONTRACT_SECONDS", "8")
        with RankPool(4, nccl_contract.BACKEND) as pool:
            for text in pool.run(local_group)[:2]:
                assert "waits in split of a group from this one" in text
                assert f"[NCCL contract: split; {RULES['split'].source}]" in text


@SPLITS
def test_groups_that_all_ranks_make_and_those_of_meshes_need_nobody_else() -> None:
    with RankPool(4, nccl_contract.BACKEND) as pool:
        assert pool.run(shared_group) == [[2.0] * 2] * 2 + [[1.0] * 2] * 2
        assert pool.run(group_of_a_mesh_of_two) == [[2.0, 0.0, 1.0, 2.0]] * 2 + [[]] * 2


def scattered_with_an_empty_piece() -> list[float]:
    """Two numbers scattered over three ranks, as the first operation of their group."""
    mesh = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("x",))
    if dist.get_rank() == 3:
        return []
    out: list[float] = distribute_tensor(torch.arange(2.0), mesh, [Shard(0)]).full_tensor().tolist()
    return out


def test_a_scatter_may_be_the_first_operation_of_a_group() -> None:
    with RankPool(4, nccl_contract.BACKEND) as pool:
        assert pool.run(scattered_with_an_empty_piece) == [[0.0, 1.0]] * 3 + [[]]
