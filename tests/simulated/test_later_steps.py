"""The timeline of a first step, completed, is that of the second, in which buckets begin as soon as they are full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import TypeAlias

import pytest
import torch
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dshard import Mesh, Topology, plan_model, use_topology
from dshard.parallel.step_price import LaterSteps, StepPrices

WIDTH, BLOCKS = 1024, 5


@pytest.fixture(autouse=True)
def on_gpus() -> Iterator[None]:
    """Seconds of hosts with NVLink."""
    with use_topology(Topology.preset("dgx-h100")):
        yield


class Block(nn.Module):
    """A block of attention, and a feed-forward part; it may be computed again in the backward pass."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.again = again
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.run(x) if self.again is None else checkpoint(self.run, x, use_reentrant=self.again)
        return out

    def run(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Deep(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(96, WIDTH), nn.Linear(WIDTH, 96, bias=False)
        self.blocks = nn.ModuleList([Block(again) for _ in range(BLOCKS)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tied() -> nn.Module:
    """The head has the table's weight: its gradient comes twice."""
    model = Deep()
    model.head.weight = model.table.weight
    return model


def frozen() -> nn.Module:
    """Some weights get no gradient."""
    model = Deep()
    for block in model.blocks[::2]:
        block.up.requires_grad_(False)
    return model


def again() -> nn.Module:
    """Blocks are computed again."""
    return Deep(again=False)


def again_within() -> nn.Module:
    """Blocks are computed again, each in a backward pass of its own, at whose end its gradients are reduced."""
    return Deep(again=True)


Case: TypeAlias = tuple[Callable[[], nn.Module], tuple[str, tuple[int, ...]]]
CASES: list[Case] = [
    *product([Deep, tied, frozen, again, again_within], [("data", (8,)), ("fsdp", (8,)), ("data x fsdp", (2, 4))])
]
MORE: list[Case] = [*product([Deep, tied], [("megatron", (8,)), ("fsdp x megatron-sp", (2, 4)), ("optimus", (2, 4))])]


@pytest.mark.parametrize("case", [*one_in(8, CASES), *one_in(5, MORE)])
def test_a_first_step_is_completed_to_the_second(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its collectives, with the seconds that they hide behind work, its waits, and its peak of memory."""
    make, (strategy, shape) = case
    with torch.device("meta"):
        model = make()
    ids = torch.zeros(16, 4, dtype=torch.long, device="meta")
    plan = plan_model(model, Mesh(shape, ("x", "y")[: len(shape)]), strategy, ids)
    completed, runs = list[bool](), LaterSteps.complete
    monkeypatch.setattr(LaterSteps, "complete", lambda steps: completed.append(runs(steps)) or completed[-1])

    first = StepPrices(model, (ids,), {}).run(plan)
    monkeypatch.setattr(LaterSteps, "complete", lambda steps: False)
    second = StepPrices(model, (ids,), {}).run(plan)

    assert completed == [True] or make is again_within
    assert [(slot.begin, slot.event.name, slot.event.nbytes) for slot in first.slots] == [
        (slot.begin, slot.event.name, slot.event.nbytes) for slot in second.slots
    ]
    assert first.cost == second.cost
    assert first.cost.hidden > 0 or case in MORE
