"""A small GPT as functions of tensors: of plain ones, dshard's or torch's DTensors, by the same lines of code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Place = Callable[[torch.Tensor, str], Any]
"""How a parameter, or an input, is laid out: `"column"`, `"row"`, `"whole"` or `"batch"`."""


@dataclass(frozen=True)
class Size:
    """Entries of a batch, positions, width, heads, width within the MLP, words."""

    batch: int = 4
    length: int = 8
    width: int = 32
    heads: int = 4
    hidden: int = 64
    words: int = 64


def plain(x: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor itself."""
    return x.clone()


def local_part(data: int, model: int) -> Place:
    """The part that one rank of a mesh of `data` x `model` ranks computes with, as a plain tensor."""

    def place(x: torch.Tensor, where: str) -> torch.Tensor:
        match where:
            case "batch":
                return x.chunk(data, 0)[0].clone()
            case "column":
                return x.chunk(model, 0)[0].clone()
            case "row":
                return x.chunk(model, 1)[0].clone()
        return x.clone()

    return place


def distributed(lib: Any, mesh: Any) -> Place:
    """Laid out as Megatron-LM does on a mesh (data, model) by `lib`, dshard or torch.distributed.tensor."""
    whole, first, second = lib.Replicate(), lib.Shard(0), lib.Shard(1)
    layouts = {"batch": [first, whole], "column": [whole, first], "row": [whole, second], "whole": [whole, whole]}
    return lambda x, where: lib.distribute_tensor(x, mesh, layouts[where], src_data_rank=None)


def block_parameters(size: Size, place: Place) -> dict[str, Any]:
    """The parameters of one block."""
    shapes = {
        "norm1": ((size.width,), "whole"),
        "q": ((size.width, size.width), "column"),
        "k": ((size.width, size.width), "column"),
        "v": ((size.width, size.width), "column"),
        "out": ((size.width, size.width), "row"),
        "norm2": ((size.width,), "whole"),
        "up": ((size.hidden, size.width), "column"),
        "up_bias": ((size.hidden,), "column"),
        "down": ((size.width, size.hidden), "row"),
    }
    made = {}
    for name, (shape, where) in shapes.items():
        x = torch.ones(shape) if name.startswith("norm") else torch.randn(shape) * size.width**-0.5
        made[name] = place(x, where).requires_grad_()
    return made


def block(x: Any, w: dict[str, Any], width: int, complete: Callable[[Any], Any]) -> Any:
    """Attention and an MLP, each behind a layer norm and beside a residual; `complete` ends a row-split product."""
    h = F.layer_norm(x, (x.shape[-1],), w["norm1"])
    q, k, v = (F.linear(h, w[name]).unflatten(-1, (-1, width)).transpose(1, 2) for name in "qkv")
    scores = (q @ k.transpose(-2, -1)) * width**-0.5
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)
    x = x + complete(F.linear(mixed, w["out"]))
    h = F.layer_norm(x, (x.shape[-1],), w["norm2"])
    h = F.gelu(F.linear(h, w["up"], w["up_bias"]))
    return x + complete(F.linear(h, w["down"]))


class GPT:
    """Word and position embeddings, blocks, and a head, with the loss of predicting `targets`."""

    def __init__(self, size: Size, depth: int, place: Place, complete: Callable[[Any], Any]) -> None:
        self.size, self.complete = size, complete
        self.words = place(torch.randn(size.words, size.width), "whole").requires_grad_()
        self.places = place(torch.randn(size.length, size.width), "whole").requires_grad_()
        self.blocks = [block_parameters(size, place) for _ in range(depth)]
        self.norm = place(torch.ones(size.width), "whole").requires_grad_()
        self.head = place(torch.randn(size.words, size.width) * size.width**-0.5, "whole").requires_grad_()

    def parameters(self) -> list[Any]:
        """All of them."""
        inner = [w for parameters in self.blocks for w in parameters.values()]
        return [self.words, self.places, *inner, self.norm, self.head]

    def loss(self, ids: Any, targets: Any) -> Any:
        """The mean cross-entropy."""
        x = F.embedding(ids, self.words) + self.places
        for w in self.blocks:
            x = block(x, w, self.size.width // self.size.heads, self.complete)
        x = F.layer_norm(x, (self.size.width,), self.norm)
        scores = F.linear(x, self.head)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())
