"""Transformer blocks (GPT, Llama, vision) and the layouts of their parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard import DeviceMesh, Mesh, Placement, Replicate, Shard, distribute_tensor

WIDTH, HEADS, KV_HEADS, TOKENS = 16, 4, 2, 6


class GPT(nn.Module):
    """Causal attention with one matmul for queries, keys and values, and a perceptron; both pre-normalised."""

    causal = True

    def __init__(self, width: int = WIDTH, tokens: int = TOKENS) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(GPT):
    """A GPT block without the causal mask."""

    causal = False


class Llama(nn.Module):
    """Grouped-query attention with rotary positions and a gated perceptron, each after an RMS norm; no biases."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = WIDTH, tokens: int = TOKENS) -> None:
        super().__init__()
        self.head = head = width // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, KV_HEADS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        angles = torch.outer(torch.arange(tokens), 10000.0 ** (-torch.arange(0, head, 2) / head)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def turned(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


BLOCKS: dict[str, type[nn.Module]] = {"gpt": GPT, "vit": ViT, "llama": Llama}


class Laid(NamedTuple):
    """A mesh, the placements of the input, and those of parameters by patterns of their names."""

    mesh: Mesh
    inputs: tuple[Placement, ...]
    parameters: Mapping[str, tuple[Placement, ...]]
    matmul: str | None = None


R = Replicate()
_COLUMNS, _ROWS = ("qkv", "q", "k", "v", "gate", "up"), ("out", "down")
_BLOCKED = {"norm*": (R, Shard(0)), "*.weight": (Shard(1), Shard(0)), "*.bias": (R, Shard(0))}
LAYOUTS = {
    "megatron": Laid(
        Mesh((2,), ("tp",)),
        (R,),
        {f"{name}.*": (Shard(0),) for name in _COLUMNS} | {f"{name}.weight": (Shard(1),) for name in _ROWS},
    ),
    "megatron with data": Laid(
        Mesh((2, 2), ("dp", "tp")),
        (Shard(0), R),
        {f"{name}.*": (R, Shard(0)) for name in _COLUMNS} | {f"{name}.weight": (R, Shard(1)) for name in _ROWS},
    ),
    "summa": Laid(Mesh((2, 2), ("r", "c")), (Shard(0), R), _BLOCKED, "summa"),
    "tesseract": Laid(
        Mesh((2, 2, 2), ("d", "r", "c")),
        (Shard(0), Shard(0), R),
        {pattern: (R, *placements) for pattern, placements in _BLOCKED.items()},
        "tesseract",
    ),
    "atp": Laid(
        Mesh((2, 2), ("d1", "d2")),
        (R, R),
        {"norm*": (R, Shard(0))}
        | {f"{name}.weight": (Shard(0), Shard(1)) for name in _COLUMNS}
        | {f"{name}.bias": (Shard(0), R) for name in _COLUMNS}
        | {f"{name}.weight": (Shard(1), Shard(0)) for name in _ROWS}
        | {f"{name}.bias": (R, Shard(0)) for name in _ROWS},
    ),
}


def lay_out(model: nn.Module, mesh: DeviceMesh | Mesh, laid: Laid) -> nn.Module:
    """Distribute the model's parameters and buffers without communication, as every rank has their values."""

    def place(name: str, x: Any) -> Any:
        whole = (R,) * laid.mesh.ndim
        placements = next((p for pattern, p in laid.parameters.items() if fnmatchcase(name, pattern)), whole)
        return distribute_tensor(x.data, mesh, placements, src_data_rank=None)

    for name, module in model.named_modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(own, nn.Parameter(place(f"{name}.{own}", parameter)))
        for own, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(own, place(own, buffer))
    return model
