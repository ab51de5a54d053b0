"""Replayed steps on real ranks: the numbers, the collectives and the memory of the steps that Python runs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.looking_soon import looking_soon
from torch import Tensor, nn

import dshard
from dshard import Replicate, Shard, distribute_tensor, init_device_mesh, parallelize
from dshard.replay import Replay
from dshard.testing import RankPool, count_traffic

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "data": ((4,), ("dp",)),
    "fsdp x megatron-sp": ((2, 2), ("dp", "tp")),
    "tesseract": ((1, 2, 2), ("d", "r", "c")),
}
STEPS = 7
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.drop(self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(13, width), Block(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 13)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.blocks(self.embed(ids)))).flatten(0, 1), targets.flatten())


Step = Callable[[Tensor, Tensor], Tensor]


def trainer(
    strategy: str, dtype: torch.dtype, example: tuple[Tensor, Tensor]
) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A parallelized model, its optimiser, and a training step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape, names = MESHES[strategy]
    model = parallelize(GPT().to(dtype), init_device_mesh("cpu", shape, mesh_dim_names=names), strategy, *example)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def step(ids: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(ids, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def batch(number: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randint(13, (rows, 6), generator=generator) for _ in range(2))  # type: ignore[return-value]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, dshard.DTensor) else x


def learn_alike(strategy: str, dtype: torch.dtype, rows: int) -> int:
    """Train two equal models, one by replays, of which some are compared: the bytes of a step."""
    of_both, received = [], list[Any]()
    for replays in (False, True):
        model, optimizer, run = trainer(strategy, dtype, batch(0, rows))
        step = dshard.replay(run, check_every=STEPS) if replays else run
        dshard.manual_seed(3)
        losses = []
        for number in range(STEPS + 1):  # the last but one is replayed, the last is compared
            optimizer.param_groups[0]["lr"] = 0.01 * 0.8**number
            with count_traffic() if number >= STEPS - 1 else nullcontext() as traffic:
                losses.append(local(step(*batch(number, rows))))
            if traffic is not None:
                received.append((traffic.nbytes, len(traffic.collectives)))
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        of_both.append([*losses, *(local(p.detach()) for p in model.parameters()), *grads])
    assert isinstance(step, Replay)
    assert (step.replays, step.why_not) == (STEPS - 3, "this call is compared with the program")
    for a, b in zip(*of_both, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    python, _, replayed, compared = received
    assert python[0] == replayed[0]
    assert python[1] >= replayed[1]  # counting runs the calls of Python without their shortcuts
    assert replayed == compared
    return int(replayed[0])


@pytest.mark.parametrize("strategy", one_in(3, [*MESHES][1:] + [*MESHES][:1]))
def test_a_replay_computes_and_sends_what_python_does(strategy: str, ranks: RankPool) -> None:
    dtype, rows = (torch.bfloat16, 2) if strategy == "data" else (torch.float64, 7)  # two of four ranks have no rows
    assert any(ranks.run(learn_alike, strategy, dtype, rows))


def peaks() -> list[int]:
    """The most bytes held at once, since the model was made, in a warm step by Python and by a replay."""
    peaks, out, x = import_module("allocator").peaks, list[int](), batch(0, 8)
    for replays in (False, True):
        made: list[Step] = []

        def make(replays: bool = replays, made: list[Step] = made) -> None:
            _, _, run = trainer("fsdp x megatron-sp", torch.float32, x)
            made.append(dshard.replay(run) if replays else run)

        steps = {str(number): lambda made=made: made[0](*x) for number in range(6)}
        held = peaks(steps, make)  # type: ignore[arg-type]
        out.append(min([*held.values()][4:]))
    return out


@pytest.mark.thorough
def test_a_replay_holds_no_more_than_python(ranks: RankPool) -> None:
    for python, replay in ranks.run(peaks):
        assert replay <= 1.02 * python


def some_look() -> list[float]:
    """Some ranks trace steps, which they then run by Python, while the others replay them."""
    _, _, run = trainer("fsdp x megatron-sp", torch.float64, batch(0, 7))
    step, losses = dshard.replay(run, check_every=3), []
    for number in range(9):
        looks = number % 2 and dist.get_rank() in (0, 3)
        with dshard.trace() if looks else nullcontext():
            losses.append(step(*batch(number, 7)).item())
    assert step.replays == (1 if dist.get_rank() in (0, 3) else 4)
    return losses


def test_ranks_that_replay_match_ranks_that_run_python(ranks: RankPool) -> None:
    first, *others = ranks.run(some_look)
    assert all(losses == first for losses in others)


class Switch:
    """What the step of a rank reads beside its arguments, unseen."""

    factor = 1.0
    sends = once = True


@looking_soon()
def differ(what: str, ranks: tuple[int, ...]) -> list[str]:
    """The errors of calls after something has changed on some ranks, and a new recording."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    Switch.factor, Switch.sends, Switch.once = 1.0, True, True

    def run(x: Tensor) -> Tensor:
        y = x * Switch.factor
        if not Switch.once:
            y.full_tensor()  # type: ignore[attr-defined]
        return y.full_tensor().sum() if Switch.sends else y.to_local().sum()  # type: ignore[attr-defined]

    step, errors = dshard.replay(run, check_every=4), list[str]()
    for number in range(1, 12):
        if number == 6 and dist.get_rank() in ranks:
            setattr(Switch, what, 0)
        try:
            step(x)
        except dshard.errors.ReplayError as error:
            errors.append(f"{number}: {error}")
            if len(ranks) == 1:  # which the ranks do not survive
                break
    if len(ranks) == 2:
        assert torch.equal(local(step(x)), local(run(x)))
        assert not step.why_not
    return errors


@pytest.mark.parametrize("what", one_in(2, ["factor", "sends", "once"]))
def test_what_has_changed_on_all_ranks_is_an_error_of_all_and_then_recorded(what: str) -> None:
    with RankPool(2) as pool:
        for (error,) in pool.run(differ, what, (0, 1)):
            assert re.match(r"9: call 9 of differ\.<locals>\.run runs .*, and replays since call 5 may be wrong", error)


@pytest.mark.parametrize("what", one_in(3, ["factor", "sends", "once"]))
def test_what_has_changed_on_one_rank_is_an_error_of_all(what: str) -> None:
    with RankPool(2) as pool:
        one, other = pool.run(differ, what, (0,), timeout=30)
    assert one[0].startswith("9: call 9 of differ")
    assert ("where it was no other collective" in one[0]) == (what == "once")  # refused before it is sent
    assert re.search(r"call 9 of differ.* runs .*\(on rank 0, which this rank waited for\)", other[0])


def rows_of_each_rank(rows: list[tuple[int, int]]) -> tuple[int, int]:
    """Train on rows of each rank, by Python and by a replay: the calls, and those that were replayed."""
    torch.set_num_threads(1)
    rank, of_both = dist.get_rank(), []
    for replays in (False, True):
        torch.manual_seed(0)
        model, mesh = nn.Linear(4, 1), init_device_mesh("cpu", (2,))
        parallelize(model, mesh, "data", torch.zeros(6, 4), inputs="per-data-rank", outputs="distributed")

        def run(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            model.zero_grad()
            loss = F.mse_loss(model(x), dshard.distribute_batch(model, y))
            loss.backward()
            return loss.detach()

        step, losses = dshard.replay(run, check_every=9) if replays else run, []
        for number, counts in enumerate(rows):
            x = torch.randn(counts[rank], 5, generator=torch.Generator().manual_seed(10 * number + rank))
            looks = replays and number == 5 and rank == 0
            with dshard.trace() if looks else nullcontext():
                losses.append(step(x[:, :4], x[:, 4:]).item())
            losses += model.weight.grad.full_tensor().flatten().tolist()  # type: ignore[union-attr, operator]
        of_both.append(losses)
    assert of_both[0] == of_both[1]
    assert isinstance(step, Replay)
    return step.calls, step.replays


def test_the_rows_of_all_ranks_are_compared() -> None:
    rows = [(4, 2)] * 6 + [(2, 4)] * 4 + [(4, 4)] * 4 + [(4, 3), (4, 2), (2, 4), (4, 0), (4, 2)]
    with RankPool(2) as pool:
        # the fifth call of the first kind, the fourth of two others, and the last are replayed
        assert set(pool.run(rows_of_each_rank, rows, timeout=60)) == {(19, 4)}


def split_vocabulary() -> None:
    """A table of words that is split over the ranks: replayed, and indices beyond it are refused all the same."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    alone = torch.randn(6, 4, dtype=torch.float64).requires_grad_()
    table = distribute_tensor(alone.detach(), mesh, [Shard(0)]).requires_grad_()

    def run(ids: Tensor, targets: Tensor, table: Tensor = table) -> Tensor:
        loss = F.cross_entropy(F.linear(F.embedding(ids, table), table), targets)
        loss.backward()
        return loss.detach()

    def spread(*numbers: int) -> Tensor:
        return distribute_tensor(torch.tensor(numbers), mesh, [Replicate()])

    step = dshard.replay(run)
    for number in range(6):
        table.grad = alone.grad = None
        ids, targets = [number, 0, 2], [1, 5 - number, 3]
        found, expected = step(spread(*ids), spread(*targets)), run(torch.tensor(ids), torch.tensor(targets), alone)
        torch.testing.assert_close(local(found), expected)
        assert table.grad is not None
        torch.testing.assert_close(table.grad.full_tensor(), alone.grad)
    assert step.replays == 3, step.why_not
    table.grad = None  # as before each step
    with pytest.raises(IndexError, match="index 6 is out of bounds for dimension 0 with size 6"):
        step(spread(0, 1, 6), spread(0, 1, 2))
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        step(spread(0, 1, 2), spread(0, -1, 2))
    torch.testing.assert_close(local(step(spread(*ids), spread(*targets))), expected)
    assert step.replays == 6, (step, step.why_not)


def test_a_split_vocabulary(ranks: RankPool) -> None:
    ranks.run(split_vocabulary)


def of_tensors() -> None:
    """A step of distributed tensors without a module: arguments of several layouts, an in-place write, a gradient."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    w = distribute_tensor(torch.randn(5, 7, dtype=torch.float64), mesh, [Replicate(), Shard(1)]).requires_grad_()
    state = distribute_tensor(torch.zeros(7, dtype=torch.float64), mesh, [Replicate(), Shard(0)])

    def run(x: Tensor) -> Tensor:
        w.grad = None
        y = x @ w + state
        y.square().sum().backward()
        state.add_(y.detach().mean(0))
        return y.detach()

    step = dshard.replay(run)
    layouts = ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(1)])
    for number in range(9):
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for _ in range(2):
            before, version = state.full_tensor(), state._version
            y = step(distribute_tensor(x, mesh, layouts[number % 3]))
            expected = x @ w.detach().full_tensor() + before
            torch.testing.assert_close(y.full_tensor(), expected)
            assert w.grad is not None
            torch.testing.assert_close(w.grad.full_tensor(), 2 * x.T @ expected)
            torch.testing.assert_close(state.full_tensor(), before + expected.mean(0))
            assert state._version > version
            assert w.grad.placements == w.placements
    assert step.replays == 18 - 9, (step, step.why_not)
    assert step.code.count("def step") == 3


def test_a_step_of_tensors_in_several_layouts(ranks: RankPool) -> None:
    ranks.run(of_tensors)


def write_views() -> int:
    """A step that writes to rows of a tensor: a graph that saved this tensor says so, as after its Python."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = distribute_tensor(torch.zeros(4, 6, dtype=torch.float64), mesh, [Replicate(), Shard(1)])
    w = distribute_tensor(torch.ones(4, 6, dtype=torch.float64), mesh, [Replicate(), Shard(1)]).requires_grad_()

    @dshard.replay
    def step(x: Tensor) -> None:
        state[1:3].view(-1, 6)[1:].add_(x)

    for number in range(1, 6):
        product, version = (state * w).sum(), state._version
        step(distribute_tensor(torch.ones(1, 6, dtype=torch.float64), mesh, [Replicate(), Shard(1)]))
        assert state.full_tensor().sum() == state[2].sum().item() == 6 * number
        assert state._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    return step.replays


def test_tensors_written_by_views_count_the_writes(ranks: RankPool) -> None:
    assert ranks.run(write_views) == [2] * 4


def unsuited() -> list[str]:
    """Why steps of distributed tensors run by Python."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(8), mesh, [Replicate()]).requires_grad_()

    def accumulated() -> None:
        with dshard.accumulate():
            (x * w).sum().backward()

    def plain() -> None:
        dist.all_reduce(torch.ones(1))

    why, numbers = list[str](), count()
    for run in (lambda: x.sum().item(), accumulated, plain, lambda: x * next(numbers)):
        step = dshard.replay(run)  # type: ignore[arg-type]
        for _ in range(8):
            step()
        assert not step.replays
        why.append(step.why_not)
    return why


def test_what_cannot_be_replayed(ranks: RankPool) -> None:
    item, accumulated, plain, counted = ranks.run(unsuited)[0]
    assert "reads numbers on the host, which Python may use" in item or "that dshard did not run" in item
    assert "partial gradients: accumulate within one step" in accumulated
    assert "is a collective that dshard did not run" in plain
    assert "two calls differ" in counted


@looking_soon()
def wrong_index() -> str:
    """The error of an index out of range, in the rows of one rank."""
    _, _, run = trainer("data", torch.float64, batch(0, 8))
    step = dshard.replay(run)
    for number in range(5):
        step(*batch(number, 8))
    ids, targets = batch(5, 8)
    ids[-1, -1] = 99
    try:
        step(ids, targets)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_one_rank_reaches_all(ranks: RankPool) -> None:
    with ranks:  # which are out of step afterwards
        *others, last = ranks.run(wrong_index)
    assert last == "IndexError: index out of range in self"
    for text in others:
        assert text.startswith("IndexError: replayed step at ")
        assert text.endswith("index out of range in self (on rank 3, which this rank waited for)")
