"""Products in panels: the values and bytes of the product in bulk, in the memory of two panels."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from math import inf, prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import (
    DTensor,
    Mesh,
    Schedule,
    Stream,
    explain,
    init_device_mesh,
    linear,
    matmul,
    trace,
    use_strategy,
    use_topology,
)
from dshard.comm import WORKSPACE, Leg, bind, perform
from dshard.errors import RankError, StrategyError
from dshard.layout import Layout
from dshard.ops.matmul import schedules
from dshard.ops.matmul.priced import Panelled, cheapest, in_panels
from dshard.ops.matmul.ring import Ringed, executor
from dshard.ops.matmul.rules import matmul_rule
from dshard.ops.matmul.streamed import Streamed
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.redistribute import AllReduce, Plan, cuts, plan, slices, turns
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.topology import BYTES, Device, Topology

MESHES = [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 3), ("x", "y")), Mesh((2, 2, 2), ("x", "y", "z"))]
Prices = tuple[Panelled, ...]
SUMMA = Schedule(("m", "n"), ("k", "k"))
ABT = Schedule(("m", "k"), ("n", "n"))
sizes = st.tuples(*(st.integers(0, 9) for _ in range(3)))
streams = st.builds(
    Stream,
    st.integers(1, 5),
    st.sampled_from([None, "m", "n", "k"]),
    st.sampled_from(["collective", "broadcast", "ring"]),
)


@st.composite
def schedules_on_meshes(draw: st.DrawFn) -> tuple[Mesh, Schedule]:
    mesh = draw(st.sampled_from(MESHES))
    return mesh, draw(st.sampled_from(list(schedules(mesh.ndim))))


def reals(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(dtype)


def placed(mesh: Mesh, schedule: Schedule, m: int, k: int, n: int) -> list[DTensor]:
    """A, B and the gradient of C."""
    a, b, c = schedule.layouts(mesh)
    return [
        distribute(reals(m, k), a).requires_grad_(),
        distribute(reals(k, n), b).requires_grad_(),
        distribute(reals(m, n), c.cotangent()),
    ]


def expected(m: int, k: int, n: int) -> list[Tensor]:
    a, b, grad = reals(m, k), reals(k, n), reals(m, n)
    return [a @ b, grad @ b.mT, a.mT @ grad]


def plans_of(mesh: Mesh, schedule: Schedule, m: int, k: int, n: int) -> tuple[Plan, Plan, Plan]:
    """How A, B and C move where every axis has the loop of the schedule."""
    a, b, c = schedule.layouts(mesh)
    none = Schedule(schedule.loops, tuple("P" if loop == "k" else "R" for loop in schedule.loops))
    whole_a, whole_b, pending = none.layouts(mesh)
    moves = ((a, whole_a, (m, k)), (b, whole_b, (k, n)), (pending, c, (m, n)))
    first, second, third = (plan(src, dst, shape, 8, BYTES) for src, dst, shape in moves)
    return first, second, third


def executor_of(mesh: Mesh, schedule: Schedule, shape: tuple[int, int, int], stream: Stream) -> Streamed | None:
    m, k, n = shape
    plans = plans_of(mesh, schedule, m, k, n)
    return executor(matmul_rule((m, k), (k, n)), plans, torch.float64, stream, None)


# -- panels


@given(st.integers(0, 20), st.integers(1, 6), st.sampled_from(MESHES))
def test_every_index_is_in_one_panel(size: int, n: int, mesh: Mesh) -> None:
    a, b, _ = Schedule(("m",) * mesh.ndim, ("k",) * mesh.ndim).layouts(mesh)
    points, bounds = cuts(size, [(a, 0), (b, 0)]), cuts(size, [(a, 0)])

    for panels in (slices(points, n), turns(points, bounds, n)):
        found = sorted(i for panel in panels for part in panel for i in part)
        assert found == list(range(size))
    assert len(slices(points, n)) == n


# -- laws


@settings(max_examples=2 * settings().max_examples // 3)
@given(schedules_on_meshes(), sizes, streams)
def test_values_and_gradients_are_those_of_one_device(
    case: tuple[Mesh, Schedule], shape: tuple[int, int, int], stream: Stream
) -> None:
    mesh, schedule = case
    with simulated(mesh), use_topology(BYTES):
        x, y, grad = placed(mesh, schedule, *shape)
        c = matmul(x, y, strategy=schedule, panels=stream)
        c.backward(grad)
        assert x.grad is not None
        assert y.grad is not None
        wholes = [whole(t.detach()) for t in (c, x.grad, y.grad)]

    for mine, right in zip(wholes, expected(*shape), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
    assert [t.layout for t in (c, x.grad, y.grad)] == [schedule.layouts(mesh)[2], x.layout, y.layout]


EQUATIONS = ["bij,bjk->bik", "bij,bkj->bik", "bij,jk->bik", "ij,j->i", "i,i->", "i,j->ij", "abij,bjk->aik"]


@settings(max_examples=settings().max_examples)
@given(st.sampled_from(MESHES[:3]), st.sampled_from(EQUATIONS), streams, st.data())
def test_batches_vectors_and_operands_in_any_layout(
    mesh: Mesh, equation: str, stream: Stream, data: st.DataObject
) -> None:
    """`whole` also compares replicas to the bit: ranks around a ring add up in different orders."""
    left, right = equation.partition("->")[0].split(",")
    extent = {letter: data.draw(st.integers(1, 8)) for letter in sorted({*left, *right})}
    a, b = (reals(*(extent[letter] for letter in side)).requires_grad_() for side in (left, right))
    layouts = [
        Layout(mesh, tuple(data.draw(st.lists(placements(t.ndim), min_size=mesh.ndim, max_size=mesh.ndim))))
        for t in (a, b)
    ]
    c = torch.einsum(equation, a, b)
    c.sum().backward()
    with simulated(mesh), use_topology(BYTES), use_strategy(panels=stream):
        x, y = (distribute(t.detach(), at).requires_grad_() for t, at in zip((a, b), layouts, strict=True))
        found = torch.einsum(equation, x, y)
        found.sum().backward()
        wholes = [whole(t.detach()) for t in (found, x.grad, y.grad)]

    for mine, right_one in zip(wholes, (c.detach(), a.grad, b.grad), strict=True):
        torch.testing.assert_close(mine, right_one, atol=1e-9, rtol=1e-9)


def placements(ndim: int) -> st.SearchStrategy[Placement]:
    return st.sampled_from([Replicate(), Partial(), *map(Shard, range(ndim))])


def test_replicas_are_not_added_up_around_a_ring() -> None:
    mesh, (b, i, j, k) = MESHES[2], (8, 3, 8, 3)
    x_at, y_at = Layout(mesh, (Shard(0), Shard(1))), Layout(mesh, (Shard(1), Partial()))
    with simulated(mesh), use_topology(BYTES), use_strategy(panels=Stream(3, None, "ring")):
        x, y = (distribute(reals(*shape), at).requires_grad_() for shape, at in (((b, i, j), x_at), ((b, k, j), y_at)))
        torch.einsum("bij,bkj->bik", x, y).backward(distribute(reals(b, i, k), Layout(mesh, (Replicate(),) * 2)))
        for gradient in (x.grad, y.grad):
            assert gradient is not None
            whole(gradient)  # compares them


@given(schedules_on_meshes(), sizes, streams)
def test_every_rank_receives_what_it_receives_in_bulk(
    case: tuple[Mesh, Schedule], shape: tuple[int, int, int], stream: Stream
) -> None:
    """Chunks of an all_reduce may be rounded up in every panel; in all else the count is exact."""
    mesh, schedule = case
    found = executor_of(mesh, schedule, shape, stream)
    if found is None:
        return
    for at in mesh.coordinates():
        todo = found.compiled(at, None)
        bulk = sum(p.received(at) for i, p in enumerate(found.plans) if not passes(found, i))
        legs = [leg for group in (*(part.legs for part in todo.parts), todo.whole) for each in group for leg in each]
        received = sum(leg.elements for leg in legs if isinstance(leg, Leg))
        rounding = len(found.panels) * len(at) * mesh.size**2 * 9
        reduces = any(isinstance(step, AllReduce) for p in found.plans for step in p.steps)
        assert bulk <= received <= bulk + rounding * reduces


def passes(found: Streamed, i: int) -> bool:
    return isinstance(found, Ringed) and i in found.axes


@pytest.mark.parametrize("panels", [1, 2, 4])
@pytest.mark.parametrize("transport", ["collective", "broadcast"])
def test_summa_moves_its_closed_form_in_the_memory_of_two_panels(panels: int, transport: str) -> None:
    m, k, n = 16, 32, 24
    for q in (2, 4):
        mesh = Mesh((q, q), ("r", "c"))
        found = executor_of(mesh, SUMMA, (m, k, n), Stream(panels, "k", transport))
        if found is None:
            assert (panels, transport) == (1, "collective")  # bulk
            continue
        gathered = 8 * (m // q * k + k * n // q)
        parts = panels if transport == "collective" else panels * q
        for at in mesh.coordinates():
            legs = [leg for part in found.compiled(at, None).parts for each in part.legs for leg in each]
            assert sum(leg.elements for leg in legs) == (q - 1) * (m * k + k * n) // q**2
            # where the chunks of A, which is gathered along its second dim, are put together they are there twice
            assert found.transient_bytes(at) <= 2 * gathered / parts


@pytest.mark.parametrize("schedule", [SUMMA, ABT, Schedule(("n", "k"), ("k", "R"))], ids=str)
def test_twice_the_panels_take_half_the_memory(schedule: Schedule) -> None:
    mesh, taken = Mesh((4, 4), ("r", "c")), []
    for panels in (2, 4, 8):
        found = executor_of(mesh, schedule, (128, 128, 128), Stream(panels))
        assert found is not None
        taken.append(found.transient_bytes((1, 2)))

    assert taken[0] == 2 * taken[1] == 4 * taken[2]


def test_sixty_four_ranks_in_one_process() -> None:
    mesh, (m, k, n) = Mesh((8, 8), ("r", "c")), (16, 24, 19)
    asked = Stream(2), Stream(1, None, "broadcast"), Stream(2, None, "ring")
    with simulated(mesh), use_topology(BYTES):
        x, y, _ = placed(mesh, SUMMA, m, k, n)
        found = [whole(matmul(x, y, strategy=SUMMA, panels=stream).detach()) for stream in asked]

    for each in found:
        torch.testing.assert_close(each, expected(m, k, n)[0], atol=1e-10, rtol=1e-10)


@given(st.sampled_from(MESHES[:3]), st.sampled_from(["m", "n", "k"]), streams, st.data())
def test_a_bias_is_added_once(mesh: Mesh, loop: str, stream: Stream, data: st.DataObject) -> None:
    schedule = data.draw(st.sampled_from([s for s in schedules(mesh.ndim) if s.loops[0] == loop]))
    b, s, k, n = 3, 4, 6, 5
    x, w, bias = reals(b, s, k), reals(n, k), reals(n)
    split = Layout(mesh, schedule.layouts(mesh)[0].placements)
    with simulated(mesh), use_topology(BYTES):
        given_x = distribute(x, split).requires_grad_()
        tensors = [distribute(t, Layout(mesh, split.placements[:0] + whole_of(mesh))) for t in (w, bias)]
        c = linear(given_x, *tensors, strategy=schedule, panels=stream)
        found = whole(c.detach())

    torch.testing.assert_close(found, torch.nn.functional.linear(x, w, bias), atol=1e-10, rtol=1e-10)


def whole_of(mesh: Mesh) -> tuple[object, ...]:
    return Schedule(("m",) * mesh.ndim, ("R",) * mesh.ndim).layouts(mesh)[1].placements


# -- rings


@pytest.mark.parametrize("panels", [1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "schedule", "around"),
    [
        ((2, 2), SUMMA, {0, 1}),
        ((3, 3), SUMMA, {0, 1}),
        ((2, 3), SUMMA, {0}),
        ((2, 2, 2), Schedule(("m", "n", "k"), ("k", "k", "R")), {0, 1}),
        ((4,), Schedule(("n",), ("m",)), {0}),
        ((4,), Schedule(("m",), ("k",)), {1}),
        ((4,), Schedule(("k",), ("n",)), {2}),
    ],
    ids=str,
)
def test_rings_pass_each_chunk_on(shape: tuple[int, ...], schedule: Schedule, around: set[int], panels: int) -> None:
    mesh = Mesh(shape, ("x", "y", "z")[: len(shape)])
    for m, k, n in ((12, 36, 24), (5, 7, 6), (1, 2, 4)):
        found = executor_of(mesh, schedule, (m, k, n), Stream(panels, None, "ring"))
        assert isinstance(found, Ringed)
        assert set(found.axes) == around or (m, k, n) != (12, 36, 24)
        with simulated(mesh), use_topology(BYTES):
            x, y, grad = placed(mesh, schedule, m, k, n)
            with trace() as sent:
                c = matmul(x, y, strategy=schedule, panels=Stream(panels, None, "ring"))
            c.backward(grad)
            assert x.grad is not None
            assert y.grad is not None
            wholes = [whole(t.detach()) for t in (c, x.grad, y.grad)]
        for mine, right in zip(wholes, expected(m, k, n), strict=True):
            torch.testing.assert_close(mine, right, atol=1e-10, rtol=1e-10)
        if (m, k, n) == (12, 36, 24):
            skew = 8 * (m * k + k * n) // prod(shape[:2]) if len(around) == 2 else 0
            if len(shape) == 3:
                skew //= shape[2]
            assert sent.nbytes == pytest.approx(8 * schedule.volume(mesh, m, k, n) + skew)
            assert any(event.collective == "permute" for event in sent.events)


def test_cannon_is_a_ring() -> None:
    mesh = Mesh((3, 3), ("r", "c"))
    with simulated(mesh), use_topology(BYTES):
        x, y, _ = placed(mesh, SUMMA, 6, 9, 12)
        with trace() as sent:
            c = whole(matmul(x, y, strategy="cannon").detach())

    torch.testing.assert_close(c, expected(6, 9, 12)[0], atol=1e-10, rtol=1e-10)
    assert {event.collective for event in sent.events} == {"permute"}
    assert len(sent.events) == 2 * 3  # the skew and two shifts, of both


# -- overlap


class Log(TorchDispatchMode):
    """The order of local products, and of collectives that begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.seen.append("mm")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """What a product does on a mesh without processes, where collectives do nothing."""
    log = Log()

    def drive(program, launch):  # type: ignore[no-untyped-def]
        begin = launch

        def logged(request):  # type: ignore[no-untyped-def]
            begin(request)
            number = sum(word.startswith("begin") for word in log.seen)
            log.seen.append(f"begin {number}")
            return lambda: log.seen.append(f"end {number}")

        return original(program, logged)

    module = __import__("sys").modules[perform.__module__]
    original = module.drive
    monkeypatch.setattr(module, "drive", drive)
    return log


def planned(mesh: Mesh, layout: Layout, *shape: int) -> DTensor:
    local = torch.empty(layout.local_shape(shape, (0,) * mesh.ndim), device="meta")
    stride = torch.empty(shape, device="meta").stride()
    found = DTensor.from_local(local, mesh, layout.placements, shape=torch.Size(shape), stride=stride)
    assert isinstance(found, DTensor)
    return found


def test_a_panel_is_multiplied_while_the_next_one_moves(log: Log) -> None:
    mesh = Mesh((4,), ("x",))
    a, b, _ = Schedule(("n",), ("m",)).layouts(mesh)
    x, y = planned(mesh, a, 16, 8), planned(mesh, b, 8, 12)

    for _ in range(2):  # the first decides
        log.seen.clear()
        with log:
            matmul(x, y, strategy="column", panels=3)

    assert log.seen == ["begin 0", "end 0", "begin 1", "mm", "end 1", "begin 2", "mm", "end 2", "mm"]


def test_the_first_gradient_is_reduced_while_the_second_is_computed(log: Log) -> None:
    mesh = Mesh((4,), ("x",))
    a, b, _ = Schedule(("n",), ("m",)).layouts(mesh)
    x, y = planned(mesh, a, 16, 8).requires_grad_(), planned(mesh, b, 8, 12).requires_grad_()
    c = matmul(x, y, strategy="column", saved="moved")

    log.seen.clear()
    with log:
        c.sum().backward()

    assert log.seen == ["mm", "begin 0", "mm", "end 0"]


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


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["collective", "broadcast", "ring"])
@pytest.mark.parametrize(("shape", "schedule"), CASES, ids=str)
def test_on_real_ranks(ranks: RankPool, shape: tuple[int, ...], schedule: Schedule, transport: str) -> None:
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
@pytest.mark.parametrize("transport", ["collective", "broadcast", "ring"])
@pytest.mark.parametrize(("shape", "schedule"), CASES, ids=str)
def test_a_repeated_product_uses_its_buffers_again(
    ranks: RankPool, shape: tuple[int, ...], schedule: Schedule, transport: str
) -> None:
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
@pytest.mark.parametrize("transport", ["collective", "broadcast", "ring"])
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
    return in_panels(matmul_rule((m, k), (k, n)), plans, torch.float64, topology)


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


@pytest.mark.parametrize("schedule", [SUMMA, ABT, Schedule(("n", "k"), ("k", "R"))], ids=str)
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
        ((2, "m", "pigeon"), "there is no transport 'pigeon': use collective, broadcast, ring"),
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
                (leg.message.collective, leg.message.axes)
                for part in found.compiled(at, None).parts
                for legs in part.legs
                for leg in legs
                if isinstance(leg, Leg)
            )
            for at in mesh.coordinates()
        }
        assert len(orders) == 1
