"""All schedules of a product: values and both gradients are those of one device, bytes and messages the closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from helpers.default_cases import one_in
from helpers.held_memory import Held
from helpers.schedule_forms import messages, peak
from hypothesis import settings
from torch import Tensor

from dshard import DTensor, Mesh, Schedule, Topology, matmul, trace, use_topology
from dshard.comm import DeviceMesh, bind, transport
from dshard.rules.matmul_loops import schedules
from dshard.testing import RankPool, count_traffic, distribute, nccl_contract, rank_pool, simulated, whole
from dshard.topology import BYTES, CPU
from dshard.trace import Trace

MESHES = {"4": Mesh((4,), ("x",)), "2x3": Mesh((2, 3), ("x", "y")), "2x2x2": Mesh((2, 2, 2), ("x", "y", "z"))}


THOROUGH = settings().max_examples > 100
pytestmark = [pytest.mark.thorough] if THOROUGH else []


def picked(name: str) -> list[Schedule]:
    """All schedules of a mesh; of two axes a third, of the thousand of three every 59th, but all in a thorough run."""
    return list(schedules(MESHES[name].ndim))[:: 1 if THOROUGH else (1, 3, 59)[MESHES[name].ndim - 1]]


CASES = [(name, schedule) for name in MESHES for schedule in picked(name)]


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def multiplied(schedule: Schedule, mesh: Mesh, given: list[Tensor]) -> tuple[list[DTensor], Trace]:
    """A, B, C and both gradients on simulated ranks, and what was sent going forward."""
    a, b, grad = given
    stored_a, stored_b, stored_c = schedule.layouts(mesh)
    x, y = distribute(a, stored_a).requires_grad_(), distribute(b, stored_b).requires_grad_()
    with trace() as sent:
        c = matmul(x, y, strategy=schedule)
    c.backward(distribute(grad, stored_c.cotangent()))
    return [x, y, c, x.grad, y.grad], sent


def operands(m: int, k: int, n: int) -> list[Tensor]:
    return [reals(m, k), reals(k, n), reals(m, n)]


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=str)
def test_every_schedule_gives_the_dense_product_and_gradients(name: str, schedule: Schedule) -> None:
    mesh = MESHES[name]
    for sizes in ((24, 12, 36), (5, 7, 3)):
        a, b, grad = given = operands(*sizes)
        expected = [a, b, a @ b, grad @ b.mT, a.mT @ grad]
        with simulated(mesh):
            found, _ = multiplied(schedule, mesh, given)
            wholes = [whole(x.detach()) for x in found]

        for mine, right in zip(wholes, expected, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
        assert found[2].layout == schedule.layouts(mesh)[2]
        assert [found[3].layout, found[4].layout] == [found[0].layout, found[1].layout]


@pytest.mark.parametrize(("name", "schedule"), CASES, ids=str)
def test_every_schedule_moves_its_closed_form(name: str, schedule: Schedule) -> None:
    mesh, sizes = MESHES[name], (48, 24, 72)
    given = operands(*sizes)
    with simulated(mesh), use_topology(BYTES):
        _, sent = multiplied(schedule, mesh, given)

    assert sum(event.nbytes for event in sent.events) == pytest.approx(8 * schedule.volume(mesh, *sizes))


# -- counted on ranks, below dshard

LEAST = Topology.flat(1.0, 0.3, device=replace(CPU, launch=0.0), name="least")
"""Bytes are dear, messages cheap and copies cheaper: of plans that move the fewest bytes the one of fewest messages."""


def off_the_closed_form(mesh: Mesh, picked: list[Schedule], sizes: tuple[int, int, int]) -> list[str]:
    """On a rank: the schedules that do not receive, or do not hold, what their closed form says, or are not dense."""
    device_mesh(mesh)
    kept, transport._FEW_BYTES = transport._FEW_BYTES, 0  # what is small is gathered through a copy more
    try:
        with use_topology(LEAST):
            at_once = 3 if dist.get_backend() == "gloo" else 1
            found = [off(mesh, schedule, sizes, at_once) for schedule in picked if dist.get_rank() in mesh]
    finally:
        transport._FEW_BYTES = kept
    return [text for text in found if text]


def off(mesh: Mesh, schedule: Schedule, sizes: tuple[int, int, int], times: int) -> str:
    """What is counted and what the closed form says, where they differ. Of `times` the least memory.

    A thread of gloo's may let go of a buffer late. Without processes that send anything there are no values.
    """
    a, b, _ = given = operands(*sizes)
    x, y = (distribute(t, layout) for t, layout in zip((a, b), schedule.layouts(mesh), strict=False))
    held = []
    for _ in range(times):
        with count_traffic() as sent, Held(x._local_tensor, y._local_tensor) as memory, torch.no_grad():
            matmul(x, y, strategy=schedule)
        held.append(memory.most)
    counted = sent.nbytes, sent.messages, min(held)
    said = 8 * schedule.volume(mesh, *sizes), messages(schedule, mesh), 8 * peak(schedule, mesh, *sizes)
    if dist.get_backend() == nccl_contract.BACKEND and counted[2] < said[2]:
        said = (*said[:2], counted[2])  # an upper bound: its reduce_scatter needs no memory for the terms of all ranks
    if counted != pytest.approx(said, rel=1e-12):
        return f"{schedule} on rank {dist.get_rank()} of ({mesh}): counted {counted}, said {said}"
    if times > 1:
        dense = [*given[:2], a @ b, given[2] @ b.mT, a.mT @ given[2]]
        found, _ = multiplied(schedule, mesh, given)
        for mine, right in zip(found, dense, strict=True):
            if mine.layout.partial_axes():
                torch.testing.assert_close(whole(mine.detach()), right, atol=1e-10, rtol=1e-10)
            else:
                part = distribute(right, mine.layout)._local_tensor
                torch.testing.assert_close(mine._local_tensor.detach(), part, atol=1e-10, rtol=1e-10)
    return ""


@cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of the same ranks; every rank of the world must come here."""
    made = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names)
    assert bind(made) == mesh
    return made


def as_one_of(rank: int, mesh: Mesh, picked: list[Schedule], sizes: tuple[int, int, int]) -> list[str]:
    """The same for one rank whose peers are not there: it runs all that it would, but nothing is sent."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=mesh.size)
    try:
        device_mesh.cache_clear()
        return off_the_closed_form(mesh, picked, sizes)
    finally:
        dist.destroy_process_group()


WIDE, TALL = (128, 64, 192), (192, 64, 128)
FEW, SOME = (1, 1) if THOROUGH else (5, 31)
ALONE = [
    (MESHES["4"], 1, 3, WIDE),
    (MESHES["2x3"], FEW, 0, (48, 24, 72)),
    (MESHES["2x3"], FEW, 5, (72, 24, 48)),
    (MESHES["2x2x2"], SOME, 6, WIDE),
    (MESHES["2x2x2"], SOME, 1, TALL),
    (Mesh((8, 8), ("x", "y")), FEW, 41, WIDE),
    (Mesh((4, 4, 4), ("x", "y", "z")), SOME, 63, TALL),
    (Mesh((4, 2, 8), ("x", "y", "z")), SOME, 17, TALL),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.ranks
@pytest.mark.parametrize(("mesh", "every", "rank", "sizes"), ALONE, ids=str)
def test_bytes_messages_and_memory_of_a_rank_are_the_closed_form(
    alone: RankPool, mesh: Mesh, every: int, rank: int, sizes: tuple[int, int, int]
) -> None:
    picked = list(schedules(mesh.ndim))[::every]

    assert alone.run(as_one_of, rank, mesh, picked, sizes, timeout=600) == [[]]


@pytest.mark.ranks
def test_bytes_messages_and_memory_of_four_ranks_are_the_closed_form(ranks: RankPool) -> None:
    found = ranks.run(off_the_closed_form, MESHES["4"], list(schedules(1)), (48, 24, 72), timeout=300)

    assert found == [[]] * 4


@pytest.mark.thorough
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "part"), [*(("2x3", i) for i in range(2)), *(("2x2x2", i) for i in range(20))])
def test_bytes_messages_and_memory_of_eight_ranks_are_the_closed_form(name: str, part: int) -> None:
    """Of the hundred and the thousand, fifty at a time; some of these, but all of them where tests are thorough."""
    mesh = MESHES[name]
    some = list(schedules(mesh.ndim))[50 * part : 50 * (part + 1)][:: 1 if THOROUGH else 50]

    assert rank_pool(8).run(off_the_closed_form, mesh, some, (48, 24, 72), timeout=280) == [[]] * 8


WHOLE_NUMBERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def wrong_whole_numbers(mesh: Mesh, dtype: torch.dtype) -> list[str]:
    """On a rank: the schedules that reduce along k and do not give the product in the operands' own dtype."""
    device_mesh(mesh)
    a, b = (torch.arange(n).view(shape).remainder(7).to(dtype) for n, shape in ((35, (5, 7)), (21, (7, 3))))
    found = []
    for schedule in list(schedules(mesh.ndim))[::7]:
        x, y = (distribute(t, layout) for t, layout in zip((a, b), schedule.layouts(mesh), strict=False))
        c = whole(matmul(x, y, strategy=schedule))
        if c.dtype != dtype or not torch.equal(c, a @ b):
            found.append(str(schedule))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", one_in(2, WHOLE_NUMBERS), ids=str)
def test_products_of_whole_numbers_that_the_backend_does_not_reduce(ranks: RankPool, dtype: torch.dtype) -> None:
    """gloo does not sum 16-bit integers: their terms are exchanged and summed here, and wrap around as torch's do."""
    assert ranks.run(wrong_whole_numbers, Mesh((2, 2), ("x", "y")), dtype, timeout=120) == [[]] * 4
