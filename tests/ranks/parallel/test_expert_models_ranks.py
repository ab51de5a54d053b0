"""Unmodified models with experts train on real ranks as on one device, and go from one layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.expert_models import FAMILIES, OwnExperts, OwnModel, batch, expert_model, parallelized, trained

import dshard
from dshard import DTensor
from dshard.checkpoint import load, save
from dshard.parallel import register_experts
from dshard.testing import RankPool, rank_pool, whole
from dshard.topology import BYTES

STRATEGIES = ("data", "fsdp", "megatron", "expert", "fsdp x expert", "data x expert", "expert x megatron")
FITTING = {4: STRATEGIES, 8: tuple(each for each in STRATEGIES if each != "megatron")}
"""Strategies by the number of ranks: eight would not all have one of four heads."""
IMPLEMENTATIONS = (None, "eager", "batched_mm", "grouped_mm")


def mesh_of(strategy: str) -> Any:
    ranks = torch.distributed.get_world_size()
    shape = (ranks,) if " x " not in strategy else (ranks // 2, 2)
    return dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])


def wrong(family: str, implementation: str | None, strategies: tuple[str, ...], steps: int) -> list[str]:
    """What differs from one device, where bytes are all that counts, so that experts rather stay than move."""
    torch.set_num_threads(1)
    found = []
    expected = trained(expert_model(family, implementation), steps)
    for strategy in strategies:
        with dshard.use_topology(BYTES):
            model = parallelized(expert_model(family, implementation), mesh_of(strategy), strategy)
            error = trained(model, steps).differs(expected)
        if not error < 1e-4:
            found.append(f"{strategy}: {error}")
    return found


def own_gradients() -> None:
    torch.set_num_threads(1)
    register_experts(OwnExperts, "e f d, e d f, e f d", counts=["count"])
    alone, x = OwnModel(), torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    alone(x).backward()
    with dshard.use_topology(BYTES):
        for strategy in ("expert", "fsdp x expert", "expert x megatron"):
            model = dshard.parallelize(OwnModel(), mesh_of(strategy), strategy, x)
            for _ in range(3):  # recorded, and answered from the record
                model.zero_grad()
                model(x).backward()
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=f"{strategy} {name}")


@pytest.mark.ranks
def test_gradients_are_those_of_one_device(ranks: RankPool) -> None:
    ranks.run(own_gradients)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("size", [4, 8])  # of these twice as many as there are experts, and as rows of a batch
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_models_train_as_on_one_device(family: str, implementation: str | None, size: int) -> None:
    assert rank_pool(size).run(wrong, family, implementation, FITTING[size], 10, timeout=280) == [[]] * size


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_models_train_by_the_cheapest_plan(ranks: RankPool, family: str) -> None:
    assert ranks.run(wrong, family, "eager", ("auto",), 3, timeout=280) == [[]] * 4


def saved_and_loaded(folder: str, family: str, strategies: tuple[str, ...]) -> None:
    """Checkpoints of each strategy, and files of transformers, come to each strategy and to one device unchanged."""
    torch.set_num_threads(1)
    alone = expert_model(family)
    expected = {name: x.clone() for name, x in alone.state_dict().items()}
    targets = {"one device": expert_model(family, seed=1)}
    for source in strategies:
        model = targets[source] = parallelized(expert_model(family), mesh_of(source), source)
        save(model.state_dict(), f"{folder}/{source}")
        model.save_pretrained(f"{folder}/{source}.transformers")
        again = type(alone).from_pretrained(f"{folder}/{source}.transformers")
        assert [name for name, x in again.state_dict().items() if not torch.equal(x, expected[name])] == [], source
    for target, model in targets.items():
        for source in strategies:
            state = model.state_dict()
            with torch.no_grad():
                for x in state.values():
                    x.zero_()
            load(state, f"{folder}/{source}")
            for name, x in model.state_dict().items():
                assert torch.equal(whole(x) if isinstance(x, DTensor) else x, expected[name]), (source, target, name)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_experts_goes_from_each_strategy_to_each(family: str, size: int, tmp_path: Path) -> None:
    rank_pool(size).run(saved_and_loaded, str(tmp_path), family, FITTING[size], timeout=300)


def generated(strategies: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    tokens = batch()["input_ids"]
    expected = expert_model("qwen3-moe").eval().generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
    for strategy in strategies:
        model = parallelized(expert_model("qwen3-moe"), mesh_of(strategy), strategy).eval()
        found = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, expected), strategy


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_model_with_experts_generates_as_on_one_device(ranks: RankPool) -> None:
    ranks.run(generated, ("expert", "expert x megatron"), timeout=300)


def compiled(strategies: tuple[str, ...]) -> list[float]:
    """How far steps of a compiled model are from those of one device."""
    torch.set_num_threads(1)
    expected = trained(expert_model("mixtral", output_router_logits=False))
    found = []
    for strategy in strategies:
        model = parallelized(expert_model("mixtral", output_router_logits=False), mesh_of(strategy), strategy)
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        found.append(max(float(abs(a - b)) for a, b in zip(trained(graph).losses, expected.losses, strict=True)))
    return found


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_compiled_model_trains_as_on_one_device(ranks: RankPool) -> None:
    assert max(map(max, ranks.run(compiled, ("expert", "megatron"), timeout=300))) < 1e-4
