"""Names of other libraries, tried here, are answered by what to write; names of this library stay what they are."""

from __future__ import annotations

import pkgutil

import pytest
import torch
from torch import nn

import dshard
import dshard.testing
from dshard import Mesh, StrategyError, plan_model
from dshard.foreign_names import line_for
from dshard.parallel.strategies import STRATEGIES

TRIED = {
    "data": "ddp DDP dp DataParallel distributed_data_parallel",
    "fsdp": "fsdp2 FSDP2 fully_shard zero1 zero2 zero3 ZeRO-3 FullyShardedDataParallel",
    "data x fsdp": "hsdp hybrid_shard",
    "megatron": "tp tensor_parallel",
    "megatron-sp": "sp sequence_parallel",
    "context": "cp context_parallel",
    "expert": "ep expert_parallel",
}
PAIRS = [(name, strategy) for strategy, names in TRIED.items() for name in names.split()]


@pytest.mark.parametrize(("name", "strategy"), PAIRS)
def test_a_strategy_of_another_library_is_answered_by_the_line_to_write(name: str, strategy: str) -> None:
    model, mesh, x = nn.Linear(8, 8), Mesh((2, 2)), torch.randn(2, 4, 8)

    with pytest.raises(StrategyError, match=rf'called {name!r}: write parallelize\(model, mesh, "{strategy}", batch\)'):
        plan_model(model, mesh, name, x)
    assert all(part in STRATEGIES for part in strategy.split(" x "))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("pp", "dshard.pipeline.Pipeline"),
        ("data x megatorn", "did you mean 'megatron'"),
        ("fancy", "'fancy'; there are data, fsdp"),
    ],
)
def test_what_no_strategy_does_is_answered_too(name: str, hint: str) -> None:
    with pytest.raises(StrategyError, match=hint):
        plan_model(nn.Linear(8, 8), Mesh((2, 2)), name, torch.randn(2, 8))


@pytest.mark.parametrize("name", ["fully_shard", "FSDP", "DDP", "DistributedDataParallel", "fsdp2"])
def test_an_attribute_of_another_library_is_answered_where_it_is_asked_for(name: str) -> None:
    assert not hasattr(dshard, name)
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}: write parallelize\(model, mesh, "):
        getattr(dshard, name)
    with pytest.raises(ImportError, match=rf"{name!r}: write parallelize"):
        exec(f"from dshard import {name}")


def test_no_module_of_this_library_is_mistaken_for_another() -> None:
    """A module is asked for as an attribute before it is imported: `from dshard import pipeline`."""
    modules = [module.name for module in pkgutil.iter_modules(dshard.__path__)]

    assert not [name for name in (*dshard.__all__, *modules) if line_for(name)]


def test_the_generators_of_tests_are_listed() -> None:
    assert {*dshard.testing.__all__} <= {*dir(dshard.testing)}
