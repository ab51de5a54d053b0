"""Functions on planned tensors for tests of `explain`."""

from __future__ import annotations

from functools import cache

import torch

from dshard import DeviceMesh, Mesh, Replicate, Shard, distribute_tensor, init_device_mesh

MESH = Mesh((4, 2), ("dp", "tp"))


def planned(*shape: int, placements):
    return distribute_tensor(torch.empty(shape, device="meta"), MESH, placements)


def row_parallel():
    return planned(64, 32, placements=[Shard(0), Shard(1)]), planned(16, 32, placements=[Replicate(), Shard(1)])


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
