"""What plans say they move is what torch.distributed is asked to move, counted below the transport."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dshard as ours
from dshard import Layout, Mesh, Shard, matmul
from dshard.autograd.crossing import redistribute
from dshard.comm import CommEvent, DeviceMesh, bind, collectives, init_device_mesh, listen, run, runtime_of
from dshard.core.context import planning_context
from dshard.placements import REDUCE_OPS
from dshard.redistribute import Plan, plan
from dshard.redistribute.step import after
from dshard.testing import (
    RankPool,
    Redistribution,
    count_traffic,
    distribute,
    rank_pool,
    redistributions,
    whole,
    whole_numbers,
)
from dshard.topology import BYTES

FOUR = (
    Mesh((4,), ("tp",)),
    Mesh((2, 2), ("dp", "tp")),
    Mesh((1, 4), ("dp", "tp")),
    Mesh((2, 1, 2), ("pp", "dp", "tp")),
    Mesh((4,), ("x",), (3, 1, 0, 2)),
    Mesh((2, 2), ("x", "y"), (3, 1, 0, 2)),
    Mesh((3,), ("some",), (0, 3, 1)),
)
EIGHT = (
    Mesh((8,), ("tp",)),
    Mesh((2, 4), ("dp", "tp")),
    Mesh((4, 2), ("x", "y"), (5, 0, 7, 2, 1, 6, 3, 4)),
    Mesh((2, 2, 2), ("pp", "dp", "tp")),
    Mesh((3, 2), ("x", "y"), (1, 2, 3, 4, 6, 7)),
)
Case = tuple[Redistribution, torch.dtype]


@cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of the same ranks; every rank of the world must come here."""
    made = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names)
    assert bind(made) == mesh
    return made


def steps_of(found: Plan) -> list[Plan]:
    """Each step of a plan as a plan of its own."""
    return [Plan(layout, after(step, layout), found.shape, (step,), 0.0) for step, layout in found.stages()]


# -- on each rank: what was counted and is not what the plan says


def hold(batch: list[Case]) -> list[str]:
    wrong = []
    rank = dist.get_rank()
    for (src, dst, shape), dtype in batch:
        device_mesh(src.mesh)
        if rank in src.mesh:
            at = src.mesh.coordinate(rank)
            wrong += against_each_step(src, dst, shape, dtype, at) + against_the_whole(src, dst, shape, dtype, at)
    return wrong


def against_each_step(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, at: tuple[int, ...]
) -> list[str]:
    """Every step of the cheapest plan and of the one of fewest bytes, run alone."""
    wrong = []
    for topology in (planning_context().topology_of(src.mesh), BYTES):
        x = distribute(whole_numbers(shape, dtype), src)._local_tensor
        for step in steps_of(plan(src, dst, shape, dtype.itemsize, topology)):
            with count_traffic() as traffic:
                x = run(step, x)
            told = step.received(at) * dtype.itemsize, sum(map(bool, step.sizes_received(at)))
            if told != (traffic.nbytes, traffic.messages):
                wrong.append(f"{step}\nof {shape}, {dtype}, rank at {at}: planned {told}, counted {traffic}")
    return wrong


def against_the_whole(
    src: Layout, dst: Layout, shape: tuple[int, ...], dtype: torch.dtype, at: tuple[int, ...]
) -> list[str]:
    """The plan as a redistribution runs it, and what its listeners are told."""
    events: list[CommEvent] = []
    x = distribute(whole_numbers(shape, dtype), src)
    expected = plan(src, dst, shape, dtype.itemsize, planning_context().topology_of(src.mesh))
    with count_traffic() as traffic, listen(events.append):
        redistribute(x, dst)
    figures = {expected.received(at) * dtype.itemsize, sum(event.nbytes for event in events), traffic.nbytes}
    if len(figures) > 1 or not traffic.messages <= expected.messages():
        return [f"{expected}\nof {shape}, {dtype}, rank at {at}: told {events}, counted {traffic}"]
    return []


@st.composite
def cases(draw: st.DrawFn, meshes: tuple[Mesh, ...]) -> Case:
    case = draw(redistributions(st.sampled_from(meshes), partial=REDUCE_OPS))  # type: ignore[arg-type]
    return case, draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32]))


@pytest.mark.ranks
@settings(max_examples=settings().max_examples // 10, phases=[Phase.generate])
@given(st.data())
def test_what_is_planned_is_what_is_moved(ranks: RankPool, cases_run: Counter[str], data: st.DataObject) -> None:
    batch = data.draw(st.lists(cases(FOUR), min_size=20, max_size=20))
    cases_run["plans held to a count"] += len(batch)

    assert ranks.run(hold, batch) == [[]] * 4


@pytest.fixture(scope="module")
def hosts() -> Iterator[RankPool]:
    """Four ranks that are told that they are on two hosts."""
    with RankPool(4) as pool:
        with (
            pytest.MonkeyPatch.context() as environment
        ):  # no longer than its processes start: those of others would, too
            environment.setenv("LOCAL_WORLD_SIZE", "2")
            pool.run(dist.get_rank)
        yield pool


@pytest.mark.ranks
@settings(max_examples=settings().max_examples // 10, phases=[Phase.generate])
@given(st.data())
def test_what_is_planned_is_what_hosts_move(hosts: RankPool, cases_run: Counter[str], data: st.DataObject) -> None:
    batch = data.draw(st.lists(cases(FOUR), min_size=20, max_size=20))
    cases_run["plans held to a count between hosts"] += len(batch)

    assert hosts.run(hold, batch) == [[]] * 4


def late_exchange(late: int) -> bool:
    """On hosts of two ranks: whether all have what the others sent, one host beginning later than the other."""
    mesh = Mesh((2, 2), ("host", "rank"))
    device_mesh(mesh)
    runtime = runtime_of(mesh)
    assert runtime is not None
    assert runtime.group(("host",)).hosts == 2
    src, dst = (Layout(mesh, (Shard(i), Shard(1 - i))) for i in (0, 1))
    x = distribute(whole_numbers((256, 256), torch.float64), src)
    if dist.get_rank() // 2 == late:
        time.sleep(0.05)
    y = redistribute(x, dst)
    product = matmul(x, y, panels=2)
    return torch.equal(whole(y), whole(x)) and torch.equal(whole(product), whole(x) @ whole(x))


@pytest.mark.ranks
@pytest.mark.parametrize("late", [0, 1])
def test_hosts_that_begin_late_get_and_give_all(hosts: RankPool, late: int) -> None:
    assert hosts.run(late_exchange, late) == [True] * 4


def test_what_hosts_exchange_is_asked_for_before_anything_is_sent() -> None:
    asked: list[tuple[str, int]] = []

    class Group:
        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            asked.append(("recv", peer))

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            asked.append(("send", peer))

    pieces, parts = ([torch.full((size,), 1.0) for size in (1, 2, 0)] for _ in range(2))
    collectives.exchange(pieces, parts, 1, Group())  # type: ignore[arg-type]  # all that is asked of one

    assert asked == [("recv", 0), ("send", 0)]
    collectives.exchange(pieces, parts, 2, Group())  # type: ignore[arg-type]
    assert asked[2:] == [("recv", 1), ("recv", 0), ("send", 0), ("send", 1)]


@pytest.mark.thorough
@pytest.mark.ranks
@settings(max_examples=40, phases=[Phase.generate])
@given(st.data())
def test_what_is_planned_is_what_eight_ranks_move(cases_run: Counter[str], data: st.DataObject) -> None:
    batch = data.draw(st.lists(cases(EIGHT), min_size=20, max_size=20))
    cases_run["plans held to a count on eight ranks"] += len(batch)

    assert rank_pool(8).run(hold, batch, timeout=300) == [[]] * 8


# -- the counter itself


def counted_collectives() -> list[tuple[str, int, int, int]]:
    """Collectives of torch's own, on all ranks."""
    rank, x = dist.get_rank(), torch.zeros(6)
    splits = [[0, 1, 2, 3], [1, 1, 1, 1], [2, 0, 1, 2], [3, 2, 0, 0]]
    with count_traffic() as traffic:
        dist.broadcast(x, 2)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(x.new_empty(24), x)
        dist.all_to_all_single(
            x.new_empty(sum(row[rank] for row in splits)),
            x.new_zeros(sum(splits[rank])),
            [row[rank] for row in splits],
            splits[rank],
        )
        dist.barrier()
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
    return [(found.name, found.ranks, found.nbytes, found.messages) for found in traffic.collectives]


@pytest.mark.ranks
def test_the_counter_knows_what_each_collective_brings(ranks: RankPool) -> None:
    found = ranks.run(counted_collectives)

    assert [row[:2] for row in found[1][:4]] == [
        ("broadcast_", 4), ("allreduce_", 4), ("_allgather_base_", 4), ("alltoall_base_", 4)
    ]  # fmt: skip
    # chunks of six over four ranks are 2, 2, 2, 0: an owner gets its own three times, and the two others
    assert [[row[2] // 4 for row in rows[:4]] for rows in found] == [
        [6, 10, 18, 6], [6, 10, 18, 3], [0, 10, 18, 3], [6, 6, 18, 6]
    ]  # fmt: skip
    assert [[row[3] for row in rows[:4]] for rows in found] == [
        [1, 5, 3, 3], [1, 5, 3, 2], [0, 5, 3, 2], [1, 3, 3, 3]
    ]  # fmt: skip
    assert [rows[4:] for rows in found] == [[("send", 4, 0, 0)], [("recv_", 4, 24, 1)], [], []]


def counted_pieces() -> list[tuple[str, int, int, int]]:
    """A tensor to each rank, as many elements as the number of the receiver."""
    rank = dist.get_rank()
    with count_traffic() as traffic:
        dist.all_to_all([torch.zeros(rank) for _ in range(4)], [torch.zeros(n) for n in range(4)])
    return [(found.name, found.ranks, found.nbytes, found.messages) for found in traffic.collectives]


@pytest.mark.ranks
def test_pieces_in_tensors_of_their_own_are_counted() -> None:
    found = rank_pool(4, "nccl_contract").run(counted_pieces)  # gloo has no such collective

    assert found == [[("alltoall_", 4, 4 * 3 * rank, 3 * (rank > 0))] for rank in range(4)]


def unknown_collective() -> str:
    x = torch.zeros(2)
    with pytest.raises(AssertionError) as caught, count_traffic():
        dist.all_gather([x.clone() for _ in range(4)], x)
    return str(caught.value)


@pytest.mark.ranks
def test_a_collective_that_is_not_known_is_no_zero(ranks: RankPool) -> None:
    assert ranks.run(unknown_collective) == ["c10d::allgather_ is a collective that count_traffic does not know"] * 4


def rows_become_columns() -> list[int]:
    """Bytes that this rank receives by torch's DTensor, and by dshard."""
    mesh, found = init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), []
    for lib in (theirs, ours):
        x = lib.DTensor.from_local(torch.zeros(2, 8), mesh, [lib.Shard(0)])
        with count_traffic() as traffic:
            x.redistribute(mesh, [lib.Shard(1)])
        found.append(traffic.nbytes)
    return found


@pytest.mark.ranks
def test_the_counter_counts_whoever_asks(ranks: RankPool) -> None:
    """torch's DTensor gathers all rows on CPUs; where it learns to exchange them, it moves what dshard moves."""
    for gathered, exchanged in ranks.run(rows_become_columns):
        assert exchanged == 3 * 2 * 2 * 4
        assert gathered in (exchanged, 3 * 2 * 8 * 4)
