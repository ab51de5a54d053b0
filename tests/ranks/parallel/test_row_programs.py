"""Programs of DDP and FSDP2 with two words changed: values and parameters are those of one device with all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.default_cases import one_way_each
from helpers.row_programs import PROGRAMS, Job
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import dshard
from dshard import DTensor
from dshard.testing import RankPool

MESHES = {"data": (4,), "fsdp": (4,), "data x megatron": (2, 2)}


def loaded(data: Dataset[Any], ranks: int, rank: int, epoch: int) -> Iterator[Sequence[Tensor]]:
    sampler = DistributedSampler(data, ranks, rank)
    sampler.set_epoch(epoch)
    yield from DataLoader(data, 16 // ranks, sampler=sampler)


class OneDevice(Job):
    """One device, with the rows of so many data ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def wrap(self, model: nn.Module, *example: Tensor) -> nn.Module:
        return model

    def own(self, x: Tensor) -> Tensor:
        return x

    def of_all(self, x: Tensor) -> Tensor:
        return x

    def load(self, data: Dataset[Any], epoch: int) -> Iterator[Sequence[Tensor]]:
        every = [loaded(data, self.ranks, rank, epoch) for rank in range(self.ranks)]
        for batches in zip(*every, strict=True):
            yield [torch.cat(parts) for parts in zip(*batches, strict=True)]

    def without_sync(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mean(self, value: Tensor, rows: int) -> float:
        return value.item()


class Gathered(torch.autograd.Function):
    """The rows of all ranks of a group, as users gather them; torch's own cannot over gloo in a part of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class DataRank(Job):
    """A data rank under a strategy."""

    def __init__(self, strategy: str) -> None:
        shape, self.strategy = MESHES[strategy], strategy
        self.mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])

    def wrap(self, model: nn.Module, *example: Tensor) -> nn.Module:
        self.model = dshard.parallelize(
            model, self.mesh, self.strategy, *example, inputs="per-data-rank", outputs="plain"
        )
        return self.model

    def own(self, x: Tensor) -> Tensor:
        """So many for each, and one row that is left over for each of the first: uneven, if they do not divide."""
        ranks, rank = self.mesh.size(0), self.mesh.get_local_rank(0)
        return x.tensor_split(ranks)[rank]

    def of_all(self, x: Tensor) -> Tensor:
        return Gathered.apply(x, self.mesh.get_group(0))  # type: ignore[no-any-return, no-untyped-call]

    def load(self, data: Dataset[Any], epoch: int) -> Iterator[Sequence[Tensor]]:
        return loaded(data, *dshard.data_ranks(self.model), epoch)

    def without_sync(self) -> AbstractContextManager[object]:
        return dshard.accumulate()

    def mean(self, value: Tensor, rows: int) -> float:
        assert type(value) is Tensor
        total = torch.stack([value.detach() * rows, torch.tensor(rows)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()


def found(job: Job, name: str) -> list[Tensor]:
    """What a program has logged, and the parameters and buffers that it leaves."""
    torch.manual_seed(0)
    before, out = torch.get_default_dtype(), []
    torch.set_default_dtype(torch.float64)
    try:
        for logged in PROGRAMS[name](job):
            if isinstance(logged, nn.Module):
                left = [x.detach() for x in logged.state_dict().values()]
                out += [x.full_tensor() if isinstance(x, DTensor) else x for x in left]
            else:
                out.append(torch.tensor(logged))
        return out
    finally:
        torch.set_default_dtype(before)


def unlike_one_device(name: str, strategy: str) -> list[str]:
    torch.set_num_threads(1)
    got, want = found(DataRank(strategy), name), found(OneDevice(MESHES[strategy][0]), name)
    assert len(got) == len(want)
    pairs = enumerate(zip(got, want, strict=True))
    return [f"{i}: {a} for {b}" for i, (a, b) in pairs if not torch.allclose(a, b, rtol=1e-8, atol=1e-10)]


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "strategy"), one_way_each(PROGRAMS, list(MESHES), every=4))
def test_a_program_of_data_parallelism_is_one_device(ranks: RankPool, name: str, strategy: str) -> None:
    assert ranks.run(unlike_one_device, name, strategy, timeout=120.0) == [[]] * 4
