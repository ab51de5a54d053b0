"""Plain operands beside models of whole batches: they count as replicated, and ranks that differ are told."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_in
from helpers.set_aside import imports_set_aside
from torch import Tensor, nn

import dshard
from dshard import DTensor, MixedError, Replicate, Shard, distribute_tensor, init_device_mesh, parallelize
from dshard.comm import as_mesh
from dshard.core.comparisons import EVERY, MAX_ENTRIES, comparisons_on
from dshard.debug import CommDebugMode
from dshard.experimental import local_map
from dshard.testing import RankPool

RANKS = 4


@cache
def mesh() -> Any:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


X, TARGETS = drawn(8, 6), torch.arange(8) % 5


def net(strategy: str = "data", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
    return parallelize(model, mesh(), strategy, X, **options)


def step(model: nn.Module, targets: Tensor, loss: Callable[..., Any] = F.cross_entropy) -> Any:
    model.zero_grad()
    out = loss(model(X), targets)
    out.backward()
    return out


def error_of(call: Callable[..., object], *args: object) -> str:
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_targets(strategy: str) -> list[str]:
    rank = torch.distributed.get_rank()
    wrong = TARGETS.roll(int(rank == 2))
    floats = drawn(8, 5, seed=int(rank == 1))

    def error(targets: Tensor, loss: Callable[..., Any]) -> str:
        return error_of(step, net(strategy), targets, loss)

    return [
        error(wrong, F.cross_entropy),
        error(floats, F.mse_loss),
        error(rank < TARGETS, lambda out, kept: (out * kept[:, None]).mean()),
        error(drawn(8 + rank, 5).sum(0), lambda out, row: (out * row).mean()),
        error(drawn(1 + 7 * (rank == 3), 5), lambda out, rows: (out * rows).mean()),
        error(drawn(rank + 1)[-1], lambda out, mixed: (mixed * out).mean()),
        error(drawn(8, 5) * (1 + 1e-7 * rank), F.mse_loss),
    ]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", one_in(3, ["data", "fsdp", "megatron"]))
def test_ranks_with_other_plain_operands_are_told_before_the_optimiser_steps(ranks: RankPool, strategy: str) -> None:
    for labels, floats, mask, row, shape, factor, rounded in ranks.run(other_targets, strategy):
        line = r"test_plain_operands.py:\d+ of shape"
        for error, who in (
            (labels, "ranks [0, 1, 3] and ranks [2]"),
            (floats, "ranks [0, 2, 3] and ranks [1]"),
            (mask, "ranks [0] and ranks [1] and ranks [2] and ranks [3]"),
            (row, "ranks [0] and ranks [1] and ranks [2] and ranks [3]"),
            (shape, "ranks [0, 1, 2] and ranks [3]"),
            (factor, "ranks [0] and ranks [1] and ranks [2] and ranks [3]"),
        ):
            assert error.startswith("LayoutError: a parallelized module is given different data, plain operand"), error
            assert who in error
            assert "parallelize(..., inputs='per-data-rank')" in error
            assert re.search(line, error), error
        assert rounded == ""  # a teacher computed on each rank


def draw(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] + 0 * torch.rand([]),)


def differ_later(what: str, model: nn.Module, n: int) -> None:
    """The `n`th step, in which rank 1 has another order of targets or inputs from the 11th on, or draws once more."""
    other = torch.distributed.get_rank() == 1 and n > 10
    if what == "draws" and n == 11 and other:
        torch.rand([])
    x, y = X.roll(int(other and what == "inputs"), 0), TARGETS.roll(int(other and what == "targets"), 0)
    F.cross_entropy(model(x), y).backward()


def first_error(what: str) -> tuple[int, str]:
    model = net()
    if what == "draws":
        model.register_forward_pre_hook(draw)
    torch.manual_seed(0)
    errors = ((n, error_of(differ_later, what, model, n)) for n in range(1, 2 * EVERY))
    return next(((n, error) for n, error in errors if error), (0, ""))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("targets", "plain operand 1 of cross_entropy"),
        ("inputs", "the input input"),
        ("draws", "torch's generator, from"),
    ],
)
def test_what_differs_later_is_found_within_a_hundred_calls(ranks: RankPool, what: str, text: str) -> None:
    for n, error in ranks.run(first_error, what):
        assert 10 < n <= 16
        assert text in error


def found_late() -> tuple[int, str]:
    rank, model = torch.distributed.get_rank(), net()
    for n in range(1, 2 * EVERY):
        error = error_of(step, model, TARGETS.roll(int(n > 33 and rank == 1)))
        if error:
            return n, error
    return 0, ""


@pytest.mark.ranks
def test_a_comparison_of_fifty_is_read_a_step_later_and_says_when(ranks: RankPool) -> None:
    for n, error in ranks.run(found_late):
        assert n == EVERY + 1
        assert f"in backward pass {EVERY} since the last model was laid out: a parallelized module" in error


def distance(whole: Tensor, seed: int) -> float:
    return float((whole - drawn(8, 5, seed=seed)).abs().max())


def distance_of(rows: Tensor, seed: int) -> float:
    return float((rows - drawn(*rows.shape, seed=seed)).abs().max())


def lines_of_one_rank() -> tuple[list[str], int]:
    """What rank 0 alone does between steps, with its own plain values; the errors, and the messages of that."""
    rank, model = torch.distributed.get_rank(), net()
    errors, messages = list[str](), 0
    whole = model(X).detach().redistribute(placements=[Replicate()])
    for n in range(6):
        if rank == 0:
            with CommDebugMode() as comm:
                errors.append(error_of(distance, whole, n))
            messages += comm.get_total_counts()
        errors.append(error_of(step, model, TARGETS))
    for turn in range(2):  # one line, run for the first time by rank 0 a step before the others
        for n in range(3):
            if n > 0 or rank == 0:
                errors.append(error_of(lambda seed: (whole * drawn(8, 5, seed=seed)).sum().item(), 9 * turn + n))
            errors.append(error_of(step, model, TARGETS))
    for rows in (2, 3, 1):  # a line that all ranks run, and rank 0 once more before, or a step before
        if rank == 0:
            errors.append(error_of(distance_of, whole[:rows], rows))
        if rows > 1:
            errors.append(error_of(distance_of, whole[:rows], 0))
        errors.append(error_of(step, model, TARGETS))
    if rank == 0:
        errors.append(error_of(distance_of, whole[:5], 5))
    errors.append(error_of(distance_of, whole[:1], 0))
    errors += [error_of(step, model, TARGETS) for _ in range(20)]
    if rank == 0:
        errors += [error_of(distance_of, whole[:4], 30), *(error_of(distance, whole, n) for n in range(MAX_ENTRIES))]
    errors += [error_of(distance_of, whole[:4], 0), error_of(step, model, TARGETS)]
    return errors, messages


@pytest.mark.ranks
def test_a_line_of_one_rank_stays_its_own_and_sends_nothing(ranks: RankPool) -> None:
    for errors, messages in ranks.run(lines_of_one_rank):
        assert not any(errors)
        assert messages == 0


@imports_set_aside()
def refused() -> dict[str, str]:
    x = distribute_tensor(drawn(8, 5), mesh(), [Shard(0)])
    apart = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("without_a_model",))
    row, out = drawn(5), dict[str, str]()
    out["nothing"] = error_of(lambda: distribute_tensor(drawn(8, 5), apart, [Shard(0)]) * row)
    model = net()
    out["whole"] = error_of(lambda: x * row)
    out["part"] = error_of(lambda: distribute_tensor(drawn(2, 5), mesh(), [Replicate()]) * x.to_local())
    out["view"] = error_of(lambda: distribute_tensor(drawn(5), mesh(), [Replicate()]) * x.to_local()[0])
    out["detached"] = error_of(lambda: distribute_tensor(drawn(2, 5), mesh(), [Replicate()]) * x.to_local().detach())
    own = drawn(8, 5)
    part = DTensor.from_local(own.chunk(RANKS)[torch.distributed.get_rank()], mesh(), [Shard(0)]).to_local()
    out["taken"] = error_of(lambda: x * own) + error_of(lambda: x[:2] * part)[:10]
    out["replica"] = error_of(lambda: x * distribute_tensor(row, mesh(), [Replicate()]).to_local())
    out["local_map"] = error_of(lambda: local_map(lambda local: (x * row).to_local(), [Shard(0)])(x))
    with dshard.strict():
        out["strict"] = error_of(lambda: x * row)
    rows = net(inputs="per-data-rank")
    out["both"] = error_of(lambda: x * row)
    del model
    out["rows"] = error_of(lambda: x * row)
    del rows
    return out


@pytest.mark.ranks
def test_what_may_differ_by_rank_is_refused_with_the_way_out(ranks: RankPool) -> None:
    words = {
        "nothing": "wrap it with distribute_tensor",
        "part": "it is what to_local gave, one rank's part",
        "detached": "it is what to_local gave, one rank's part",
        "view": "it is what to_local gave, one rank's part",
        "local_map": "wrap it with distribute_tensor",
        "strict": "wrap it with distribute_tensor",
        "both": "models on one mesh are given whole batches and rows of each data rank",
        "rows": "take dshard.distribute_batch(model, batch), or have plain outputs by parallelize(...",
    }
    for errors in ranks.run(refused):
        assert errors["whole"] == errors["replica"] == ""
        assert errors["taken"] == "MixedError"
        for case, text in words.items():
            assert errors[case].startswith(MixedError.__name__), case
            assert text in errors[case], case


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.norm, self.head = (
            nn.Embedding(9, 6),
            nn.Conv1d(6, 6, 3),
            nn.LayerNorm(6),
            nn.Linear(6, 6),
        )

    def encode(self, ids: Tensor) -> Tensor:
        return self.norm(self.mix(self.table(ids).mT).mT)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))


def layers_by_themselves(strategy: str) -> list[str]:
    torch.manual_seed(0)
    alone, ids, wrong = Layers(), torch.arange(56).view(8, 7) % 9, list[str]()
    laid_out = parallelize(deepcopy(alone), mesh(), strategy, ids)
    calls: dict[str, Callable[[Any], Any]] = {
        "encode": lambda model: model.encode(ids),
        "table": lambda model: model.table(ids),
        "mix": lambda model: model.mix(drawn(8, 6, 7)),
        "norm": lambda model: model.norm(drawn(8, 7, 6)),
        "head": lambda model: model.head(drawn(8, 6)),
        "children": lambda model: nn.Sequential(model.norm, model.head)(drawn(8, 6)),
        "a row of the table": lambda model: model.table(ids[0]),
        "a row of the head": lambda model: model.head(drawn(6)),
        "a row": lambda model: model(ids[0].expand(1, 7))[0],
    }
    for name, call in calls.items():
        out, expected = call(laid_out), call(alone)
        shares = out.numel() / max(1, out.to_local().numel())
        if (out.full_tensor() - expected).abs().max() > 1e-5:
            wrong.append(f"{name}: other values")
        if strategy == "data" and "row" not in name and shares != RANKS:  # the others choose by what they send
            wrong.append(f"{name}: each rank computes one part of {shares}")
        grads = []
        for model, y in ((laid_out, out), (alone, expected)):
            model.zero_grad()
            y.square().sum().backward()
            grads.append({at: p.grad for at, p in model.named_parameters() if p.grad is not None})
        if any((grads[0][at].full_tensor() - grad).abs().max() > 1e-4 for at, grad in grads[1].items()):
            wrong.append(f"{name}: other gradients")
    one = net(strategy)(X[0])
    return wrong if one.placements == (Replicate(),) else [*wrong, f"an input without a batch: {one.placements}"]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", one_in(3, ["megatron", "data", "fsdp"]))
def test_a_plain_batch_that_enters_a_layer_by_itself_has_its_rows_split(ranks: RankPool, strategy: str) -> None:
    for wrong in ranks.run(layers_by_themselves, strategy):
        assert not wrong


def messages_of_steps() -> list[int]:
    model, counts = net(), list[int]()
    comparisons = comparisons_on(as_mesh(mesh()))
    for _ in range(12):
        before = comparisons.sent()
        step(model, TARGETS)
        counts.append(comparisons.sent() - before)
    return counts


@pytest.mark.ranks
def test_comparisons_are_one_message_in_the_passes_that_meet(ranks: RankPool) -> None:
    first, *others = ranks.run(messages_of_steps)
    assert all(each == first for each in others)
    in_step = first[-1]
    assert [n - in_step for n in first[1:]] == [1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0]


def written_with_gradients() -> list[float]:
    """The loss of outputs collected in a plain tensor, and its gradients, less those of one device."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5))
    out = list[float]()
    for strategy in ("data", "megatron"):
        values = []
        for model in (alone, net(strategy)):
            collected = torch.zeros(2, 8, 5)
            collected[0] = model(X)
            collected[1, :4] = model(X)[:4]
            loss = F.cross_entropy(collected.flatten(0, 1), torch.arange(16) % 5)
            model.zero_grad()
            loss.backward()
            values.append([loss.detach(), *(p.grad for p in model.parameters())])
        pairs = ((getattr(y, "full_tensor", lambda y=y: y)(), x) for x, y in zip(*values, strict=True))
        out += [float((y - x).abs().max()) for y, x in pairs]
    return out


@pytest.mark.ranks
def test_outputs_written_to_a_plain_tensor_keep_their_gradients(ranks: RankPool) -> None:
    for differences in ranks.run(written_with_gradients):
        assert max(differences) < 1e-6


def inputs_of_plain_outputs() -> tuple[int, str]:
    rank, model = torch.distributed.get_rank(), net(outputs="plain")
    for n in range(1, EVERY):
        x = X.roll(int(n > 5 and rank == 1), 0)
        error = error_of(lambda x: F.cross_entropy(model(x), TARGETS).backward(), x)
        if error:
            return n, error
    return 0, ""


@pytest.mark.ranks
def test_inputs_of_a_model_with_plain_outputs_are_compared_again(ranks: RankPool) -> None:
    for n, error in ranks.run(inputs_of_plain_outputs):
        assert n == 8
        assert "given different data, the input input" in error


def right_operands() -> list[str]:
    """The errors of programs in which operands hold what a digest must not trip over."""
    rank, errors = torch.distributed.get_rank(), list[str]()
    lowest = torch.full((8, 5), torch.finfo(torch.double).min, dtype=torch.double).tril(1)
    empty = torch.full((8, 5), float(rank)), torch.full((8, 5), rank)

    def sorted_into(out: Any, _: Tensor) -> Any:
        torch.sort(out.detach(), 1, out=empty)
        return (out * empty[1]).mean() + (out * empty[0]).mean()

    def alone(out: Any, _: Tensor) -> Any:
        values, places = out.detach().full_tensor().sort(1)
        return (out * places).mean() + (out * values).mean()

    for loss in (lambda out, mask: (out.double() + mask).softmax(1).square().sum(), sorted_into):
        errors.append(error_of(step, net(), lowest, loss))
    losses = [step(net(), lowest, loss).full_tensor() for loss in (sorted_into, alone)]
    infinite = error_of(step, net(), lowest * (1 + (rank == 1)), lambda out, mask: (out.double() + mask).exp().sum())
    found = [torch.allclose(*losses), "and ranks [1]" in infinite, sparse_operand().startswith(MixedError.__name__)]
    return [*errors, *(f"case {i}" for i, is_right in enumerate(found) if not is_right)]


def sparse_operand() -> str:
    return error_of(lambda: torch.sparse.mm(torch.eye(8).to_sparse(), net()(X)))


@pytest.mark.ranks
def test_large_values_and_outputs_that_are_written_are_no_other_data(ranks: RankPool) -> None:
    for errors in ranks.run(right_operands):
        assert not any(errors)
