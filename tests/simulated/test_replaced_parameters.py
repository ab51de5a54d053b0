"""Who holds a parameter from before `parallelize` goes on with the distributed one, as on one device."""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from helpers.kept_parameters import SIMULATED, X, build
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dshard import ArgumentError, DTensor, Mesh, parallelize
from dshard.testing import simulated, whole

PLANS = {
    "fsdp": Mesh((3,), ("x",)),
    "data": Mesh((2,), ("x",)),
    "megatron": Mesh((2,), ("x",)),
    "fsdp x megatron": Mesh((2, 2), ("x", "y")),
}
DEFAULT = list(zip(SIMULATED, cycle(PLANS), strict=False))
ALL = [(name, plan) for name in SIMULATED for plan in PLANS]


@pytest.mark.parametrize(
    ("name", "plan"),
    [*DEFAULT, *(pytest.param(*each, marks=pytest.mark.thorough) for each in ALL if each not in DEFAULT)],
)
def test_parameters_from_before_are_those_of_one_device(name: str, plan: str) -> None:
    model = build()
    alone = [x.detach().clone() for x in SIMULATED[name](model, lambda: None)]

    with simulated(PLANS[plan]):
        model = build()
        out = SIMULATED[name](model, lambda: parallelize(model, PLANS[plan], plan, X))
        results = [whole(x) if isinstance(x, DTensor) else x for x in out]

    torch.testing.assert_close([x.detach() for x in results], alone)


def test_the_memory_of_a_replaced_parameter_is_free() -> None:
    model, mesh = nn.Linear(5, 7), Mesh((2,), ("x",))
    kept, storage = list(model.parameters()), StorageWeakRef(model.weight.untyped_storage())

    with simulated(mesh):
        parallelize(model, mesh, "fsdp", torch.ones(2, 5))

        assert storage.expired()
        assert kept[0].shape == (7, 5)


def test_a_graph_from_before_is_refused() -> None:
    model, mesh = nn.Linear(5, 7), Mesh((2,), ("x",))
    model.weight.requires_grad_(False)
    x = torch.ones(2, 5, requires_grad=True)
    by_bias, by_weight = (2 * model.bias).sum(), F.linear(x, model.weight).sum()

    with simulated(mesh):
        parallelize(model, mesh, "data", torch.ones(2, 5))

    with pytest.raises(ArgumentError, match="graph recorded before bias was laid out"):
        by_bias.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        by_weight.backward()
    assert x.grad is None


def test_two_models_that_share_a_parameter_are_laid_out_one_after_the_other() -> None:
    first, second, mesh = nn.Linear(5, 7), nn.Linear(5, 7), Mesh((2,), ("x",))
    second.weight, x = first.weight, torch.ones(2, 5)

    with simulated(mesh):
        parallelize(first, mesh, "fsdp", x)
        parallelize(second, mesh, "fsdp", x)
        (first(x).sum() + 2 * second(x).sum()).backward()

        assert second.weight is first.weight
        grad: Tensor = first.weight.grad  # type: ignore[assignment]
        assert whole(grad).eq(6).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("plan", ["data", "fsdp", "megatron"])
def test_a_model_made_on_simulated_ranks_is_copied_with_the_attributes_of_its_parameters(plan: str) -> None:
    mesh = PLANS[plan]

    with simulated(mesh):
        model = nn.Linear(6, 7)
        model.weight.mark = "set"  # type: ignore[assignment]
        parallelize(model, mesh, plan, torch.ones(6, 6))
        copied = copy.deepcopy(model)

        assert copied.weight.mark == "set"
        assert torch.equal(whole(copied.weight), whole(model.weight))
