"""A deep model is priced by a few of its blocks, as if all had run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, product

import pytest
import torch
from helpers.default_cases import one_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dshard import Mesh, Topology, plan_model, use_topology
from dshard.parallel.plan_values import Cost
from dshard.parallel.repeated_blocks import BlockLists, repeats_in
from dshard.parallel.step_price import _Case

WIDTH = 64
FEWEST = 5
"""The fewest repeats that count as such."""
BLOCKS = FEWEST + 1


@pytest.fixture(autouse=True)
def on_gpus() -> Iterator[None]:
    """Seconds of hosts with NVLink."""
    with use_topology(Topology.preset("dgx-h100")):
        yield


class Attention(nn.Module):
    """A block of attention, and a feed-forward part of its own width; it may be computed again in the backward pass."""

    def __init__(self, width: int = 4 * WIDTH, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.run, x, use_reentrant=False) if self.again else self.run(x)
        return out

    def run(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Deep(nn.Module):
    """BlockLists between an embedding and a head."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.table, self.blocks, self.head = nn.Embedding(96, WIDTH), nn.ModuleList(blocks), nn.Linear(WIDTH, 96)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.run(self.table(ids))).flatten(0, 1), ids.flatten())

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Gathering(Deep):
    """Takes what all blocks made."""

    def run(self, x: Tensor) -> Tensor:
        return torch.stack([x := block(x) for block in self.blocks]).sum(0)


class Counting(Deep):
    """Knows how many blocks it has."""

    def run(self, x: Tensor) -> Tensor:
        for i in range(BLOCKS):
            x = self.blocks[i](x)
        return x


def costs(model: nn.Module, mesh: Mesh, strategy: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Cost, Cost, list[int]]:
    """What a step is said to cost, what it costs if all blocks run, and how many blocks were run before."""
    ids, ran = torch.zeros(16, 32, dtype=torch.long, device="meta"), list[int]()
    run = _Case._run
    monkeypatch.setattr(_Case, "_run", lambda case, plan: ran.append(len(model.blocks)) or run(case, plan))  # type: ignore[arg-type, func-returns-value]
    cost = plan_model(model, mesh, strategy, ids).cost
    monkeypatch.setattr(BlockLists, "may_repeat", lambda blocks: False)
    return cost, plan_model(model, mesh, strategy, ids).cost, ran[:-1]


def alike() -> list[nn.Module]:
    """Equal blocks."""
    return [Attention() for _ in range(BLOCKS)]


def in_pairs() -> list[nn.Module]:
    """A block of its own, then several times two that differ."""
    return [Attention(WIDTH), *(Attention((2 + i % 2) * WIDTH) for i in range(2 * FEWEST))]


def every_other_again() -> list[nn.Module]:
    """Blocks that are made alike, of which every other is computed again in the backward pass."""
    return [Attention(again=bool(i % 2)) for i in range(2 * FEWEST)]


@pytest.mark.parametrize(
    ("shape", "strategy", "blocks"),
    [
        *product([(8,)], ["fsdp"], [in_pairs, every_other_again]),
        pytest.param((8,), "fsdp", alike, marks=pytest.mark.thorough),
        pytest.param((2, 4), "data x megatron-sp", in_pairs, marks=pytest.mark.thorough),
        ((8,), "data", alike),
    ],
)
def test_a_deep_model_costs_as_if_all_blocks_had_run(
    shape: tuple[int, ...], strategy: str, blocks: Callable[[], list[nn.Module]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("meta"):
        model = Deep(blocks())

    cost, whole, ran = costs(model, Mesh(shape, ("x", "y")[: len(shape)]), strategy, monkeypatch)

    assert min(ran) < len(model.blocks)
    assert len(model.blocks) == len(blocks())  # as before
    assert (cost.nbytes, cost.flops) == (whole.nbytes, whole.flops)
    held, expected = cost.memory, whole.memory
    assert (held.parameters, held.gradients, held.optimizer, held.activations) == (
        expected.parameters,
        expected.gradients,
        expected.optimizer,
        expected.activations,
    )
    if strategy != "data":
        assert held.peak == expected.peak
    assert cost.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert {(m.module, m.direction, m.collective) for m in cost.moves} == {
        (m.module, m.direction, m.collective) for m in whole.moves
    }


@pytest.mark.parametrize("kind", one_in(2, [Gathering, Counting]))
def test_a_model_that_needs_all_of_its_blocks_runs_them(kind: type[Deep], monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = kind(alike())

    cost, whole, ran = costs(model, Mesh((8,), ("x",)), "fsdp", monkeypatch)

    assert ran == [BLOCKS]
    assert cost == whole


def test_blocks_that_share_weights_do_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Deep(alike())
    for block in model.blocks[1:]:
        block.up = model.blocks[0].up

    cost, whole, ran = costs(model, Mesh((8,), ("x",)), "fsdp", monkeypatch)

    assert ran == [BLOCKS]
    assert cost == whole


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("aaaaa", [(0, 1, 5)]),
        ("aaaa", []),
        ("abcd", []),
        ("ababababab", [(0, 2, 5)]),
        ("zaaaaazbbbbb", [(1, 1, 5), (7, 1, 5)]),
        ([next(c) for c in [count()] * 9], []),
    ],
)
def test_repeats_are_units_next_to_each_other(keys: str, expected: list[tuple[int, int, int]]) -> None:
    assert [(each.first, each.period, each.times) for each in repeats_in("", keys)] == expected
