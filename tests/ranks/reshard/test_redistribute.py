"""Any layout to any layout keeps the tensor and its gradient: on simulated ranks, and on real ones."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, TypeAlias

import pytest
import torch
from helpers.layout_steps import steps_from
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard
from dshard.autograd.crossing import redistribute
from dshard.comm import CommEvent, DeviceMesh, bind, listen, run
from dshard.core.context import planning_context
from dshard.core.wrapper import wrap
from dshard.layout import Shape, parse_layout
from dshard.placements import REDUCE_OPS
from dshard.redistribute import Plan, plan
from dshard.redistribute.layout_state import load_of
from dshard.redistribute.step import after, sizes_received
from dshard.testing import (
    RankPool,
    Redistribution,
    distribute,
    layouts,
    parts,
    redistributions,
    simulated,
    whole,
    whole_numbers,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128)
MORE_DTYPES = (*DTYPES, torch.float16, torch.int32, torch.int16, torch.int8, torch.uint8, torch.complex64)
Case: TypeAlias = tuple[Redistribution, torch.dtype]


def planned(src: Layout, dst: Layout, shape: Shape, itemsize: int) -> Plan:
    """The plan that a redistribution runs."""
    return plan(src, dst, shape, itemsize, planning_context().topology_of(src.mesh))


def ordered(case: Redistribution) -> bool:
    """Whether the values must have an order, which complex numbers lack."""
    return any(isinstance(p, Partial) and p.reduce_op in ("max", "min") for end in case[:2] for p in end.placements)


@st.composite
def cases(
    draw: st.DrawFn, mesh: st.SearchStrategy[Mesh] | None = None, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> Case:
    case = draw(redistributions(mesh, partial=REDUCE_OPS))  # type: ignore[arg-type]
    dtype = draw(st.sampled_from(dtypes))
    return case, torch.float64 if dtype.is_complex and ordered(case) else dtype


def assert_value(x: Tensor, expected: Tensor) -> None:
    """Equal; a mean may be rounded."""
    exact = not x.dtype.is_floating_point and not x.dtype.is_complex
    torch.testing.assert_close(x, expected, **({"rtol": 0, "atol": 0} if exact else {}))


# -- simulated ranks


@given(cases())
def test_any_layout_to_any_layout_keeps_the_tensor(case: Case) -> None:
    (src, dst, shape), dtype = case
    value = whole_numbers(shape, dtype)
    with simulated(src.mesh):
        x = distribute(value, src)

        moved = redistribute(x, dst)

        assert moved.layout == dst
        assert_value(whole(moved), value)
        assert_value(whole(x), value)


@given(redistributions(partial=REDUCE_OPS), st.data())  # type: ignore[arg-type]
def test_the_gradient_of_a_redistribution_comes_back(case: Redistribution, data: st.DataObject) -> None:
    src, dst, shape = case
    incoming = whole_numbers(shape, seed=1)
    laid = data.draw(st.one_of(st.just(dst.cotangent()), layouts(src.mesh, len(shape))))
    with simulated(src.mesh):
        x = distribute(whole_numbers(shape), src).requires_grad_()
        between = x.clone()
        between.retain_grad()

        redistribute(between, dst).backward(distribute(incoming, laid))

        assert between.grad is not None
        if between.layout != dst and not laid.partial_axes():
            assert between.grad.layout == between.layout.cotangent()
        assert x.grad is not None
        assert x.grad.layout == src.cotangent()
        assert_value(whole(x.grad), incoming)


@given(cases())
def test_what_moved_shares_no_memory(case: Case) -> None:
    (src, dst, shape), dtype = case
    with simulated(src.mesh):
        x = distribute(whole_numbers(shape, dtype), src)
        moved = redistribute(x, dst)

    if src != dst:
        ours, theirs = (
            {part.untyped_storage().data_ptr() for part in parts(t).values() if part.numel()} for t in (x, moved)
        )
        assert not ours & theirs


@given(redistributions())
def test_the_busiest_ranks_bytes_are_told(case: Redistribution) -> None:
    src, dst, shape = case
    events: list[CommEvent] = []
    with simulated(src.mesh), listen(events.append):
        redistribute(distribute(whole_numbers(shape), src), dst)

    found = planned(src, dst, shape, 8)
    expected = [
        max(sum(sizes_received(step, layout, shape, at)) for at in src.mesh.coordinates()) * 8
        for step, layout in found.stages()
        if len(src.mesh.group(step.axes, (0,) * src.mesh.ndim)) > 1
    ]
    assert sum(event.nbytes for event in events) == sum(expected)


@given(redistributions(partial=REDUCE_OPS), st.data())  # type: ignore[arg-type]
def test_every_step_along_any_axes_keeps_the_tensor(case: Redistribution, data: st.DataObject) -> None:
    """Also the steps that no plan has, such as a reduction to chunks whose order of axes nobody asks for."""
    src, dst, shape = case
    begun = {i: p.reduce_op for i, p in enumerate(dst.placements) if isinstance(p, Partial)}
    steps = steps_from(src, range(len(shape)), begun)  # type: ignore[arg-type]
    if not steps:
        return
    step, value, events = data.draw(st.sampled_from(steps)), whole_numbers(shape), list[CommEvent]()
    alone = Plan(src, after(step, src), shape, (step,), 0.0)
    with simulated(src.mesh), listen(events.append):
        x = distribute(value, src)

        moved = wrap(run(alone, x._local_tensor), x._spec.with_layout(alone.dst))

        assert_value(whole(moved), value)
    received = {at: sum(sizes_received(step, src, shape, at)) for at in src.mesh.coordinates()}
    assert sum(event.nbytes for event in events) == max(received.values()) * value.itemsize
    others = [i for i, axis in enumerate(src.mesh.names) if axis not in step.axes]
    first = [elements for at, elements in received.items() if not any(at[i] for i in others)]
    assert load_of(step, src, shape).received == max(first)


@given(redistributions())
def test_there_and_back_again(case: Redistribution) -> None:
    src, dst, shape = case
    value = whole_numbers(shape)
    with simulated(src.mesh):
        back = redistribute(redistribute(distribute(value, src), dst), src)

        assert back.layout == src
        assert_value(whole(back), value)


def test_nested_shards_on_one_dim_can_be_turned_around() -> None:
    mesh = Mesh((2, 3), ("dp", "tp"))
    src, dst = (parse_layout(f"dp:S(0) tp:S(0); 0:{order}", mesh) for order in ("dp,tp", "tp,dp"))
    with simulated(mesh):
        moved = redistribute(distribute(torch.arange(7), src), dst)

    assert {rank: part.tolist() for rank, part in parts(moved).items()} == {
        0: [0, 1], 3: [2], 1: [3, 4], 4: [5], 2: [6], 5: []
    }  # fmt: skip


def test_one_rank_keeps_the_value_that_becomes_partial_on_several_axes() -> None:
    mesh = Mesh((2, 3), ("dp", "tp"))
    with simulated(mesh):
        moved = redistribute(
            distribute(torch.ones(2), Layout(mesh, (Replicate(),) * 2)), Layout(mesh, (Partial(),) * 2)
        )

    assert {rank: part.tolist() for rank, part in parts(moved).items()} == {0: [1, 1]} | {
        i: [0, 0] for i in range(1, 6)
    }


def test_nothing_moves_where_nothing_changes() -> None:
    mesh = Mesh((2,), ("tp",))
    with simulated(mesh):
        x = distribute(torch.ones(3), Layout(mesh, (Shard(0),)))

        assert redistribute(x, x.layout) is x


# -- real ranks


MESHES = (
    Mesh((4,), ("tp",)),
    Mesh((2, 2), ("dp", "tp")),
    Mesh((1, 4), ("dp", "tp")),
    Mesh((2, 1, 2), ("pp", "dp", "tp")),
    Mesh((4,), ("x",), (3, 1, 0, 2)),
    Mesh((2, 2), ("x", "y"), (3, 1, 0, 2)),
    Mesh((2,), ("half",), (1, 3)),
)


@cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    """torch's mesh of the same ranks; every rank of the world must come here."""
    made = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names)
    assert bind(made) == mesh
    return made


def move(batch: list[Case]) -> list[tuple[str, str]]:
    """Redistribute on this rank; the plan of each case, and what went wrong."""
    found = []
    for case in batch:
        mesh = case[0][0].mesh
        rank = torch.distributed.get_rank()
        device_mesh(mesh)
        found.append(move_one(case, mesh.coordinate(rank)) if rank in mesh else ("", ""))
    return found


def move_one(case: Case, at: tuple[int, ...]) -> tuple[str, str]:
    (src, dst, shape), dtype = case
    value, incoming = (whole_numbers(shape, dtype, seed) for seed in (0, 1))
    with_grad = dtype.is_floating_point or dtype.is_complex
    expected = planned(src, dst, shape, dtype.itemsize)
    events: list[CommEvent] = []
    x = distribute(value, src).requires_grad_(with_grad)
    with listen(events.append):
        moved = redistribute(x, dst)
    told = sum(event.nbytes for event in events)
    try:
        assert_value(whole(moved.detach()), value)
        assert told == expected.received(at) * dtype.itemsize, f"{told} bytes told"
        if with_grad:
            moved.backward(distribute(incoming, dst.cotangent()))
            assert_value(whole(x.grad), incoming)
    except AssertionError as error:
        return str(expected), f"{expected}\nshape {shape}, {dtype}, rank at {at}: {error}"
    return str(expected), ""


@pytest.mark.ranks
@settings(max_examples=settings().max_examples // 8, phases=[Phase.generate])
@given(st.data())
def test_real_ranks_redistribute(ranks: RankPool, cases_run: Counter[str], data: st.DataObject) -> None:
    batch = data.draw(st.lists(cases(st.sampled_from(MESHES), MORE_DTYPES), min_size=25, max_size=25))
    cases_run["redistributions on real ranks"] += len(batch)

    results = ranks.run(move, batch)

    assert not [problem for result in results for _, problem in result if problem]
    for plans in zip(*([text for text, _ in result] for result in results), strict=True):
        assert len({text for text in plans if text}) == 1, "the ranks plan differently"


def outside() -> list[int]:
    """The local shape of a redistributed tensor, also on ranks outside the mesh."""
    mesh = Mesh((2,), ("half",), (1, 3))
    device_mesh(mesh)
    x = distribute(torch.ones(4), Layout(mesh, (Shard(0),)))
    return list(x.redistribute(placements=[Replicate()]).to_local().shape)


@pytest.mark.ranks
def test_a_rank_outside_the_mesh_has_nothing(ranks: RankPool) -> None:
    assert ranks.run(outside) == [[0], [4], [0], [4]]


def doubled(shape: Shape) -> list[Any]:
    """A gradient that comes back through two uses of one redistributed tensor, on each rank."""
    mesh = Mesh((2, 2), ("dp", "tp"))
    device_mesh(mesh)
    x = distribute(torch.arange(6.0).view(shape), Layout(mesh, (Shard(0), Partial()))).requires_grad_()
    y: DTensor = redistribute(x, Layout(mesh, (Replicate(), Shard(1))))
    (y * y + y).sum().backward()
    assert x.grad is not None
    return whole(x.grad).tolist()


@pytest.mark.ranks
def test_gradients_of_several_uses_add_up(ranks: RankPool) -> None:
    assert ranks.run(doubled, (2, 3)) == [[[1.0, 3.0, 5.0], [7.0, 9.0, 11.0]]] * 4
