"""A number that all ranks have made is whole on each of them: one rank alone reads it, and sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from torch import Tensor, nn

import dshard
from dshard import DTensor, Partial, Replicate, Shard, distribute_tensor
from dshard.comm import listen
from dshard.testing import RankPool

MESHES: dict[str, tuple[int, ...]] = {"data": (4,), "fsdp": (4,), "data x megatron": (2, 2)}


class Net(nn.Module):
    """Two layers; `parts` are the sums that its forward pass has made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.parts = nn.Linear(6, 8), nn.Linear(8, 5), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.parts.append(h.square().sum())
        return self.down(h)


def mesh(shape: tuple[int, ...] = (4,)) -> Any:
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def numbers(model: nn.Module, x: Any, y: Any) -> Iterator[tuple[str, Any]]:
    """The numbers that a step of training makes, before its backward pass and after."""
    out = model(x)
    loss = (out - F.one_hot(y, 5)).square().mean()
    with torch.no_grad():
        hits = (out.argmax(-1) == y).double()
        running = 0.9 * hits.mean() + 0.1 * loss.detach()
        yield "accuracy", hits.mean()
        yield "count", (out.argmax(-1) == y).sum()
        yield "running", running
        yield "extremes", out.max() - out.min()
    yield "loss", loss
    yield "cross entropy", F.cross_entropy(out, y)
    yield "not a number", torch.isnan(loss)
    yield "comparison", loss > 0.5
    loss.backward()
    yield "loss after", loss
    yield "squares", sum(p.pow(2).sum() for p in model.parameters())
    yield "norm", model.get_parameter("up.weight").norm()
    yield "clipped", nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    yield "gradients", sum(p.grad.abs().sum() for p in model.parameters())  # type: ignore[union-attr]


def ways_to_read(x: Tensor) -> list[Any]:
    return [x.item(), float(x), bool(x), f"{x:.6f}", x.detach().clone().tolist(), str(x) and round(float(x), 9)]


def training() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net().double(), torch.randn(8, 6, dtype=torch.double), torch.randint(5, (8,))


def wrong_numbers(strategy: str) -> list[str]:
    """The numbers that differ from one device's, or for which rank 0 sends something when it reads them alone."""
    model, x, y = training()
    expected = {name: ways_to_read(torch.as_tensor(number)) for name, number in numbers(model, x, y)}
    wrong = []
    for turn in ("cold", "warm", "warm"):
        model, x, y = training()
        model = dshard.parallelize(model, mesh(MESHES[strategy]), strategy, x)
        made = list(numbers(model, *dshard.distribute_batch(model, (x, y))))
        if dist.get_rank() == 0:
            sent: list[Any] = []
            with listen(sent.append):
                for name, number in made:
                    for got, want in zip(ways_to_read(number), expected[name], strict=True):
                        if sent or got != (want if isinstance(want, str) else pytest.approx(want, abs=1e-12)):
                            wrong.append(f"{name}, {turn}: {got} for {want}, {len(sent)} sent")
        del made
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", one_in(2, MESHES))
def test_one_rank_reads_what_all_have_made(strategy: str, ranks: RankPool) -> None:
    assert ranks.run(wrong_numbers, strategy) == [[]] * 4


def sent_for(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    sent: list[str] = []
    with listen(lambda event: sent.append(event.collective)):
        return call(), sent


def what_is_sent_when() -> dict[str, object]:
    x = distribute_tensor(torch.arange(8.0).double(), mesh(), [Shard(0)], src_data_rank=None)
    x.requires_grad_()
    model, batch, _ = training()
    model = dshard.parallelize(model, mesh(), "data", batch)
    found: dict[str, object] = {}
    for turn in ("cold", "second", "warm"):
        number, made = sent_for(lambda: x.square().sum())
        _, backward = sent_for(number.backward)
        with torch.no_grad():
            _, unrecorded = sent_for(lambda: x.square().sum())
        _, both = sent_for(lambda: torch.aminmax(x.detach()))
        _, forward = sent_for(lambda: model(batch))
        found[turn] = made, backward, unrecorded, both, forward, model.parts[-1].placements
    return found


@pytest.mark.ranks
def test_a_number_is_one_message_when_it_is_made_and_none_within_a_forward_pass(ranks: RankPool) -> None:
    one = ["all_reduce"]
    expected = one, [], one, [*one, *one], [], (Partial(),)
    assert ranks.run(what_is_sent_when) == [dict.fromkeys(("cold", "second", "warm"), expected)] * 4


def local_by_right() -> list[object]:
    rank = dist.get_rank()
    term = DTensor.from_local(torch.tensor(float(rank)), mesh(), [Partial()])
    asked = distribute_tensor(torch.tensor(1.0), mesh(), [Replicate()]).redistribute(placements=[Partial()])
    vector = DTensor.from_local(torch.full((3,), float(rank)), mesh(), [Partial()])
    for _ in range(3):  # a view has memory of its operand, whether a cached function makes it or not
        vector[1].zero_()
        kept = [term, asked, term.detach(), term.requires_grad_(False), vector[0]]
    return [[x.placements for x in kept], vector.full_tensor().tolist(), (term + 1).placements]


@pytest.mark.ranks
def test_terms_that_the_user_asked_for_stay_and_views_write_to_their_base(ranks: RankPool) -> None:
    expected = [[(Partial(),)] * 5, [6.0, 0.0, 6.0], (Replicate(),)]
    assert ranks.run(local_by_right) == [expected] * 4


def planned_and_sent() -> list[object]:
    x = distribute_tensor(torch.randn(8, 4), mesh(), [Shard(0)], src_data_rank=None).requires_grad_()
    found = []
    for _ in range(3):
        with dshard.strict(), dshard.trace() as traced:
            x.mean()
        explained = [sent for call in dshard.explain(torch.mean, x).operators for sent in call.collectives]
        found.append([[(each.collective, each.nbytes) for each in sent] for sent in (traced.events, explained)])
    return found


@pytest.mark.ranks
def test_a_number_is_asked_for_and_planned_as_it_is_sent(ranks: RankPool) -> None:
    assert ranks.run(planned_and_sent)[0] == [[[("all_reduce", 12)]] * 2] * 3  # the busiest
