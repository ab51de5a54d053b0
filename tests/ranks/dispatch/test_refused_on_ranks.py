"""What torch refuses, on real ranks: all raise the same kind of error, and none has sent or waits for anything."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as recorded_all_reduce

import dshard
from dshard import DTensor, Layout, Partial, Replicate, Shard, pipeline
from dshard.comm import bind, peer_failure
from dshard.errors import DShardError
from dshard.pipeline import Pipeline, Stage, StageCost, chain
from dshard.testing import RankPool, count_traffic, distribute
from dshard.torch_dtensor import IS_TORCHS

BENCHMARKS = str(Path(__file__).parents[3] / "benchmarks")
PLACEMENTS = [Shard(0), Shard(1), Replicate(), Partial()]
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "sizes": lambda x: x + x.t(),
    "inner sizes": lambda x: x @ x,
    "bias": lambda x: F.linear(x, x, x),
    "dtypes": lambda x: x @ torch.ones_like(x.T, dtype=torch.float32),
    "dim": lambda x: x.softmax(2),
    "reduced dim": lambda x: x.sum(-3),
    "cat": lambda x: torch.cat([x, x.T]),
    "cat of numbers": lambda x: torch.cat([x.new_zeros(()), x.new_zeros(())]),
    "view": lambda x: x.view(4, 9),
    "index": lambda x: x.index_select(0, torch.zeros(1)),
    "select": lambda x: x.select(0, 5),
    "transpose": lambda x: x.transpose(0, 3),
    "expand": lambda x: x.expand(2, 3, 7),
    "split": lambda x: x.split([2, 2], 0),
    "normalised shape": lambda x: F.layer_norm(x, (4,)),
    "in place": lambda x: x.add_(torch.ones(3, 5, 7)),
    "top": lambda x: x.topk(8),
    "chunks": lambda x: x.chunk(0),
    "diagonal": lambda x: x.diagonal(0, 1, 1),
}


def outcome(call: Callable[[], Any]) -> tuple[type | None, int]:
    """The kind of error, and the messages that this rank received before."""
    with count_traffic() as traffic:
        try:
            call()
        except Exception as error:
            return type(error), traffic.messages
    return None, traffic.messages


def refusals() -> list[tuple[str, str, type | None, int, int]]:
    """Each call in each layout, on this rank, and how often it then waits until the others have failed, too."""
    mesh, found = bind(dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))), []
    draw = Random(0)
    for name, call in REFUSED.items():
        for _ in range(4):
            placements = tuple(draw.choice(PLACEMENTS) for _ in mesh.shape)
            x = distribute(torch.ones(5, 7, dtype=torch.float64), Layout(mesh, placements))
            with patch.object(peer_failure, "_wait_for_failures", wraps=peer_failure._wait_for_failures) as waits:
                met = outcome(lambda call=call, x=x: call(x))
            found.append((name, str(x.layout), *met, waits.call_count))
    dist.barrier()  # all have come here, and none has left a collective for the next to fall into
    return found


@pytest.mark.ranks
def test_bad_arguments_are_refused_on_all_ranks_alike_and_nothing_is_sent(ranks: RankPool) -> None:
    first, *others = ranks.run(refusals)

    assert all(other == first for other in others)
    assert len(first) == 4 * len(REFUSED)
    for name, layout, kind, messages, waits in first:
        torchs, _ = outcome(lambda name=name: REFUSED[name](torch.ones(5, 7, dtype=torch.float64)))
        assert torchs is not None
        assert kind is not None, (name, layout)
        assert issubclass(kind, torchs), (name, layout, kind, torchs)
        assert messages == 0, (name, layout)
        # these torch counts before any operator is called; over gloo alone others are heard
        assert waits == (name == "chunks" and ranks.backend == "gloo"), (name, layout)


LOOKUPS: dict[str, Callable[[Any, Any], object]] = {
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i.expand(3, 2)),
    "indexing": lambda x, i: x[:, i],
    "writing": lambda x, i: x.t().index_put_((i,), torch.tensor(1.0)),
    "embedding": lambda x, i: F.embedding(i, x.t()),
    "padded embedding": lambda x, i: F.embedding(i, x.t().contiguous().requires_grad_(), padding_idx=0),
    "padding out of range": lambda x, i: F.embedding(i, x.t().contiguous().requires_grad_(), padding_idx=-1),
    "loss": lambda x, i: F.nll_loss(x[:2], i),
    "loss of each": lambda x, i: F.nll_loss(x[:2], i, reduction="none"),
    "loss of logits": lambda x, i: F.cross_entropy(x[:2], i, reduction="sum"),
    "filling": lambda x, i: x.index_fill_(1, i, 0.5),
    "copying": lambda x, i: x.index_copy_(1, i, x.new_ones(3, 2)),
    "scattering": lambda x, i: x.scatter_(1, i.expand(3, 2), 0.5),
}


def lookups_in_nothing() -> list[tuple[str, type | None]]:
    """What each lookup in an empty dim meets on this rank; some ranks have no index, one has no row of a layout."""
    mesh, found = bind(dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))), []
    i = distribute(torch.zeros(2, dtype=torch.int64), Layout(mesh, (Shard(0), Shard(0))))
    for dim in 1, 0:
        x = distribute(torch.ones(3, 0), Layout(mesh, (Shard(dim), Shard(0))))
        found += [(name, outcome(lambda x=x, call=call: call(x, i))[0]) for name, call in LOOKUPS.items()]
    return found


@pytest.mark.ranks
def test_lookups_in_an_empty_dim_are_refused_on_all_ranks_alike(ranks: RankPool) -> None:
    first, *others = ranks.run(lookups_in_nothing)

    assert all(other == first for other in others)
    for name, kind in first:
        torchs, _ = outcome(lambda name=name: LOOKUPS[name](torch.ones(3, 0), torch.zeros(2, dtype=torch.int64)))
        assert torchs is not None
        assert kind is not None, name
        assert issubclass(kind, torchs), (name, kind, torchs)


SHARED: dict[str, Callable[[Any], object]] = {
    "row from all": lambda y: y.sub_(y[0]),
    "rows, moved on": lambda y: y[1:].add_(y[:-1]),
    "rows, assigned": lambda y: y.__setitem__(slice(1, None), y[:-1]),
    "row into all": lambda y: y.copy_(y[0]),
    "rows into other rows": lambda y: y[:2].copy_(y[1:3]),
    "a row into another": lambda y: y[0].copy_(y[1]),
    "a row to another": lambda y: y[0].add_(y[1]),
    "disjoint rows": lambda y: y.narrow(0, 0, 2).add_(y.narrow(0, 2, 2)),
    "transposed": lambda y: y.t().add_(y),
    "transposed alike": lambda y: y.t().mul_(y.t()),
    "one element": lambda y: y.mul_(y[0, 0]),
    "one element to fill with": lambda y: y.masked_fill_(y > 0, y[0, 0]),
    "itself": lambda y: y.add_(y),
    "detached": lambda y: y.add_(y.detach()),
    "detached rows": lambda y: y[1:].detach().add_(y[:-1].detach()),
    "with another dim": lambda y: y.unsqueeze(0).add_(y),
    "in another shape": lambda y: y.view(35)[1:].add_(y.view(35)[:-1]),
    "rows and no rows": lambda y: y[:0].add_(y[0]),
    "column and row": lambda y: y[:, 0].add_(y[1:2, :5].view(5)),
    "diagonal": lambda y: y.diagonal().add_(y[0, :5]),
    "expanded": lambda y: y.copy_(y[:1].expand(5, 7)),
    "row by index": lambda y: y.index_add_(0, (y[:, 0] * 0).long(), y),
    "matmul": lambda y: y[:, :5].addmm_(y[:, :5], y[:, :5]),
    "out": lambda y: torch.add(y[:2], 1, out=y[1:3]),
    "out itself": lambda y: torch.mul(y, y, out=y),
    "gathered out": lambda y: torch.gather(y, 0, (y * 0).long(), out=y),
    "list": lambda y: torch._foreach_add_([y[1:]], [y[:-1]]),
    "list of rows": lambda y: torch._foreach_add_([y], [y[0]]),
    "real and imaginary": lambda y: torch.view_as_complex(y[:, :6].reshape(5, 3, 2)).real.add_(1),
    "real parts": lambda y: torch.view_as_real(torch.complex(y, y)[1:]).add_(y[1:, :, None]),
}


COPIED: dict[str, Callable[[Any], object]] = {
    "matmul": lambda y: y[:, :5].addmm_(y[:, :5].clone(), y[:, :5].clone()),
}
"""Calls on copies, whose result is that of the call on shared memory, too.

On one device that is undefined: torch's kernel reads operands that it has written, in an order of the processor's.
"""


def written_over_shared_memory(y: Any, call: Callable[[Any], object]) -> tuple[type | None, list[float]]:
    """The kind of error that a call on `y` meets, and the numbers that `y` then holds."""
    kind, _ = outcome(lambda: call(y))
    return kind, (y.full_tensor() if isinstance(y, dshard.DTensor) else y).flatten().tolist()


def writes_over_shared_memory() -> dict[tuple[str, str], tuple[type | None, list[float]]]:
    mesh, found = bind(dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))), {}
    for name, call in SHARED.items():
        for placement in (Shard(0), Shard(1), Replicate(), Partial()):
            y = distribute(torch.arange(35.0).view(5, 7), Layout(mesh, (placement,)))
            found[name, str(placement)] = written_over_shared_memory(y, call)
    return found


@pytest.mark.ranks
def test_writes_to_memory_that_operands_share_are_those_of_one_device(ranks: RankPool) -> None:
    first, *others = ranks.run(writes_over_shared_memory)

    assert all(other == first for other in others)
    for (name, placement), found in first.items():
        if (name, placement) != ("out", "P(sum)"):  # its operand is another tensor: the sum
            expected = written_over_shared_memory(torch.arange(35.0).view(5, 7), COPIED.get(name, SHARED[name]))
            is_refused = name == "gathered out" and expected[0] is RuntimeError  # by torch before 2.13
            assert is_refused or found == expected, (name, placement)


FROM_PLAIN: dict[str, Callable[[Any, Tensor], object]] = {
    "all": lambda y, t: y.copy_(t),
    "rows from others": lambda y, t: y[:2].copy_(t[3:]),
    "a row to another": lambda y, t: y[0].add_(t[1]),
    "the same rows": lambda y, t: y[1:].copy_(t[1:]),
    "rows, moved on": lambda y, t: y[1:].add_(t[:-1]),
    "the same rows, transposed": lambda y, t: y[1:].t().mul_(t[1:].t()),
}


def writes_of_plain_values() -> list[list[tuple[type | None, list[float]]]]:
    mesh, found = bind(dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))), []
    for value in (torch.arange(35.0).view(5, 7), torch.arange(70.0).view(7, 10)[:, 5:].t()):
        for call in FROM_PLAIN.values():
            y = dshard.DTensor.from_local(value.clone(), mesh, [Replicate()])
            with dshard.implicit_replication():
                alone = value.clone()
                found.append(
                    [
                        written_over_shared_memory(y, lambda y, call=call: call(y, y.full_tensor())),
                        written_over_shared_memory(alone, lambda y, call=call: call(y, y)),
                    ]
                )
    return found


@pytest.mark.ranks
def test_replicated_tensors_are_written_to_from_plain_ones_of_their_memory(ranks: RankPool) -> None:
    for on_rank in ranks.run(writes_of_plain_values):
        for name, (found, alone) in zip([*FROM_PLAIN, *FROM_PLAIN], on_rank, strict=True):
            assert found == alone, name


def refusals_of_torch() -> dict[str, list[tuple[type | None, int]]]:
    """What torch's own list of refused arguments meets on this rank; runs on every rank.

    Not what is refused for its values: a rank may hold none of the bad ones.
    """
    sys.path.insert(0, BENCHMARKS)
    import coverage  # noqa: PLC0415  # slow to load, and wanted on ranks only here
    import operator_cases as cases  # noqa: PLC0415

    mesh, found = bind(dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))), {}
    for op in cases.operators(""):
        draw, seen = Random(cases.name_of(op)), []
        for bad in cases.bad_inputs_of(op):
            case = cases.Case.of(op.op, bad.sample_input)
            if refused_kind(lambda case=case: case.called([x.clone() for x in case.tensors()])) is None:
                continue
            if coverage.by_value(case):
                continue
            tensors = [distribute(x, cases.layout_for(x, mesh, draw)) for x in case.tensors()]
            seen.append(outcome(lambda case=case, tensors=tensors: case.called(tensors)))
            dist.barrier()
        found[cases.name_of(op)] = seen
    return found


def refused_kind(call: Callable[[], Any]) -> type | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


@pytest.mark.ranks
@pytest.mark.thorough
def test_what_torch_lists_as_refused_is_refused_on_all_ranks_alike(ranks: RankPool) -> None:
    first, *others = ranks.run(refusals_of_torch, timeout=1200)

    assert all(other == first for other in others)
    met = [kind for seen in first.values() for kind, _ in seen]
    assert len(met) > 300
    assert None not in met


def left_waiting(alike: bool) -> tuple[str, str, list[float]]:
    """What this rank meets where an index is out of range on the last rank, or on all, which is slow to go on."""
    peer_failure.PATIENCE = timedelta(seconds=0.1)
    mesh = dshard.init_device_mesh("cpu", (4,))
    table = dshard.distribute_tensor(torch.arange(5.0), mesh, [Replicate()])
    index = torch.tensor([0, 1, 2, 5] if not alike else [5, 5, 5, 5])
    error: Exception | None = None
    found: list[float] = []
    try:
        found = table.index_select(0, dshard.distribute_tensor(index, mesh, [Shard(0)])).full_tensor().tolist()
    except IndexError as raised:
        error = raised
    if alike:
        if dist.get_rank() == 3:
            time.sleep(0.5)
        found = dshard.distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]).full_tensor().tolist()
    return type(error).__name__, str(error), found


def left_waiting_between_hosts(exchange: bool) -> tuple[str, str, list[float]]:
    """The same on four hosts, whose ranks send to each other in pairs: to gather, or to exchange."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if not exchange:
        return left_waiting(False)
    peer_failure.PATIENCE = timedelta(seconds=0.1)
    mesh = dshard.init_device_mesh("cpu", (4,))
    x = dshard.distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    index = dshard.distribute_tensor(torch.tensor([[0, 1, 2, 3]] * 3 + [[5] * 4]), mesh, [Shard(0)])
    try:
        x.gather(1, index).redistribute(placements=[Shard(1)]).to_local()
    except RuntimeError as raised:
        return type(raised).__name__, str(raised), []
    return "none", "", []


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("call", "given", "kind"),
    [
        (left_waiting, False, "IndexError"),
        pytest.param(left_waiting_between_hosts, False, "IndexError", marks=pytest.mark.thorough),
        (left_waiting_between_hosts, True, "RuntimeError"),
    ],
)
def test_an_index_out_of_range_on_one_rank_is_refused_on_all(call: Callable[..., Any], given: bool, kind: str) -> None:
    with RankPool(4, timeout=60) as pool:
        met = pool.run(call, given)
    assert [found for found, _, _ in met] == [kind] * 4
    assert all("(on rank 3, which this rank waited for)" in text for _, text, _ in met[:3])
    assert "on rank" not in met[3][1]


@pytest.mark.ranks
def test_ranks_that_have_failed_alike_wait_for_a_slow_one(ranks: RankPool) -> None:
    met = ranks.run(left_waiting, True)
    assert [kind for kind, _, _ in met] == ["IndexError"] * len(met)
    assert all(found == [*range(8)] for _, _, found in met)


# torch 2.11 has a broadcast of a subclass only as an operator, which DistributedDataParallel calls, too
COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": dist.all_reduce,
    **({"broadcast": lambda x: dist.broadcast(x, 0)} if IS_TORCHS else {}),
    "reduce": lambda x: dist.reduce(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty(5, 7, dtype=x.dtype)] * 4, x),
    "gather": lambda x: dist.gather(x, [torch.empty(5, 7, dtype=x.dtype)] * 4 if dist.get_rank() == 0 else None),
    "send": lambda x: dist.send(x, (dist.get_rank() + 1) % 4),
    "all_reduce of torch.distributed.nn": recorded_all_reduce,
}


def collectives_of_distributed_tensors() -> list[str]:
    """The collectives that are not refused with the way out, and what one over other ranks than the mesh's gives."""
    mesh, wrong = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), []
    for placements in ([Shard(0), Replicate()], [Replicate(), Partial()]):
        x = distribute(torch.ones(5, 7, dtype=torch.float64), Layout(bind(mesh), tuple(placements)))
        for name, call in COLLECTIVES.items():
            with pytest.raises(dshard.MeshError) as error:
                call(x)
            if "leave the collective out" not in str(error.value) or "x.to_local()" not in str(error.value):
                wrong.append(f"{name}: {error.value}")
    of_row = distribute(torch.ones(5, 7, dtype=torch.float64), Layout(bind(mesh["b"]), (Replicate(),)))
    dist.all_reduce(of_row, group=mesh["a"].get_group())
    if of_row.full_tensor().unique().tolist() != [2.0]:
        wrong.append("over the ranks of other meshes")
    return wrong


@pytest.mark.ranks
def test_a_collective_of_torchs_on_a_distributed_tensor_is_refused_with_the_way_out(ranks: RankPool) -> None:
    assert ranks.run(collectives_of_distributed_tensors) == [[]] * 4


def test_the_memory_of_a_distributed_tensor_is_refused_but_to_those_who_compare_it() -> None:
    mesh = dshard.Mesh((2,), ("a",))
    x = dshard.DTensor.from_local(torch.ones(3, device="meta"), mesh, [Shard(0)], shape=(6,))

    with pytest.raises(dshard.LayoutError, match=r"x.to_local\(\).data_ptr\(\)"):
        x.data_ptr()
    asked = {"__name__": "torch.nn.modules.rnn"}
    exec("def pointers(*tensors): return {x.data_ptr() for x in tensors}", asked)
    assert asked["pointers"](x, x * 2) == {0}
    whole = dshard.DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    assert whole[1:].data_ptr() == whole.data_ptr() + 4 == whole.to_local().data_ptr() + 4


def differing() -> list[str]:
    """What this rank is told where one rank's local tensor differs."""
    rank, mesh = dist.get_rank(), dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
    dtype = torch.float64 if rank == 2 else torch.float32
    calls: list[Callable[[], DTensor]] = [
        lambda: DTensor.from_local(torch.ones(2, dtype=dtype), mesh, [Shard(0)], run_check=True),
        lambda: DTensor.from_local(torch.ones(2, dtype=dtype), mesh, run_check=True),
        lambda: DTensor.from_local(torch.ones(2, 2), mesh, [Shard(int(rank == 1))], run_check=True),
    ]
    told = [said(call) for call in calls]
    pipe = Pipeline([Stage(dshard.distribute_module(nn.Linear(8, 8), mesh), mesh)], n_microbatches=2)
    costs = pipeline.uniform(2, chain(2), StageCost())
    return [
        *told,
        said(lambda: setattr(pipe, "timeout", -3)),
        said(lambda: pipe.step(None)),
        said(lambda: pipe.step([1, 2])),
        said(lambda: pipe.step(torch.ones(4, 8), [1, 2, 3, 4])),
        said(lambda: Pipeline(pipe.stages, n_microbatches="2")),
        said(lambda: Pipeline(pipe.stages, n_microbatches=2, schedule="auto", costs=costs)),
    ]


def said(call: Callable[[], object]) -> str:
    """What a call is refused with."""
    with pytest.raises(DShardError) as caught:
        call()
    return str(caught.value)


@pytest.mark.ranks
def test_all_ranks_are_told_where_one_differs(ranks: RankPool) -> None:
    for told in ranks.run(differing):
        assert "local tensors of torch.float32 at (0,) and torch.float64 at (2,)" in told[0]
        assert "local tensors of torch.float32 at (0,) and torch.float64 at (2,)" in told[1]
        assert "the ranks give different placements" in told[2]
        assert "timeout: -3 is not a number above 0" in told[3]
        assert "the batch: None is a NoneType" in told[4]
        assert "the batch: [1, 2] is a list" in told[5]
        assert "target of the batch: [1, 2, 3, 4] is a list" in told[6]
        assert "n_microbatches: '2' is not a whole number" in told[7]
        assert "costs of 2 stages for a pipeline of 1" in told[8]
