"""Products in panels on real ranks, in buffers used again; how many panels are chosen."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import product
from math import inf

import pytest
import torch
import torch.distributed as dist
from helpers.default_cases import one_way_each
from helpers.panel_matmuls import ABT, MESHES, SUMMA, executor_of, expected, placed, plans_of, reals
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import Mesh, Schedule, Stream, explain, init_device_mesh, matmul, trace, use_strategy, use_topology
from dshard.comm import Transfer, bind
from dshard.comm.workspace import WORKSPACE
from dshard.errors import RankError, StrategyError
from dshard.ops.matmul.panel_executor import PlannedMatmul
from dshard.ops.matmul.panel_price import cheapest, in_panels
from dshard.ops.matmul.rules import matmul_rule
from dshard.rules.panel_stream import PanelCost
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.topology import BYTES, Device, Topology

Prices = tuple[PanelCost, ...]


# -- real ranks


@cache
def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return bind(init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)]))


def differs_on_ranks(shape: tuple[int, ...], schedule: Schedule, stream: Stream) -> list[object]:
    mesh, found = mesh_of(shape), []
    for m, k, n in ((8, 24, 16), (7, 13, 5)):
        x, y, grad = placed(mesh, schedule, m, k, n)
        c = matmul(x, y, strategy=schedule, panels=stream)
        c.backward(grad)
        for mine, right in zip((c, x.grad, y.grad), expected(m, k, n), strict=True):
            if not torch.allclose(whole(mine.detach()), right, atol=1e-10):
                found.append((m, k, n))
    return found


CASES = [
    ((2, 2), SUMMA),
    ((2, 2), ABT),
    ((2, 2), Schedule(("n", "k"), ("R", "R"))),
    ((4,), Schedule(("n",), ("m",))),
    ((4,), Schedule(("k",), ("m",))),
]
TRANSPORTS = ["collective", "broadcast", "ring"]


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "transport"), one_way_each(CASES, TRANSPORTS), ids=str)
def test_matmuls_in_panels_agree_on_real_ranks(
    ranks: RankPool, case: tuple[tuple[int, ...], Schedule], transport: str
) -> None:
    shape, schedule = case

    assert ranks.run(differs_on_ranks, shape, schedule, Stream(3, None, transport)) == [[]] * 4


def again(shape: tuple[int, ...], schedule: Schedule, stream: Stream) -> tuple[int, int, int, int, int]:
    """Buffers made by the first call and by later ones, the most bytes lent, what was promised, bytes received."""
    mesh, sizes = mesh_of(shape), (8, 24, 16)
    x, y, _ = (t.detach() for t in placed(mesh, schedule, *sizes))
    WORKSPACE.clear()
    before, WORKSPACE.peak = WORKSPACE.allocations, 0
    with use_topology(BYTES), trace() as sent:
        matmul(x, y, strategy=schedule, panels=stream)
    first = WORKSPACE.allocations
    with use_topology(BYTES):
        for _ in range(3):
            matmul(x, y, strategy=schedule, panels=stream)
    found = executor_of(mesh, schedule, sizes, stream)
    assert found is not None
    at = mesh.coordinate(dist.get_rank())
    return first - before, WORKSPACE.allocations - first, WORKSPACE.peak, found.transient_bytes(at), sent.nbytes


@pytest.mark.ranks
@pytest.mark.parametrize(("case", "transport"), one_way_each(CASES, TRANSPORTS), ids=str)
def test_a_repeated_product_uses_its_buffers_again(
    ranks: RankPool, case: tuple[tuple[int, ...], Schedule], transport: str
) -> None:
    shape, schedule = case
    for made, more, peak, promised, nbytes in ranks.run(again, shape, schedule, Stream(2, None, transport)):
        assert made > 0
        assert more == 0
        assert peak == promised
        if transport != "ring":
            assert nbytes == 8 * schedule.volume(Mesh(shape, ("x", "y")[: len(shape)]), 8, 24, 16)


class Broken(TorchDispatchMode):
    """Fails in the second local product."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.count += 1
            if self.count == 2:
                raise FloatingPointError("broken")
        return func(*args, **(kwargs or {}))


def fails(everywhere: bool) -> None:
    mesh = mesh_of((2, 2))
    x, y, _ = placed(mesh, SUMMA, 8, 24, 16)
    if everywhere or dist.get_rank() == 1:
        with Broken():
            matmul(x.detach(), y.detach(), strategy=SUMMA, panels=4)
    else:
        matmul(x.detach(), y.detach(), strategy=SUMMA, panels=4)


@pytest.mark.ranks
def test_an_error_between_panels_hangs_nobody(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="broken"):
        ranks.run(fails, True)
    assert ranks.run(differs_on_ranks, (2, 2), SUMMA, Stream(4)) == [[]] * 4
    assert ranks.run(lent) == [0] * 4


@pytest.mark.ranks
@pytest.mark.thorough
def test_where_one_rank_fails_the_others_wait_as_in_any_collective() -> None:
    with RankPool(4, timeout=20) as ranks:
        with pytest.raises(RankError, match="rank 1 raised FloatingPointError: broken"):
            ranks.run(fails, False)
        assert ranks.run(differs_on_ranks, (2, 2), SUMMA, Stream(4)) == [[]] * 4


def lent() -> int:
    return WORKSPACE.held


# -- numerics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("schedule", [SUMMA, ABT, Schedule(("k", "k"), ("m", "R"))], ids=str)
def test_half_precision_is_added_up_in_single(schedule: Schedule, transport: str, dtype: torch.dtype) -> None:
    mesh, (m, k, n) = MESHES[1], (24, 512, 20)
    a, b = reals(m, k, dtype=dtype), reals(k, n, dtype=dtype)
    exact = a.double() @ b.double()
    with simulated(mesh):
        x, y = (distribute(t, layout) for t, layout in zip((a, b), schedule.layouts(mesh)[:2], strict=True))
        for panels in (4, 8):
            found = whole(matmul(x, y, strategy=schedule, panels=Stream(panels, None, transport)))
            assert found.dtype == dtype
            mine, single = ((value.double() - exact).norm() for value in (found, a @ b))
            assert mine <= 2 * single


# -- prices, errors


def priced(topology: Topology, schedule: Schedule = SUMMA, shape: tuple[int, int, int] = (64, 64, 64)) -> Prices:
    """The product on (4, 4) in each number of panels."""
    m, k, n = shape
    plans = plans_of(Mesh((4, 4), ("r", "c")), schedule, m, k, n)
    return in_panels(PlannedMatmul(matmul_rule((m, k), (k, n)), plans, torch.float64, topology))


@given(st.floats(1, 1e6), st.floats(1, 1e6))
def test_panels_hide_the_lesser_of_moving_and_multiplying(bandwidth: float, flops: float) -> None:
    topology = Topology.flat(bandwidth, device=Device("one", (("float64", flops),), memory_bandwidth=inf, launch=0.0))
    move, compute = 8 * SUMMA.volume(Mesh((4, 4), ("r", "c")), 64, 64, 64) / bandwidth, 2 * 64**3 / 16 / flops

    for found in priced(topology):
        hidden = max(move, compute) + min(move, compute) / found.panels
        assert found.seconds == pytest.approx(hidden)


def test_where_messages_are_dear_a_product_runs_in_bulk() -> None:
    assert cheapest(priced(Topology.flat(1e9, latency=1.0))).panels == 1


@pytest.mark.parametrize("schedule", [SUMMA, ABT], ids=str)
def test_what_buffers_may_take_bounds_the_panels(schedule: Schedule) -> None:
    found = priced(BYTES, schedule)
    for limit in (*(each.buffer_bytes for each in found), 0):
        chosen = cheapest(found, limit)
        fits = [each for each in found if each.buffer_bytes <= limit]
        assert chosen in (fits or found)
        assert all(chosen.seconds <= each.seconds for each in fits)
        assert fits or chosen.buffer_bytes == min(each.buffer_bytes for each in found)


@pytest.mark.parametrize(
    "schedule",
    [SUMMA, *(pytest.param(each, marks=pytest.mark.thorough) for each in (ABT, Schedule(("n", "k"), ("k", "R"))))],
    ids=str,
)
def test_the_number_of_panels_chosen_is_the_cheapest_of_all(schedule: Schedule) -> None:
    mesh, shape = Mesh((2, 2), ("x", "y")), (16, 24, 32)
    slow = Topology.flat(
        1e9, latency=1e-9, device=Device("one", (("float64", 1e12),), memory_bandwidth=inf, launch=0.0)
    )
    with simulated(mesh), use_topology(slow):
        x, y, grad = placed(mesh, schedule, *shape)
        report = explain(lambda: matmul(x, y, strategy=schedule, panels="auto"))
        with use_strategy(panels="auto", buffer_bytes=0):
            least = explain(lambda: matmul(x, y, strategy=schedule))
        c = matmul(x, y, strategy=schedule, panels="auto")
        c.backward(grad)
        wholes = [whole(t.detach()) for t in (c, x.grad, y.grad)]

    for mine, right in zip(wholes, expected(*shape), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
    (asked,), (bounded,) = report.operators, least.operators
    assert asked.run_in == min(asked.panels, key=lambda each: each.seconds).panels > 1
    assert bounded.run_in == min(asked.panels, key=lambda each: each.buffer_bytes).panels
    assert f"{asked.run_in}: " in str(report)
    assert "(as it runs)" in str(report)
    assert json.loads(report.to_json())[0]["panels"][0]["panels"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "0 panels: a stream has at least one"),
        ((2, "q"), "'q' is no loop of a product: stream m, n or k"),
        ((2, "m", "pigeon"), "there is no transport 'pigeon': use collective, broadcast, ring, symmetric"),
    ],
)
def test_streams_that_cannot_be(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        Stream(*arguments)  # type: ignore[arg-type]


def test_moved_operands_cannot_be_kept_of_panels() -> None:
    with simulated(MESHES[1]), use_topology(BYTES):
        x, y, _ = placed(MESHES[1], SUMMA, 8, 8, 8)
        with pytest.raises(StrategyError, match="saved='moved': in panels no operand is ever there whole"):
            matmul(x, y, panels=2, saved="moved")
        with pytest.raises(StrategyError, match="use saved='stored' or 'auto', or leave the panels out"):
            matmul(x, y, panels="auto", saved="moved")
        with pytest.raises(StrategyError, match="panels='four': give a number of them, or 'auto'"):
            matmul(x, y, panels="four")  # type: ignore[arg-type]
        with pytest.raises(StrategyError, match="a limit needs a choice, panels='auto'"), use_strategy(buffer_bytes=8):
            pass


@pytest.mark.parametrize(
    ("stream", "runs"),
    [
        (Stream(2), "2: "),
        (Stream(3), "3 by collective, not priced"),
        (Stream(2, None, "ring"), "2 by ring, not priced"),
        (Stream(2, None, "broadcast"), "2 by broadcast, not priced"),
    ],
)
def test_explain_tells_the_panels_that_run_though_they_have_no_price(stream: Stream, runs: str) -> None:
    with simulated(MESHES[1]), use_topology(BYTES):
        x, y, _ = (t.detach() for t in placed(MESHES[1], SUMMA, 8, 8, 8))
        last = str(explain(lambda: matmul(x, y, strategy=SUMMA, panels=stream))).splitlines()[-1]

    assert last.count("(as it runs)") == 1
    assert re.search(rf" {runs}[^:]*\(as it runs\)", last)


def test_panels_can_be_asked_for_in_a_block_and_by_a_schedule() -> None:
    mesh = MESHES[1]
    with simulated(mesh), use_topology(BYTES):
        x, y, _ = (t.detach() for t in placed(mesh, SUMMA, 8, 8, 8))
        with trace() as bulk:
            matmul(x, y, strategy=SUMMA)
        with trace() as block, use_strategy(matmul=SUMMA, panels=4):
            x @ y
        with trace() as schedule:
            matmul(x, y, strategy=Schedule(SUMMA.loops, SUMMA.stored, Stream(4)))
        counts = [len(t.events) for t in (bulk, block, schedule)]
    assert counts == [2, 8, 8]


def test_all_coordinates_have_collectives_in_one_order() -> None:
    mesh = MESHES[2]
    for schedule, panels in product((SUMMA, ABT), (2, 5)):
        found = executor_of(mesh, schedule, (7, 11, 5), Stream(panels))
        assert found is not None
        orders = {
            tuple(
                (step.collective.kind, step.collective.axes)
                for part in found.compiled(at, None).parts
                for steps in part.steps
                for step in steps
                if isinstance(step, Transfer)
            )
            for at in mesh.coordinates()
        }
        assert len(orders) == 1
