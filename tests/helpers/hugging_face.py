"""Tiny random language models of Hugging Face in single precision, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dshard
from dshard.comm import DeviceMesh, plain

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    **TOKENS,
}
SLIDING = {**SIZES, "num_hidden_layers": 2, "head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 4}
SLIDING |= {"layer_types": ["sliding_attention", "full_attention"]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 4}),
    "mistral": ("Mistral", {**SIZES, "head_dim": 4, "sliding_window": 4}),
    "gemma2": ("Gemma2", SLIDING),
    "gemma3": ("Gemma3", SLIDING),
    "gpt2": ("GPT2", {"n_layer": 1, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 32, **TOKENS}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**SIZES, "head_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gpt-oss": (
        "GptOss",
        {**SIZES, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "deepseek": (
        "DeepseekV3",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 16,
        },
    ),
}
"""The name of each family in transformers, and the sizes of its model here."""


@plain()
def language_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """Build a causal language model from a seed, with weights large enough to tell tokens apart."""
    return causal_model(*CONFIGS[family], seed, **changes)


@plain()
def causal_model(name: str, sizes: dict[str, Any], seed: int = 0, **changes: Any) -> Any:
    """Build a causal language model of this name in transformers, of these sizes."""
    import transformers  # noqa: PLC0415 - takes seconds, and most tests do not need it

    transformers.logging.set_verbosity_error()
    suffix = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    config = "TextConfig" if name == "Gemma3" else "Config"
    torch.manual_seed(seed)
    model = getattr(transformers, name + suffix)(getattr(transformers, f"{name}{config}")(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.eval()


@plain()
def prompt(seed: int = 1, rows: int = 4, length: int = 5) -> dict[str, Tensor]:
    """Return random tokens, some rows of which are padded on the left, with their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 32, (rows, length), generator=generator)
    mask = torch.ones_like(tokens)
    for row in range(rows):
        mask[row, : row % 3] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, TOKENS["pad_token_id"]), "attention_mask": mask}


def mesh_for(strategy: str) -> DeviceMesh:
    """Create a mesh of four ranks with the axes of a strategy."""
    names = {
        "data": ("dp",),
        "fsdp": ("fsdp",),
        "megatron": ("dp", "tp"),
        "atp": ("d1", "d2"),
        "context": ("cp",),
        "ulysses": ("cp",),
        "context x megatron": ("cp", "tp"),
    }[strategy]
    return dshard.init_device_mesh("cpu", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def parallel(family: str, strategy: str, model: nn.Module | None = None, **changes: Any) -> Any:
    """Parallelize a language model of this family (or `model`) under a strategy."""
    model = language_model(family, **changes) if model is None else model
    return dshard.parallelize(model, mesh_for(strategy), strategy, input_ids=prompt()["input_ids"])
