"""A training step of a rehearsed model beside the same step by Python alone, and beside plain local torch.

    python benchmarks/rehearsal.py [--models llama gpt vit experts] [--plans data megatron "data x megatron" fsdp]
                                   [--widths 64 256] [--turns 20] [--clock process] [--json FILE] [--write]

A fake process group of eight ranks sends nothing, so all of a step is the host's work and the kernels of one rank.
*Plain* is what that rank computes without any DTensor: its rows of the batch, its heads and inner features; FSDP
gathers parameters, so beside it plain torch has whole ones. Ranks compare what has to be alike in one step of 50,
which they count by what they have sent: a fake group counts nothing, so it would compare in each step, and here does in
none. The steps of all are interleaved, and each figure is a median. The bounds are those that rehearsed steps are to
keep. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from torch import Tensor, nn

import dshard
from dshard.parallel.boundary import boundary_of

RANKS, LAYERS, ROWS, TOKENS, WORDS, CLASSES, PATCH, EXPERTS, CHOSEN = 8, 4, 8, 16, 1024, 16, 4, 4, 2
HEADS, KEY_HEADS = 16, 8
WARM, EACH = 6, 2
"""Steps before any is timed, which record and compile, and steps of one kind in each turn."""
PARTS = ("forward", "backward", "optimiser", "step")
PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "data": ((RANKS,), ("dp",)),
    "megatron": ((RANKS,), ("tp",)),
    "data x megatron": ((2, RANKS // 2), ("dp", "tp")),
    "fsdp": ((RANKS,), ("dp",)),
}
STEP_BOUNDS = {
    ("data", 64): 1.20,
    ("data", 256): 1.12,
    ("megatron", 64): 1.15,
    ("megatron", 256): 1.00,
    ("data x megatron", 64): 1.25,
    ("data x megatron", 256): 1.10,
    ("fsdp", 64): 1.45,
    ("fsdp", 256): 1.35,
}
PART_BOUNDS = {"forward": 1.45, "backward": 1.05, "optimiser": 1.20}
CLOCKS: dict[str, Callable[[], float]] = {"process": time.process_time, "wall": time.perf_counter}
Step = Callable[[], tuple[float, ...]]


# -- models; `local` is the number of ranks that share the heads and the inner features


def linear(n: int, m: int) -> nn.Linear:
    return nn.Linear(n, m, bias=False)


class LlamaBlock(nn.Module):
    """Grouped queries, rotations, RMS norms and a gated layer."""

    def __init__(self, width: int, local: int) -> None:
        super().__init__()
        heads, keys, inner, self.size = HEADS // local, KEY_HEADS // local, 4 * width // local, width // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (linear(width, n * self.size) for n in (heads, keys, keys))
        self.out = linear(heads * self.size, width)
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (z * cos + rotated(z) * sin for z in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


class Llama(nn.Module):
    def __init__(self, width: int, local: int = 1) -> None:
        super().__init__()
        self.embed, self.head, self.pairs = nn.Embedding(WORDS, width), linear(width, WORDS), width // HEADS // 2
        self.blocks, self.norm = nn.ModuleList(LlamaBlock(width, local) for _ in range(LAYERS)), nn.RMSNorm(width)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        angles = torch.arange(words.shape[1])[:, None] * 100.0 ** -torch.linspace(0, 1, self.pairs)
        angles = torch.cat([angles, angles], -1)
        x, cos, sin = self.embed(words), angles.cos(), angles.sin()
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class GPTBlock(nn.Module):
    """Attention with a softmax of its own, layer norms and biases."""

    def __init__(self, width: int, local: int) -> None:
        super().__init__()
        n, inner, self.size = width // local, 4 * width // local, width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (*(nn.Linear(width, n) for _ in range(3)), nn.Linear(n, width))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) / sqrt(self.size)).masked_fill(mask, float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, width: int, local: int = 1) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        self.blocks, self.norm = nn.ModuleList(GPTBlock(width, local) for _ in range(LAYERS)), nn.LayerNorm(width)
        self.head = linear(width, WORDS)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        length = words.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self.words(words) + self.places(torch.arange(length))
        for block in self.blocks:
            x = block(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class ViTBlock(nn.Module):
    def __init__(self, width: int, local: int) -> None:
        super().__init__()
        n, inner, self.size = width // local, 4 * width // local, width // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (*(nn.Linear(width, n) for _ in range(3)), nn.Linear(n, width))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches by a convolution, a token of the class before them."""

    def __init__(self, width: int, local: int = 1) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(TOKENS + 1, width))
        self.blocks, self.norm = nn.ModuleList(ViTBlock(width, local) for _ in range(LAYERS)), nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), classes)


class ExpertsBlock(nn.Module):
    """Attention, and experts that are all computed, weighted by a router."""

    def __init__(self, width: int, local: int) -> None:
        super().__init__()
        n, inner, self.size = width // local, 2 * width // local, width // HEADS
        self.norm1, self.norm2, self.router = nn.RMSNorm(width), nn.RMSNorm(width), linear(width, EXPERTS)
        self.q, self.k, self.v, self.out = (*(linear(width, n) for _ in range(3)), linear(n, width))
        self.up = nn.Parameter(torch.randn(EXPERTS, width, inner) / sqrt(width))
        self.down = nn.Parameter(torch.randn(EXPERTS, inner, width) / sqrt(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        weights, experts = self.router(y).softmax(-1).topk(CHOSEN, -1)
        gates = torch.zeros_like(self.router(y)).scatter(-1, experts, weights)
        inner = F.silu(torch.einsum("bsd,edf->bsef", y, self.up))
        return x + torch.einsum("bsef,efd,bse->bsd", inner, self.down, gates)


class Experts(nn.Module):
    def __init__(self, width: int, local: int = 1) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), linear(width, WORDS)
        self.blocks, self.norm = nn.ModuleList(ExpertsBlock(width, local) for _ in range(LAYERS)), nn.RMSNorm(width)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


MODELS: dict[str, Callable[..., nn.Module]] = {"llama": Llama, "gpt": GPT, "vit": ViT, "experts": Experts}


def batch_of(model: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    if model == "vit":
        side = PATCH * int(sqrt(TOKENS))
        return torch.randn(ROWS, 3, side, side), torch.randint(CLASSES, (ROWS,))
    return torch.randint(WORDS, (ROWS, TOKENS)), torch.randint(WORDS, (ROWS, TOKENS))


# -- what is measured


def stepper(net: nn.Module, inputs: Sequence[Tensor], clock: Callable[[], float], is_rehearsed: bool | None) -> Step:
    """A training step that gives the seconds of its parts; `is_rehearsed` is None for plain torch."""
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step() -> tuple[float, ...]:
        times = [clock()]
        optimiser.zero_grad()
        times.append(clock())
        loss = net(*inputs)
        times.append(clock())
        loss.backward()
        times.append(clock())
        optimiser.step()
        times.append(clock())
        clear, forward, backward, update = (end - begin for begin, end in pairwise(times))
        return forward, backward, clear + update, times[-1] - times[0]

    if is_rehearsed is None:
        return step

    def switched() -> tuple[float, ...]:
        with dshard.rehearsing(is_rehearsed):
            return step()

    return switched


def measure(model: str, plan: str, width: int, turns: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Medians of the seconds of a step's parts, by way, and what the rehearsed model says of itself."""
    shape, names = PLANS[plan]
    mesh, inputs = dshard.init_device_mesh("cpu", shape, mesh_dim_names=names), batch_of(model)
    sizes = dict(zip(names, shape, strict=True))
    rows = ROWS // sizes.get("dp", 1)
    steps: dict[str, Step] = {}
    torch.manual_seed(0)
    local = MODELS[model](width, sizes.get("tp", 1))
    steps["plain"] = stepper(local, [x[:rows] for x in inputs], clock, None)
    for way in ("eager", "rehearsed"):
        torch.manual_seed(0)
        net: Any = dshard.parallelize(MODELS[model](width), mesh, plan, *inputs)
        steps[way] = stepper(net, inputs, clock, way == "rehearsed")
    for step in steps.values():
        for _ in range(WARM):
            step()
    boundary_of(net).comparisons.are_due = False
    times: dict[str, list[tuple[float, ...]]] = {way: [] for way in steps}
    gc.collect()
    gc.disable()
    for _ in range(turns):
        for way, step in steps.items():
            times[way] += [step() for _ in range(EACH)]
    gc.enable()
    medians = {
        way: {part: statistics.median(each[i] for each in found) for i, part in enumerate(PARTS)}
        for way, found in times.items()
    }
    return {"model": model, "plan": plan, "width": width, "seconds": medians, "rehearsed": repr(net.rehearsed)}


def row_of(found: dict[str, Any]) -> list[str]:
    """A row of the table: ratios to plain torch, bold where they exceed their bound."""
    plain, eager, rehearsed = (found["seconds"][way] for way in ("plain", "eager", "rehearsed"))
    bounds = PART_BOUNDS | {"step": STEP_BOUNDS.get((found["plan"], found["width"]))}
    cells = []
    for part in PARTS:
        ratio, bound = rehearsed[part] / plain[part], bounds[part]
        cells.append(f"**{ratio:.2f}**" if bound is not None and ratio > bound else f"{ratio:.2f}")
    bound = bounds["step"]
    return [
        *(str(found[name]) for name in ("model", "plan", "width")),
        f"{plain['step'] * 1e3:.2f}",
        f"{eager['step'] / plain['step']:.2f}",
        *cells,
        "" if bound is None else f"{bound:.2f}",
    ]


HEADER = ["model", "plan", "width", "plain ms", "by Python", "forward", "backward", "optimiser", "step", "bound"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--turns", type=int, default=20, help="turns of all ways, of two steps each")
    parser.add_argument("--clock", choices=CLOCKS, default="process", help="seconds of the processor, or of the wall")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    rows, figures = [], []
    for model in options.models:
        for plan in options.plans:
            for width in options.widths:
                found = measure(model, plan, width, options.turns, CLOCKS[options.clock])
                figures.append(found)
                rows.append(row_of(found))
                print(" | ".join(rows[-1]), "|", found["rehearsed"], flush=True)
    text = markdown_table(HEADER, rows)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    if options.write:
        write_section("rehearsal", text)


if __name__ == "__main__":
    main()
