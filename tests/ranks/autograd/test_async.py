"""Redistributions that are waited for at their first use, and gradients reduced behind the backward pass."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from functools import cache, partial
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import dshard
from dshard import DTensor, LayoutError, Mesh, Partial, Replicate, Shard, distribute_tensor, trace
from dshard.autograd import leaf_gradients
from dshard.caches import clear_caches
from dshard.comm import DeviceMesh, bind, collectives
from dshard.comm.peer_failure import wait_for
from dshard.placements import REDUCE_OPS
from dshard.testing import RankPool, Redistribution, distribute, redistributions, shapes, whole_numbers

MESHES = (Mesh((4,), ("tp",)), Mesh((2, 2), ("dp", "tp")), Mesh((4,), ("x",), (3, 1, 0, 2)))
WHOLE, ROWS = [Replicate(), Replicate()], [Shard(0), Replicate()]


@cache
def device_mesh(mesh: Mesh) -> DeviceMesh:
    made = DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names)
    assert bind(made) == mesh
    return made


def grid() -> DeviceMesh:
    return device_mesh(MESHES[1])


def on_its_way(x: DTensor) -> bool:
    return "_local_tensor" not in x.__dict__


def against_the_plain_call(batch: list[Redistribution]) -> list[str]:
    wrong = []
    for src, dst, shape in batch:
        mesh = device_mesh(src.mesh)
        x = distribute(whole_numbers(shape, torch.float64), src)
        expected = x.redistribute(mesh, dst.placements)
        found = x.redistribute(mesh, dst.placements, async_op=True)
        if (found.shape, found.placements) != (expected.shape, expected.placements):
            wrong.append(f"{src} -> {dst}: {found.shape}, {found.placements}")
        if not found.to_local().equal(expected.to_local()) or on_its_way(found):
            wrong.append(f"{src} -> {dst} of {shape}: {found.to_local()} is not {expected.to_local()}")
    return wrong


@pytest.mark.ranks
@settings(max_examples=settings().max_examples // 10, phases=[Phase.generate])
@given(st.data())
def test_what_is_waited_for_later_is_the_same(ranks: RankPool, cases_run: Counter[str], data: st.DataObject) -> None:
    cases = redistributions(st.sampled_from(MESHES), shapes(max_size=7), partial=REDUCE_OPS)  # type: ignore[arg-type]
    batch = data.draw(st.lists(cases, min_size=10, max_size=10))
    cases_run["asynchronous redistributions"] += len(batch)

    assert ranks.run(against_the_plain_call, batch) == [[]] * 4


def laid(shape: tuple[int, ...], placements: list[Any], grad: bool = False) -> Any:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) / 9
    out = distribute_tensor(x, grid(), placements, src_data_rank=None)
    return out.requires_grad_() if grad else out


def uses() -> list[str]:
    """What does not wait, and what does."""
    x, wrong = laid((4, 6), ROWS), []

    def fresh() -> DTensor:
        found: DTensor = x.redistribute(grid(), WHOLE, async_op=True)
        return found

    y = fresh()
    _ = y.shape, y.dtype, y.placements, y.layout, y.device_mesh, y.ndim, y.requires_grad
    wrong += [] if on_its_way(y) else ["to look at it waits"]
    for name, use in (
        ("an operator", lambda y: y + 1),
        ("a product", lambda y: y @ y.t()),
        ("to_local", lambda y: y.to_local()),
        ("full_tensor", lambda y: y.full_tensor()),
        ("an operator in place", lambda y: y.add_(0)),
        ("redistribute", lambda y: y.redistribute(grid(), ROWS)),
        ("repr", repr),
    ):
        y = fresh()
        was = on_its_way(y)
        use(y)
        wrong += [] if was and not on_its_way(y) else [f"{name}: before {was}, after {on_its_way(y)}"]
    for _ in range(5):
        fresh()  # never used
    wrong += [] if fresh().full_tensor().equal(laid((4, 6), WHOLE).to_local()) else ["wrong after unused results"]
    with dshard.trace() as traced:
        y = fresh()
    told = [event.collective for event in traced.events]
    wrong += [] if told and y.full_tensor() is not None else ["nothing is told"]
    return wrong


@pytest.mark.ranks
def test_the_first_use_waits(ranks: RankPool) -> None:
    assert ranks.run(uses) == [[]] * 4


def gradients() -> list[str]:
    wrong, found = [], {}
    for later in (False, True):
        x, w = laid((8, 4), ROWS, grad=True), laid((6, 4), [Replicate(), Shard(0)], grad=True)
        whole = w.redistribute(grid(), WHOLE, async_op=later)
        out = F.linear(x, whole).softmax(-1).redistribute(grid(), [Shard(1), Shard(0)], async_op=later)
        loss = (out * out).sum()
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        (first[0].square().sum() + first[1].square().sum()).backward()
        found[later] = [t.full_tensor() for t in (out, *first, x.grad, w.grad)]
    for i, (a, b) in enumerate(zip(found[False], found[True], strict=True)):
        wrong += [] if torch.allclose(a, b, rtol=1e-12) else [f"{i}: {a} is not {b}"]
    return wrong


@pytest.mark.ranks
def test_gradients_come_back_alike(ranks: RankPool) -> None:
    assert ranks.run(gradients) == [[]] * 4


def reduced_behind() -> list[str]:
    """Gradients of parameters are reduced while the backward pass goes on."""
    wrong = []
    x = laid((64, 4), ROWS)  # more than the weights, whose gradients are therefore what is sent
    with dshard.use_topology(dshard.Topology.preset("bytes")):
        weights = [laid((4, 4), WHOLE, grad=True) for _ in range(3)]
        h = x
        for w in weights:
            h = F.linear(h, w)
        h.sum().backward()
        coming = [on_its_way(w.grad) for w in weights]
        wrong += [] if any(coming) else ["no gradient is on its way after the backward pass"]
        once = [w.grad.full_tensor().clone() for w in weights]
        h = x
        for w in weights:
            h = F.linear(h, w)
        h.sum().backward()
    again = [w.grad.full_tensor() for w in weights]
    wrong += [] if all(torch.allclose(b, 2 * a) for a, b in zip(once, again, strict=True)) else ["they do not add up"]
    wrong += [] if all(w.grad.placements == w.placements for w in weights) else ["they lie elsewhere"]
    torch.optim.AdamW(weights, lr=0.1).step()
    return wrong


@pytest.mark.ranks
def test_gradients_are_reduced_behind_the_backward_pass(ranks: RankPool) -> None:
    assert ranks.run(reduced_behind) == [[]] * 4


class Broken:
    def _get_op_type(self) -> int:
        return 1  # an all_reduce

    def wait(self, patience: timedelta | None = None) -> None:
        raise RuntimeError("connection closed by peer")

    def is_completed(self) -> bool:
        return True


def kept_on_the_way(weight: Any, x: Any, keep: str) -> list[Any]:
    """The gradients that a hook keeps, of what the weight becomes on its way into a product."""
    kept: list[Any] = []
    made = {"turned": weight.t(), "joined": torch.cat([weight, weight]).t(), "itself": weight.t()}[keep]
    (weight if keep == "itself" else made).register_hook(kept.append)
    (x @ made).square().sum().backward()
    return kept


def what_hooks_keep() -> list[str]:
    """A gradient is reduced in place where nobody keeps it, or a tensor that shares its memory."""
    torch.manual_seed(0)
    a, b = torch.randn(4, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    wrong = []
    for keep in ("turned", "joined", "itself"):
        one, rows = a.clone().requires_grad_(), distribute_tensor(b, grid(), ROWS)
        many = distribute_tensor(a, grid(), WHOLE).requires_grad_()
        both = kept_on_the_way(many, rows, keep), kept_on_the_way(one, b, keep)
        for found, wanted in zip(*both, strict=True):
            if not torch.allclose(found.full_tensor(), wanted):
                wrong.append(f"{keep}: kept {found.full_tensor()}, not {wanted}")
        assert many.grad is not None
        assert one.grad is not None
        if not torch.allclose(many.grad.full_tensor(), one.grad):
            wrong.append(f"{keep}: the gradient is {many.grad.full_tensor()}, not {one.grad}")
    w = distribute_tensor(a, grid(), WHOLE).requires_grad_()
    clear_caches()  # of functions that begin collectives
    with patch.object(collectives, "reduce", wraps=collectives.reduce) as begin:
        for _ in range(2):  # the first call records
            begin.reset_mock()
            F.linear(distribute_tensor(b, grid(), ROWS), w).sum().backward()
    if [call.args[2] is call.args[3] for call in begin.call_args_list if call.args[2].dim()] != [True]:
        wrong.append(f"not reduced in place: {begin.call_args_list}")
    return wrong


@pytest.mark.ranks
def test_gradients_that_are_kept_are_not_overwritten(ranks: RankPool) -> None:
    assert ranks.run(what_hooks_keep) == [[]] * 4


class KeepsGradient(torch.autograd.Function):
    """The identity, with a backward pass that keeps what it returns."""

    kept: ClassVar[list[Tensor]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        KeepsGradient.kept.append(2 * grad)
        return KeepsGradient.kept[-1]


def what_python_keeps() -> list[str]:
    """Gradients that only variables of Python hold are neither reduced in place nor accumulated into."""
    x = distribute_tensor(torch.ones(3), grid(), WHOLE).requires_grad_()
    wrong, kept = [], []
    for _ in range(2):
        KeepsGradient.apply(x.to_local(grad_placements=[Partial(), Partial()])).sum().backward()
        y = x.clone()
        y.register_hook(kept.append)
        (3 * y).sum().backward()
    wrong += [f"reduced: {grad}" for grad in KeepsGradient.kept if grad.tolist() != [2.0] * 3]
    wrong += [f"accumulated: {grad}" for grad in kept if grad.full_tensor().tolist() != [3.0] * 3]
    assert x.grad is not None
    wrong += [f"wrong: {x.grad}"] * (x.grad.full_tensor().tolist() != [2 * (4 * 2.0 + 3)] * 3)
    return wrong


@pytest.mark.ranks
def test_gradients_that_python_keeps_are_not_overwritten(ranks: RankPool) -> None:
    assert ranks.run(what_python_keeps) == [[]] * 4


@pytest.mark.parametrize("blind", ["getrefcount", "storage_references"])
def test_gradients_are_copied_where_counts_do_not_tell_who_holds_them(
    blind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(leaf_gradients._measured(make) is not None for make in (leaf_gradients._plain, leaf_gradients._view))

    monkeypatch.setattr(leaf_gradients, blind, lambda x: 1)

    assert [leaf_gradients._measured(make) for make in (leaf_gradients._plain, leaf_gradients._view)] == [None, None]


def some_listen(listens: bool) -> tuple[list[Tensor], list[tuple[str, str]]]:
    """What collectives give that are begun before others and used after them, and those that a trace has.

    Only ranks on the diagonal listen, so that in each group one does and one does not.
    """
    x = distribute_tensor(torch.arange(2.0**17).view(512, 256), grid(), WHOLE).requires_grad_()
    terms = DTensor.from_local(torch.arange(2.0**17).view(512, 256), grid(), [Partial(), Partial()])
    rows = distribute_tensor(torch.ones(64, 512), grid(), [Shard(0), Shard(0)])
    scale = distribute_tensor(torch.ones(512), grid(), WHOLE).requires_grad_()
    uneven = distribute_tensor(torch.arange(5.0), grid(), [Shard(0), Replicate()])
    found: list[Tensor] = []
    with trace() if listens and torch.distributed.get_rank() in (0, 3) else nullcontext() as traced:
        for _ in range(3):
            begun = terms.redistribute(grid(), WHOLE, async_op=True)
            between = terms.redistribute(grid(), [Replicate(), Partial()])
            found += [
                begun.to_local() * 2,
                between.to_local(),
                uneven.redistribute(grid(), WHOLE, async_op=True).to_local(),
            ]
            loss = ((rows * scale) @ x).sum()
            loss.backward()  # the gradient of x takes several collectives
            found += [x.grad.to_local(), scale.grad.to_local(), loss.detach().to_local()]  # type: ignore[union-attr]
            x.grad = scale.grad = None
    return found, [(event.op, event.collective) for event in traced.events] if traced is not None else []


def test_ranks_that_listen_run_collectives_in_the_order_of_the_others(ranks: RankPool) -> None:
    expected = ranks.run(some_listen, False)

    for i, (found, events) in enumerate(ranks.run(some_listen, True)):
        assert all(map(torch.equal, found, expected[i][0]))
        if i in (0, 3):
            assert len(events) > 12
            assert all(op != "?" and not op.startswith("aten.mul") for op, _ in events)


def errors() -> list[str]:
    found = []
    x = DTensor.from_local(torch.ones(3, dtype=torch.float64), grid(), [Partial(), Partial()])
    try:
        x.redistribute(grid(), [Shard(5), Replicate()], async_op=True)
    except LayoutError as error:
        found.append(str(error))
    kept = collectives.reduce
    collectives.reduce = lambda op, group, x, out: partial(wait_for, Broken(), group)  # type: ignore
    try:
        with dshard.use_topology(dshard.Topology.preset("bytes")):  # an all_reduce alone
            y = x.redistribute(grid(), WHOLE, async_op=True)
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                _ = y + 1
            found.append(str(raised.value))
    finally:
        collectives.reduce = kept
    rows = DTensor.from_local(torch.ones(3, dtype=torch.float64), grid(), [Partial(), Replicate()])  # another group
    found.append(str(rows.redistribute(grid(), WHOLE, async_op=True).to_local().tolist()))
    return found


@pytest.mark.ranks
def test_errors_are_raised_at_once_or_at_the_first_use() -> None:
    with RankPool(4) as pool:  # of its own: a group in which a collective has failed serves nobody any more
        answers = pool.run(errors)
    for found in answers:
        assert found[0].startswith("S(5) is out of range: the tensor has 1 dims")
        for message in found[1:3]:
            assert "all_reduce along dp, tp of ranks 0, 1, 2, 3: connection closed by peer" in message
        assert found[3:] == ["[2.0, 2.0, 2.0]"]


def test_without_processes_it_is_there_at_once() -> None:
    mesh = Mesh((2, 2), ("dp", "tp"))
    x = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, ROWS, shape=(4, 3))

    y = x.redistribute(mesh, WHOLE, async_op=True)

    assert not on_its_way(y)
    assert y.to_local().shape == (4, 3)
