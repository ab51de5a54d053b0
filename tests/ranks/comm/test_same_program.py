"""Ranks that are not one program are told: other draws of a model's own code, other hashes, other versions."""

from __future__ import annotations

import copy
import os
import random
import warnings
from functools import cache
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import dshard
from dshard import LayoutError, parallelize
from dshard.parallel import same_program
from dshard.testing import RankPool


class Net(nn.Module):
    """A layer of which the model's own code draws half of the factors."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.draws = draws
        self.double()

    def forward(self, x: Tensor) -> Any:
        match self.draws if self.training else "nothing":
            case "torch":
                factor = float(torch.rand([], device="cpu") < 0.5)
            case "torch's tensor":
                x, factor = x[torch.randperm(len(x))], 1.0
            case "Python":
                factor = float(random.random() < 0.5)
            case "numpy":
                factor = float(numpy.random.rand() < 0.5)
            case _:
                factor = 1.0
        return self.second(torch.tanh(self.first(x)) * (1 + factor))


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def batch(rows: int = 8) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


NAMES = {"torch": "torch.manual_seed", "torch's tensor": "torch.manual_seed", "Python": "random.seed", "numpy": "numpy"}
PLANS = ("data", "fsdp", "megatron")


def draw_by_rank(draws: str) -> list[str]:
    """Plans under which a model that draws by seeds of the ranks is not refused, or goes on otherwise than alone."""
    rank, x, wrong = torch.distributed.get_rank(), batch(), []
    for plan in PLANS:
        model, alone = Net(draws), Net(draws)
        parallelize(model, mesh_of((4,)), plan, x)
        seed(100 + rank)
        try:
            model(x)
            wrong.append(plan)
        except LayoutError as error:
            if NAMES[draws] not in str(error) or "ranks [0] and ranks [1]" not in str(error):
                wrong.append(f"{plan}: {error}")
        fresh = copy.deepcopy(alone)
        parallelize(fresh, mesh_of((4,)), plan, x)
        seed(7)
        got = fresh(x).full_tensor()
        seed(7)
        if not torch.allclose(got, alone(x), atol=1e-12):
            wrong.append(f"{plan}: other values")
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("draws", NAMES)
def test_a_model_that_draws_by_seeds_of_the_ranks_is_refused(ranks: RankPool, draws: str) -> None:
    assert ranks.run(draw_by_rank, draws) == [[]] * 4


def draw_nothing() -> list[str]:
    """Models that draw nothing, or not in inference, beside generators that differ; then one that does in training."""
    rank, x, wrong = torch.distributed.get_rank(), batch(), []
    model, alone = Net("Python"), Net("Python").eval()
    parallelize(model, mesh_of((2, 2)), "data x megatron", x)
    seed(rank)
    model.eval()
    if not all(torch.allclose(model(x).full_tensor(), alone(x), atol=1e-12) for _ in range(5)):
        wrong.append("inference")
    model.train()
    try:
        model(x)
        wrong.append("training")
    except LayoutError:
        pass
    return wrong


@pytest.mark.ranks
def test_generators_that_differ_are_no_error_before_a_model_draws(ranks: RankPool) -> None:
    assert ranks.run(draw_nothing) == [[]] * 4


def draw_by_data_rank() -> list[str]:
    """Rows of each data rank, of which each draws alone; the ranks of one data rank must draw alike."""
    rank, wrong = torch.distributed.get_rank(), []
    x = batch()
    for draws in ("torch", "Python", "numpy"):
        for plan, shape in (("data", (4,)), ("data x megatron", (2, 2))):
            model = Net(draws)
            parallelize(model, mesh_of(shape), plan, x, inputs="per-data-rank")
            n, own = dshard.data_ranks(model)
            rows = x.chunk(n)[own]
            seed(own)
            for _ in range(4):
                factor = 2.0 if (seed_and_draw := copied_draw(draws)) else 1.0
                got = model(rows).full_tensor().chunk(n)[own]
                if not torch.allclose(got, Net("").second(torch.tanh(Net("").first(rows)) * factor), atol=1e-12):
                    wrong.append(f"{draws}, {plan}, {seed_and_draw}")
    model = Net("numpy")
    parallelize(model, mesh_of((2, 2)), "data x megatron", x, inputs="per-data-rank")
    seed(rank)
    try:
        model(x.chunk(2)[rank // 2])
        wrong.append("other draws in one data rank")
    except LayoutError as error:
        if "ranks of one data rank" not in str(error):
            wrong.append(str(error))
    return wrong


def copied_draw(draws: str) -> bool:
    """Whether the next draw doubles the factor, without drawing it."""
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    make = {"torch": lambda: torch.rand([]), "Python": random.random, "numpy": numpy.random.rand}[draws]
    out = float(make()) < 0.5
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])
    return out


def models_seeded_apart(seeds_apart: bool) -> list[str]:
    """The warnings of a model whose parameters each rank draws by a seed of its own, or by one."""
    torch.manual_seed(torch.distributed.get_rank() // 2 if seeds_apart else 0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2)).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallelize(model, mesh_of((4,)), "data", batch())
    return [str(each.message) for each in caught]


@pytest.mark.ranks
def test_ranks_that_made_other_parameters_are_told(ranks: RankPool) -> None:
    (message,), *others = ranks.run(models_seeded_apart, True)

    assert message.startswith("ranks [0, 1] and ranks [2, 3] give parallelize other parameters")
    assert "call torch.manual_seed with one seed on all ranks" in message
    assert others == [[]] * 3
    assert ranks.run(models_seeded_apart, False) == [[]] * 4


def refused_models() -> list[str]:
    """What is said of models that rank 1 makes otherwise: in another order, dtype or class, or partly frozen."""
    texts = []
    for change in ("nothing", "order", "dtype", "class", "frozen"):
        torch.manual_seed(0)
        parts = {"a": nn.Linear(8, 8), "b": nn.Tanh(), "c": nn.Linear(8, 8)}
        if torch.distributed.get_rank() == 1:
            match change:
                case "order":  # that of the registration, not that of the calls
                    parts = {name: parts[name] for name in "cba"}
                case "dtype":
                    parts["a"].half()
                case "class":
                    parts["b"] = nn.Sigmoid()
                case "frozen":
                    parts["c"].requires_grad_(False)
        model = nn.ModuleDict(parts)
        model.forward = lambda x, of=parts: of["c"](of["b"](of["a"](x.to(of["a"].weight.dtype)).float()))
        try:
            parallelize(model, mesh_of((4,)), "data", batch().float())
            texts.append("taken")
        except LayoutError as error:
            texts.append(str(error))
    return texts


@pytest.mark.ranks
def test_ranks_that_made_other_models_are_refused(ranks: RankPool) -> None:
    taken, *refused = ranks.run(refused_models)[1]

    assert taken == "taken"
    for text in refused:
        assert text.startswith("ranks [0, 2, 3] and ranks [1] give parallelize models whose modules"), text
        assert "make the same model on all ranks" in text


@pytest.mark.ranks
def test_each_data_rank_may_draw_its_own(ranks: RankPool) -> None:
    assert ranks.run(draw_by_data_rank) == [[]] * 4


def seeded_alike(inputs: str) -> tuple[float, float]:
    seed(torch.distributed.get_rank())
    parallelize(Net(""), mesh_of((2, 2)), "data x megatron", batch(), inputs=inputs, seed_alike=True)
    return random.random(), float(numpy.random.rand())


@pytest.mark.ranks
def test_ranks_are_seeded_alike_if_asked(ranks: RankPool) -> None:
    assert len({*ranks.run(seeded_alike, "global")}) == 1
    a, b, c, d = ranks.run(seeded_alike, "per-data-rank")
    assert a == b != c == d


def warned_of(name: str) -> list[str]:
    """The warnings of `parallelize` where ranks have another `hash`, or another version."""
    rank = torch.distributed.get_rank()
    before = vars(same_program).get(name)
    setattr(same_program, name, (lambda text: rank) if name == "hash" else f"0.{rank // 2}")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            parallelize(Net(""), mesh_of((4,)), "data", batch())
    finally:
        if before is None:
            delattr(same_program, name)
        else:
            setattr(same_program, name, before)
    return [str(each.message) for each in caught]


@pytest.mark.ranks
def test_ranks_of_other_hashes_and_versions_are_told(ranks: RankPool) -> None:
    (hashes,), *others = ranks.run(warned_of, "hash")
    assert "PYTHONHASHSEED=0" in hashes
    assert others == [[]] * 3  # the first rank says it
    (versions,), *_ = ranks.run(warned_of, "__version__")
    assert "ranks [0, 1] and ranks [2, 3] run other versions" in versions
    assert ranks.run(warned_of, "unused") == [[]] * 4


@pytest.mark.ranks
def test_ranks_that_are_started_here_have_one_hash(ranks: RankPool) -> None:
    given = os.environ.get("PYTHONHASHSEED", "0")

    assert ranks.run(os.getenv, "PYTHONHASHSEED") == [given] * 4
    assert len({*ranks.run(hash, "a text")}) == 1
