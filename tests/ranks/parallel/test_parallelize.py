"""Whole models under every strategy equal single-device torch: logits, all gradients, and twenty steps of AdamW."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in
from helpers.demo_model import demo_plan, images
from helpers.real_models import FAMILIES, InDouble, alone, batch_of, build, train, weights_for
from torch import Tensor, nn

import dshard
from dshard import ArgumentError, LayoutError, Mesh, Replicate, Shard, distribute_tensor, trace
from dshard.comm import plain
from dshard.comm.rank_tensors import per_rank
from dshard.parallel import parallelize
from dshard.testing import RankPool, rank_pool, simulated, whole
from dshard.tools.demo.vit import build as build_demo

MESHES = {
    "data": Mesh((4,), ("dp",)),
    "megatron": Mesh((2, 2), ("dp", "tp")),
    "megatron-sp": Mesh((2, 2), ("dp", "tp")),
    "optimus": Mesh((2, 2), ("r", "c")),
    "tesseract": Mesh((2, 2, 1), ("d", "r", "c")),
    "atp": Mesh((2, 2), ("d1", "d2")),
    "fsdp": Mesh((4,), ("x",)),
    "context": Mesh((2, 2), ("dp", "cp")),
    "ulysses": Mesh((2, 2), ("dp", "cp")),
    "auto": Mesh((4,), ("x",)),
}
EIGHT = {
    "data": Mesh((8,), ("dp",)),
    "megatron": Mesh((2, 4), ("dp", "tp")),
    "megatron-sp": Mesh((2, 4), ("dp", "tp")),
    "optimus": Mesh((2, 2, 2), ("dp", "r", "c")),
    "tesseract": Mesh((2, 2, 2), ("d", "r", "c")),
    "atp": Mesh((2, 2, 2), ("dp", "d1", "d2")),
    "fsdp": Mesh((8,), ("x",)),
    "context": Mesh((2, 4), ("dp", "cp")),
    "ulysses": Mesh((2, 4), ("dp", "cp")),
    "auto": Mesh((8,), ("x",)),
}
ALL = [(family, strategy) for family in FAMILIES for strategy in MESHES]
SAMPLE = [
    ("gpt2", "megatron"),
    ("llama", "context"),
    ("vit", "fsdp"),
]
TOLERANCE = 1e-9

single = cache(alone)


def errors(
    family: str, strategy: Any, mesh: Any, expected: tuple[Tensor, dict[str, Tensor | None]]
) -> dict[str, float]:
    """How far logits and each gradient are from those of one device."""
    with plain():
        model = build(family)
    parallelize(model, mesh, strategy, **batch_of(family))
    with InDouble():
        logits = model(**batch_of(family)).logits
        weights = distribute_tensor(weights_for(logits), logits.device_mesh, src_data_rank=None)  # auto unfolds meshes
        (logits * weights).sum().backward()
    right, grads = expected
    found = {"logits": (whole(logits.detach()) - right).abs().max().item()}
    for name, parameter in model.named_parameters():
        theirs = grads[name]
        assert (parameter.grad is None) == (theirs is None), name
        if theirs is not None:
            found[name] = (whole(parameter.grad) - theirs).abs().max().item()
    return found


@pytest.mark.parametrize(
    ("family", "strategy"), [pytest.param(*c, marks=() if c in SAMPLE else pytest.mark.thorough) for c in ALL]
)
def test_a_model_under_a_strategy_equals_one_device(family: str, strategy: str) -> None:
    mesh = MESHES[strategy]
    with simulated(mesh):
        found = errors(family, strategy, mesh, single(family))

    worst = max(found, key=found.__getitem__)
    assert found[worst] < TOLERANCE, worst


def on_ranks(family: str, strategy: str, mesh: Mesh) -> dict[str, float]:
    made = dshard.init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.names)
    return errors(family, strategy, made, alone(family))


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("n_ranks", [4, 8])
@pytest.mark.parametrize(("family", "strategy"), ALL)
def test_the_same_on_real_ranks(family: str, strategy: str, n_ranks: int) -> None:
    mesh = (MESHES if n_ranks == 4 else EIGHT)[strategy]
    pool = rank_pool(n_ranks)
    pool.timeout = 300  # with "auto" each of the ranks, which share cores, searches for the plan
    for found in pool.run(on_ranks, family, strategy, mesh):
        assert max(found.values()) < TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "strategy"), ALL)
def test_twenty_steps_of_adamw(family: str, strategy: str) -> None:
    mesh = MESHES[strategy]
    expected, model = train(build(family), family, 20), build(family)
    with simulated(mesh):
        parallelize(model, mesh, strategy, **batch_of(family))
        found = train(model, family, 20)

    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-6


def demo_on_ranks(strategy: str, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[float, float, int]:
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=names)
    alone, model = build_demo(0, torch.float64), build_demo(0, torch.float64)
    expected = alone(images())
    expected.square().mean().backward()
    parallelize(model, mesh, strategy, images())
    found = model(images())
    found.square().mean().backward()
    gradients = [
        (whole(mine.grad) - theirs.grad).abs().max().item()
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True)
    ]
    split = sum(any(p != Replicate() for p in parameter.placements) for parameter in model.parameters())
    return (whole(found.detach()) - expected).abs().max().item(), max(gradients), split


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", one_in(4, ["optimus", "megatron", "fsdp x megatron-sp", "atp"]))
def test_a_plain_module_on_real_ranks(ranks: RankPool, strategy: str) -> None:
    for error, gradient, split in ranks.run(demo_on_ranks, strategy, (2, 2), ("a", "b")):
        assert error < TOLERANCE
        assert gradient < TOLERANCE
        assert split > 10


def test_roles_are_found_by_what_the_forward_pass_does() -> None:
    plan = demo_plan("megatron", Mesh((4,), ("tp",)))

    assert {name.rpartition("0.")[2]: p for name, (p,) in plan.parameters.items() if "blocks.0" in name} == {
        "norm1.weight": Replicate(),
        "norm1.bias": Replicate(),
        "attention.qkv.weight": Shard(0),
        "attention.qkv.bias": Shard(0),
        "attention.out.weight": Shard(1),
        "attention.out.bias": Replicate(),
        "norm2.weight": Replicate(),
        "norm2.bias": Replicate(),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
        "down.bias": Replicate(),
    }


def test_a_plan_tells_what_each_module_sends() -> None:
    plan = demo_plan("megatron", Mesh((4,), ("tp",)))
    text = str(plan)

    assert "blocks.0-1.down (x2)" in text
    assert "all_reduce tp" in text
    assert plan.cost is not None
    assert plan.cost.nbytes == sum(move.nbytes for move in plan.cost.moves) > 0


def counted(strategy: str, shape: tuple[int, ...], names: tuple[str, ...]) -> list[int]:
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = parallelize(build_demo(0), mesh, strategy, images().float())
    with trace() as sent:
        out = model(images().float())
        torch.autograd.backward([out], [torch.empty_like(out)])
    return [event.nbytes for event in sent.events]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", one_in(3, ["megatron-sp", "optimus", "fsdp"]))
def test_planned_bytes_are_counted_bytes(ranks: RankPool, strategy: str) -> None:
    planned = demo_plan(strategy, Mesh((2, 2), ("a", "b")))

    assert planned.cost is not None
    of_ranks = ranks.run(counted, strategy, (2, 2), ("a", "b"))
    assert sum(map(max, zip(*of_ranks, strict=True))) == planned.cost.nbytes, "those of each collective's busiest rank"


def test_a_plan_is_a_value_that_parallelize_runs() -> None:
    mesh = Mesh((2, 2), ("r", "c"))
    plan = demo_plan("optimus", mesh)
    with simulated(mesh):
        model = parallelize(build_demo(0), mesh, plan)

        assert {name: p.placements for name, p in model.named_parameters()} == plan.parameters


def test_a_plan_is_the_same_where_ranks_are_simulated() -> None:
    mesh = Mesh((2, 2), ("a", "b"))
    alone = demo_plan("megatron-sp", mesh)
    with simulated(mesh):
        assert demo_plan("megatron-sp", mesh) == alone


def test_parameters_are_placed_by_name() -> None:
    mesh = Mesh((4,), ("tp",))
    model = build_demo(0)
    expected = model(images().float())
    with simulated(mesh):
        parallelize(model, mesh, {"*.up.*": [Shard(0)], "*.down.weight": [Shard(1)]})

        assert model.blocks[0].up.weight.placements == (Shard(0),)
        assert model.blocks[0].norm1.weight.placements == (Replicate(),)
        torch.testing.assert_close(whole(model(images().float()).detach()), expected.detach())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + torch.arange(8.0, dtype=self.table.weight.dtype)
        return self.head(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize("strategy", one_in(3, ["megatron", "optimus", "atp"]))
def test_tied_weights_stay_one_and_their_gradients_add_up(strategy: str) -> None:
    mesh, tokens = Mesh((2, 2), ("a", "b")), torch.arange(12).view(4, 3)
    torch.manual_seed(0)
    alone = Tied().double()
    alone(tokens).square().sum().backward()
    torch.manual_seed(0)
    model = Tied().double()
    with simulated(mesh):
        parallelize(model, mesh, strategy, tokens)
        model(tokens).square().sum().backward()

        assert model.head.weight is model.table.weight
        torch.testing.assert_close(whole(model.table.weight.grad), alone.table.weight.grad, rtol=1e-9, atol=1e-9)


def test_plain_tensors_that_ranks_do_not_share_are_refused_outside_the_model() -> None:
    mesh, model = Mesh((2,), ("tp",)), Tied()
    with simulated(mesh):
        parallelize(model, mesh, "megatron", torch.arange(4).view(2, 2))
        out = model(torch.arange(4).view(2, 2))
        with pytest.raises(dshard.MixedError, match="a plain torch"):
            out + per_rank(mesh, lambda rank: torch.full((32,), rank))


class FailsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.fails = nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("on purpose")
        return self.fc(x) + torch.ones(4)


def test_a_forward_pass_that_fails_leaves_nothing_behind() -> None:
    mesh, x, model = Mesh((2,), ("tp",)), torch.ones(2, 4), FailsOnce()
    with simulated(mesh):
        parallelize(model, mesh, "data", x)
        model.fails = True
        with pytest.raises(KeyError):
            model(x)
        model.fails = False
        out = model(x)
        with pytest.raises(dshard.MixedError):
            out + per_rank(mesh, lambda rank: torch.full((4,), rank))


# -- twice


def test_a_model_is_laid_out_once() -> None:
    model, mesh = nn.Linear(4, 4), Mesh((2,), ("x",))
    with simulated(mesh):
        parallelize(model, mesh, "data", torch.ones(2, 4))
        with pytest.raises(ArgumentError, match=r"Linear is laid out by parallelize already \('data'\): give"):
            parallelize(model, mesh, "fsdp", torch.ones(2, 4))


# -- without data


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(10, 6), nn.Linear(6, 20), nn.Linear(20, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.norm(x + self.down(self.up(x).relu()))


@pytest.mark.parametrize(
    ("strategy", "mesh"), [("megatron", Mesh((4,), ("t",))), ("optimus", Mesh((2, 3), ("r", "c")))]
)
def test_a_model_without_data_gets_the_same_values_on_every_mesh(strategy: str, mesh: Mesh) -> None:
    values = []
    for name, on in (("data", Mesh((1,), ("x",))), (strategy, mesh)):
        with torch.device("meta"):
            model = Small()
        with simulated(on):
            dshard.manual_seed(5)
            parallelize(model, on, name, torch.zeros(2, 3, dtype=torch.long))
            values.append({own: whole(p.detach()) for own, p in model.named_parameters()})

    assert all(torch.equal(values[0][own], values[1][own]) for own in values[0])
    assert values[0]["up.weight"].std() > 0.1


def test_a_parameter_without_data_that_nothing_sets() -> None:
    with torch.device("meta"):
        model = build_demo(0)
    mesh = Mesh((2,), ("tp",))
    with simulated(mesh), pytest.raises(LayoutError, match="without data that no module set: position"):
        parallelize(model, mesh, "megatron", images())


class Solved(nn.Module):
    """A layer whose results solve a problem that torch does not solve without data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.lstsq(self.linear.weight, self.linear(x).t()).solution


def planned_in_vain() -> None:
    mesh, x = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.ones(6, 4)
    for _ in range(2):  # the ranks are in step after it
        with pytest.raises(LayoutError, match=r"a step of Solved does not run without data .*the name of a strategy"):
            parallelize(Solved(), mesh, "auto", x)
    out = parallelize(Solved(), mesh, "data", x)(x)
    assert out.full_tensor().shape == (4, 6)


@pytest.mark.ranks
def test_a_plan_that_the_first_rank_does_not_find_is_the_error_of_all(ranks: RankPool) -> None:
    ranks.run(planned_in_vain)


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_hugging_face_without_data(family: str) -> None:
    mesh = MESHES["megatron"]
    with torch.device("meta"):
        model = build(family)
    with simulated(mesh):
        dshard.manual_seed(5)
        parallelize(model, mesh, "megatron", **batch_of(family))
        with InDouble():
            logits = model(**batch_of(family)).logits

    assert whole(logits.detach()).isfinite().all()
