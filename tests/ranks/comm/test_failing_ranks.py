"""Errors on one rank, and ranks that call what the others do not: all ranks raise soon, say why, and none is ended."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import THOROUGH
from helpers.finite_numbers import finite
from torch import Tensor

import dshard
from dshard import Partial, Replicate, Shard, comm
from dshard.checkpoint import save
from dshard.comm import peer_failure
from dshard.comm.told_waits import Waiting, stuck
from dshard.testing import RankPool
from dshard.torch_dtensor import IS_TORCHS

operators = torch.ops._c10d_functional
SECONDS = 20.0  # for a rank to raise, on a machine with much else to do; about 2 where it has not
BAD = 2


def waiting(rank: int, group: str, ranks: tuple[int, ...], counts: dict[str, int], kind: str = "all_reduce") -> Waiting:
    return Waiting(rank, group, ranks, kind, counts, "")


ROW, COLUMN = (0, 1), (0, 2)
SITUATIONS: dict[str, tuple[list[Waiting], set[int]]] = {
    "one waits for a rank that computes": ([waiting(0, "row", ROW, {"row": 1})], set()),
    "both have come, and the data is on its way": (
        [waiting(0, "row", ROW, {"row": 1}), waiting(1, "row", ROW, {"row": 1})],
        set(),
    ),
    "each waits where the other has not come": (
        [waiting(0, "row", ROW, {"row": 1}), waiting(1, "line", ROW, {"row": 0, "line": 1})],
        {0, 1},
    ),
    "both have come, to different collectives": (
        [waiting(0, "row", ROW, {"row": 1}), waiting(1, "row", ROW, {"row": 1}, "all_gather")],
        {0, 1},
    ),
    "the other has passed": ([waiting(0, "row", ROW, {"row": 1}), waiting(1, "row", ROW, {"row": 2})], {0, 1}),
    "a chain that ends at a rank that computes": (
        [waiting(1, "row", ROW, {"row": 1}), waiting(0, "column", COLUMN, {"row": 0, "column": 1})],
        set(),
    ),
    "a chain that ends at ranks which have all come": (
        [
            waiting(1, "row", ROW, {"row": 1}),
            waiting(0, "column", COLUMN, {"row": 0, "column": 1}),
            waiting(2, "column", COLUMN, {"column": 1}),
        ],
        set(),
    ),
    "a chain that ends at ranks which are stuck": (
        [
            waiting(1, "row", ROW, {"row": 1}),
            waiting(0, "column", COLUMN, {"row": 0, "column": 1}),
            waiting(2, "column", COLUMN, {"column": 1}, "all_gather"),
        ],
        {0, 1, 2},
    ),
    "a third may still be on its way": (
        [waiting(0, "all", (0, 1, 2), {"all": 1}), waiting(1, "all", (0, 1, 2), {"all": 2})],
        set(),
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_ranks_are_stuck_where_none_that_they_wait_for_goes_on(name: str) -> None:
    situation, expected = SITUATIONS[name]
    assert stuck({waiting.rank: waiting for waiting in situation}) == expected


def mesh() -> Any:
    return dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


def laid(x: Tensor, placement: Any) -> Any:
    return dshard.distribute_tensor(x, mesh(), [placement], src_data_rank=None)


def recorded() -> tuple[Any, Any]:
    """The root of the products of split x and a replicated w: that of one rank is not a number."""
    x = laid(torch.ones(8).index_fill_(0, torch.tensor([2 * BAD]), -1.0), Shard(0)).requires_grad_()
    w = laid(torch.ones(8), Replicate()).requires_grad_()
    return w, (x * w).sqrt()


def nan_under_anomaly() -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        w, y = recorded()
        y.sum().backward()
    return w.grad.full_tensor()


def nan_under_anomaly_of_a_plain_loss() -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        w, y = recorded()
        y.sum().full_tensor().backward()
    return w.grad.full_tensor()


def selected() -> Any:
    index = torch.arange(4)
    index[BAD] = 7
    return laid(torch.arange(5.0), Replicate()).index_select(0, laid(index, Shard(0)))


def index_in_a_shard() -> Any:
    return selected().full_tensor()


def hook() -> Any:
    def bad(grad: Tensor) -> None:
        if dist.get_rank() == BAD:
            raise IndexError("my hook")

    x, w = laid(torch.ones(8, 4), Shard(0)), laid(torch.ones(4, 4), Replicate()).requires_grad_()
    h = x @ w
    h.register_hook(bad)
    (h.relu() @ w).sum().backward()
    return w.grad.full_tensor()


def hook_of_a_local_tensor() -> Any:
    def bad(grad: Tensor) -> None:
        if dist.get_rank() == BAD:
            raise IndexError("my hook")

    x, w = laid(torch.ones(8, 4), Shard(0)), laid(torch.ones(4, 4), Replicate()).requires_grad_()
    h = x @ w
    h.register_hook(bad)
    h.to_local().square().sum().backward()
    return w.grad.full_tensor()


def forward_pass_of_a_model() -> Any:
    """A rank whose own line of a forward pass fails once the model is rehearsed: the others wait in its record."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), torch.ones(8, 4)
    model = dshard.parallelize(model, mesh(), "megatron", x)
    for step in range(5):
        if step == 4 and dist.get_rank() == BAD:
            model[1].register_forward_hook(raise_my_own)
        model(x).sum().backward()
    return model[0].weight.grad.full_tensor()


def raise_my_own(*_: object) -> None:
    raise IndexError("my hook")


def collective_of_graphs() -> Any:
    """A rank that fails while the others wait in an operator that compiled graphs call."""
    comm.wait_in_graphs_as_in_eager()
    next_step()  # makes the group of the mesh
    if dist.get_rank() == BAD:
        index_in_a_shard()
    return operators.wait_tensor(operators.all_reduce(torch.ones(4), "sum", mesh().get_group().group_name))


ONE_RANK: dict[Callable[[], Any], tuple[str, str]] = {
    nan_under_anomaly: ("RuntimeError", "returned nan values"),
    nan_under_anomaly_of_a_plain_loss: ("RuntimeError", "returned nan values|its backward pass has failed"),
    index_in_a_shard: ("IndexError", "index out of range|out of bounds"),
    hook: ("IndexError", "my hook"),
    forward_pass_of_a_model: ("IndexError", "my hook"),
    collective_of_graphs: ("IndexError", "index out of range|out of bounds"),
    hook_of_a_local_tensor: ("IndexError|RuntimeError", "my hook|its backward pass has failed"),
}


# -- in compiled graphs


def looked_up(table: Tensor, index: Tensor, w: Tensor) -> Any:
    h: Any = F.embedding(index, table) @ w
    return h.sum(0).redistribute(placements=[Replicate()])


def through_gathered_weights(x: Any, w: Any) -> Any:
    """A gradient of w that the ranks exchange in the graph, after what may fail on one of them."""
    whole = w.redistribute(placements=[Replicate()])
    return finite(x @ whole) @ whole


def loss_of_gathered_weights(x: Any, w: Any) -> Any:
    return through_gathered_weights(x, w).sum().redistribute(placements=[Replicate()]).to_local()


def on_bad_rank(x: Tensor, value: float) -> Tensor:
    return x.index_fill(0, torch.tensor([2 * BAD]), value)


def lookup(backend: str) -> Callable[[float], Any]:
    table, w = laid(torch.ones(8, 4), Replicate()).requires_grad_(), laid(torch.ones(4, 4), Replicate())
    compiled = torch.compile(looked_up, backend=backend, fullgraph=True)
    return lambda index: compiled(table, laid(on_bad_rank(torch.arange(8), index), Shard(0)), w)


def in_a_graph(backend: str) -> Callable[[], Any]:
    run = lookup(backend)
    run(0)
    return lambda: run(99)


def in_a_graph_at_its_first_run(backend: str) -> Callable[[], Any]:
    run = lookup(backend)
    return lambda: run(99)


def before_a_graph(backend: str) -> Callable[[], Any]:
    run = lookup(backend)
    run(0)
    return lambda: (selected(), run(0))


def between_graphs(backend: str) -> Callable[[], Any]:
    run = lookup(backend)
    run(0)
    return lambda: (run(0), selected(), run(0))


def in_a_backward_graph(backend: str) -> Callable[[], Any]:
    x, w = laid(torch.ones(8, 4), Shard(0)), laid(torch.ones(4, 4), Shard(0)).requires_grad_()
    compiled = torch.compile(through_gathered_weights, backend=backend, fullgraph=True)

    def step(value: float) -> Any:
        (compiled(x, w) * laid(on_bad_rank(torch.ones(8, 4), value), Shard(0))).sum().backward()

    step(1)
    return lambda: step(float("nan"))


def in_the_backward_graph_of_a_plain_loss(backend: str) -> Callable[[], Any]:
    x, w = laid(torch.ones(8, 4), Shard(0)), laid(torch.ones(4, 4), Shard(0)).requires_grad_()
    compiled = torch.compile(loss_of_gathered_weights, backend=backend, fullgraph=True)

    def step(value: float) -> Any:
        compiled(x, w).backward(torch.tensor(value if dist.get_rank() == BAD else 1.0))

    step(1)
    return lambda: step(float("nan"))


def without_a_graph(backend: str) -> Callable[[], Any]:
    run, other = lookup(backend), laid(torch.ones(8), Shard(0))
    run(0)
    return lambda: other.full_tensor() if dist.get_rank() == BAD else run(0)


COMPILED: dict[Callable[[str], Callable[[], Any]], tuple[str, str, str]] = {
    in_a_graph: ("IndexError|RuntimeError", "index out of", "compiled graph at {line}, all_reduce"),
    in_a_graph_at_its_first_run: ("IndexError|RuntimeError", "index out of", "compiled graph at {line}, all_reduce"),
    before_a_graph: ("IndexError", "index out of", "compiled graph at {line}, all_reduce"),
    between_graphs: ("IndexError", "index out of", "compiled graph at {line}, all_reduce"),
    in_a_backward_graph: ("ValueError", "no number here", "backward at {line}, exchange"),
    in_the_backward_graph_of_a_plain_loss: (
        "ValueError|RuntimeError",
        "no number here|its backward pass has failed",
        "backward at {line}, exchange",
    ),
    without_a_graph: ("PeerError", "not all these ranks come to it", "compiled graph at {line}, all_reduce"),
}
"""The kind of the error on all ranks, its text, and where the ranks are that wait for the one that fails."""


def partial_loss() -> Any:
    return laid(torch.arange(8.0), Shard(0)).sum().redistribute(placements=[Partial()])


def item() -> Any:
    loss = partial_loss()
    if dist.get_rank() == 0:
        loss.item()
    return laid(torch.ones(64, 8), Shard(0)).sum(0).full_tensor()


def as_float_before_another_number() -> Any:
    loss = partial_loss()
    if dist.get_rank() == 0:
        float(loss)
    return laid(torch.ones(64, 8), Shard(0)).full_tensor()


def truth_before_an_exchange() -> Any:
    loss = partial_loss()
    if dist.get_rank() == 0 and loss:
        pass
    return laid(torch.ones(8, 8), Shard(0)).redistribute(placements=[Shard(1)]).to_local()


def formatted_before_a_scatter() -> Any:
    loss = partial_loss()
    if dist.get_rank() == 0:
        f"{loss:.2f}"
    return dshard.distribute_tensor(torch.ones(8), mesh(), [Shard(0)]).to_local()


def gathered_alone() -> Any:
    x = laid(torch.ones(8, 8), Shard(0))
    if dist.get_rank() == 0:
        x.full_tensor()
    return x.sum(0).full_tensor()


def saved_alone() -> Any:
    x = laid(torch.ones(8, 8), Shard(0))
    if dist.get_rank() == 0:
        save({"x": x}, "/none")
    return x.sum(0).full_tensor()


ALONE = {
    saved_alone: "save",
    item: "item",
    as_float_before_another_number: "__float__",
    truth_before_an_exchange: "__bool__",
    formatted_before_a_scatter: "item",
    gathered_alone: "full_tensor",
}


def outcome(call: Callable[[], Any]) -> tuple[str, str, float]:
    """The kind and the text of the error of the call on this rank, and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


@contextmanager
def new_world(store: Any, name: str) -> Iterator[None]:
    """A world of its own; at the end of the block all ranks have come there."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=4)
    mesh()
    dist.barrier()
    yield
    store.set(f"{name} {rank}", "over")
    store.wait([f"{name} {rank}" for rank in range(4)], timedelta(seconds=40))


def outcomes(calls: list[Callable[[], Any]]) -> list[list[tuple[str, str, float]]]:
    """Of each call, in a new world, and of one more that is right but for what was before it."""
    peer_failure.PATIENCE = timedelta(seconds=0.1)
    store, found = dist.distributed_c10d._get_default_store(), []
    _, y = recorded()  # what is slow the first time
    y.sum().backward()
    next_step()
    for i, call in enumerate(calls):
        with new_world(store, f"world {i}"):
            first = outcome(call)
        found.append([first, outcome(next_step)])
    return found


def outcomes_of_graphs(cases: list[Callable[[str], Callable[[], Any]]], backend: str) -> list[tuple[str, str, float]]:
    """Of each case, in a new world, once its graph is compiled."""
    peer_failure.PATIENCE = timedelta(seconds=0.1)
    store, found = dist.distributed_c10d._get_default_store(), []
    for i, prepare in enumerate(cases):
        torch._dynamo.reset()  # graphs know process groups by name
        with new_world(store, f"{backend} {i}"):
            call = prepare(backend)
            dist.barrier()
            found.append(outcome(call))
    return found


def next_step() -> None:
    assert laid(torch.arange(8.0), Shard(0)).sum().item() == 28.0


@pytest.mark.ranks
def test_an_error_on_one_rank_is_raised_on_all_soon_and_none_is_ended() -> None:
    calls = (
        list(ONE_RANK)
        if THOROUGH
        else [nan_under_anomaly, index_in_a_shard, forward_pass_of_a_model, collective_of_graphs]
    )
    with RankPool(4, timeout=150) as pool:
        ranks = pool.run(outcomes, calls)

    for i, call in enumerate(calls):
        kind, parts = ONE_RANK[call]
        for rank, found in enumerate(ranks):
            (raised, text, seconds), (after, _, seconds_after) = found[i]
            assert raised in kind.split("|"), (call, rank, text)
            assert any(part in text for part in parts.split("|")), (call, rank, text)
            # torch looks for NaN in the global gradient, which all ranks know
            is_told = rank != BAD and not call.__name__.startswith("nan_under_anomaly")
            assert ("which this rank waited for)" in text) == is_told, (call, rank, text)
            assert ("along x of ranks 0, 1, 2, 3: " in text) == is_told, (call, rank, text)
            assert not is_told or f" at {__file__}:" in text or call is collective_of_graphs, (call, rank, text)
            assert after in ("none", "PeerError", raised), (call, rank, found[i])
            assert max(seconds, seconds_after) < SECONDS, (call, rank, found[i])


@pytest.mark.ranks
def test_a_rank_that_asks_alone_for_a_number_is_told_the_line_and_so_are_the_others() -> None:
    calls = list(ALONE) if THOROUGH else [item, gathered_alone]
    with RankPool(4, timeout=150) as pool:
        ranks = pool.run(outcomes, calls)

    for i, call in enumerate(calls):
        for rank, found in enumerate(ranks):
            (raised, text, seconds), (after, _, seconds_after) = found[i]
            assert raised == "PeerError", (call, rank, found[i])
            assert f"{ALONE[call]} at {__file__}:" in text, (call, rank, text)
            assert "not all these ranks come to it" in text, (call, rank, text)
            assert after == "PeerError", (call, rank, found[i])
            assert max(seconds, seconds_after) < SECONDS, (call, rank, found[i])


@pytest.mark.ranks
@pytest.mark.skipif(not IS_TORCHS, reason="torch.compile of DTensors needs torch 2.12")
@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_error_in_a_compiled_step_is_raised_on_all_ranks_soon(backend: str) -> None:
    with RankPool(4, timeout=900) as pool:
        ranks = pool.run(outcomes_of_graphs, list(COMPILED), backend)

    for i, case in enumerate(COMPILED):
        kind, parts, waits = COMPILED[case]
        for rank, found in enumerate(ranks):
            raised, text, seconds = found[i]
            assert raised in kind.split("|"), (case, rank, text)
            assert any(part in text for part in parts.split("|")), (case, rank, text)
            if rank != BAD:
                where = rf"{waits.format(line=f'{re.escape(__file__)}:[0-9]+')} along x of ranks 0, 1, 2, 3: "
                assert re.match(where, text), (case, rank, text)
                assert raised == "PeerError" or "(on rank 2, which this rank waited for)" in text, (case, text)
            if case is not in_a_graph_at_its_first_run:  # compiling takes longer
                assert seconds < SECONDS, (case, rank, found[i])


def raised_by_all_after_a_late_one() -> None:
    """Each rank raises the same error after a collective; on one its end is seen only when the others have failed."""
    x, has_ended = laid(torch.arange(8.0), Shard(0)), peer_failure._has_ended
    answers = iter([False])

    def seen_late(*args: Any) -> bool:
        time.sleep(1.0)
        return next(answers, None) is None and has_ended(*args)

    dist.barrier()
    if dist.get_rank() == BAD:
        time.sleep(1.0)
    with patch.object(peer_failure, "_has_ended", seen_late if dist.get_rank() == 0 else has_ended):
        assert x.sum().item() == 28
    laid(torch.arange(5.0), Replicate()).index_select(0, laid(torch.tensor([9]), Replicate()))


@pytest.mark.thorough
@pytest.mark.ranks
def test_an_error_of_all_ranks_is_their_own_though_one_sees_the_end_of_a_collective_late() -> None:
    with RankPool(4, timeout=150) as pool:
        ranks = pool.run(outcomes, [raised_by_all_after_a_late_one])

    for rank, (((raised, text, _), after),) in enumerate(ranks):
        assert raised == "IndexError", (rank, text)
        assert "which this rank waited for" not in text, rank
        assert after[0] == "none", (rank, after)
