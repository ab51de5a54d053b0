"""Models of Hugging Face on real ranks do what they do on one device: generate, save and load, train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hugging_face import CONFIGS, language_model, mesh_for, parallel, prompt
from torch import Tensor

import dshard
from dshard.ops.random import seeded_alike
from dshard.parallel import from_pretrained
from dshard.parallel.boundary import boundary_of
from dshard.testing import RankPool

transformers = pytest.importorskip("transformers")

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "sampled beam": {"num_beams": 2, "do_sample": True},
    "static": {"cache_implementation": "static"},
    "static beam": {"cache_implementation": "static", "num_beams": 2},
    "no cache": {"use_cache": False},
}
FAMILIES, STRATEGIES = ("llama", "qwen3", "gpt2"), ("megatron", "atp", "data", "fsdp")


def generated(model: Any, masked: bool, mode: str) -> Tensor:
    inputs = prompt() if masked else {"input_ids": prompt()["input_ids"]}
    found: Tensor = model.generate(**inputs, max_new_tokens=6, **{"do_sample": False, **MODES[mode]})
    return found


def generates(family: str, strategies: tuple[str, ...], modes: tuple[str, ...]) -> list[str]:
    """What is not as on one device."""
    torch.set_num_threads(1)
    alone, wrong = language_model(family), []
    for strategy in strategies:
        model = parallel(family, strategy)
        for mode in modes:
            for masked in (False, True):
                dshard.manual_seed(7)
                with seeded_alike("generate", boundary_of(model).plan.mesh, torch.device("cpu")):
                    expected = generated(alone, masked, mode)
                torch.manual_seed(torch.distributed.get_rank())  # which must not matter
                dshard.manual_seed(7)
                found = generated(model, masked, mode)
                if type(found) is not Tensor or not torch.equal(found, expected):
                    wrong.append(f"{strategy} {mode} {masked}: {found} instead of {expected}")
    return wrong


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generate_equals_one_device_to_the_token(ranks: RankPool, family: str, strategy: str) -> None:
    for wrong in ranks.run(generates, family, (strategy,), tuple(MODES), timeout=300):
        assert not wrong


def small_run(folder: str) -> None:
    assert generates("llama", ("megatron",), ("greedy", "sampled")) == []
    saved_and_loaded(folder, "llama", "megatron")


@pytest.mark.ranks
def test_a_model_generates_and_is_saved_as_on_one_device(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(small_run, str(tmp_path), timeout=120)
    assert (tmp_path / "model.safetensors").is_file()


def saved_and_loaded(folder: str, family: str, strategy: str) -> None:
    torch.set_num_threads(1)
    alone, model = language_model(family), parallel(family, strategy)
    model.save_pretrained(folder)
    again = type(alone).from_pretrained(folder)
    for name, value in alone.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", CONFIGS)
def test_save_pretrained_writes_what_plain_transformers_loads(ranks: RankPool, family: str, tmp_path: Path) -> None:
    ranks.run(saved_and_loaded, str(tmp_path), family, "megatron", timeout=300)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def loaded(folder: str, family: str, strategies: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    alone, tokens = language_model(family), prompt()["input_ids"]
    if torch.distributed.get_rank() == 0:
        alone.save_pretrained(folder)
    torch.distributed.barrier()
    for strategy in strategies:
        cls = transformers.AutoModelForCausalLM if strategy == "megatron" else type(alone)
        dtype = torch.bfloat16 if strategy == "fsdp" else torch.float32
        model = from_pretrained(cls, folder, mesh_for(strategy), strategy, example={"input_ids": tokens}, dtype=dtype)
        assert all(type(p) is dshard.DTensor for p in model.parameters())
        assert any(p.to_local().numel() < p.numel() for p in model.parameters()) == (strategy != "data")
        assert not model.config.tie_word_embeddings or model.lm_head.weight is model.get_input_embeddings().weight
        state = model.state_dict()
        assert state.keys() == alone.state_dict().keys()
        for name, value in alone.state_dict().items():
            assert torch.equal(state[name].full_tensor(), value.to(state[name].dtype)), name
        with torch.no_grad():
            found, expected = model(tokens).logits.full_tensor(), alone(tokens).logits
        assert found.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", CONFIGS)
def test_from_pretrained_reads_each_rank_its_part(ranks: RankPool, family: str, tmp_path: Path) -> None:
    ranks.run(loaded, str(tmp_path), family, STRATEGIES, timeout=300)
