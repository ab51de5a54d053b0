"""Process groups that come and go in one process, of other sizes and orders, and threads that use several at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import distributed_c10d

from dshard import MeshError, Replicate, Shard, distribute_tensor, init_device_mesh, parallelize
from dshard.comm import DeviceMesh, bind, group_of, planned_backend, process_groups, runtime_of
from dshard.comm.graph_collectives import wait_in_graphs_as_in_eager
from dshard.comm.peer_failure import _has_others
from dshard.testing import RankPool

ORDERS = [
    [1, 0, None, None],
    [3, 1, 2, 0],
    [None, None, 0, 1],
]
"""The rank that each of four processes has in one world after another; None: it is alone in a world of its own."""
WAIT = 120.0  # seconds


def operands() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, dtype=torch.float64, generator=random) for size in [(7, 12), (5, 12), (5,)])  # type: ignore[return-value]


def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b).softmax(0).pow(2).sum()


def trains_as_one_device(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    placements = [Shard(axis % 2) for axis in range(len(shape))]
    layouts: list[Sequence[Shard | Replicate]] = [placements, placements[::-1], [Replicate()] * len(shape)]
    wholes = [x.requires_grad_() for x in operands()]
    parts = [distribute_tensor(x.detach(), mesh, layout) for x, layout in zip(operands(), layouts, strict=True)]
    for part in parts:
        part.requires_grad_()
    for _ in range(2):  # warm, the second time
        program(*wholes).backward()
        program(*parts).backward()
    for part, x in zip(parts, wholes, strict=True):
        assert part.grad is not None
        assert x.grad is not None
        torch.testing.assert_close(part.grad.full_tensor(), x.grad)


def in_one_world_after_another(folder: str) -> None:
    process = dist.get_rank()
    trains_as_one_device((2, 2), ("a", "b"))
    for number, order in enumerate(ORDERS):
        dist.destroy_process_group()
        rank, size = order[process], len(order) - order.count(None)
        file = f"{folder}/{number}" if rank is not None else f"{folder}/{number} of {process}"
        rank, size = (0, 1) if rank is None else (rank, size)
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
        trains_as_one_device(*(((2, 2), ("a", "b")) if size == 4 else ((size,), ("x",))))


def test_nothing_of_a_world_that_has_ended_is_used(tmp_path: Path) -> None:
    with RankPool(4) as pool:
        pool.run(in_one_world_after_another, str(tmp_path), timeout=WAIT)


def in_a_world_without_a_named_backend(file: str) -> list[str]:
    """The backends of a world as torchrun's programs have it that begin with `init_device_mesh`: of axes, of all."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(init_method=f"file://{file}", rank=rank, world_size=4)
    runtime = runtime_of(bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))))
    assert runtime is not None
    groups = [runtime.group(axes) for axes in [("a",), ("b",), ("a", "b")]] + [group_of((0, 1, 2, 3), runtime)]
    return [*(group.backend.name for group in groups), planned_backend(runtime.mesh).name, *["heard"] * _has_others()]


@pytest.mark.ranks
def test_a_world_without_a_named_backend_has_that_of_its_devices(tmp_path: Path) -> None:
    with RankPool(4) as pool:
        found = pool.run(in_a_world_without_a_named_backend, str(tmp_path / "world"), timeout=WAIT)

    assert found == [["gloo"] * 5 + ["heard"]] * 4


def model_in_the_next_world(file: str) -> tuple[str, bool]:
    """What is said of a model whose world has been destroyed, and whether it goes on once its mesh is made again."""
    x, rank = torch.ones(4, 8), dist.get_rank()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("ended",))
    model: Any = parallelize(torch.nn.Linear(8, 4), mesh, "fsdp", x)
    before = model(x).full_tensor()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    with pytest.raises(MeshError) as error:
        model(x)
    bind(init_device_mesh("cpu", (4,), mesh_dim_names=("ended",)))
    return str(error.value), torch.equal(model(x).full_tensor(), before)


def test_a_model_of_a_world_that_has_ended_is_refused_until_its_mesh_is_made_again(tmp_path: Path) -> None:
    with RankPool(4) as pool:
        for text, goes_on in pool.run(model_in_the_next_world, str(tmp_path / "world"), timeout=WAIT):
            assert text.startswith("the process groups of the mesh (ended=4) have been destroyed"), text
            assert goes_on


def steps_of_a_thread_in_a_wait() -> int:
    """How often another thread runs while this rank waits in a graph for torch's own collective, of a foreign group."""
    wait_in_graphs_as_in_eager()
    rank, group, steps = dist.get_rank(), dist.new_group(), [0, 0]
    ended = threading.Event()

    def count() -> None:
        while not ended.wait(0.01):
            steps[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    dist.barrier()
    if rank == 3:
        ended.wait(0.5)
    sum_ = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
    steps[1] = steps[0]
    assert torch.ops._c10d_functional.wait_tensor(sum_).tolist() == [4.0, 4.0]
    ended.set()
    thread.join()
    return steps[0] - steps[1]


@pytest.mark.ranks
def test_threads_run_while_a_graph_waits(ranks: RankPool) -> None:
    """Gloo's do, to let go of the tensors of a collective that has ended: a wait that stopped them would not end."""
    assert min(ranks.run(steps_of_a_thread_in_a_wait)[:3]) > 3


def threads_of_a_mesh_made_again() -> tuple[bool, bool, int]:
    """Whether the same arguments give the same mesh, whether other names do, and the threads that it has added."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("again", "inner"))
    before = len(os.listdir("/proc/self/task"))
    same = all(init_device_mesh("cpu", (2, 2), mesh_dim_names=("again", "inner")) is mesh for _ in range(3))
    added = len(os.listdir("/proc/self/task")) - before
    return same, init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "inner")) is mesh, added


@pytest.mark.ranks
def test_a_mesh_made_again_has_no_groups_of_its_own(ranks: RankPool) -> None:
    """A group of gloo has three threads, one of which wakes a hundred times a second while nothing is sent."""
    assert ranks.run(threads_of_a_mesh_made_again) == [(True, False, 0)] * 4


def in_two_threads() -> list[str]:
    """What fails in threads that use the same ranks along meshes of their own, at the same time."""
    meshes = [init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), init_device_mesh("cpu", (2, 2))]
    failed: list[str] = []

    def work(mesh: DeviceMesh) -> None:
        x = operands()[0]
        try:
            for _ in range(10):
                part = distribute_tensor(x, mesh, [Shard(0), Replicate()][: mesh.ndim], src_data_rank=None)
                gram = (part @ part.t()).sin()
                torch.testing.assert_close(gram.sum(0).full_tensor(), (x @ x.t()).sin().sum(0))
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(mesh,)) for mesh in meshes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT / 2)
    return [*failed, *("still at work" for thread in threads if thread.is_alive())]


def test_threads_use_meshes_of_their_own_at_once() -> None:
    with RankPool(4) as pool:
        assert pool.run(in_two_threads, timeout=WAIT) == [[]] * 4


def test_torch_is_as_before_when_threads_have_made_groups_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that make groups, the first to begin is the first to end."""
    before = [distributed_c10d._process_group_name, distributed_c10d._get_split_source]
    second_began, first_ended, asked = threading.Event(), threading.Event(), list[object]()
    second = threading.Thread(target=process_groups._new_group, args=((1,), "second", None))

    def make(ranks: Sequence[int], backend: str | None, use_local_synchronization: bool) -> SimpleNamespace:
        if len(ranks) == 2:
            second.start()
            assert second_began.wait(WAIT)
        else:
            second_began.set()
            assert first_ended.wait(WAIT)
        asked.append(distributed_c10d._get_split_source(None))
        return SimpleNamespace(group_name=distributed_c10d._process_group_name(ranks, True))

    monkeypatch.setattr(dist, "new_group", make)
    process_groups._new_group((0, 1), "first", None)
    first_ended.set()
    second.join(WAIT)
    assert asked == [None, None]
    assert [distributed_c10d._process_group_name, distributed_c10d._get_split_source] == before
