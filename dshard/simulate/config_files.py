"""The sizes that a model's file gives: by this library's names, or of a Hugging Face configuration.

What the keys of a configuration mean is in the code of its `model_type`. So transformers makes the module, without
data, and each of its parameters must be one that a block of a `Model` has, or a vector; all else is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from importlib import import_module
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from dshard.errors import ShapeError

SIZES = ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "ffn", "head_size")
_FLAGS = ("gated", "tied", "fused", "biases")
_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_FFN = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def own_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Model` in a file that has this library's names for them."""
    if unknown := [key for key in values if key not in (*SIZES, *_FLAGS)]:
        raise ShapeError(
            f"the model's {', '.join(unknown)}: a file without model_type has the keys {', '.join((*SIZES, *_FLAGS))}; "
            "give these, or the whole config.json of a Hugging Face model"
        )
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        if type(value) is not (bool if key in _FLAGS else int):
            kind = "true or false" if key in _FLAGS else "an integer"
            raise ShapeError(f"the model's {key} is {value!r}: give {kind}")
    return given


def config_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Model` of a Hugging Face configuration."""
    if any(key.endswith("experts") and size for key, size in values.items()):
        raise _refused(values, "for a simulated model has no experts")
    config, module = _made_by_transformers(values)
    found = {key: _sizes_at(config, key) for key in _KEYS}
    if missing := [key for key, sizes in found.items() if not sizes]:
        raise _refused(values, f"for it has no number at {', '.join(missing)}")
    layers, hidden, heads, vocabulary = (sizes[0] for sizes in found.values())
    head = (_sizes_at(config, "head_dim") or [hidden // heads])[0]
    widths, tables, vectors = _count(values, module, layers, (vocabulary, hidden))
    of_block = {  # of keys some types have a flag for one head, and of the gate none has any
        (kv_heads, ffn, gated)
        for kv_heads in (heads, 1, *_sizes_at(config, *_KV_HEADS))
        for ffn in _sizes_at(config, *_FFN) or [4 * hidden]
        for gated in (False, True)
        if sum(width for width in widths if width in (ffn, 2 * ffn)) == (2 + gated) * ffn
        and sum(width for width in widths if width not in (ffn, 2 * ffn)) == 2 * (heads + kv_heads) * head
    }
    if len(of_block) != 1:
        raise _refused(values, f"for its sizes do not explain {widths} x {hidden}, the matrices of its blocks")
    ((kv_heads, ffn, gated),) = of_block
    bias = sum(parameter.numel() for name, parameter in module.named_parameters() if name.endswith(".bias"))
    biases = bias >= layers * ((heads + 2 * kv_heads) * head + (1 + gated) * ffn + 2 * hidden)
    fields = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "kv_heads": kv_heads}
    fields |= {"ffn": ffn, "head_size": head, "gated": gated, "tied": tables == 1, "biases": biases, "vectors": vectors}
    sequence = _sizes_at(config, "max_position_embeddings", "seq_length")
    return fields | ({"sequence": sequence[0]} if sequence else {})


def _sizes_at(config: Any, *keys: str) -> list[int]:
    """The integers above 0 at these keys of a configuration."""
    return [size for key in keys if isinstance(size := getattr(config, key, None), int) and size > 0]


def _made_by_transformers(values: Mapping[str, Any]) -> tuple[Any, nn.Module]:
    """The configuration, and its language model without data."""
    try:
        library = import_module("transformers")
    except ImportError:
        raise _refused(values, "for transformers reads it: pip install 'dshard[hf]'") from None
    try:
        config = type(library.AutoConfig.for_model(values["model_type"])).from_dict(dict(values))
        with torch.device("meta"):
            return config, library.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise _refused(values, f"for transformers makes no language model of it ({shorten(str(error), 160)})") from None


def _count(
    values: Mapping[str, Any], module: nn.Module, layers: int, table: tuple[int, int]
) -> tuple[list[int], int, int]:
    """The sizes of each block's matrices beside the hidden one, tables of the vocabulary, elements of other vectors."""
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    tables = vectors = 0
    for name, parameter in module.named_parameters():
        shape, owner = tuple(parameter.shape), module.get_submodule(name.rpartition(".")[0])
        block = re.match(r".*?\.\d+\.", name)
        if len(shape) < 2 or (block is None and shape != table and isinstance(owner, nn.Embedding)):
            vectors += parameter.numel()
        elif block is None and shape == table:
            tables += 1
        elif block is not None and len(shape) == 2 and table[1] in shape:
            blocks[block[0]].append(parameter.numel() // table[1])
        else:
            raise _refused(values, f"for its {name} {shape} is no matrix of a plain block")
    widths = [sorted(of_block) for of_block in blocks.values()]
    if len(widths) != layers or any(of_block != widths[0] for of_block in widths):
        raise _refused(values, "for its blocks are not alike")
    return widths[0], tables, vectors


def _refused(values: Mapping[str, Any], why: str) -> ShapeError:
    keys = [f"{key}={size}" for key, size in values.items() if key == "model_type" or key.endswith("experts")]
    return ShapeError(
        f"{', '.join(keys)} is not understood, {why}: plan the module itself, "
        "dshard.plan_model(AutoModelForCausalLM.from_config(config), mesh, 'auto', batch), or write a file with the "
        f"keys {', '.join((*SIZES, *_FLAGS))}"
    )
