"""Models of Hugging Face on real ranks do what they do on one device: generate, save and load, train."""

from __future__ import annotations

import copy
import io
import os
import pickle
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.hugging_face import CONFIGS, language_model, mesh_for, parallel, prompt
from torch import Tensor

import dshard
from dshard import ArgumentError, LayoutError, MeshError
from dshard.ops.random import seeded_alike
from dshard.parallel import from_pretrained
from dshard.parallel.boundary import boundary_of
from dshard.testing import RankPool, rank_pool

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

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
SEQUENCES = (
    "context",
    "ulysses",
    "context x megatron",
)  # caches split over the sequence, the last by heads too


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
@pytest.mark.parametrize("strategy", [*STRATEGIES, *SEQUENCES])
def test_generate_equals_one_device_to_the_token(ranks: RankPool, family: str, strategy: str) -> None:
    for wrong in ranks.run(generates, family, (strategy,), tuple(MODES), timeout=300):
        assert not wrong


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3"])
def test_sliding_windows_generate_as_on_one_device(ranks: RankPool, family: str) -> None:
    window = language_model(family).config.sliding_window
    assert window < prompt()["input_ids"].shape[1], "a prompt is longer than the window, and so is a cache"
    for wrong in ranks.run(generates, family, ("megatron", *SEQUENCES), ("greedy", "static", "beam"), timeout=300):
        assert not wrong


def generates_rows(family: str, strategies: tuple[str, ...]) -> list[str]:
    """What is not as on one device where each data rank gives prompts of its own, and not equally many."""
    torch.set_num_threads(1)
    alone, given, wrong = language_model(family), prompt(rows=5), []
    for strategy in strategies:
        model = dshard.parallelize(
            language_model(family), mesh_for(strategy), strategy, input_ids=given["input_ids"], inputs="per-data-rank"
        )
        ranks, rank = dshard.data_ranks(model)
        own = torch.arange(5).tensor_split(ranks)[rank]
        for mode in ("greedy", "beam", "static", "sampled"):
            options = {"max_new_tokens": 5, "do_sample": False, **MODES[mode]}
            dshard.manual_seed(7)
            with seeded_alike("generate", boundary_of(model).plan.mesh, torch.device("cpu")):
                expected = alone.generate(**given, **options)[own]
            dshard.manual_seed(7)
            found = model.generate(**{name: x[own] for name, x in given.items()}, **options)
            if not torch.equal(found, expected):
                wrong.append(f"{strategy} {mode}: {found} instead of {expected}")
    return wrong


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_takes_the_rows_of_each_data_rank(ranks: RankPool, family: str) -> None:
    for wrong in ranks.run(generates_rows, family, ("megatron", "data"), timeout=300):
        assert not wrong


def decodes(strategy: str, kind: str) -> tuple[str, int, int, int]:
    """The layout of a cache of keys for 4,096 tokens, its bytes here and in all, and those that a rank receives.

    Those are for a further token.
    """
    torch.set_num_threads(1)
    sizes = {"max_position_embeddings": 8192, "hidden_size": 128, "head_dim": 32, "intermediate_size": 32}
    model = parallel("llama", strategy, **sizes)
    tokens = torch.full((4, 1024 if kind == "static" else 4096), 5)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=4096)
    else:
        cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad(), dshard.use_topology(dshard.Topology.flat(1e8)):  # on a fast one this cache is short
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
        with dshard.trace() as sent:
            model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True)
    keys = cache.layers[0].keys
    held = keys.to_local().untyped_storage().nbytes()
    return str(keys.layout), held, keys.numel() * keys.element_size(), sum(event.nbytes for event in sent.events)


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("megatron", "dp:S(0) tp:S(1)"),
        ("data", "dp:S(0)"),
        ("context", "cp:S(2)"),
        ("ulysses", "cp:S(2)"),
        ("context x megatron", "cp:S(2) tp:S(1)"),
    ],
)
def test_a_long_cache_is_sharded_and_stays_where_it_is(ranks: RankPool, strategy: str, layout: str, kind: str) -> None:
    for found, held, whole, received in ranks.run(decodes, strategy, kind, timeout=300):
        assert found == layout
        assert held <= whole // 4 * 1.1
        assert received < whole / 50


def small_run(folder: str) -> None:
    assert generates("llama", ("megatron",), ("greedy", "sampled")) == []
    saved_and_loaded(folder, "llama", "megatron")


@pytest.mark.ranks
@pytest.mark.thorough  # test_docs.py runs as much
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


def test_copies_keep_the_class_and_pickles_are_refused() -> None:
    mesh, tokens = dshard.Mesh((2,), ("tp",)), {"input_ids": prompt()["input_ids"]}
    for model in (language_model("llama"), with_adapters(language_model("llama"))):
        dshard.parallelize(model, mesh, "megatron", **tokens)
        assert type(copy.copy(model)) is type(copy.deepcopy(model)) is type(model)
        with pytest.raises(ArgumentError, match=r"cannot be pickled, .*model.state_dict\(\)"):
            pickle.dumps(model)


def test_from_pretrained_asks_for_the_names_of_axes(tmp_path: Path) -> None:
    mesh = dshard.init_device_mesh("cpu", (1, 1))
    with pytest.raises(MeshError, match=r"2 axes without names, .*mesh_dim_names=\('dp', 'tp'\)"):
        from_pretrained(transformers.LlamaForCausalLM, str(tmp_path), mesh, "megatron")


PROGRAM = Path(__file__).parents[3] / "examples" / "finetune_llama.py"


def printed(*options: str) -> str:
    sys.argv = [str(PROGRAM), *options]
    out = io.StringIO()
    with redirect_stdout(out), as_torchrun():
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return out.getvalue()


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "strategy"), [(("2", "2"), "fsdp x megatron"), (("4",), "data")])
def test_a_checkpoint_is_tuned_as_on_one_device(
    ranks: RankPool, tmp_path: Path, mesh: tuple[str, ...], strategy: str
) -> None:
    alone = rank_pool(1).run(printed, "--folder", f"{tmp_path}/alone", timeout=300.0)[0]

    first, *others = ranks.run(
        printed, "--mesh", *mesh, "--strategy", strategy, "--folder", str(tmp_path), timeout=300.0
    )

    assert set(others) == {""}
    assert first == alone  # losses to three digits, tokens
    assert "continued 2 3 4 5 6 7 8 9 10\n" in first
    assert "continues alike: True" in first


@pytest.mark.ranks
@pytest.mark.thorough
def test_the_trainer_tunes_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    options = ("--mesh", "4", "--strategy", "fsdp", "--trainer", "--folder", str(tmp_path))

    first, *_ = ranks.run(printed, *options, timeout=300.0)

    assert "continued 2 3 4 5 6 7 8 9 10\n" in first
    assert "continues alike: True" in first


def rows(n: int) -> list[dict[str, Tensor]]:
    """Rows of tokens, with labels for other numbers of them: a loss counts labels, not rows or ranks."""
    generator = torch.Generator().manual_seed(5)
    tokens, places = torch.randint(3, 32, (n, 6), generator=generator), torch.arange(6)
    return [{"input_ids": row, "labels": row.where(places < 2 + i % 5, -100)} for i, row in enumerate(tokens)]


def trained(model: Any, folder: str, batch: int, **options: Any) -> list[float]:
    """Losses and gradient norms of four steps of the Trainer, and the loss of an evaluation."""
    sizes = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "max_steps": 4}
    quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    asked = transformers.TrainingArguments(folder, learning_rate=1e-2, **sizes, **quiet, **options)
    trainer = transformers.Trainer(model, asked, train_dataset=rows(24), eval_dataset=rows(8))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [entry[name] for name in ("loss", "grad_norm") for entry in steps] + [trainer.evaluate()["eval_loss"]]


@contextmanager
def as_torchrun() -> Iterator[None]:
    """What a launcher tells accelerate, which is asked anew."""
    names = {"RANK": torch.distributed.get_rank(), "WORLD_SIZE": torch.distributed.get_world_size()}
    told = {**names, "LOCAL_RANK": names["RANK"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        yield


def tuned_model(kind: str) -> Any:
    """A language model, one with adapters, or one whose loss counts its own labels, not those of a step."""
    if kind == "own mean":
        torch.manual_seed(0)
        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
        ids = {"decoder_start_token_id": 0, "pad_token_id": 2}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ids, dropout_rate=0.0))
    return with_adapters(language_model("llama")) if kind == "adapters" else language_model("llama")


def trains_under_the_trainer(folder: str, expected: list[list[float]], cases: list[tuple[str, dict[str, Any]]]) -> None:
    torch.set_num_threads(1)
    tokens = prompt()["input_ids"]
    with as_torchrun():
        for strategy in ("data", "fsdp"):
            for losses, (kind, asked) in zip(expected, cases, strict=True):
                example = {"input_ids": tokens} | ({"labels": tokens} if kind == "own mean" else {})
                model = dshard.parallelize(
                    tuned_model(kind), mesh_for(strategy), strategy, **example, inputs="per-data-rank"
                )
                found = trained(model, folder, 1, **asked)
                assert found == pytest.approx(losses, rel=1e-4), (strategy, kind, asked)


def refused_by_the_trainer(folder: str) -> None:
    tokens = prompt()["input_ids"]
    with as_torchrun():
        with pytest.raises(LayoutError, match=r"the Trainer gives each rank rows of its own.*inputs='per-data-rank'"):
            trained(parallel("llama", "fsdp"), folder, 1)
        model = dshard.parallelize(
            language_model("llama"), mesh_for("megatron"), "megatron", input_ids=tokens, inputs="per-data-rank"
        )
        with pytest.raises(LayoutError, match=r"'megatron' on .* needs the same ones on 2 ranks each: use 'data' or"):
            trained(model, folder, 1)
        accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
        with pytest.raises(dshard.MeshError, match="DistributedDataParallel"):
            accelerator.prepare(parallel("llama", "fsdp"))


@pytest.mark.ranks
@pytest.mark.thorough
def test_the_trainer_trains_as_on_one_device_or_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    accumulated = {"gradient_accumulation_steps": 2}
    of_ranks = {**accumulated, "average_tokens_across_devices": False}
    cases: list[tuple[str, dict[str, Any]]] = [("llama", each) for each in ({}, accumulated, of_ranks, compiled)]
    cases += [("adapters", accumulated), ("own mean", accumulated), ("own mean", {})]
    expected = [trained(tuned_model(kind), str(tmp_path), 4, **asked) for kind, asked in cases]
    ranks.run(trains_under_the_trainer, str(tmp_path), expected, cases, timeout=300)
    ranks.run(refused_by_the_trainer, str(tmp_path), timeout=300)


def rehearsed_under_the_trainer(name: str, folder: str) -> tuple[bool, int, int]:
    """Whether losses and weights after 24 steps are those by Python alone; calls of the model, and those answered."""
    torch.set_num_threads(1)
    found = []
    for on in (False, True):
        model: Any = dshard.parallelize(
            language_model(name), mesh_for("data"), "data", input_ids=prompt()["input_ids"], inputs="per-data-rank"
        )
        quiet = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
        asked = transformers.TrainingArguments(folder, per_device_train_batch_size=1, max_steps=24, seed=3, **quiet)
        with as_torchrun(), dshard.rehearsing(on):
            dshard.manual_seed(0)
            trainer = transformers.Trainer(model, asked, train_dataset=rows(24))
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
        found.append((losses, [p.full_tensor() for p in model.parameters()]))
    (losses, weights), (others, other_weights) = found
    same = losses == others and all(map(torch.equal, weights, other_weights))
    return same, model.rehearsed.calls, model.rehearsed.answered


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_steps_of_the_trainer_are_rehearsed(ranks: RankPool, tmp_path: Path, name: str) -> None:
    pytest.importorskip("accelerate")
    for same, calls, answered in ranks.run(rehearsed_under_the_trainer, name, str(tmp_path), timeout=300):
        assert same
        assert calls == 24
        assert answered >= 0.95 * (calls - 3)


# -- adapters


def with_adapters(model: Any) -> Any:
    torch.manual_seed(11)  # on all ranks
    modules = ["q_proj", "v_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(12)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:  # which begins with zeros
                p.copy_(torch.randn(p.shape, generator=generator) / 10)
    return adapted


def steps(model: Any) -> list[float]:
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(3):
        tokens = prompt(step)["input_ids"]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses


def trains_adapters(folder: str) -> None:
    torch.set_num_threads(1)
    tokens = prompt()["input_ids"]
    alone = with_adapters(language_model("llama"))
    losses, tokens_of_one = steps(alone), alone.eval().generate(input_ids=tokens, max_new_tokens=4, do_sample=False)
    for strategy in ("megatron", "fsdp"):
        before = with_adapters(language_model("llama"))
        dshard.parallelize(before, mesh_for(strategy), strategy, input_ids=tokens)
        assert all(isinstance(p, dshard.DTensor) for p in before.parameters())
        after = with_adapters(parallel("llama", strategy))
        for model in (before, after):
            assert steps(model) == pytest.approx(losses, rel=1e-4), strategy
            assert torch.equal(
                model.eval().generate(input_ids=tokens, max_new_tokens=4, do_sample=False), tokens_of_one
            )
        path = f"{folder}/{strategy}"
        before.save_pretrained(path)
        torch.distributed.barrier()
        again = peft.PeftModel.from_pretrained(language_model("llama"), path).state_dict()
        for name, value in before.state_dict().items():
            assert torch.equal(value.full_tensor(), again[name]) or "lora_" not in name


@pytest.mark.ranks
@pytest.mark.thorough
def test_adapters_before_and_after_parallelize_train_as_on_one_device(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(trains_adapters, str(tmp_path), timeout=300)


# -- experts


def experts(family: str, strategies: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        alone, tokens = language_model(family).to(dtype), prompt()["input_ids"]
        expected = alone(input_ids=tokens, labels=tokens)
        expected.loss.backward()
        for strategy in strategies:
            model = parallel(family, strategy, language_model(family).to(dtype))
            found = model(input_ids=tokens, labels=tokens)
            found.loss.backward()
            assert relative(found.logits.full_tensor(), expected.logits) < tolerance, (strategy, dtype)
            assert relative(found.loss.full_tensor(), expected.loss) < tolerance, (strategy, dtype)
            for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), name
                if theirs.grad is not None:
                    assert relative(mine.grad.full_tensor(), theirs.grad) < tolerance, (name, strategy, dtype)


def relative(found: Tensor, expected: Tensor) -> float:
    """How far apart tensors are, as a part of their size."""
    return float((found - expected).float().norm() / expected.float().norm().clamp(min=1e-9))


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek"])
def test_experts_as_they_come_equal_one_device(ranks: RankPool, family: str) -> None:
    ranks.run(experts, family, ("megatron", "fsdp"), timeout=300)
