"""In FakeTensorMode a program gives tensors of the shapes and layouts that it has, and sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.fake_cuda_world import fake_cuda_world
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import dshard
from dshard import DTensor, Layout, Replicate, Shard, distribute_tensor, init_device_mesh
from dshard.caches import clear_caches
from dshard.comm import DeviceMesh, as_mesh, graph_collectives, listen, wait_in_graphs_as_in_eager
from dshard.compile.graph_runs import _publishing
from dshard.core.observe import OperatorMode
from dshard.distribute import cut
from dshard.ops import lookup
from dshard.testing import RankPool


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sines(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).sin()


def program(mesh: DeviceMesh) -> list[Any]:
    """Each way to make distributed tensors, operators of each family, a step of a model laid out by its name."""
    dshard.manual_seed(1)
    a = DTensor.from_local(sines(8, 6), mesh, [Shard(0), Replicate()])
    w = distribute_tensor(sines(5, 6), mesh, [Replicate(), Shard(0)]).requires_grad_()
    F.linear(a, w).relu().softmax(-1).square().sum().backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    dshard.parallelize(model, mesh, "megatron", torch.ones(4, 6))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss = model(torch.ones(4, 6)).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    q = distribute_tensor(sines(2, 4, 8, 4), mesh, [Shard(0), Shard(1)])
    rows = distribute_tensor(sines(10, 4), mesh, [Shard(0), Replicate()], src_data_rank=None)
    index = distribute_tensor(torch.tensor([[1, 7], [9, 0]]), mesh, [Replicate(), Replicate()])
    images = distribute_tensor(sines(2, 3, 8, 8), mesh, [Shard(0), Shard(2)])
    kernel = distribute_tensor(sines(4, 3, 3, 3), mesh, [Replicate(), Replicate()])
    return [
        *(a, w.grad, loss, norm, *model.parameters()),
        *(dshard.randn(4, 4, device_mesh=mesh, placements=[Shard(0), Shard(1)]), F.dropout(a, 0.5)),
        *(a[1:3], torch.cat([a, a]), a @ a.t(), F.scaled_dot_product_attention(q, q, q, is_causal=True)),
        *(F.embedding(index, rows), rows.index_select(0, index[0]), rows.sort(0)[0], rows.cumsum(0)),
        *(rows.amax(0), rows.std(0), rows.argmax(0), rows.flip(0), torch.where(rows > 0, rows, rows * 2)),
        *(F.conv2d(images, kernel, padding=1), rows.redistribute(placements=[Replicate(), Shard(1)])),
    ]


def told(tensors: list[Any]) -> list[tuple[Any, ...]]:
    return [(x.shape, x.stride(), x.dtype, x.placements, x.to_local().shape) for x in tensors]


def faked(mesh: DeviceMesh | None = None) -> list[tuple[Any, ...]]:
    with FakeTensorMode():
        made = program(mesh or grid())
        assert {type(x._local_tensor) for x in made} == {FakeTensor}
        return told(made)


def before_and_after() -> None:
    clear_caches()
    events: list[Any] = []
    with listen(events.append):
        first = faked()  # no cache has seen the program yet
    assert events == []
    mesh = grid()
    real = program(mesh)
    assert told(real) == first == faked(mesh)
    for x, y in zip(program(mesh), real, strict=True):
        torch.testing.assert_close(x.full_tensor(), y.full_tensor(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.ranks
def test_a_program_among_fake_tensors_is_that_of_real_ones(ranks: RankPool) -> None:
    ranks.run(before_and_after)


@contextmanager
def fake_world(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_program_runs_in_a_process_group_that_sends_nothing() -> None:
    seen = []
    for rank in (0, 3):
        with fake_world(rank):
            seen.append(faked())

    assert [row[:4] for row in seen[0]] == [row[:4] for row in seen[1]]
    assert [row[4] for row in seen[0]] != [row[4] for row in seen[1]]


def test_graphs_call_torchs_collectives_in_a_process_group_that_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    for name, value in (("_LIBRARY", registered), ("_KERNELS", {}), ("_ASKED", [-1])):
        monkeypatch.setattr(graph_collectives, name, value)
    graph = _publishing(list, (0,))

    wait_in_graphs_as_in_eager()  # without a process group
    with fake_world(0):
        graph(())
    assert not registered
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graph(())  # compiled in the world before
    dist.destroy_process_group()

    assert len(registered) == 1


def test_what_numbers_of_the_cpu_make_with_tensors_of_a_gpu_is_on_the_gpu() -> None:
    with fake_cuda_world(rank=1):
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("x",))
        x = distribute_tensor(torch.ones(8, 8, device="cuda"), mesh, [Shard(0)], src_data_rank=None)
        two = torch.tensor(2.0)
        made = [two * x, torch.pow(two, x), torch.lerp(two, x, x), two * x.sum(), torch.zeros_like(x, device="cuda")]
        assert [(y.device, y.to_local().device) for y in made] == [(x.device, x.device)] * 5


def test_indices_of_the_cpu_come_to_the_device_of_the_tensor() -> None:
    call: Any = SimpleNamespace(shapes=[(8, 3)])
    for i in (0, 1):
        held = {i: range(1)}
        mapped, is_held = lookup._mapped(call, [torch.tensor([0, 2])] * 2, held, torch.device("meta"))
        assert (mapped[i].device, is_held.device) == (torch.device("meta"),) * 2  # type: ignore[union-attr]


def test_tensors_of_the_cpu_come_to_the_device_of_the_mesh() -> None:
    with fake_cuda_world(rank=1):
        mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("x",))
        x, layout = torch.ones(8, 8), Layout(as_mesh(mesh), (Shard(0),))
        made = [distribute_tensor(x, mesh, [Shard(0)]), DTensor.from_local(x[:2], mesh, [Shard(0)])]
        made += [cut(x, layout) for _ in range(2)]
        assert {str(device) for y in made for device in (y.device, y.to_local().device)} == {"cuda:0"}


def test_a_stream_is_recorded_for_the_local_tensor() -> None:
    recorded: list[tuple[int, ...]] = []

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        return recorded.append(args[0].shape) if "record_stream" in str(func) else func(*args, **kwargs)

    with fake_world(1):
        x = DTensor.from_local(sines(2, 4), init_device_mesh("cpu", (4,)), [Shard(0)]).requires_grad_()
        with OperatorMode(run):
            x.record_stream(torch.Stream(stream_id=0, device_index=0, device_type=1))

    assert recorded == [(2, 4)]
