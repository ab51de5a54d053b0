"""Between local and distributed tensors: what is sent, what is checked, and where gradients are summed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import tensor as torch_tensor

import dshard
from dshard import DTensor, Mesh, Partial, Replicate, Shard
from dshard.caches import clear_caches
from dshard.comm import DeviceMesh
from dshard.errors import MixedError, ShapeError
from dshard.testing import RankPool, count_traffic, simulated

GRID = Mesh((2, 2), ("a", "b"))
WAIT = 300.0  # seconds, for torch's DTensor imports half of torch at its first use


@functools.cache
def line() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


@functools.cache
def grid() -> DeviceMesh:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


# -- from_local


LOCALS: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((4, 6), (0, 1), [Shard(0), Replicate()]),
    ((4, 6), (1, 0), [Shard(0), Shard(1)]),
    ((4, 6, 3), (1, 2, 0), [Shard(1), Shard(1)]),
    ((4, 6, 3), (2, 0, 1), [Shard(-1), Partial()]),
    ((2, 6), (1, 0), [Shard(0), Partial("max")]),
]


def torchs(placement: Any) -> Any:
    kind = next(kind for kind in (Shard, Replicate, Partial) if isinstance(placement, kind))
    return getattr(torch_tensor, kind.__name__)(*(getattr(placement, name) for name in kind.__match_args__))


def as_torch_makes_them() -> int:
    """The collectives in making distributed tensors, each compared with torch's."""
    sent = 0
    for sizes, order, placements in LOCALS:
        local = torch.ones(sizes).permute(order)
        theirs = torch_tensor.DTensor.from_local(local, grid(), [torchs(p) for p in placements])
        with count_traffic() as traffic, grid():
            found = [
                DTensor.from_local(local, grid(), placements),
                DTensor.from_local(local, None, placements, run_check=False),
                DTensor.from_local(local, placements=placements, shape=theirs.shape, stride=theirs.stride()),
            ]
        for mine in found:
            assert (mine.shape, mine.stride(), mine.placements) == (theirs.shape, theirs.stride(), theirs.placements)
            assert (mine.to_local().data_ptr(), mine.device_mesh) == (local.data_ptr(), grid())
        sent += len(traffic.collectives)
    with pytest.raises(MixedError, match="not a DTensor"):
        DTensor.from_local(DTensor.from_local(torch.ones(4), grid()), grid())
    return sent


@pytest.mark.ranks
def test_from_local_sends_nothing_and_makes_what_torch_makes(ranks: RankPool) -> None:
    assert ranks.run(as_torch_makes_them, timeout=WAIT) == [0] * 4


def uneven() -> tuple[str, tuple[int, ...], int]:
    """What the debug mode says of parts of 3, 3, 3 and 1 rows; the shape that `run_check` finds, and what it sends."""
    local = torch.ones(1 if dist.get_rank() == 3 else 3, 2)
    with count_traffic() as traffic:
        shape = tuple(DTensor.from_local(local, line(), [Shard(0)], run_check=True).shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_DEBUG", "1")
        clear_caches()
        DTensor.from_local(torch.ones(2, 2), line(), [Shard(0)])
        DTensor.from_local(local, line(), [Shard(0)], shape=(10, 2))
        with pytest.raises(ShapeError) as caught:
            DTensor.from_local(local, line(), [Shard(0)])
    clear_caches()
    return str(caught.value), shape, len(traffic.collectives)


@pytest.mark.ranks
def test_uneven_parts_need_a_shape_or_a_check(ranks: RankPool) -> None:
    for rank, (told, shape, sent) in enumerate(ranks.run(uneven)):
        guess = (4, 2) if rank == 3 else (12, 2)
        assert f"count as even parts of a tensor of shape {guess}" in told
        assert "give the global shape, shape=(10, 2), or let the ranks tell each other, run_check=True" in told
        assert (shape, sent) == ((10, 2), 1)


def test_uneven_parts_of_simulated_ranks_need_a_shape() -> None:
    with simulated(GRID):
        parts = dshard.distribute_tensor(torch.ones(3, 2), GRID, [Shard(0), Replicate()]).to_local()
        with pytest.raises(ShapeError, match=r"give the global shape, shape=\(3, 2\)"):
            DTensor.from_local(parts, GRID, [Shard(0), Replicate()])
        assert DTensor.from_local(parts, GRID, [Shard(0), Replicate()], run_check=True).shape == (3, 2)
