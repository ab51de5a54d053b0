"""Kernels of a warm training step on fake CUDA tensors, by name: of plain torch on one rank's part, and of dshard.

    PYTHONPATH=.:tests python -m helpers.fake_cuda_kernels [PATTERN]

prints those that only one of the two runs, or runs more often, as JSON: for each model and strategy two tables. Views
are left out. CUDA's fused kernels of RMS norms are registered, for a torch without CUDA decomposes what they compute.
"""

from __future__ import annotations

from helpers import fake_cuda

if __name__ == "__main__":
    fake_cuda.prepare()

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dshard
from dshard.core.comparisons import nothing_compared
from dshard.core.observe import OperatorMode
from dshard.torch_private import decomposition_table
from helpers.fake_cuda_world import RANKS, fake_cuda_world

WIDTH, HEADS, HIDDEN, WORDS, LENGTH, BATCH, WARM = 64, 8, 256, 128, 16, 8, 6
FUSED = (torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default)


class Attention(nn.Module):
    """Attention of the heads of one of `n` ranks, by torch's operator, or by a softmax of its own."""

    def __init__(self, n: int, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH // n, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH // n, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.is_own:
            y = ((q @ k.transpose(-2, -1)) * 0.3).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * 0.5 + torch.cat((-second, first), -1) * 0.5


class Llama(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention(n, is_own=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN // n, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN // n, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class GPT(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(n, is_own=True)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // n), nn.Linear(HIDDEN // n, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Experts(nn.Module):
    """Four experts, of which each token has a share by the softmax of a router."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.zeros(4, *s)) for s in ((WIDTH, HIDDEN), (HIDDEN, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        shares = self.router(y).softmax(-1)
        each = torch.einsum("bth,ehf->betf", y, self.up).relu()
        return x + torch.einsum("betf,efh,bte->bth", each, self.down, shares)


class Words(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], n: int) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.Sequential(block(n), block(n))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.words(ids))))
        return out


class Vision(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, WIDTH, 4, 4), nn.Sequential(GPT(n), GPT(n))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class Noise(nn.Module):
    """Residual blocks of convolutions between group norms, as those of diffusion models."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.enter, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 10)
        self.norms = nn.ModuleList(nn.GroupNorm(8, WIDTH) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(F.silu(norm(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "llama": (lambda n: Words(Llama, n), (LENGTH,), (LENGTH,)),
    "gpt": (lambda n: Words(GPT, n), (LENGTH,), (LENGTH,)),
    "experts": (lambda n: Words(Experts, n), (LENGTH,), (LENGTH,)),
    "vit": (Vision, (3, 8, 8), ()),
    "noise": (Noise, (3, 8, 8), ()),
}
STRATEGIES = ("data", "megatron", "fsdp")
WHOLE = (("experts", "megatron"), ("noise", "megatron"))
"""Models that a strategy leaves whole."""


def kernels_of(name: str, strategy: str, rows: int, n: int) -> Counter[str]:
    """The kernels of a warm training step; no strategy is plain torch, with the parameters of one of `n` ranks."""
    make, size, of_target = MODELS[name]
    counted = Counter[str]()

    def count(func: Any, args: Any, kwargs: Any) -> Any:
        returns = func._schema.returns
        if func.namespace != "prim" and not (
            returns and all(x.alias_info and not x.alias_info.is_write for x in returns)
        ):
            counted[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **kwargs)

    with fake_cuda_world(), nothing_compared():  # of which a group that sends nothing would never have enough
        with torch.device("cuda"):
            model = make(n)
            x = torch.zeros(rows, *size, dtype=torch.long if of_target else torch.float32)
            target = torch.zeros(rows, *of_target, dtype=torch.long)
        if strategy:
            mesh = dshard.init_device_mesh("cuda", (RANKS,), mesh_dim_names=("x",))
            dshard.parallelize(model, mesh, strategy, x)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(WARM):
            counted.clear()
            with OperatorMode(count):
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, -2), target.flatten()).backward()
                optimizer.step()
    for view in ("_unsafe_view", "prim.device"):
        del counted[view]
    return counted


def compared(name: str, strategy: str) -> tuple[dict[str, int], dict[str, int]]:
    """The kernels that plain torch runs on the part of one rank beyond those of dshard, and the reverse."""
    splits_rows = strategy != "megatron"
    plain = kernels_of(name, "", BATCH // RANKS if splits_rows else BATCH, 1 if splits_rows else RANKS)
    ours = kernels_of(name, strategy, BATCH, 1)
    return dict(plain - ours), dict(ours - plain)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    library = torch.library.Library("aten", "IMPL")
    for operator in FUSED:
        library.impl(operator, decomposition_table[operator], "CUDA")
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    cases = [
        (name, strategy) for name in MODELS for strategy in STRATEGIES if f"{name} under {strategy}".count(pattern)
    ]
    cases = [
        case for case in cases if case not in (("experts", "megatron"), ("noise", "megatron"))
    ]  # which are whole there
    print(json.dumps({f"{name} under {strategy}": compared(name, strategy) for name, strategy in cases}), flush=True)
    os._exit(0)  # the thread of a backward pass may still free objects, which an interpreter that ends does not let it
