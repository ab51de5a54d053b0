"""Models of Hugging Face configurations: transformers makes them, without data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import import_module
from os import PathLike, fspath
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from dshard.errors import ShapeError

WAY_OUT = (
    "make the module yourself: plan_model(module, mesh, 'auto', batch), or --model file.py:function with a function "
    "that returns it"
)
"""What to do about a model that transformers does not make of a configuration."""


def read_config(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The contents of a config.json.

    Raises:
        ShapeError: no such file, or one that holds no configuration.
    """
    try:
        with open(fspath(path), encoding="utf-8") as file:  # not as a Path: that of "" is the directory
            config = json.load(file, object_hook=_decoded)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ShapeError(f"the model {str(path)!r} cannot be read: {why}") from None
    except json.JSONDecodeError as error:
        raise ShapeError(f"{path}: the model is no JSON: {error}") from None
    if not isinstance(config, Mapping):
        raise ShapeError(f"{path}: the model is no JSON object: give the config.json of a Hugging Face model")
    return config


def _decoded(values: dict[str, Any]) -> Any:
    """A JSON object, or the number that JSON has not as which transformers writes it: {"__float__": "Infinity"}."""
    number = values.get("__float__") if len(values) == 1 else None
    return float(number) if isinstance(number, str) else values


def model_of_config(values: Mapping[str, Any]) -> nn.Module:
    """The language model of a Hugging Face configuration, on the meta device, for training.

    Raises:
        ShapeError: a key that is missing or not understood, or transformers is not installed.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str):
        keys = ", ".join(list(values)[:6])
        raise ShapeError(
            f"the model's model_type is {kind!r} (it has {keys}): give a config.json with it, or {WAY_OUT}"
        )
    try:
        library = import_module("transformers")
    except ImportError:
        raise ShapeError(
            f"model_type={kind!r}: transformers reads it: pip install 'dshard[hf]'; or {WAY_OUT}"
        ) from None
    if kind not in library.CONFIG_MAPPING:
        version = library.__version__
        raise ShapeError(
            f"model_type={kind!r} is not known to transformers {version}: install a later one, or {WAY_OUT}"
        )
    try:
        config = library.CONFIG_MAPPING[kind].from_dict({**values, "use_cache": False})
        makers = library.AutoModelForCausalLM, library.AutoModelForSeq2SeqLM
        maker = makers[bool(getattr(config, "is_encoder_decoder", False))]
        with torch.device("meta"):
            model: nn.Module = maker.from_config(config, trust_remote_code=False, dtype=torch.float32)
    except Exception as error:  # whatever transformers raises of a value that a model cannot have
        raise ShapeError(
            f"model_type={kind!r}: transformers makes no language model of it ({shorten(str(error), 200)}); {WAY_OUT}"
        ) from None
    return model.train()
