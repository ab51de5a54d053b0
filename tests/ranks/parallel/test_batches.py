"""Loaders of different lengths: losses and gradients are those of one device that sees the rows of all data ranks."""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dshard
from dshard import DTensor, LayoutError, PeerError
from dshard.comm import begin_rows
from dshard.testing import RankPool

PLANS = {"data": ((4,), (5, 3, 4, 0)), "fsdp": ((4,), (0, 3, 4, 5)), "data x megatron": ((2, 2), (5, 0))}
FULL, LAST = 3, 2
"""The rows of a batch, and of the last one of a loader."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(2))
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def rows_of(data_rank: int, n_batches: int) -> list[dict[str, Any]]:
    """The batches of a data rank: nested, with what is no tensor, and a number that all have."""
    generator, out = torch.Generator().manual_seed(data_rank), []
    for step in range(n_batches):
        n = LAST if step == n_batches - 1 else FULL
        x = torch.randn(n, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(4, (n,), generator=generator)
        out.append({"x": x, "more": (y, f"step {step}"), "scale": torch.tensor(1.0 + step, dtype=torch.float64)})
    return out


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def laid_out(plan: str, **options: Any) -> nn.Module:
    shape, _ = PLANS[plan]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    inputs = options.pop("inputs", "per-data-rank")
    return dshard.parallelize(Net(), mesh, plan, torch.zeros(4, 6, dtype=torch.float64), inputs=inputs, **options)


def unlike_one_device(plan: str, outputs: str) -> list[str]:
    """Steps whose loss or gradients are not those of one device."""
    lengths, wrong, alone = PLANS[plan][1], [], Net()
    model = laid_out(plan, outputs=outputs)
    _, mine = dshard.data_ranks(model)
    steps = dshard.batches(model, rows_of(mine, lengths[mine]))
    every = [rows_of(i, n) for i, n in enumerate(lengths)]
    count = 0
    for step, batch in enumerate(steps):
        count += 1
        of_all = [rows[step] for rows in every if step < len(rows)]
        y, text = batch["more"]
        if text != f"step {step}" or batch["scale"].item() != 1.0 + step:
            wrong.append(f"step {step}: {text}, {batch['scale']}")
        model.zero_grad(), alone.zero_grad()
        loss = F.cross_entropy(model(batch["x"]), y) * batch["scale"]
        loss.backward()
        x, y = torch.cat([each["x"] for each in of_all]), torch.cat([each["more"][0] for each in of_all])
        expected = F.cross_entropy(alone(x), y) * (1.0 + step)
        expected.backward()
        pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
        if outputs == "distributed":
            pairs.append((loss.detach(), expected.detach()))
        for got, want in pairs:
            if not torch.allclose(whole(got), want, atol=1e-12):
                wrong.append(f"step {step}: {whole(got)} for {want}")
        with torch.no_grad():
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                p -= 0.1 * p.grad
                q -= 0.1 * q.grad
    return [*wrong, *([] if count == max(lengths) else [f"{count} steps"])]


@pytest.mark.ranks
@pytest.mark.parametrize(("plan", "outputs"), one_way_each(PLANS, ["distributed", "plain"], every=4))
def test_loaders_of_different_lengths_are_one_device(ranks: RankPool, plan: str, outputs: str) -> None:
    assert ranks.run(unlike_one_device, plan, outputs) == [[]] * 4


def evaluated() -> list[float]:
    """The accuracy and loss on rows that a sampler deals out unevenly, over two epochs, and those of one device."""
    data = TensorDataset(torch.randn(19, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    model, found = laid_out("data"), []
    ranks, rank = dshard.data_ranks(model)
    sampler = DistributedSampler(data, ranks, rank, shuffle=False, drop_last=False)
    own = [i for i in sampler if i < 19][: 1 + rank]  # of other numbers on each rank
    loader = DataLoader(data, 2, sampler=own)
    for _ in range(2):
        total = rows = 0.0
        with torch.no_grad():
            for [x] in dshard.batches(model, loader):
                total, rows = total + model(x).square().sum().item(), rows + len(x)
        found += [total, rows]
    seen = [i for r in range(4) for i in list(DistributedSampler(data, 4, r, shuffle=False))[: 1 + r]]
    return [*found, Net()(data.tensors[0][seen]).square().sum().item()]


@pytest.mark.ranks
def test_an_evaluation_sees_each_row_once(ranks: RankPool) -> None:
    for *found, total in ranks.run(evaluated):
        assert found == pytest.approx([total, 10.0] * 2)


def whole_batches(shorter: bool) -> list[str]:
    """The batches of loaders that ought to be alike on all ranks, and the error if one ends before."""
    model = laid_out("data", inputs="global")
    loader = rows_of(0, 2 if shorter and dist.get_rank() == 1 else 3)
    seen: list[str] = []
    try:
        seen.extend(str(tuple(model(batch["x"]).shape)) for batch in dshard.batches(model, loader))
    except LayoutError as error:
        seen.append(str(error))
    return seen


@pytest.mark.ranks
def test_whole_batches_are_laid_out_and_compared(ranks: RankPool) -> None:
    assert ranks.run(whole_batches, False) == [["(3, 4)", "(3, 4)", "(2, 4)"]] * 4
    for seen in ranks.run(whole_batches, True):
        assert len(seen) == 2  # in the second step the one rank has the smaller last batch
        assert "batch 1 of a loader, or its end, on ranks [0, 2, 3] and ranks [1]" in seen[-1]
        assert "each is given the whole batch" in seen[-1]


def loaded_otherwise(how: str) -> str:
    """The error of a program in which ranks of one data rank load otherwise."""
    model, rank = laid_out("data x megatron"), dist.get_rank()
    loader = rows_of(rank // 2, 3)
    if rank == 3:
        loader = {"length": loader[:1], "values": rows_of(7, 3), "rows": [{**loader[0], "x": loader[0]["x"][:1]}]}[how]
    try:
        for _ in dshard.batches(model, loader):
            pass
    except LayoutError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize(("how", "step"), [("length", 1), ("values", 0), ("rows", 0)])
def test_ranks_of_one_data_rank_load_alike(ranks: RankPool, how: str, step: int) -> None:
    for text in ranks.run(loaded_otherwise, how):
        assert f"different data, batch {step} of a loader, or its end, on ranks [2] and ranks [3]" in text
        assert "load by dshard.data_ranks(model)" in text


class Iterating:
    """A loader that is its own iterator, and begins again when it is asked for one, or after its end."""

    def __init__(self, n_batches: int, is_reset: bool) -> None:
        self.left = self.n_batches = n_batches
        self.is_reset = is_reset

    def __iter__(self) -> Iterator[Tensor]:
        if self.is_reset:
            self.left = self.n_batches
        return self

    def __next__(self) -> Tensor:
        if self.left == 0:
            self.left = self.n_batches
            raise StopIteration
        self.left -= 1
        return torch.full((2, 6), float(self.left), dtype=torch.float64)


def seen_of_iterators(is_reset: bool) -> list[list[float]]:
    model, rank = laid_out("data", outputs="plain"), dist.get_rank()
    steps = islice(dshard.batches(model, Iterating((2, 1, 3, 0)[rank], is_reset)), 5)
    return [x[:, 0].tolist() for x in steps]


@pytest.mark.ranks
@pytest.mark.parametrize("is_reset", [True, False])
def test_loaders_that_begin_again_end_once(ranks: RankPool, is_reset: bool) -> None:
    expected = [[1.0, 0.0], [0.0], [2.0, 1.0, 0.0], []]
    assert ranks.run(seen_of_iterators, is_reset) == [[[x] * 2 for x in xs] + [[]] * (3 - len(xs)) for xs in expected]


def texts() -> list[int]:
    """The strings of batches of which some, or all, are strings: two for each row, of which a name is none."""
    model, n = laid_out("data", outputs="plain"), 2 - min(dist.get_rank(), 2)
    rows = [(["a", "b"], {"x": torch.zeros(2, 6), "y": ("c", "d")}, "name")] * n
    first = [len(x) + len(more["y"]) + len(name) for x, more, name in dshard.batches(model, rows)]
    return first + [len(x) for x in dshard.batches(model, [["a", "b"]] * n)]


@pytest.mark.ranks
def test_strings_are_rows(ranks: RankPool) -> None:
    assert ranks.run(texts) == [[8, 8, 2, 2], [8, 4, 2, 0], [4, 4, 0, 0], [4, 4, 0, 0]]


def raised_by_loader(at: int) -> tuple[str, str, int]:
    """The error, and the steps before it, of a program in which one loader raises."""

    def failing() -> Iterator[dict[str, Any]]:
        yield from rows_of(0, at)
        raise OSError("no such file")

    model, steps = laid_out("data"), 0
    try:
        for batch in dshard.batches(model, failing() if dist.get_rank() == 2 else rows_of(0, 4)):
            model(batch["x"])
            steps += 1
    except (OSError, PeerError) as error:
        found = type(error).__name__, str(error), steps
    again = sum(len(batch["x"]) for batch in dshard.batches(model, rows_of(0, 2)))
    return (*found[:2], found[2] if again == 20 else -1)


@pytest.mark.ranks
@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_of_one_loader_is_one_error_on_all(ranks: RankPool, at: int) -> None:
    for rank, (kind, text, steps) in enumerate(ranks.run(raised_by_loader, at)):
        assert steps == at
        assert (kind, text) == ("OSError", "no such file") if rank == 2 else kind == "PeerError"
        assert "no such file" in text
        assert rank == 2 or f"no rank has batch {at}, for the loader of rank 2 has raised OSError" in text


def left_early() -> tuple[list[int], str]:
    """The rows of loops that all ranks leave, and the error where one leaves alone."""
    model = laid_out("data", outputs="plain")
    _, rank = dshard.data_ranks(model)
    seen: list[int] = []
    for _ in range(3):
        seen += [len(batch["x"]) for batch in islice(dshard.batches(model, rows_of(rank, 3 + rank)), 2)]
    seen += [len(batch["x"]) for batch in dshard.batches(model, rows_of(rank, 1))]
    try:
        for _ in dshard.batches(model, rows_of(rank, 4)):
            if rank == 1:
                break
        for _ in dshard.batches(model, rows_of(rank, 4)):
            pass
    except LayoutError as error:
        seen += [len(batch["x"]) for batch in dshard.batches(model, rows_of(rank, 1))]  # all go on together
        return seen, str(error)
    return seen, ""


@pytest.mark.ranks
def test_a_loop_is_left_by_all_ranks_or_it_is_told(ranks: RankPool) -> None:
    for seen, told in ranks.run(left_early):
        assert seen == [FULL, FULL] * 3 + [LAST] * 2
        assert "ranks [0, 2, 3] and ranks [1] are in different loops over dshard.batches" in told
        assert "on all ranks at the same step" in told


def times() -> list[float]:
    """When each rank has had its first and second batch, and done its first step, which is slow on one."""
    model, out = laid_out("data", outputs="plain"), []
    for step, _ in enumerate(dshard.batches(model, rows_of(0, 3))):
        if step == 0 and dist.get_rank() == 0:
            time.sleep(1.0)
        out.append(time.monotonic())
    return out


@pytest.mark.ranks
def test_the_next_batch_waits_for_no_rank_in_its_step(ranks: RankPool) -> None:
    slow, *others = ranks.run(times)
    assert all(second < slow[0] for _, second, _ in others)


def left_in_flight() -> int:
    """The exchanges of a loop that has ended for which nobody has waited."""
    module, left = importlib.import_module("dshard.parallel.boundary"), 0

    def begin(*args: Any) -> Any:
        nonlocal left
        wait, left = begin_rows(*args), left + 1

        def waited() -> Any:
            nonlocal left
            left -= 1
            return wait()

        return waited

    with patch.object(module, "begin_rows", begin):
        for _ in dshard.batches(laid_out("data"), rows_of(0, 1 + dist.get_rank())):
            pass
    return left


@pytest.mark.ranks
def test_a_loop_that_has_ended_leaves_nothing_in_flight(ranks: RankPool) -> None:
    assert ranks.run(left_in_flight) == [0] * 4


def test_one_process_has_batches_as_they_are() -> None:
    mesh, example = dshard.Mesh((1,), ("dp",)), torch.zeros(4, 6, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a mesh without processes
        model = dshard.parallelize(Net(), mesh, "data", example, outputs="plain")

    assert [batch["more"][1] for batch in dshard.batches(model, rows_of(0, 2))] == ["step 0", "step 1"]
    with pytest.raises(dshard.ArgumentError, match="not laid out by parallelize"):
        dshard.batches(Net(), [])
