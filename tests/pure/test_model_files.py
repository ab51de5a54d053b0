"""Files of models: the parameters that were published, or a refusal that names the key."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dshard.errors import ShapeError
from dshard.simulate import Model
from dshard.tools.cli import main


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
]
"""Types, what their files give, and the elements of the weights that were published."""


@pytest.mark.parametrize(("kind", "config", "parameters"), PUBLISHED)
def test_a_configuration_has_the_parameters_that_were_published(
    kind: str, config: dict[str, Any], parameters: int
) -> None:
    model = Model.from_json(json.dumps({"model_type": kind, **config}))

    assert model.parameters == parameters
    assert f"{parameters:,} parameters" in model.summary


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

    assert Model.from_json(json.dumps(config)).parameters == sum(p.numel() for p in made.parameters())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "num_local_experts=8.*has no experts: plan the module itself",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 128}, "num_experts=128.*has no experts"),
        ({"model_type": "mixtral"}, r"model_type=mixtral.*experts.gate_up_proj \(8, 28672, 4096\) is no matrix"),
        ({"model_type": "llama", "num_experts": 8}, "num_experts=8"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "sizes do not explain .*1536, 2304"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "project_out.weight"),
        ({"model_type": "mamba"}, "no number at num_attention_heads"),
        ({"model_type": "recurrent_gemma"}, "no matrix of a plain block"),
        ({"model_type": "none"}, "model_type=none is not understood"),
        ({"model_type": "llama", "hidden_size": "eight"}, "hidden_size"),
        ({"model_type": "bloom", "n_layer": 2}, "lacks sequence"),
        ({"hidden_size": 8, "layers": 2}, "model's hidden_size: a file without model_type"),
        ({"layers": 2, "num_experts": 8}, "model's num_experts"),
        ({"layers": True}, "model's layers is True: give an integer"),
        ({"gated": "silu"}, "model's gated is 'silu': give true or false"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        Model.from_json(json.dumps(config))


def test_of_a_configuration_the_sequence_alone_is_changed() -> None:
    text = json.dumps({"model_type": "gpt2", "n_layer": 2})

    assert Model.from_json(text, sequence=128).parameters == Model.from_json(text).parameters
    with pytest.raises(ShapeError, match="layers: change the configuration itself"):
        Model.from_json(text, layers=3)


def test_commands_print_what_they_read_and_as_many_rows_as_asked(tmp_path: Any, capsys: Any) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama"} | sizes(4, 64, 8, 256, 100, 2)))
    common = ["--model", str(file), "--batch", "8", "--topology", "dgx-h100"]

    for command in (["plan", "model", "--devices", "2", "--form", "data"], ["simulate", "step", "--form", "data"]):
        assert main([*command, *common]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "4 layers, hidden 64, 8 heads of 8 (2 of keys), feed-forward 256 gated, no experts" in out
        assert main([*command, *common, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["parameters"] == 250_944

    for top in (1, 3):
        assert main(["plan", "model", "--devices", "2", "--form", "data", "--top", str(top), *common]) == 0
        rows = [
            line for line in capsys.readouterr().out.splitlines() if line.rstrip().endswith("B") and "fit" not in line
        ]
        assert len(rows) == top
