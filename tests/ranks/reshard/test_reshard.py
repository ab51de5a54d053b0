"""Tensors cross between meshes, and their gradients come back: on simulated ranks, and on real ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

import pytest
import torch
from helpers.plans_of_one_form import plan_of_form
from helpers.reshard_cases import Case, case_of, meshes_of, paper_network, reshards
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dshard import (
    DTensor,
    Layout,
    Mesh,
    MeshError,
    Partial,
    Replicate,
    Shard,
    Topology,
    distribute_tensor,
    explain,
    init_device_mesh,
    strict,
    trace,
)
from dshard.autograd.crossing import redistribute
from dshard.comm import DeviceMesh, begin_reshard, bind, reshard
from dshard.core.context import use_topology
from dshard.placements import REDUCE_OPS
from dshard.reshard import order, plan_reshard
from dshard.reshard.chains import FORMS, Form
from dshard.rules.strategy import completed_layout
from dshard.testing import RankPool, count_traffic, distribute, parts, rank_pool, simulated, whole, whole_numbers

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
Run: TypeAlias = tuple[Case, torch.dtype, Topology, Form]

TOPOLOGIES = (
    Topology.flat(1e9, 1e-5),
    Topology.preset("cpu", nodes=4, ranks=2),
    Topology.preset("cpu", nodes=2, ranks=4),
    paper_network(4, cards=4),
)


def ordered(case: Case) -> bool:
    """Whether the values must have an order, which complex numbers lack."""
    return any(isinstance(p, Partial) and p.reduce_op in ("max", "min") for end in case[:2] for p in end.placements)


@st.composite
def runs(draw: st.DrawFn, mesh: st.SearchStrategy[Mesh]) -> Run:
    case = draw(reshards(mesh, REDUCE_OPS))  # type: ignore[arg-type]
    dtype = draw(st.sampled_from(DTYPES))
    if dtype.is_complex and ordered(case):
        dtype = torch.float64
    return case, dtype, draw(st.sampled_from(TOPOLOGIES)), draw(st.sampled_from(FORMS))


def assert_value(x: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal; a mean may be rounded."""
    exact = not x.dtype.is_floating_point and not x.dtype.is_complex
    torch.testing.assert_close(x, expected, **({"rtol": 0, "atol": 0} if exact else {}))


# -- simulated ranks


@given(runs(meshes_of(8)))
def test_any_layout_to_any_layout_on_another_mesh_keeps_the_tensor(run: Run) -> None:
    (src, dst, shape), dtype, topology, _ = run
    value = whole_numbers(shape, dtype)
    with simulated(8), use_topology(topology):
        x = distribute(value, src)

        moved = redistribute(x, dst)

        assert moved.layout == dst
        assert_value(whole(moved), value)
        assert_value(whole(x), value)


@given(runs(meshes_of(8)))
def test_the_gradient_comes_back_from_another_mesh(run: Run) -> None:
    (src, dst, shape), _, topology, _ = run
    incoming = whole_numbers(shape, seed=1)
    with simulated(8), use_topology(topology):
        x = distribute(whole_numbers(shape), src).requires_grad_()

        redistribute(x, dst).backward(distribute(incoming, dst.cotangent()))

        assert x.grad is not None
        assert x.grad.layout == src.cotangent()
        assert_value(whole(x.grad), incoming)


@given(runs(meshes_of(8)))
def test_every_form_keeps_the_tensor(run: Run) -> None:
    (src, dst, shape), dtype, topology, form = run
    src, dst = completed_layout(src), completed_layout(dst)
    value = whole_numbers(shape, dtype)
    with simulated(8), many_chunks():
        x = distribute(value, src)
        plan = plan_of_form(src, dst, shape, dtype.itemsize, topology, form, balance=True)

        moved = DTensor._wrap(reshard(plan, x._local_tensor), x._spec.with_layout(dst))

        assert_value(whole(moved), value)


@contextmanager
def many_chunks() -> Iterator[None]:
    """Within the block chains may have chunks of a single element."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "LEAST_BYTES", 1)
        yield


@given(runs(meshes_of(8)))
def test_what_crossed_shares_no_memory(run: Run) -> None:
    (src, dst, shape), dtype, topology, _ = run
    with simulated(8), use_topology(topology):
        x = distribute(whole_numbers(shape, dtype), src)
        moved = redistribute(x, dst)

    ours, theirs = (
        {part.untyped_storage().data_ptr() for part in parts(t).values() if part.numel()} for t in (x, moved)
    )
    assert not ours & theirs


def test_without_data_it_plans() -> None:
    src, dst = Mesh((2,)), Mesh((3,), ranks=(2, 3, 4))
    x = distribute_tensor(torch.empty(7, 4, device="meta"), src, [Shard(0)])

    moved = x.redistribute(dst, [Shard(0)])

    assert moved.layout == Layout(dst, (Shard(0),))
    assert moved.to_local().shape == (3, 4)


# -- real ranks


@cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of the same ranks; every rank of the world must come here."""
    made = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names)
    assert bind(made) == mesh
    return made


MESHES = {
    4: (
        Mesh((2,), ("x",), (0, 1)),
        Mesh((2,), ("x",), (2, 3)),
        Mesh((3,), ("x",), (3, 1, 2)),
        Mesh((2, 2), ("x", "y"), (3, 1, 0, 2)),
        Mesh((4,), ("x",)),
        Mesh((1,), ("x",), (2,)),
    ),
    8: (
        Mesh((4,), ("x",), (0, 1, 2, 3)),
        Mesh((2, 2), ("x", "y"), (4, 5, 6, 7)),
        Mesh((2, 3), ("x", "y"), (7, 0, 3, 2, 5, 6)),
        Mesh((8,), ("x",)),
        Mesh((2, 2, 2), ("x", "y", "z"), (7, 6, 5, 4, 3, 2, 1, 0)),
        Mesh((3,), ("x",), (1, 4, 6)),
        Mesh((5,), ("x",), (6, 1, 0, 7, 3)),
        Mesh((2,), ("x",), (2, 5)),
    ),
}


def cross(batch: list[Run], meshes: tuple[Mesh, ...]) -> list[str]:
    """Cross between meshes on this rank and back; what went wrong in each case."""
    for mesh in meshes:
        device_mesh(mesh)
    return [cross_one(run) if torch.distributed.get_rank() in {*run[0][0].mesh.ranks, *run[0][1].mesh.ranks} else ""
            for run in batch]  # fmt: skip


def cross_one(run: Run) -> str:
    (src, dst, shape), dtype, topology, form = run
    rank, with_grad = torch.distributed.get_rank(), dtype.is_floating_point or dtype.is_complex
    value, incoming = (whole_numbers(shape, dtype, seed) for seed in (0, 1))
    x = distribute(value, src)
    x = DTensor._wrap(x._local_tensor.to(dtype), x._spec).requires_grad_(with_grad)
    with use_topology(topology), count_traffic() as traffic:
        moved = redistribute(x, dst)
    plan = plan_reshard(src, dst, shape, dtype.itemsize, topology)
    try:
        if plan.first is None and plan.last is None:
            expected = plan.received(rank) * dtype.itemsize
            assert traffic.nbytes == expected, f"{traffic.nbytes} bytes received, {expected} planned"
        if rank in dst.mesh:
            assert_value(whole(moved.detach()), value)
        else:
            assert moved._local_tensor.is_meta
        if with_grad:
            with use_topology(topology):
                moved.backward(distribute(incoming, dst.cotangent()) if rank in dst.mesh else moved)
            if rank in src.mesh:
                assert_value(whole(x.grad), incoming)
            else:
                assert x.grad._local_tensor.is_meta
        ends, value = (completed_layout(src), completed_layout(dst)), value.to(dtype)
        with many_chunks():
            plan = plan_of_form(*ends, shape, dtype.itemsize, topology, form, balance=True)
        out = reshard(plan, distribute(value, ends[0]).to_local().to(dtype))
        if out is not None:
            spec = moved._spec.with_layout(ends[1])
            assert_value(whole(DTensor._wrap(out, spec)), value)
    except AssertionError as error:
        return f"{plan}\nshape {shape}, {dtype}, rank {rank}: {error}"
    return ""


def check_batch(pool: RankPool, batch: list[Run], meshes: tuple[Mesh, ...]) -> None:
    results = pool.run(cross, batch, meshes, timeout=300.0)

    assert not [problem for result in results for problem in result if problem]


@pytest.mark.ranks
@settings(max_examples=2, phases=[Phase.generate])
@given(st.lists(runs(st.sampled_from(MESHES[4])), min_size=12, max_size=12))
def test_real_ranks_cross(ranks: RankPool, cases_run: Counter[str], batch: list[Run]) -> None:
    cases_run["reshards on real ranks"] += len(batch)
    check_batch(ranks, batch, MESHES[4])


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("turn", range(8))  # each within the time limit of one test
@settings(max_examples=10, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(batch=st.lists(runs(st.sampled_from(MESHES[8])), min_size=25, max_size=25))
def test_eight_real_ranks_cross(cases_run: Counter[str], batch: list[Run], turn: int) -> None:
    cases_run["reshards on eight real ranks"] += len(batch)
    check_batch(rank_pool(8), batch, MESHES[8])


def asked_wrongly() -> str:
    """What ranks are told that ask for what cannot be, before anything is sent."""
    first, second = (Mesh((2,), ("x",), ranks) for ranks in ((0, 1), (1, 2)))
    for mesh in (first, second):
        device_mesh(mesh)
    x = distribute_tensor(torch.ones(4), device_mesh(first), [Shard(0)], src_data_rank=None)
    if torch.distributed.get_rank() == 3:  # which is in neither, and sends nothing
        assert x.redistribute(device_mesh(second), [Shard(0)]).to_local().shape == (0,)
    with pytest.raises(MeshError) as caught:
        x.redistribute(Mesh((2,), ("planned",), (2, 3)), [Shard(0)])
    return str(caught.value)


@pytest.mark.ranks
def test_what_cannot_be_is_refused(ranks: RankPool) -> None:
    told = ranks.run(asked_wrongly)

    assert all("the mesh (planned=2) has no processes" in found for found in told)


def told_of_slices() -> list[str]:
    """What ranks are told that name slices of a mesh, of which each has its own."""
    root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rows, values = root["tp"], torch.arange(6.0)
    x, whole = distribute_tensor(values, rows, [Shard(0)]), distribute_tensor(values, root, [Replicate(), Shard(0)])
    told = []
    for tensor, mesh in ((whole, rows), (x, root), (x, root["dp"])):
        with pytest.raises(MeshError) as caught:
            tensor.redistribute(mesh, [Replicate()] * mesh.ndim)
        told.append(str(caught.value))
    there = DTensor.from_local(whole.to_local(), rows, [Shard(0)], shape=whole.shape)  # the way out
    assert torch.equal(there.full_tensor(), values)
    return told


@pytest.mark.ranks
def test_slices_of_a_mesh_are_refused(ranks: RankPool) -> None:
    for told in ranks.run(told_of_slices):
        assert len(told) == 3
        assert all("each rank has another slice" in said and "take DTensor.from_local" in said for said in told)


def several_at_once() -> bool:
    """Two tensors under way between the same ranks, begun in another order on the other side."""
    src, dst = Mesh((2,), ("x",), (0, 1)), Mesh((2,), ("x",), (2, 3))
    for mesh in (src, dst):
        device_mesh(mesh)
    rank, values = torch.distributed.get_rank(), [whole_numbers((5, 3), seed=seed) for seed in (1, 2)]
    layout, there = Layout(src, (Shard(0),)), Layout(dst, (Replicate(),))
    plan = plan_reshard(layout, there, (5, 3), 8, Topology.flat(1e9))
    locals_of = [distribute(value, layout).to_local().double() for value in values]
    order = (0, 1) if rank in src else (1, 0)
    flights = {i: begin_reshard(plan, locals_of[i], tag=i) for i in order}
    found = [flights[i].finish() for i in (1, 0)][::-1]
    return all(
        out is None if rank in src else out is not None and torch.equal(out, value)
        for out, value in zip(found, values, strict=True)
    )


@pytest.mark.ranks
def test_several_tensors_are_under_way_at_once(ranks: RankPool) -> None:
    assert ranks.run(several_at_once) == [True] * 4


def twice() -> list[float] | None:
    """The gradient of a tensor that crosses to another mesh, is computed with, and crosses back."""
    src, dst = Mesh((2,), ("x",), (0, 1)), Mesh((3,), ("x",), (1, 2, 3))
    for mesh in (src, dst):
        device_mesh(mesh)
    rank = torch.distributed.get_rank()
    x = distribute(torch.arange(5.0), Layout(src, (Shard(0),))).requires_grad_()
    there = x.redistribute(device_mesh(dst), [Shard(0)])
    if rank in dst:
        there = there * there
    back = there.redistribute(device_mesh(src), [Replicate()])
    back.backward(distribute(torch.ones(5), Layout(src, (Replicate(),))) if rank in src else back)
    if rank not in src:
        return None
    assert x.grad is not None
    found: list[float] = whole(x.grad).tolist()
    return found


@pytest.mark.ranks
def test_what_is_computed_on_another_mesh_is_differentiated(ranks: RankPool) -> None:
    assert ranks.run(twice) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2 + [None, None]


def diverge() -> str:
    """In debug mode, ranks that are about to run different plans."""
    src, dst = Mesh((2,), ("x",), (0, 1)), Mesh((2,), ("x",), (2, 3))
    for mesh in (src, dst):
        device_mesh(mesh)
    rows = 4 if torch.distributed.get_rank() else 6
    plan = plan_reshard(Layout(src, (Shard(0),)), Layout(dst, (Shard(0),)), (rows,), 4, Topology.flat(1e9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_DEBUG", "1")
        with pytest.raises(MeshError) as caught:
            reshard(plan, torch.zeros(rows // 2))
    return str(caught.value)


@pytest.mark.ranks
def test_ranks_that_plan_differently_are_told(ranks: RankPool) -> None:
    for told in ranks.run(diverge):
        assert "different plans" in told
        assert "ranks [0] run (6,)" in told
        assert "ranks [1, 2, 3] run (4,)" in told


@pytest.mark.parametrize("name", ["1", "2", "3", "4", "5", "6 uneven", "7", "8 of the paper", "9"])
def test_the_papers_cases_keep_their_tensor(name: str) -> None:
    src, dst, shape = case_of(name, scale=64)
    value = whole_numbers(shape)
    with simulated(20), use_topology(paper_network()):
        moved = redistribute(distribute(value, src), dst)

        assert torch.equal(whole(moved), value)


# -- seen before and after


def test_what_crosses_is_explained() -> None:
    src, dst = Mesh((2,), ("a",)), Mesh((2, 2), ("b", "c"), ranks=(2, 3, 4, 5))
    x = distribute_tensor(torch.empty(8, 4, device="meta"), src, [Shard(0)])

    with use_topology(Topology.flat(1e9, 1e-5)):
        found = explain(x.redistribute, dst, [Shard(0), Replicate()])

    assert found.chosen.name == "reshard"
    assert found.chosen.placements == "a:S(0) -> b:S(0) c:R"
    assert found.chosen.bytes_moved == 64
    assert len(found.chosen.steps) == 4
    assert "send" in found.chosen.steps[0]
    assert "0>2" in " ".join(found.chosen.steps)


def test_what_crosses_is_traced_and_allowed_by_strict() -> None:
    src, dst = Layout(Mesh((2,), ("a",)), (Partial(),)), Layout(Mesh((2,), ("b",), (2, 3)), (Replicate(),))
    with simulated(4), use_topology(paper_network(2)), trace() as t, strict():
        redistribute(distribute(whole_numbers((4, 4)), src), dst)

    (event,) = t.events
    plan = plan_reshard(src, dst, (4, 4), 8, paper_network(2))
    assert (event.op, event.collective, event.axis) == ("redistribute", "reshard reduce", "a -> b")
    assert event.nbytes == 128
    assert event.seconds == plan.seconds
    assert "reshard reduce" in t.summary()


def timed() -> tuple[int, bool]:
    """Events and their seconds of a crossing, where they are measured."""
    src, dst = Mesh((2,), ("x",), (0, 1)), Mesh((2,), ("x",), (2, 3))
    for mesh in (src, dst):
        device_mesh(mesh)
    x = distribute(torch.arange(6.0), Layout(src, (Shard(0),)))
    with trace(measure=True) as t:
        x.redistribute(device_mesh(dst), [Replicate()])
    return t.nbytes, all(event.measured is not None and event.measured > 0 for event in t.events)


@pytest.mark.ranks
def test_what_crosses_is_measured(ranks: RankPool) -> None:
    assert ranks.run(timed) == [(0, True), (0, True), (24, True), (24, True)]
