"""Small models of the families that users bring, run on one device and on a mesh."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dshard.comm import plain

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
FAMILIES = ("gpt2", "llama", "bert", "vit", "t5", "mixtral")
BATCH, TOKENS = 4, 8


@plain()
def build(family: str, **changes: Any) -> nn.Module:
    """Build a model of Hugging Face in double precision, with fixed values."""
    import transformers  # noqa: PLC0415 - takes seconds, and most tests do not need it

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    bert = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
    llama = {"num_key_value_heads": 2, "max_position_embeddings": 16}
    heads = {"head_dim": 4}
    gemma = {"sliding_window": 3, "query_pre_attn_scalar": 4, "use_cache": False}
    whisper = {"vocab_size": 32, "d_model": 16, "num_mel_bins": 6, "eos_token_id": 1}
    whisper |= dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
    whisper |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
    whisper |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32)
    whisper |= dict.fromkeys(("max_source_positions", "max_target_positions"), TOKENS)
    whisper |= dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 0)
    make, config = {
        "gpt2": lambda: (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(
                **{"n_layer": 2, "n_embd": 16, "n_head": 4, "vocab_size": 32, "n_positions": 16}
                | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
                | changes
            ),
        ),
        "llama": lambda: (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES | llama | changes)),
        "qwen3": lambda: (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES | llama | heads | changes)),
        "gemma2": lambda: (
            transformers.Gemma2ForCausalLM,
            transformers.Gemma2Config(**SIZES | llama | heads | gemma | changes),
        ),
        "whisper": lambda: (
            transformers.WhisperForConditionalGeneration,
            transformers.WhisperConfig(**whisper | changes),
        ),
        "bert": lambda: (transformers.BertForMaskedLM, transformers.BertConfig(**SIZES | bert | changes)),
        "vit": lambda: (
            transformers.ViTForImageClassification,
            transformers.ViTConfig(
                **{k: v for k, v in SIZES.items() if k != "vocab_size"}
                | {"image_size": 8, "patch_size": 4, "num_labels": 10}
                | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
                | changes
            ),
        ),
        "t5": lambda: (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(
                **{"num_layers": 2, "d_model": 16, "d_ff": 32, "num_heads": 4, "d_kv": 4, "vocab_size": 32}
                | {"dropout_rate": 0.0, "decoder_start_token_id": 0}
                | changes
            ),
        ),
        "mixtral": lambda: (
            transformers.MixtralForCausalLM,
            transformers.MixtralConfig(
                **SIZES
                | llama
                | {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
                | changes
            ),
        ),
    }[family]()
    return make(config).double()


@plain()
def batch_of(family: str, seed: int = 1, size: int = BATCH) -> dict[str, Tensor]:
    """Return a batch for a model of this family."""
    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)}
    tokens = torch.randint(0, 32, (size, TOKENS), generator=generator)
    if family == "whisper":  # two frames make one position
        frames = torch.randn(size, 6, 2 * TOKENS, generator=generator, dtype=torch.float64)
        return {"input_features": frames, "decoder_input_ids": tokens[:, :-1].contiguous()}
    if family == "t5":
        return {"input_ids": tokens, "decoder_input_ids": tokens.flip(1)[:, 1:].contiguous()}
    return {"input_ids": tokens}


class InDouble(TorchFunctionMode):
    """What a model casts to single precision stays double: so that sums in another order agree to 1e-9."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@plain()
def weights_for(logits: Tensor) -> Tensor:
    """A gradient for the logits that tells all their elements apart."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(logits.shape, dtype=logits.dtype, generator=generator)


def alone(family: str, **changes: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the logits and the gradients of all parameters on one device."""
    model = build(family, **changes)
    with InDouble():
        logits = model(**batch_of(family)).logits
        (logits * weights_for(logits)).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def train(model: nn.Module, family: str, steps: int) -> list[float]:
    """The losses of so many steps of AdamW, each on a batch of its own."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        with InDouble():
            loss = model(**batch_of(family, seed=step)).logits.square().mean()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
    return losses
