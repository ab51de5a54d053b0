"""Matmuls fused with a collective by symmetric memory, under NCCL's contract: values, gradients, bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from helpers.panel_matmuls import executor_of, expected, placed, plans_of, reals
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dshard import (
    Mesh,
    Schedule,
    Stream,
    init_device_mesh,
    linear,
    matmul,
    trace,
    use_strategy,
    use_topology,
)
from dshard.comm import bind
from dshard.core.observe import OperatorMode
from dshard.errors import StrategyError
from dshard.layout import Layout
from dshard.ops.matmul.ring import executor
from dshard.ops.matmul.rules import matmul_rule
from dshard.ops.matmul.symmetric import SymmetricExecutor
from dshard.placements import Partial, Placement, Replicate, Shard
from dshard.rules.matmul_loops import schedules
from dshard.testing import RankPool, distribute, nccl_contract, no_host_sync, rank_pool, simulated, whole
from dshard.testing.nccl_contract.process_state import CURRENT
from dshard.topology import BYTES, Layer, Topology

BY_KERNEL = Stream(1, transport="symmetric")
COLUMN, ROW = Schedule(("n",), ("m",)), Schedule(("k",), ("m",))
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


@settings(max_examples=max(4, settings().max_examples // 4))
@given(st.lists(cases(), min_size=8, max_size=8))
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
            found = torch.einsum(equation, x, y)
            found.square().sum().backward()
        told.append(differences([found, x.grad, y.grad], [c, a.grad, b.grad]))
    return told


@settings(max_examples=max(4, settings().max_examples // 4))
@given(st.lists(products(), min_size=8, max_size=8))
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
        found = executor(matmul_rule((m, k), (k, n)), plans, dtype, stream, None, topology)
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


def warm_step() -> list[tuple[int, list[str]]]:
    """Of two warm training steps the waits that no collective of the contract needs, and what begins."""
    mesh, told = mesh_of((4,)), []
    x, w, _ = (t.detach().requires_grad_() for t in placed(mesh, COLUMN, 8, 12, 16))

    def step() -> None:
        matmul(x, w, strategy=COLUMN, panels=BY_KERNEL).square().sum().backward()
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


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("loops", "stored", "needed"),
    [("n", "m", []), ("k", "m", []), ("k", "n", []), ("m", "n", ["aten.clone.default"] * 2)],
)
def test_only_a_chunk_and_a_result_in_another_order_are_copied(
    contract: RankPool, loops: str, stored: str, needed: list[str]
) -> None:
    assert contract.run(copies, loops, stored, BY_KERNEL) == [needed] * 4
