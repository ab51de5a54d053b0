"""Projections to query, key and value as one layer whose result a view cuts: laid out in blocks, as if split."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn

from dshard import DTensor, Layout, Mesh, Replicate, Shard, StrategyError, Topology, parallelize, plan_model, trace
from dshard.parallel.strategies import StrategyName
from dshard.parallel.trace_step import record_step
from dshard.planning.plan_step import plan_step
from dshard.planning.step_tables import StepTables, Weights
from dshard.testing import simulated, whole

WIDTH, HEADS = 16, 4


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def permuted(x: Tensor, n: int) -> Tensor:
    """The parts of the features in front, as vision transformers have them."""
    return x.reshape(*x.shape[:2], n, HEADS, -1).permute(2, 0, 3, 1, 4)


def heads_first(x: Tensor, n: int) -> Sequence[Tensor]:
    return x.view(*x.shape[:2], HEADS, n, -1).permute(3, 0, 2, 1, 4).unbind(0)


def indexed(x: Tensor, n: int) -> Sequence[Tensor]:
    packed = permuted(x, n)
    return [packed[i] for i in range(n)]


def indexed_within(x: Tensor, n: int) -> Sequence[Tensor]:
    packed = x.unflatten(-1, (n, HEADS, -1))
    return [packed[:, :, i].transpose(1, 2) for i in range(n)]


UNPACKED: dict[str, Callable[[Tensor, int], Sequence[Tensor]]] = {
    "chunk": lambda x, n: [heads(part) for part in x.chunk(n, -1)],
    "unbind": lambda x, n: permuted(x, n).unbind(0),
    "indices": indexed,
    "indices within": indexed_within,
    "pieces": lambda x, n: [part.squeeze(2).transpose(1, 2) for part in x.unflatten(-1, (n, HEADS, -1)).chunk(n, 2)],
    "two views": lambda x, n: x.unflatten(-1, (n, -1)).unflatten(-1, (HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0),
    "rows of heads": lambda x, n: [y.transpose(1, 2) for y in x.unflatten(-1, (n * HEADS, -1)).split(HEADS, 2)],
    "rows cut again": lambda x, n: permuted(x.unflatten(-1, (n * HEADS, -1)).flatten(2), n).unbind(0),
    "heads first": heads_first,
}
"""Ways to take apart the result of a layer of n projections."""


class Attention(nn.Module):
    """Attention whose projections are packed in `sizes`: (3,), (1, 2), or (1, 1, 1) for a layer each."""

    def __init__(self, unpack: str = "unbind", sizes: Sequence[int] = (3,), width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.out, self.unpack, self.sizes = nn.LayerNorm(width), nn.Linear(width, width), unpack, sizes
        self.packed = nn.ModuleList([nn.Linear(width, n * width) for n in sizes])

    def forward(self, x: Tensor) -> Tensor:
        y, parts = self.norm(x), list[Tensor]()
        for n, layer in zip(self.sizes, self.packed, strict=True):
            made = layer(y)
            parts += [heads(made)] if n == 1 else UNPACKED[self.unpack](made, n)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        return x + self.out(mixed)  # type: ignore[no-any-return]


def model_of(unpack: str, sizes: Sequence[int]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Attention(unpack, sizes), Attention(unpack, sizes)).double()


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and gradients of the last of three steps, and the weights after it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    results = [each.detach() for each in (loss, *gradients, *model.parameters())]
    return [whole(each) if isinstance(each, DTensor) else each for each in results]


def sent(strategy: StrategyName, mesh: Mesh, model: nn.Module, x: Tensor) -> tuple[list[Tensor], Counter[str]]:
    with simulated(mesh), trace() as traced:
        results = trained(parallelize(copy.deepcopy(model), mesh, strategy, x), x)
    return results, Counter(event.collective for event in traced.events)


WAYS: list[tuple[StrategyName, Sequence[int]]]
WAYS = [*product(("megatron", "data x megatron", "megatron-sp"), ((3,), (1, 2)))]


@pytest.mark.parametrize(("unpack", "way"), one_way_each(UNPACKED, WAYS))
def test_packed_projections_train_as_on_one_device_and_send_what_separate_ones_send(
    unpack: str, way: tuple[StrategyName, Sequence[int]]
) -> None:
    strategy, sizes = way
    mesh = Mesh((2, 2), ("dp", "tp")) if strategy.startswith("data") else Mesh((4,), ("tp",))
    x, model = torch.randn(4, 6, WIDTH, dtype=torch.float64), model_of(unpack, sizes)

    plan = plan_model(model, mesh, strategy, x)
    results, counts = sent(strategy, mesh, model, x)

    for name, placements in plan.parameters.items():
        if "packed" in name:
            n = 1 if unpack == "heads first" else sizes[int(name.split(".")[2])]
            assert placements[-1] == Shard(0, blocks=n)
    torch.testing.assert_close(results, trained(model, x), rtol=1e-8, atol=1e-10)
    _, separate = sent(strategy, mesh, model_of(unpack, (1, 1, 1)), x)
    assert counts == separate


@pytest.mark.parametrize("unpack", UNPACKED)
def test_heads_are_counted_within_a_block(unpack: str) -> None:
    model, x = model_of(unpack, (3,)), torch.randn(4, 6, WIDTH, dtype=torch.float64)
    with pytest.raises(StrategyError, match=r"has 4 heads in dim 0, split over 8 ranks"):
        plan_model(model, Mesh((8,), ("tp",)), "megatron", x)


@pytest.mark.parametrize(("unpack", "mesh"), one_way_each(UNPACKED, [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y"))]))
def test_the_planner_of_steps_sends_for_packed_projections_what_it_does_for_separate_ones(
    unpack: str, mesh: Mesh
) -> None:
    """Of weights that lie as Megatron has them the planner shards the biases in blocks, too."""
    seconds = list[float]()
    for sizes in ((1, 1, 1), (3,), (1, 2)):
        with torch.device("meta"):
            steps = record_step(Attention(unpack, sizes, 1024), (torch.empty(1, 64, 1024),), {})
        tables = StepTables(steps.graph().copies(), mesh, Topology.preset("dgx-h100"))
        counts = [1 if unpack == "heads first" else n for n in sizes]
        pins = {f"packed.{i}.weight": Shard(0, blocks=n) for i, n in enumerate(counts)} | {"out.weight": Shard(1)}
        pinned = tables.pinned({name: Layout(mesh, (shard,) * mesh.ndim) for name, shard in pins.items()})
        plan = plan_step(pinned, Weights(beside=1e3))
        seconds.append(plan.parts.exposed)
        biases = {value.name: plan.parameters[value.number].blocks for value in tables.graph.parameters()}
        for i, n in enumerate(counts):
            assert biases[f"packed.{i}.bias"] == ({0: n} if n > 1 else {})
    assert seconds[1:] == pytest.approx(seconds[:1] * 2)


class JoinedBias(Attention):
    """Attention whose packed bias is joined of two and zeros, as BEiT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q_bias, self.v_bias = (nn.Parameter(torch.randn(WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        q, k, v = permuted(F.linear(self.norm(x), self.packed[0].weight, bias), 3).unbind(0)  # type: ignore[arg-type]
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


def test_a_layer_is_packed_whatever_its_bias_is_joined_of() -> None:
    torch.manual_seed(0)
    model, x, mesh = JoinedBias().double(), torch.randn(4, 6, WIDTH, dtype=torch.float64), Mesh((4,), ("tp",))
    assert plan_model(model, mesh, "megatron", x).parameters["packed.0.weight"] == (Shard(0, blocks=3),)

    results, counts = sent("megatron", mesh, model, x)

    torch.testing.assert_close(results, trained(model, x), rtol=1e-8, atol=1e-10)
    assert "all_to_all" not in counts  # the biases alone are gathered


class JoinedProjections(Attention):
    """Attention that joins separate projections for one scale, as for a convolution, and splits them again."""

    def __init__(self) -> None:
        super().__init__(sizes=(1, 1, 1))
        self.scale = nn.Parameter(torch.rand(3 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([layer(self.norm(x)) for layer in self.packed], -1) * self.scale
        mixed = F.scaled_dot_product_attention(*[heads(part) for part in joined.split(WIDTH, -1)])
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


@pytest.mark.parametrize("n", [2, 4])
def test_what_is_joined_and_split_again_is_packed_but_not_what_it_is_joined_of(n: int) -> None:
    """3 blocks of 16 features would not be of one size."""
    torch.manual_seed(0)
    model, x = JoinedProjections().double(), torch.randn(4, 6, WIDTH, dtype=torch.float64)
    plan = plan_model(model, Mesh((n,), ("tp",)), "megatron", x)
    assert plan.parameters["scale"] == (Shard(0, blocks=3),)
    assert {plan.parameters[f"packed.{i}.weight"] for i in range(3)} == {(Shard(0),)}

    results, _ = sent("megatron", Mesh((n,), ("tp",)), model, x)

    torch.testing.assert_close(results, trained(model, x), rtol=1e-8, atol=1e-10)


class HeadByHead(Attention):
    """Attention that takes heads apart, not projections, and joins their results."""

    def forward(self, x: Tensor) -> Tensor:
        made = [layer(self.norm(x)).unflatten(-1, (HEADS, -1)).unbind(2) for layer in self.packed]
        mixed = [F.scaled_dot_product_attention(*parts) for parts in zip(*made, strict=True)]
        return x + self.out(torch.cat(mixed, -1))  # type: ignore[no-any-return]


def test_heads_that_are_taken_apart_and_joined_are_no_blocks() -> None:
    """The blocks would be heads, and what is sharded their features, which each head sums over."""
    model, x = HeadByHead(sizes=(1, 1, 1)), torch.randn(4, 6, WIDTH)
    plan = plan_model(nn.Sequential(model, copy.deepcopy(model)), Mesh((4,), ("tp",)), "megatron", x)

    sharded = [placements for name, placements in plan.parameters.items() if "packed" in name]
    assert sharded == [(Shard(0),)] * 12
    assert plan.parameters["0.out.weight"][0] in (Replicate(), Shard(1))


class Modulated(nn.Module):
    """Blocks of a diffusion transformer: each adds a table of its own to shifts and scales that all of them share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 3 * WIDTH)
        self.tables = nn.ParameterList(torch.randn(3, WIDTH) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared(x.mean(1)).reshape(len(x), 3, -1)
        for table, up, down in zip(self.tables, self.ups, self.downs, strict=True):
            shift, scale, gate = (table[None] + shared).chunk(3, dim=1)
            x = x + gate * down(up(x * (1 + scale) + shift).relu())
        return x


def test_shifts_that_are_taken_apart_once_a_table_is_added_are_no_heads() -> None:
    """Of 3 heads 4 ranks would have none."""
    torch.manual_seed(0)
    model, x = Modulated().double(), torch.randn(4, 6, WIDTH, dtype=torch.float64)
    mesh = Mesh((4,), ("tp",))

    results, _ = sent("megatron", mesh, model, x)

    torch.testing.assert_close(results, trained(model, x), rtol=1e-8, atol=1e-10)
    assert plan_model(model, mesh, "megatron", x).parameters["shared.weight"] == (Replicate(),)
