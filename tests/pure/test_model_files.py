"""Files of models: the parameters that were published, or a refusal that names the key."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dshard import Mesh, Routing, Topology, plan_model, use_topology
from dshard.errors import ShapeError
from dshard.parallel import Precision
from dshard.parallel.factors import trace_factors
from dshard.parallel.integrations.config_models import model_of_config, read_config
from dshard.parallel.plan_table import model_summary
from dshard.parallel.roles import roles_of
from dshard.tools.cli import main
from dshard.tools.cli.plan_commands import model_and_batch


def sizes(layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, kv_heads: int = 0) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **({"num_key_value_heads": kv_heads} if kv_heads else {}),
    }


GPT2_XL = {"n_layer": 48, "n_embd": 1600, "n_head": 25}
PYTHIA = {"tie_word_embeddings": False, "max_position_embeddings": 2048}
OPT_125M = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
}
BLOOM_560M = {"n_layer": 24, "n_head": 16, "hidden_size": 1024, "vocab_size": 250880, "seq_length": 2048}
TIED = {"tie_word_embeddings": True}

EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
OF_128 = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
T5_BASE |= {"decoder_start_token_id": 0}

PUBLISHED = [
    ("llama", sizes(32, 4096, 32, 11008, 32000), 6_738_415_616),  # Llama 2 7B
    ("llama", sizes(32, 4096, 32, 14336, 128256, 8) | {"mlp_bias": False}, 8_030_261_248),  # Llama 3 8B
    ("mistral", sizes(32, 4096, 32, 14336, 32000, 8), 7_241_732_096),
    ("qwen2", sizes(24, 896, 14, 4864, 151936, 2) | TIED, 494_032_768),
    ("qwen3", sizes(28, 1024, 16, 3072, 151936, 8) | TIED | {"head_dim": 128}, 596_049_920),
    ("gemma", sizes(18, 2048, 8, 16384, 256000, 1) | {"head_dim": 256}, 2_506_172_416),
    ("gemma2", sizes(26, 2304, 8, 9216, 256000, 4) | {"head_dim": 256}, 2_614_341_888),
    ("phi3", sizes(32, 3072, 32, 8192, 32064, 32), 3_821_079_552),
    ("gpt2", {}, 124_439_808),
    ("gpt2", GPT2_XL, 1_557_611_200),
    ("gpt_neox", sizes(16, 2048, 8, 8192, 50304) | PYTHIA, 1_011_781_632),
    ("falcon", {"num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71}, 6_921_720_704),
    ("opt", OPT_125M, 125_239_296),
    ("bloom", BLOOM_560M, 559_214_592),
    ("mixtral", sizes(32, 4096, 32, 14336, 32000, 8) | EIGHT, 46_702_792_704),
    ("qwen3_moe", sizes(48, 2048, 32, 6144, 151936, 4) | OF_128, 30_532_122_624),
    ("gpt_oss", {}, 116_829_156_672),
    ("deepseek_v3", {}, 671_026_404_352),
    ("t5", T5_BASE, 222_903_552),
]
"""Types, what their files give, and the elements of the weights that were published."""


@pytest.mark.parametrize(("kind", "config", "parameters"), PUBLISHED)
def test_a_configuration_has_the_parameters_that_were_published(
    kind: str, config: dict[str, Any], parameters: int
) -> None:
    model = model_of_config({"model_type": kind, **config})

    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "gemma3_text", "starcoder2", "cohere", "gpt_bigcode", "olmo2", "phi"]
)
@pytest.mark.parametrize("biased", [False, True])
def test_small_configurations_have_the_parameters_of_the_module(kind: str, biased: bool) -> None:
    """Of what a file may lack, the values are those of the type: also without `hidden_act`, and with other biases."""
    own = {"num_hidden_layers": 2, "vocab_size": 300, "pad_token_id": 0, "attention_bias": biased, "layer_types": None}
    config = {key: value for key, value in AutoConfig.for_model(kind, **own).to_dict().items() if key != "hidden_act"}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **own))

    names = {name: tuple(p.shape) for name, p in model_of_config(config).named_parameters()}
    assert names == {name: tuple(p.shape) for name, p in made.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "config", "summary"),
    [
        ("llama", sizes(32, 4096, 32, 11008, 32000), "32 layers, gated, 6.74 B parameters"),
        ("gpt2", {}, "12 layers, 124.4 M parameters"),
        ("mixtral", sizes(32, 4096, 32, 14336, 32000, 8) | EIGHT, "46.70 B parameters, experts 8 of which 2"),
    ],
)
def test_what_was_read_is_said(kind: str, config: dict[str, Any], summary: str) -> None:
    model, ids = model_of_config({"model_type": kind, **config}), torch.empty(2, 64, dtype=torch.long, device="meta")
    traced = trace_factors(model, (), {"input_ids": ids, "labels": ids})

    assert model_summary(model, traced, roles_of(traced)).endswith(summary)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8, "layers": 2}, r"model_type is None \(it has hidden_size, layers\): give a config.json"),
        ({"model_type": "none"}, "model_type='none' is not known to transformers .*or make the module yourself"),
        ({"model_type": "llama", "hidden_size": "eight"}, "hidden_size"),
        ({"model_type": "llama", "hidden_act": "sillu"}, "sillu"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        model_of_config(config)


def test_a_model_that_does_not_run_on_the_batch_is_refused_in_words(tmp_path: Any, capsys: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "bert", "hidden_size": 24, "num_hidden_layers": 1, "max_position_embeddings": 8})
    )
    common = ["--model", str(file), *COMMON]
    for command in (["plan", "model", "--devices", "2"], ["simulate", "step", "--mesh", "2"]):
        assert main([*command, *common]) == 1
        told = " ".join(capsys.readouterr().err.split())
        assert "this model does not run on 8 sequences of 16 tokens (" in told
        assert "give a --sequence that it takes" in told


def test_files_that_are_no_configurations_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ShapeError, match="'' cannot be read: No such file"):
        read_config("")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ShapeError, match="is no JSON object"):
        read_config(tmp_path / "list.json")


def test_numbers_that_json_has_not_are_read_as_transformers_writes_them(tmp_path: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"time_step_limit": [0.0, {"__float__": "Infinity"}], "rope": {"theta": {"__float__": "-Infinity"}}}'
    )
    assert read_config(file) == {"time_step_limit": [0.0, inf], "rope": {"theta": -inf}}


@pytest.fixture(name="small")
def small_model(tmp_path: Any) -> str:
    """The file of a small mixture of experts."""
    file = tmp_path / "config.json"
    config = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2} | sizes(2, 64, 8, 64, 96, 2)
    file.write_text(json.dumps(config))
    return str(file)


COMMON = ("--batch", "8", "--sequence", "16", "--topology", "dgx-h100")


def test_the_command_and_plan_model_agree_to_the_digit(small: str, capsys: Any) -> None:
    command = ["plan", "model", "--devices", "4", "--model", small, *COMMON]
    assert main([*command, "--strategy", "expert", "--efficiency", "1", "--routing", "zipf:1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["plans"]

    model, ids = model_of_config(read_config(small)), torch.empty(8, 16, dtype=torch.long, device="meta")
    precision = Precision(torch.bfloat16, torch.float32)
    with use_topology(Topology.preset("dgx-h100")):
        plan = plan_model(
            *(model, Mesh((4,), ("expert",)), "expert"),
            precision=precision,
            routing=Routing.zipf(1.0),
            input_ids=ids,
            labels=ids,
        )
    assert (row["seconds"], row["received"], row["memory"]["total"]) == (
        plan.cost.seconds,
        plan.cost.nbytes,
        plan.cost.memory.total,
    )
    assert row["experts"] == dict(plan.cost.experts)
    assert set(row["experts"]) == {f"model.layers.{i}.mlp.experts" for i in range(2)}


@pytest.mark.parametrize("given", ["x", "(x,)", "[x]", "{'input': x}"])
def test_a_batch_is_a_tensor_or_the_arguments_of_the_model(given: str, tmp_path: Any) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        f"import torch\n\ndef make():\n    x = torch.empty(4, 8)\n    return torch.nn.Linear(8, 2), {given}\n"
    )
    model, args, kwargs = model_and_batch(f"{file}:make", 1, 1)
    assert model(*args, **kwargs).shape == (4, 2)


NAMED = ("--strategy", "fsdp", "--strategy", "data", "--strategy", "expert")


def test_the_table_says_what_was_read_and_has_as_many_rows_as_asked(small: str, tmp_path: Any, capsys: Any) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    command = ["plan", "model", "--devices", "2", "--model", small, *COMMON, "--out", str(plan), *NAMED]
    assert main([*command, "--top", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 layers, gated, " in out
    assert "experts 4 of which 2" in out
    assert sum("%" in line and "=" in line for line in out.splitlines()) == 2
    assert main(["simulate", "step", "--plan", str(plan), "--model", small, *COMMON, "--trace", str(trace)]) == 0
    assert "a rank holds at most" in " ".join(capsys.readouterr().out.split())
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_planner_is_a_row_whose_file_runs_as_it_is(small: str, tmp_path: Any, capsys: Any) -> None:
    path, options = tmp_path / "plan.json", ["--model", small, *COMMON]
    named = ["--strategy", "planned", "--strategy", "data"]
    assert main(["plan", "model", "--devices", "2", *options, *named, "--json", "--out", str(path)]) == 0
    rows = json.loads(capsys.readouterr().out)["plans"]
    assert len({tuple(map(str, (row["seconds"], row["received"], row["memory"]))) for row in rows}) == len(rows)
    (planned,) = [row for row in rows if row["strategy"] == "planned"]
    assert planned["certificate"] == pytest.approx(1.0)
    assert {row["certificate"] for row in rows if row is not planned} <= {None}

    html = str(tmp_path / "step.html")
    assert main(["simulate", "step", "--plan", str(path), *options, "--json", "--html", html]) == 0
    step = json.loads(capsys.readouterr().out)
    page = (tmp_path / "step.html").read_text()
    assert "of any plan of this space" in page
    assert {"compute", "network"} <= {word for word in ("compute", "network") if f"{word} " in page}
    assert "█" in page
    assert (step["strategy"], step["seconds"]) == ("planned", planned["seconds"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--routing", "zipf"), "'zipf' is no routing: write uniform, zipf:1.0"),
        (("--routing", "zipf:-1"), "is no routing"),
        (("--efficiency", "85"), "'85' is no share"),
    ],
)
def test_options_that_mean_nothing_are_refused(option: tuple[str, str], message: str, small: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "model", "--devices", "4", "--model", small, *COMMON, *option])
    assert message in " ".join(capsys.readouterr().err.split())
