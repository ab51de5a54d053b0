"""Dims that are sharded in blocks, on ranks: torch's tensors, checkpoints, other meshes, joined collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dshard
from dshard import LayoutError, Mesh, Replicate, Shard, distribute_tensor, trace
from dshard.checkpoint import load_safetensors, save_safetensors
from dshard.comm import DeviceMesh
from dshard.layout import layout_of, parse_layout
from dshard.testing import RankPool
from dshard.torch_dtensor import IS_TORCHS

pytestmark = pytest.mark.ranks
X = torch.arange(96.0).view(12, 8)
PLACEMENTS: list[list[Any]] = [
    [Shard(0, blocks=2), Replicate()],
    [Replicate(), Shard(1, blocks=2)],
    [Shard(0, blocks=3), Shard(0, blocks=3)],
    [Shard(0, blocks=2), Shard(1, blocks=4)],
    [_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=3)],
]


def square() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def to_torch_and_back(placements: list[Any]) -> None:
    mesh = square()
    x = distribute_tensor(X, mesh, placements)

    theirs = x.to_torch()

    assert tuple(theirs.placements) == tuple(x.placements)
    assert not IS_TORCHS or theirs.full_tensor().equal(X)  # torch 2.11 gathers no blocks
    made = torch_tensor.distribute_tensor(X, mesh, [p if p == Replicate() else _strided(p) for p in x.placements])
    assert made.to_local().equal(x.to_local())
    back = dshard.from_torch(made)
    assert back.layout == x.layout
    assert back.full_tensor().equal(X)


def _strided(placement: Any) -> _StridedShard:
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


ONE_AXIS = [
    placements for placements in PLACEMENTS if getattr(placements[0], "dim", 2) != getattr(placements[1], "dim", 3)
]


@pytest.mark.parametrize("placements", ONE_AXIS, ids=str)
def test_torch_has_the_same_placement(ranks: RankPool, placements: list[Any]) -> None:
    ranks.run(to_torch_and_back, placements)


def through_files(path: str, placements: list[Any], others: list[Any]) -> None:
    mesh = square()
    dcp.save({"x": distribute_tensor(X, mesh, placements)}, checkpoint_id=f"{path}/dcp")
    save_safetensors({"x": distribute_tensor(X, mesh, placements)}, f"{path}/x.safetensors")
    for target in (placements, others):
        loaded = distribute_tensor(torch.zeros_like(X), mesh, target)
        dcp.load({"x": loaded}, checkpoint_id=f"{path}/dcp")
        assert loaded.full_tensor().equal(X)
        loaded = distribute_tensor(torch.zeros_like(X), mesh, target)
        load_safetensors({"x": loaded}, f"{path}/x.safetensors")
        assert loaded.full_tensor().equal(X)


def test_a_checkpoint_holds_each_block(ranks: RankPool, tmp_path: Path) -> None:
    for i, (placements, others) in enumerate(zip(PLACEMENTS, [[Shard(1), Shard(0)], *PLACEMENTS], strict=False)):
        (tmp_path / str(i)).mkdir()
        ranks.run(through_files, str(tmp_path / str(i)), placements, others)


def to_another_mesh() -> None:
    half = dshard.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(X, square(), [Shard(0, blocks=2), Shard(1, blocks=2)])

    moved = x.redistribute(half, [Shard(0, blocks=3)])

    expected = X.unflatten(0, (3, 4))[:, :2] if half.get_rank() == 0 else X.unflatten(0, (3, 4))[:, 2:]
    if half.get_coordinate() is not None:
        assert moved.to_local().equal(expected.flatten(0, 1))


def test_blocks_go_to_another_mesh(ranks: RankPool) -> None:
    ranks.run(to_another_mesh)


def gathers_beside_blocks() -> None:
    mesh = square()
    weights = [
        nn.Parameter(distribute_tensor(X, mesh, [Shard(1), Shard(0, blocks=2)])),
        nn.Parameter(distribute_tensor(X, mesh, [Replicate(), Shard(0, blocks=2)])),
        nn.Parameter(distribute_tensor(X, mesh, [Replicate(), Shard(0)])),
    ]
    rows = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0), Replicate()], src_data_rank=None)
    with trace() as traced:
        sum(F.linear(rows, w).square().sum() for w in weights).backward()

    for w in weights:
        assert w.grad.layout == w.layout
        torch.testing.assert_close(w.grad.full_tensor(), 8 * X.sum(1, keepdim=True).expand(12, 8))
    sums = [event.nbytes for event in traced.events if (event.collective, event.axis) == ("all_reduce", "a")]
    assert max(sums) == 2 * 6 * 8 * 4  # of two weights in one


def test_gradients_beside_blocks_share_a_collective(ranks: RankPool) -> None:
    ranks.run(gathers_beside_blocks)


def test_uneven_blocks_are_not_torchs(ranks: RankPool) -> None:
    ranks.run(refuses_uneven)


def refuses_uneven() -> None:
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    x = distribute_tensor(X, mesh, [Shard(0, blocks=2)])
    assert x.full_tensor().equal(X)
    with pytest.raises(LayoutError, match="of dim 0 of 6 entries for 4 ranks on 1 mesh axes, where torch's _Strided"):
        x.to_torch()
    x = distribute_tensor(X, square(), [Shard(0, blocks=3), Shard(0, blocks=3)])
    with pytest.raises(LayoutError, match="of 4 entries for 4 ranks on 2 mesh axes, where torch's _StridedShard takes"):
        x.to_torch()


def test_blocks_that_do_not_divide_a_dim_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"Shard\(0, blocks=5\) of a dim of size 12: blocks are of one size"):
        distribute_tensor(X, Mesh((2,), ("x",)), [Shard(0, blocks=5)])
    for blocks in (0, -1):
        with pytest.raises(LayoutError, match="a dim has at least one block"):
            Shard(0, blocks=blocks)
    with pytest.raises(LayoutError, match="the number of equal blocks must be an int"):
        Shard(0, blocks="two")  # type: ignore[arg-type]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_layout_with_blocks_is_written_and_read(placements: list[Any]) -> None:
    layout = layout_of(Mesh((2, 2), ("a", "b")), placements, 2)

    assert parse_layout(str(layout), layout.mesh) == layout
    assert repr(Shard(0, blocks=2)) == "Shard(dim=0, blocks=2)"
    assert Shard(0, blocks=2) == _StridedShard(0, split_factor=2) != Shard(0) == Shard(0, blocks=1)
    assert hash(Shard(0, blocks=2)) == hash(_StridedShard(0, split_factor=2))
