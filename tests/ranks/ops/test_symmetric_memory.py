"""Matmuls fused with a collective by symmetric memory, under NCCL's contract: values, gradients, bytes, prices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from math import inf

import pytest
import torch
import torch.nn.functional as F
from helpers.panel_matmuls import executor_of, expected, placed, plans_of, reals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dshard import (
    DTensor,
    Mesh,
    Schedule,
    Stream,
    explain,
    init_device_mesh,
    linear,
    matmul,
    strict,
    trace,
    use_strategy,
    use_topology,
)
from dshard.comm import bind
from dshard.core.observe import OperatorMode
from dshard.errors import LayoutError, StrategyError
from dshard.explain import Explanation, explain_matmul
from dshard.layout import Layout
from dshard.ops.matmul.options import Saved
from dshard.ops.matmul.panel_executor import PlannedMatmul
from dshard.ops.matmul.panel_price import cheapest, in_panels
from dshard.ops.matmul.ring import executor
from dshard.ops.matmul.rules import matmul_rule
from dshard.ops.matmul.symmetric import SymmetricExecutor
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.matmul_loops import Loop, Stored, schedules
from dshard.rules.panel_stream import PanelCost
from dshard.testing import (
    RankPool,
    count_traffic,
    distribute,
    nccl_contract,
    no_host_sync,
    rank_pool,
    simulated,
    whole,
)
from dshard.tools.nccl_contract.process_state import CURRENT
from dshard.topology import BYTES, Device, Layer, Topology
from dshard.trace import Trace

BY_KERNEL = Stream(1, transport="symmetric")
COLUMN, ROW = Schedule(("n",), ("m",)), Schedule(("k",), ("m",))
ROW_TO_COLUMNS, GATHERED_WEIGHT = Schedule(("k",), ("n",)), Schedule(("m",), ("n",))
MESHES = [(4,), (2, 2)]
NVLINK = Topology.preset("dgx-h100")
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


@pytest.fixture
def contract() -> RankPool:
    return rank_pool(4, nccl_contract.BACKEND)


@cache
def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return bind(init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)]))


@contextmanager
def kernels() -> Iterator[list[str]]:
    """The operations that begin within the block."""
    begun: list[str] = []
    CURRENT.state.listeners.append(lambda operation: begun.append(operation.what.partition(" at ")[0]))
    try:
        yield begun
    finally:
        CURRENT.state.listeners.pop()


def differences(found: list[Tensor | None], right: list[Tensor | None]) -> list[int]:
    """The numbers of the results that differ; `whole` also compares replicas, to the bit."""
    pairs = zip(found, right, strict=True)
    return [i for i, (x, y) in enumerate(pairs) if not torch.allclose(whole(x.detach()), y.detach(), atol=1e-9)]


# -- laws

EXAMPLES = 400 if settings().max_examples > 100 else 2
SIZES = st.sampled_from([4, 8, 8, 12, 12, 1, 0, 7])  # most divide, as a kernel wants
LOOPS = st.sampled_from([None, None, None, "m", "n", "k"])
SENT = {len(shape): [each for each in schedules(len(shape)) if set(each.stored) - {"R", "P"}] for shape in MESHES}
Case = tuple[tuple[int, ...], Schedule, tuple[int, int, int], Stream]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(st.sampled_from(MESHES))
    schedule = draw(st.sampled_from(SENT[len(shape)]))
    stream = Stream(draw(st.integers(1, 3)), draw(LOOPS), "symmetric")
    return shape, schedule, draw(st.tuples(SIZES, SIZES, SIZES)), stream


def multiplied(drawn: list[Case]) -> list[object]:
    """Of each case what differs from one device, and from the collectives in bulk; how many ran in a kernel."""
    told: list[object] = []
    for shape, schedule, sizes, stream in drawn:
        mesh = mesh_of(shape)
        with use_topology(BYTES):
            x, y, grad = placed(mesh, schedule, *sizes)
            with trace() as bulk:
                matmul(x.detach(), y.detach(), strategy=schedule)
            with trace() as sent, kernels() as begun:
                c = matmul(x, y, strategy=schedule, panels=stream)
            c.backward(grad)
            found = executor_of(mesh, schedule, sizes, stream)
        events = [[(event.collective, event.axis, event.nbytes) for event in t.events] for t in (bulk, sent)]
        in_kernel = isinstance(found, SymmetricExecutor)
        wrong = differences([c, x.grad, y.grad], [*expected(*sizes)])
        told.append((wrong, in_kernel and sorted(events[0]) != sorted(events[1])))
        assert in_kernel == bool({GATHER, SCATTER} & set(begun)), (sizes, begun)
    return told


@settings(max_examples=EXAMPLES)
@given(st.lists(cases(), min_size=5, max_size=5))
@pytest.mark.ranks
def test_values_gradients_and_bytes_are_those_of_one_device_and_of_bulk(drawn: list[Case]) -> None:
    for told in rank_pool(4, nccl_contract.BACKEND).run(multiplied, drawn):
        assert told == [([], False)] * len(drawn)


EQUATIONS = ["bij,jk->bik", "bij,kj->bik", "ij,bjk->bik", "bij,bjk->bik", "bij,bik->jk", "ij,jk->ki", "bij,cj->bic"]
Product = tuple[str, dict[str, int], tuple[int, ...], list[list[Placement]], Stream]


@st.composite
def products(draw: st.DrawFn) -> Product:
    equation, shape = draw(st.sampled_from(EQUATIONS)), draw(st.sampled_from(MESHES))
    sides = equation.partition("->")[0].split(",")
    extent = {letter: draw(st.sampled_from([4, 8, 8, 8, 1, 3])) for letter in sorted(set("".join(sides)))}
    one = [st.sampled_from([Replicate(), Partial(), *map(Shard, range(len(side))), Shard(0)]) for side in sides]
    layouts = [draw(st.lists(each, min_size=len(shape), max_size=len(shape))) for each in one]
    return equation, extent, shape, layouts, Stream(2, None, "symmetric")


def contracted(drawn: list[Product]) -> list[list[int]]:
    """Of each product of tensors in any layout, with a result on which nothing is partial, what differs."""
    told = []
    for equation, extent, shape, layouts, stream in drawn:
        mesh, sides = mesh_of(shape), equation.partition("->")[0].split(",")
        a, b = (reals(*(extent[letter] for letter in side)).requires_grad_() for side in sides)
        c = torch.einsum(equation, a, b)
        c.square().sum().backward()
        with use_topology(BYTES), use_strategy(panels=stream):
            pairs = zip((a, b), layouts, strict=True)
            x, y = (distribute(t.detach(), Layout(mesh, tuple(at))).requires_grad_() for t, at in pairs)
            found = torch.einsum(equation, x * 1, y * 1)  # activations, of which gathered copies are kept
            found.square().sum().backward()
        told.append(differences([found, x.grad, y.grad], [c, a.grad, b.grad]))
    return told


@settings(max_examples=EXAMPLES)
@given(st.lists(products(), min_size=5, max_size=5))
@pytest.mark.ranks
def test_tensors_of_any_dims_and_layouts(drawn: list[Product]) -> None:
    for told in rank_pool(4, nccl_contract.BACKEND).run(contracted, drawn):
        assert told == [[]] * len(drawn)


LINEARS = [
    # the loops, the layouts of x [b, s, k], of the weight [n, k] and of the result, and the kernels there and back
    ("n", (Shard(1),), (Shard(0),), (Shard(2),), [GATHER, SCATTER]),
    ("n", (Shard(0),), (Shard(0),), (Shard(2),), [GATHER, SCATTER]),
    ("k", (Shard(2),), (Shard(1),), (Shard(1),), [SCATTER, GATHER]),
    ("k", (Shard(2),), (Shard(1),), (Shard(2),), [SCATTER]),
    ("m", (Shard(0),), (Shard(0),), (Shard(0),), [GATHER, SCATTER]),  # the weight is gathered, its gradient scattered
    ("mn", (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(2)), [GATHER, SCATTER, SCATTER]),
]
Placements = tuple[Placement, ...]


def linears(
    loops: str, x_at: Placements, w_at: Placements, out_at: Placements, dtype: torch.dtype
) -> tuple[list[int], list[str]]:
    """What differs of a linear layer with bias and its gradients, and the kernels that ran."""
    schedule = Schedule(tuple(loops), ("R",) * len(loops))
    mesh, (b, s, k, n) = mesh_of((4,) if len(x_at) == 1 else (2, 2)), (4, 8, 12, 16)
    exact = [reals(*shape, dtype=dtype).double() for shape in ((b, s, k), (n, k), (n,))]
    x, w, bias = (t.requires_grad_() for t in exact)
    right = torch.nn.functional.linear(x, w, bias)
    right.backward(reals(b, s, n, dtype=dtype).double())
    everywhere = (Replicate(),) * mesh.ndim
    layouts = (x_at, w_at, everywhere)
    mine = [
        distribute(t.detach().to(dtype), Layout(mesh, at)).requires_grad_()
        for t, at in zip(exact, layouts, strict=True)
    ]
    with use_topology(BYTES), kernels() as begun:
        out = linear(*mine, strategy=schedule, out_placements=list(out_at), panels=BY_KERNEL)
        out.backward(distribute(reals(b, s, n, dtype=dtype), out.layout))
    within = 1e-9 if dtype == torch.float64 else 2e-2
    wrong = [
        i
        for i, (found, exactly) in enumerate(
            zip([out, *(t.grad for t in mine)], [right, x.grad, w.grad, bias.grad], strict=True)
        )
        if (whole(found.detach()).double() - exactly).norm() > within * exactly.norm()
    ]
    return wrong, [name for name in begun if name in (GATHER, SCATTER)]


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("layer", "through"), [(case[:-1], case[-1]) for case in LINEARS], ids=str)
def test_linear_layers_with_bias_of_any_rank(
    contract: RankPool, layer: tuple[object, ...], through: list[str], dtype: torch.dtype
) -> None:
    assert contract.run(linears, *layer, dtype) == [([], through)] * 4


# -- where there is none


def refused_over_gloo() -> tuple[str, int]:
    """The refusal on this backend, and the collectives until then."""
    x, y, _ = placed(mesh_of((4,)), COLUMN, 8, 8, 8)
    with trace() as sent, pytest.raises(StrategyError) as error:
        matmul(x, y, strategy=COLUMN, panels=BY_KERNEL)
    return str(error.value), len(sent.events)


REFUSAL = "symmetric memory is that of GPUs over NCCL; use the transport 'collective' or 'ring', or panels='auto'"


@pytest.mark.ranks
def test_over_gloo_symmetric_memory_is_refused_before_anything_is_sent() -> None:
    for message, sent in rank_pool(4, "gloo").run(refused_over_gloo):
        assert message.startswith(f"{BY_KERNEL} on the mesh (x=4) with backend 'gloo': {REFUSAL}")
        assert sent == 0


def test_simulated_ranks_have_no_symmetric_memory() -> None:
    mesh = Mesh((4,), ("x",))
    with simulated(mesh), use_topology(BYTES), pytest.raises(StrategyError, match=f"simulated ranks: {REFUSAL}"):
        matmul(*placed(mesh, COLUMN, 8, 8, 8)[:2], strategy=COLUMN, panels=BY_KERNEL)


def simulated_beside_processes() -> bool:
    """Whether ranks that are simulated where the kernel was chosen for processes get the result."""
    mesh = mesh_of((4,))
    right, _, _ = expected(8, 8, 8)
    with use_topology(BYTES):
        x, y, _ = placed(mesh, COLUMN, 8, 8, 8)
        matmul(x, y, strategy=COLUMN, panels=BY_KERNEL)
        with simulated(mesh):
            x, y, _ = placed(mesh, COLUMN, 8, 8, 8)
            return torch.allclose(whole(matmul(x, y, strategy=COLUMN, panels=BY_KERNEL).detach()), right)


@pytest.mark.ranks
def test_ranks_simulated_beside_processes_do_without(contract: RankPool) -> None:
    assert contract.run(simulated_beside_processes) == [True] * 4


def taken(topology: Topology, local: str, stream: Stream, sizes: tuple[int, int, int], dtype: torch.dtype) -> str:
    """The class of the executor of a matmul along x of a mesh (2, 2)."""
    mesh, (m, k, n) = mesh_of((2, 2)), sizes
    plans = plans_of(mesh, Schedule(("n", "m"), ("m", "R")), m, k, n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local)
        found = executor(PlannedMatmul(matmul_rule((m, k), (k, n)), plans, dtype, topology), stream)
    return type(found).__name__


def layered(outer: str | None, inner: str | None) -> Topology:
    layers = (Layer("outer", 2, 1e10, 1e-6, hardware=outer), Layer("inner", 2, 1e11, 1e-6, hardware=inner))
    return Topology("two of two", layers, backend="nccl")


IN_PANELS, WIDE = Stream(2, transport="symmetric"), (16, 8, 8)
TAKEN = [
    (NVLINK, "4", IN_PANELS, WIDE, torch.float32, "SymmetricExecutor"),
    (BYTES, "4", IN_PANELS, WIDE, torch.bfloat16, "SymmetricExecutor"),
    (BYTES, "2", IN_PANELS, WIDE, torch.float32, "PanelExecutor"),  # along x ranks are on two hosts
    (BYTES, "3", IN_PANELS, WIDE, torch.float32, "PanelExecutor"),
    (layered("network", "nvlink"), "4", IN_PANELS, WIDE, torch.float32, "PanelExecutor"),
    (layered("nvlink", "nvlink"), "4", IN_PANELS, WIDE, torch.float32, "SymmetricExecutor"),
    (layered("pcie", "nvlink"), "4", IN_PANELS, WIDE, torch.float32, "PanelExecutor"),
    (NVLINK, "4", IN_PANELS, (15, 8, 8), torch.float32, "PanelExecutor"),  # of different sizes
    (NVLINK, "4", IN_PANELS, (16, 8, 7), torch.float32, "SymmetricExecutor"),  # the operand that stays need not divide
    (NVLINK, "4", IN_PANELS, (16, 3, 8), torch.bfloat16, "PanelExecutor"),  # chunks of 24 bytes
    (NVLINK, "4", IN_PANELS, WIDE, torch.complex64, "PanelExecutor"),
    (NVLINK, "4", IN_PANELS, WIDE, torch.int64, "PanelExecutor"),
    (NVLINK, "4", Stream(2, "k", "symmetric"), WIDE, torch.float32, "PanelExecutor"),  # it is gathered along m
    (NVLINK, "4", BY_KERNEL, (15, 8, 8), torch.float32, "NoneType"),  # one panel: in bulk
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_kernels_are_for_equal_chunks_of_floats_on_one_host(contract: RankPool, case: tuple[object, ...]) -> None:
    assert contract.run(taken, *case[:-1]) == [case[-1]] * 4


# -- steps


def counted(loop: Loop, stored: Stored) -> tuple[list[tuple[str, int]], int]:
    """The collectives and bytes of a matmul in a kernel, counted from the arguments of the operators, and its trace."""
    schedule = Schedule((loop,), (stored,))
    x, w, _ = (t.detach() for t in placed(mesh_of((4,)), schedule, 8, 12, 16))
    with use_topology(BYTES), trace() as sent, count_traffic() as found:
        matmul(x, w, strategy=schedule, panels=BY_KERNEL)
    return [(each.name, each.nbytes) for each in found.collectives], sent.nbytes


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("loop", "stored", "name", "nbytes"),
    [("n", "m", GATHER, 8 * 8 * 12 * 3 // 4), ("k", "m", SCATTER, 8 * 8 * 16 * 3 // 4), ("k", "n", SCATTER, 768)],
)
def test_kernels_are_counted(contract: RankPool, loop: Loop, stored: Stored, name: str, nbytes: int) -> None:
    assert contract.run(counted, loop, stored) == [([(name, nbytes)], nbytes)] * 4


def layers(dims: int, saved: Saved) -> tuple[list[int], list[str], list[int]]:
    """Of a column and a row layer, Megatron with sequence parallelism, in bulk and in kernels.

    What differs from one device, the collectives of the step in kernels, and the bytes of both.
    """
    mesh, told = mesh_of((4,)), list[Trace]()
    shape = (8, 12) if dims == 2 else (3, 8, 12)
    tensors = [reals(*sizes).requires_grad_() for sizes in (shape, (16, 12), (12, 16))]
    right = F.linear(F.linear(tensors[0] * 2, tensors[1]).relu(), tensors[2])
    right.square().sum().backward()
    at = [(Shard(dims - 2),), (Shard(0),), (Shard(1),)]
    wrong: list[int] = []
    for panels in (None, BY_KERNEL):
        x, *weights = (
            distribute(t.detach(), Layout(mesh, each)).requires_grad_() for t, each in zip(tensors, at, strict=True)
        )
        with use_topology(BYTES), use_strategy(panels=panels, saved=saved), trace() as sent:
            hidden = linear(x * 2, weights[0], strategy=Schedule(("n",), ("R",)))
            out = linear(hidden.relu(), weights[1], strategy=Schedule(("k",), ("R",)), out_placements=[*at[0]])
            out.square().sum().backward()
        wrong += differences([out, x.grad, *(w.grad for w in weights)], [right, *(t.grad for t in tensors)])
        told.append(sent)
    sent = [event.collective for event in told[1].events if event.op != "number"]
    return wrong, sent, [sent.nbytes for sent in told]


@pytest.mark.ranks
@pytest.mark.parametrize("dims", [2, 3])
def test_a_step_sends_what_it_sends_in_bulk(contract: RankPool, dims: int) -> None:
    """A kernel leaves what it has gathered: an activation for the backward pass, a gradient for the second matmul."""
    for wrong, sent, (bulk, in_kernels) in contract.run(layers, dims, "auto"):
        assert wrong == []
        assert len(sent) == 4
        assert in_kernels == bulk


@pytest.mark.ranks
def test_what_is_stored_alone_is_kept_where_that_is_asked_for(contract: RankPool) -> None:
    for wrong, sent, (bulk, in_kernels) in contract.run(layers, 3, "stored"):
        assert wrong == []
        assert len(sent) == 5
        assert in_kernels == bulk


def warm_step() -> list[tuple[int, list[str]]]:
    """Of two warm training steps the waits that no collective of the contract needs, and what begins."""
    mesh, told = mesh_of((4,)), []
    x, w, _ = (t.detach().requires_grad_() for t in placed(mesh, COLUMN, 8, 12, 16))

    def step() -> None:
        out = matmul(x, w, strategy=COLUMN, panels=BY_KERNEL)
        torch.autograd.backward([out], [out.detach()])
        x.grad = w.grad = None

    with use_topology(BYTES):
        step()
        for _ in range(2):
            before = nccl_contract.usage()
            with no_host_sync(), kernels() as begun:
                step()
            after = nccl_contract.usage()
            told.append((after.stream_waits - before.stream_waits - len(begun), begun))
    return told


@pytest.mark.ranks
def test_a_warm_step_makes_the_host_wait_for_nothing(contract: RankPool) -> None:
    for told in contract.run(warm_step):
        for unneeded, begun in told:
            assert unneeded <= 0
            assert begun[:1] == [GATHER]
            assert begun.count(SCATTER) == 1


def copies(loops: str, stored: str, stream: Stream) -> list[str]:
    """The operators of a warm matmul that copy."""
    schedule = Schedule((loops,), (stored,))
    x, w, _ = (t.detach() for t in placed(mesh_of((4,)), schedule, 8, 12, 16))
    names: list[str] = []

    def run(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if str(func).startswith(("aten.copy", "aten.clone", "aten._to_copy", "aten.cat")):
            names.append(str(func))
        return func(*args, **kwargs)  # type: ignore[operator]

    with use_topology(BYTES):
        matmul(x, w, strategy=schedule, panels=stream)
        with OperatorMode(run):
            matmul(x, w, strategy=schedule, panels=stream)
    return names


def at_an_odd_place() -> list[int]:
    """What differs of a matmul whose chunk begins behind the first element of its memory."""
    mesh = mesh_of((4,))
    x, w, _ = (t.detach() for t in placed(mesh, COLUMN, 8, 12, 16))
    local = torch.cat([torch.zeros(1).double(), x.to_local().flatten()])[1:].view(2, 12)
    with use_topology(BYTES), kernels() as begun:
        found = matmul(DTensor.from_local(local, mesh, [Shard(0)]), w, strategy=COLUMN, panels=BY_KERNEL)
    assert GATHER in begun
    return differences([found], [expected(8, 12, 16)[0]])


@pytest.mark.ranks
def test_a_chunk_may_lie_anywhere_in_memory(contract: RankPool) -> None:
    assert contract.run(at_an_odd_place) == [[]] * 4


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_graphs_call_the_kernels(contract: RankPool, backend: str) -> None:
    assert contract.run(compiled, backend, timeout=300) == [([], [GATHER, SCATTER])] * 4


def compiled(backend: str) -> tuple[list[int], list[str]]:
    """What differs of a compiled matmul and its gradients, and the kernels that run."""
    mesh = mesh_of((4,))
    with use_topology(BYTES), kernels() as begun:
        x, w, grad = placed(mesh, COLUMN, 8, 12, 16)
        c = torch.compile(lambda a, b: matmul(a, b, strategy=COLUMN, panels=BY_KERNEL), backend=backend)(x, w)
        c.backward(grad)
    wrong = differences([c, x.grad, w.grad], [*expected(8, 12, 16)])
    return wrong, [name for name in begun if name in (GATHER, SCATTER)]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("loops", "stored", "needed"),
    [("n", "m", []), ("k", "m", []), ("k", "n", []), ("m", "n", ["aten.clone.default"] * 2)],
)
def test_only_a_chunk_and_a_result_in_another_order_are_copied(
    contract: RankPool, loops: str, stored: str, needed: list[str]
) -> None:
    assert contract.run(copies, loops, stored, BY_KERNEL) == [needed] * 4


# -- prices


def priced(topology: Topology, schedule: Schedule, sizes: tuple[int, int, int]) -> tuple[PanelCost, ...]:
    """The prices of a matmul on eight GPUs that need not exist."""
    m, k, n = sizes
    plans = plans_of(Mesh((8,), ("x",), device_type="cuda"), schedule, m, k, n)
    return in_panels(PlannedMatmul(matmul_rule((m, k), (k, n)), plans, torch.float64, topology))


def nvlinked(bandwidth: float, flops: float, latency: float = 0.0) -> Topology:
    """Eight GPUs on one host, whose memory and launches take no time."""
    device = Device("one", (("float64", flops),), memory_bandwidth=inf, launch=0.0)
    layers = (Layer("gpu", 8, bandwidth, latency, hardware="nvlink"),)
    return Topology("one host", layers, device, "nccl")


@given(st.sampled_from([COLUMN, ROW, ROW_TO_COLUMNS]), st.floats(1, 1e6), st.floats(1, 1e6))
def test_a_kernel_hides_copies_behind_products_but_of_one_chunk(
    schedule: Schedule, bandwidth: float, flops: float
) -> None:
    move, multiply = 8 * schedule.volume(Mesh((8,), ("x",)), 64, 64, 64) / bandwidth, 2 * 64**3 / 8 / flops

    last = priced(nvlinked(bandwidth, flops), schedule, (64, 64, 64))[-1]

    assert last.transport == "symmetric"
    assert last.seconds == pytest.approx(max(move, multiply * 7 / 8) + multiply / 8)


@given(
    st.sampled_from([COLUMN, ROW, ROW_TO_COLUMNS, GATHERED_WEIGHT]),
    st.floats(1e6, 1e12),
    st.floats(1e6, 1e15),
    st.floats(0, 1e-3),
    st.integers(1, 40),
)
def test_what_is_taken_is_never_dearer_than_what_is_listed(
    schedule: Schedule, bandwidth: float, flops: float, latency: float, eighths: int
) -> None:
    costs = priced(nvlinked(bandwidth, flops, latency), schedule, (8 * eighths, 64, 64))

    assert costs[-1].transport == "symmetric"
    assert cheapest(costs).seconds == min(each.seconds for each in costs)
    for limit in (0, costs[-1].buffer_bytes):
        fits = [each for each in costs if each.buffer_bytes <= limit]
        assert cheapest(costs, limit) in (fits or costs)


@pytest.mark.parametrize(
    "topology",
    [BYTES, Topology.preset("pcie"), Topology.preset("dgx-h100", nodes=2), layered(None, None)],
    ids=lambda each: each.name,
)
def test_auto_takes_no_kernel_where_nothing_says_that_nvlink_joins_the_ranks(topology: Topology) -> None:
    mesh = Mesh((16 if topology.size == 16 else 4,), ("x",), device_type="cuda")
    plans = plans_of(mesh, COLUMN, 64, 64, 64)
    costs = in_panels(PlannedMatmul(matmul_rule((64, 64), (64, 64)), plans, torch.float64, topology))

    assert {each.transport for each in costs} == {"collective"}


def chosen() -> tuple[list[int], list[str], str, tuple[int, str]]:
    """What differs where a kernel is the cheapest, the kernels there and back, and what explain says.

    Its plan is what trace records, and what strict refuses.
    """
    mesh = mesh_of((4,))
    with use_topology(nvlinked(1e9, 1e10, 1e-7)):
        x, w, grad = placed(mesh, COLUMN, 32, 64, 64)
        report = explain(lambda: matmul(x, w, strategy=COLUMN, panels="auto"))
        with kernels() as begun:
            with trace() as sent:
                c = matmul(x, w, strategy=COLUMN, panels="auto")
            c.backward(grad)
        with kernels() as refused, strict(), pytest.raises(LayoutError, match="matmul"):
            matmul(x, w, strategy=COLUMN, panels="auto")
    (asked,) = report.operators
    assert not refused
    assert [(event.collective, event.axis, event.nbytes) for event in sent.events] == [
        (each.collective, each.axis, each.nbytes) for each in asked.collectives
    ]
    wrong = differences([c, x.grad, w.grad], [*expected(32, 64, 64)])
    return wrong, [name for name in begun if name in (GATHER, SCATTER)], str(report), (asked.run_in, asked.transport)


@pytest.mark.ranks
def test_auto_takes_a_kernel_where_that_is_the_cheapest_and_explain_shows_it(contract: RankPool) -> None:
    for wrong, begun, report, runs in contract.run(chosen):
        assert wrong == []
        assert begun == [GATHER, SCATTER]
        assert runs == (1, "symmetric")
        assert report.count("(as it runs)") == 1
        assert "symmetric: " in report.splitlines()[-1]
        assert report.splitlines()[-1].endswith("(as it runs)")


def planned(mesh: Mesh, rows: int) -> Explanation:
    """What is chosen for a square matmul with gathered rows, on a mesh without processes."""
    (a, b, _), shape = COLUMN.layouts(mesh), (rows, rows)
    x, w = (
        DTensor.from_local(
            torch.empty(at.local_shape(shape, (0,)), device="meta"),
            mesh,
            at.placements,
            shape=torch.Size(shape),
            stride=(rows, 1),
        )
        for at in (a, b)
    )
    (operator,) = explain(lambda: matmul(x, w, strategy=COLUMN, panels="auto")).operators
    return operator


def test_a_matmul_of_given_sizes_lists_the_kernel() -> None:
    mesh = Mesh((8,), ("x",))
    a, b, _ = COLUMN.layouts(mesh)
    found = explain_matmul(4096, 8192, 28672, mesh, NVLINK, a=a, b=b)

    assert found.chosen.name == "x:n"
    assert [each.transport for each in found.panels] == ["collective"] * 5 + ["symmetric"]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_plans_for_gpus_that_need_not_exist_list_the_kernel(device_type: str) -> None:
    mesh = Mesh((8,), ("x",), device_type=device_type)
    with use_topology(NVLINK):
        few, many = planned(mesh, 512), planned(mesh, 16384)

    assert "symmetric: " in str(few)
    assert (few.transport, many.transport) == ("collective", "symmetric")  # each chunk has launches of its own


@given(st.sampled_from([COLUMN, ROW, ROW_TO_COLUMNS]), st.sampled_from([(8, 16, 24), (16, 8, 8)]))
def test_buffers_of_a_kernel_are_all_chunks_and_what_others_read(
    schedule: Schedule, sizes: tuple[int, int, int]
) -> None:
    """Of torch's kernels: the chunks of all ranks, and one, or two in turn, that a peer copies."""
    m, k, n = sizes
    last = priced(NVLINK, schedule, sizes)[-1]
    chunk = (m * k if schedule is COLUMN else m * n) // 8

    assert last.buffer_bytes == 8 * chunk * (9 if schedule is COLUMN else 10)
