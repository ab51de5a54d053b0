"""Products in panels: the values and bytes of the product in bulk, in the memory of two panels."""

from __future__ import annotations

from math import prod

import pytest
import torch
from helpers.default_cases import one_in
from helpers.panel_matmuls import ABT, MESHES, SUMMA, executor_of, expected, placed, reals, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from dshard import DTensor, Mesh, Schedule, Stream, linear, matmul, trace, use_strategy, use_topology
from dshard.comm import Transfer, world
from dshard.layout import Layout
from dshard.ops.matmul.panel_executor import PanelExecutor
from dshard.ops.matmul.ring import RingExecutor
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.redistribute import AllReduce
from dshard.redistribute.panel import cuts, slices, summa_panels
from dshard.rules.matmul_loops import schedules
from dshard.testing import distribute, simulated, whole
from dshard.topology import BYTES

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


# -- panels


@given(st.integers(0, 20), st.integers(1, 6), st.sampled_from(MESHES))
def test_every_index_is_in_one_panel(size: int, n: int, mesh: Mesh) -> None:
    a, b, _ = Schedule(("m",) * mesh.ndim, ("k",) * mesh.ndim).layouts(mesh)
    points, bounds = cuts(size, [(a, 0), (b, 0)]), cuts(size, [(a, 0)])

    for panels in (slices(points, n), summa_panels(points, bounds, n)):
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
    """Chunks of an all_reduce may be rounded up, whole and in every panel; in all else the count is exact."""
    mesh, schedule = case
    found = executor_of(mesh, schedule, shape, stream)
    if found is None:
        return
    for at in mesh.coordinates():
        todo = found.compiled(at, None)
        bulk = sum(p.received(at) for i, p in enumerate(found.plans) if not passes(found, i))
        steps = [
            step for group in (*(part.steps for part in todo.parts), todo.uncut) for each in group for step in each
        ]
        received = sum(step.elements for step in steps if isinstance(step, Transfer))
        rounding = len(found.panels) * len(at) * mesh.size**2 * 9
        reduces = any(isinstance(step, AllReduce) for p in found.plans for step in p.steps)
        assert bulk - rounding * reduces <= received <= bulk + rounding * reduces


def passes(found: PanelExecutor, i: int) -> bool:
    return isinstance(found, RingExecutor) and i in found.axes


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
            steps = [step for part in found.compiled(at, None).parts for each in part.steps for step in each]
            assert (
                sum(step.elements for step in steps if isinstance(step, Transfer)) == (q - 1) * (m * k + k * n) // q**2
            )
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


@pytest.mark.parametrize("panels", one_in(2, [1, 2, 3]))
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
        assert isinstance(found, RingExecutor)
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

    def advance(program, launch):  # type: ignore[no-untyped-def]
        begin = launch

        def logged(request):  # type: ignore[no-untyped-def]
            wait = begin(request)
            number = sum(word.startswith("begin") for word in log.seen)
            log.seen.append(f"begin {number}")

            def logged_wait():  # type: ignore[no-untyped-def]
                log.seen.append(f"end {number}")
                return wait()

            return logged_wait

        return original(program, logged)

    module = world
    original = module.advance
    monkeypatch.setattr(module, "advance", advance)
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
