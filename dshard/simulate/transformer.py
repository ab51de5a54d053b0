"""The sizes of a transformer, for a simulation, and the operations and parameters of one block."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from dshard.errors import ShapeError
from dshard.validate import as_int, check_one_of, check_type

_KEYS: dict[str, tuple[str, ...]] = {
    "layers": ("layers", "num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden", "hidden_size", "n_embd", "d_model"),
    "heads": ("heads", "num_attention_heads", "n_head", "num_heads"),
    "sequence": ("sequence", "max_position_embeddings", "n_positions"),
    "vocabulary": ("vocabulary", "vocab_size"),
    "kv_heads": ("kv_heads", "num_key_value_heads"),
    "ffn": ("ffn", "intermediate_size", "n_inner", "d_ff"),
    "head_size": ("head_size", "head_dim", "d_kv"),
}
"""The fields of a model, and the names that configuration files have for them."""

GATED = ("silu", "swiglu", "geglu", "gated-gelu")


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer of a block: `features_in` x `features_out`, and how many of them lie side by side."""

    name: str
    features_in: int
    features_out: int

    @property
    def parameters(self) -> int:
        """The number of elements of the weight."""
        return self.features_in * self.features_out


@dataclass(frozen=True, slots=True)
class Model:
    """A transformer: blocks of attention and feed-forward, between an embedding and a head.

    >>> model = Model(layers=2, hidden=8, heads=2, sequence=4, vocabulary=10)
    >>> [f"{x.name} {x.features_in}x{x.features_out}" for x in model.linears]
    ['qkv 8x24', 'out 8x8', 'up 8x32', 'down 32x8']
    >>> model.parameters == 2 * 12 * 8**2 + 10 * 8
    True

    Attributes:
        layers: Blocks.
        hidden: The hidden size.
        heads: Attention heads.
        sequence: Tokens of one sequence.
        vocabulary: Tokens known; 0 leaves embedding and head out.
        kv_heads: Heads of keys and values, `heads` unless given.
        ffn: The width of the feed-forward part, four times `hidden` unless given.
        gated: Whether it has a second first layer, whose result gates the other.
        head_size: The size of one head, `hidden / heads` unless given.
        tied: Whether the head is the embedding.
        fused: Whether attention keeps no scores for its backward pass.
        biases: Whether linear layers and norms have them; unless given, where it is not gated.

    Raises:
        ShapeError: a size below one, or heads that do not divide.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 0
    kv_heads: int | None = None
    ffn: int | None = None
    gated: bool = False
    head_size: int | None = None
    tied: bool = True
    fused: bool = True
    biases: bool | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "sequence", "vocabulary", "kv_heads", "ffn", "head_size"):
            size = getattr(self, name)
            if size is None and name in ("kv_heads", "ffn", "head_size"):
                continue
            least = 0 if name == "vocabulary" else 1
            number = as_int(size, f"the model's {name}", ShapeError)
            if number < least:
                raise ShapeError(f"a model of {size} {name}: all sizes must be above zero")
            object.__setattr__(self, name, number)
        if self.head_size is None and self.hidden % self.heads:
            raise ShapeError(f"{self.heads} heads do not divide the hidden size {self.hidden}: give head_size")
        if self.heads % (self.kv_heads or self.heads):
            raise ShapeError(f"{self.kv_heads} heads of keys and values do not divide the {self.heads} heads")

    @property
    def head(self) -> int:
        """The size of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def query(self) -> int:
        """The features of all queries."""
        return self.heads * self.head

    @property
    def qkv(self) -> int:
        """The features of queries, keys and values together."""
        return self.query + 2 * (self.kv_heads or self.heads) * self.head

    @property
    def width(self) -> int:
        """The width of the feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of one block in order: two pairs."""
        return (
            Linear("qkv", self.hidden, self.qkv),
            Linear("out", self.query, self.hidden),
            Linear("up", self.hidden, self.width * (2 if self.gated else 1)),
            Linear("down", self.width, self.hidden),
        )

    @property
    def biased(self) -> bool:
        """Whether linear layers and norms have biases."""
        return not self.gated if self.biases is None else self.biases

    @property
    def block_parameters(self) -> int:
        """The number of elements of the weights of one block."""
        return sum(linear.parameters for linear in self.linears)

    @property
    def parameters(self) -> int:
        """The number of elements of all weights, without biases and norms."""
        return self.layers * self.block_parameters + self.vocabulary * self.hidden * (1 if self.tied else 2)

    def core_flops(self, sequences: float) -> float:
        """Operations of attention on `sequences` sequences, forward: scores and their products with the values."""
        return 4.0 * sequences * self.sequence**2 * self.query

    @classmethod
    def from_json(cls, text: str, **changes: int) -> Model:
        """The model of a configuration file, with this library's names or those of Hugging Face's configurations.

        >>> Model.from_json('{"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4}').heads
        2

        Raises:
            ShapeError: no JSON object, a size that is missing or no integer.
        """
        check_type(text, str, "the model", "give its JSON as text; Model.load reads a file", ShapeError)
        for name in changes:
            check_one_of(name, _KEYS, "a size of the model", ShapeError)
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise ShapeError(f"the model is no JSON: {error}") from None
        if not isinstance(config, Mapping):
            raise ShapeError("the model is no JSON object: give one with the keys " + ", ".join(_KEYS))
        values = {name: _integer(config, name, keys) for name, keys in _KEYS.items()} | changes
        missing = [name for name in ("layers", "hidden", "heads", "sequence") if values[name] is None]
        if missing:
            raise ShapeError(f"the model lacks {', '.join(f'{n} ({_KEYS[n][1]})' for n in missing)}")
        gated = config.get("gated", config.get("hidden_act") in GATED or config.get("feed_forward_proj") in GATED)
        tied = config.get("tied", config.get("tie_word_embeddings", True))
        known: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        return cls(**known, gated=bool(gated), tied=bool(tied))

    @classmethod
    def load(cls, path: str | PathLike[str], **changes: int) -> Model:
        """The model of a configuration file, see `from_json`.

        Raises:
            ShapeError: no such file, or one that does not hold a model.
        """
        try:
            with open(fspath(path), encoding="utf-8") as file:  # not as a Path: that of "" is the directory
                return cls.from_json(file.read(), **changes)
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ShapeError(f"the model {str(path)!r} cannot be read: {why}") from None
        except ShapeError as error:
            raise ShapeError(f"{path}: {error}") from None


def _integer(config: Mapping[str, object], name: str, keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise ShapeError(f"the model's {name} ({key}) is {value!r}: give an integer")
        return value
    return None
