"""`compare` names the module in which a fault was planted, and none in models that are right."""

from __future__ import annotations

import json
import random
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.compared_models import CASES, MESHES, features, made
from helpers.planted_faults import FAULTS, model_with
from torch import Tensor, nn

import dshard
from dshard.compare import Comparison
from dshard.errors import ArgumentError, LayoutError, MeshError, StrategyError
from dshard.testing import RankPool
from dshard.tools.report import drawing_of

OFTEN = "dropout drawn twice"
"""The fault of the default suite."""


def mesh_of(*shape: int) -> Any:
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def findings(names: list[str], dtype: torch.dtype) -> list[Comparison]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh, x = mesh_of(4), features().to(dtype)
    return [dshard.compare(model_with(name).to(dtype), mesh, "data", x) for name in names]


def assert_found(ranks: RankPool, names: list[str], dtype: torch.dtype) -> list[Comparison]:
    results = ranks.run(findings, names, dtype, timeout=600.0)
    assert all(of_rank == results[0] for of_rank in results)  # every rank has the same report
    found = {name: (each.first, each.direction) for name, each in zip(names, results[0], strict=True)}
    assert found == {name: ("planted", FAULTS[name][2]) for name in names}
    return results[0]


@pytest.mark.ranks
def test_a_fault_is_found_where_it_was_planted(ranks: RankPool) -> None:
    (found,) = assert_found(ranks, [OFTEN], torch.float64)

    text, values = str(found), json.loads(found.json())
    assert text.startswith("Model laid out by data differs first in planted (Planted), output: off by ")
    assert {line.split()[1] for line in text.splitlines()[4:] if line[0] == "*"} == {"planted"}
    assert (values["first"], values["direction"], values["deviation"]["module"]) == ("planted", "output", "planted")
    assert [each["module"] for each in values["modules"]][:3] == ["", "before", "before.norm"]
    assert drawing_of(found) is not None
    assert "planted" in found._repr_html_()


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_each_fault_is_found_where_it_was_planted(ranks: RankPool, dtype: torch.dtype) -> None:
    assert_found(ranks, list(FAULTS), dtype)


def differing(names: list[str], strategies: list[str], dtype: torch.dtype) -> list[str]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = []
    for name in names:
        for strategy in strategies:
            model, args, kwargs = made(name, dtype)
            found = dshard.compare(model, mesh_of(*MESHES[strategy]), strategy, *args, **kwargs)
            if found.deviation is not None:
                out.append(found.head())
    return out


@pytest.mark.ranks
def test_none_is_found_in_models_that_are_right(ranks: RankPool) -> None:
    assert ranks.run(differing, ["convolutions"], ["megatron"], torch.bfloat16, timeout=600.0)[0] == []


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_none_is_found_in_any_model_that_is_right(ranks: RankPool, name: str, dtype: torch.dtype) -> None:
    assert ranks.run(differing, [name], list(MESHES), dtype, timeout=600.0)[0] == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.fc(x)))  # type: ignore[no-any-return]


class Undetermined(Net):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).count += 1
        return super().forward(x) * self.count


class Uncopied(Net):
    def __deepcopy__(self, memo: object) -> Net:
        raise TypeError("it holds a socket")


def state_of(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in (*model.parameters(), *model.buffers())]


def unchanged_and_refused() -> list[str]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mesh, x = mesh_of(4), torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = Net().eval()
    calls: list[object] = []
    model.register_forward_hook(lambda *given: calls.append(given[0]))
    model.fc.weight.grad = torch.ones(16, 16)
    before, copied = state_of(model), deepcopy(x)
    generators = torch.get_rng_state(), dshard.get_rng_state(), random.getstate()

    half, normed = dshard.parallel.Precision(torch.bfloat16, torch.float32), nn.Sequential(model.fc, nn.LayerNorm(16))
    assert dshard.compare(normed, mesh, "fsdp", x, precision=half).deviation is None
    assert dshard.compare(model, mesh, "data", x, loss=squares).deviation is None

    assert all(map(torch.equal, before, state_of(model)))
    assert torch.equal(model.fc.weight.grad, torch.ones(16, 16))
    assert torch.equal(x, copied)
    assert not model.training
    assert model not in calls  # copies ran
    assert len(model._forward_hooks) == 1
    assert not model.fc._forward_hooks
    now = torch.get_rng_state(), dshard.get_rng_state(), random.getstate()
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(generators, now, strict=True))

    lost = dshard.compare(model, mesh, lost_weights, x)
    assert (lost.first, lost.direction, lost.strategy) == ("fc", "output", "lost_weights")
    assert "value weight" in lost.head()
    scaled = dshard.compare(model, mesh, "data", x, loss=scaled_loss)
    assert (scaled.first, scaled.direction) == ("(loss)", "output")

    refused: list[tuple[type[Exception], Any]] = [
        (MeshError, lambda: dshard.compare(model, dshard.Mesh((2,), ("z",)), "data", x)),
        (MeshError, lambda: dshard.compare(model, "mesh", "data", x)),
        (StrategyError, lambda: dshard.compare(model, mesh, "no such", x)),
        (LayoutError, lambda: dshard.compare(model, mesh, "data")),
        (ArgumentError, lambda: dshard.compare(3, mesh, "data", x)),
        (ArgumentError, lambda: dshard.compare(Uncopied(), mesh, "data", x)),
        (ArgumentError, lambda: dshard.compare(Net().to("meta"), mesh, "data", x)),
        (ArgumentError, lambda: dshard.compare(model, mesh, "data", x, loss=3)),
        (ArgumentError, lambda: dshard.compare(model, mesh, "data", x, loss=lambda out: out)),
        (ArgumentError, lambda: dshard.compare(nn.Flatten(), mesh, "data", torch.ones(8, 4, dtype=torch.int64))),
        (ArgumentError, lambda: dshard.compare(Undetermined(), mesh, "data", x)),
        (ArgumentError, lambda: dshard.compare(model, mesh, lambda copy, mesh: nn.Sequential(copy), x)),
    ]
    messages = []
    for kind, call in refused:
        with pytest.raises(kind) as raised:
            call()
        messages.append(str(raised.value))
    return messages


def lost_weights(model: nn.Module, mesh: Any) -> nn.Module:
    model = dshard.parallelize(model, mesh, "fsdp", torch.ones(8, 16))
    with torch.no_grad():
        model.fc.weight.normal_()  # type: ignore[operator, union-attr]
    return model


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def scaled_loss(out: Tensor) -> Tensor:
    return squares(out) * (4 if isinstance(out, dshard.DTensor) else 1)


@pytest.mark.ranks
def test_the_model_is_unchanged_and_wrong_calls_are_refused(ranks: RankPool) -> None:
    messages = ranks.run(unchanged_and_refused, timeout=300.0)[0]
    assert "without a process here: call it on the ranks" in messages[0]
    for message, part in zip(
        messages[-8:],
        (
            "give an nn.Module",
            "Uncopied cannot be copied (it holds a socket): give it a __deepcopy__",
            "without data",
            "give a function of the model's output",
            "returns a floating-point tensor without dims",
            "the loss of a DTensor is 0: give loss=",
            "two passes of Undetermined alone differ in the model itself",
            "returned another module than it was given",
        ),
        strict=True,
    ):
        assert part in message
