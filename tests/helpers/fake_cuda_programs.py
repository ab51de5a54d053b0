"""Programs on fake CUDA tensors, whose warm run must neither create a CPU tensor nor make the host wait.

    PYTHONPATH=.:tests python -m helpers.fake_cuda_programs [PATTERN]

prints what is wrong with each, as JSON: a list for each program, empty where all is well.
"""

from __future__ import annotations

from helpers import fake_cuda

if __name__ == "__main__":
    fake_cuda.prepare()

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import permutations
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

import dshard
from dshard import Partial, Replicate, Shard, init_device_mesh, parallelize
from dshard.comm import DeviceMesh
from dshard.parallel.strategies import STRATEGIES
from helpers.fake_cuda_world import fake_cuda_world
from helpers.transformer_blocks import GPT, TOKENS, WIDTH, Llama
from helpers.vision_transformer import Vision

VOCABULARY, SAMPLES, RANKS = 32, 16, 8
Step: TypeAlias = Callable[[], object]
SHAPES = {1: (2, 4), 2: (2, 4), 3: (2, 2, 2)}


class Language(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def words() -> Tensor:
    return torch.zeros(SAMPLES, TOKENS, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], Callable[[], Tensor]]] = {
    "gpt": (partial(Language, GPT), words, words),
    "llama": (partial(Language, Llama), words, words),
    "vit": (Vision, lambda: torch.zeros(SAMPLES, 1, 4, 4), lambda: torch.zeros(SAMPLES, dtype=torch.long)),
}


def training(model: str, strategy: str) -> Step:
    """A training step of a model under a named strategy."""
    make, inputs_of, target_of = MODELS[model]
    shape = SHAPES[len(STRATEGIES[strategy])]
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])
    with torch.device("cuda"):
        net, x, target = make(), inputs_of(), target_of()
    net = parallelize(net, mesh, strategy, x)
    optimiser = torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> None:
        inputs, labels = dshard.distribute_batch(net, (x, target))
        out = net(inputs)
        loss = F.cross_entropy(out.flatten(0, -2), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


def grid() -> DeviceMesh:
    return init_device_mesh("cuda", (2, 4), mesh_dim_names=("x", "y"))


def redistributions() -> Step:
    """Redistribute a matrix of sizes that do not divide between all layouts, in three dtypes."""
    mesh, options = grid(), [Replicate(), Shard(0), Shard(1)]
    layouts = [[a, b] for a in options for b in options]
    sources = [*layouts, [Partial(), Replicate()], [Shard(0), Partial()]]
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    wholes = [torch.zeros(7, 5, dtype=dtype, device="cuda") for dtype in dtypes]

    def step() -> None:
        for whole in wholes:
            for source in sources:
                x = dshard.distribute_tensor(whole, mesh, source, src_data_rank=None)
                for layout in layouts:
                    x.redistribute(placements=layout)
                x.full_tensor()

    return step


def random_numbers() -> Step:
    """Factories, dropout and initialisers."""
    mesh, layouts = grid(), [[Shard(0), Shard(1)], [Replicate(), Shard(0)]]

    def step() -> None:
        for layout in layouts:
            x = dshard.randn(9, 7, device_mesh=mesh, placements=layout)
            F.dropout(x, 0.5)
            nn.init.normal_(x)
            torch.bernoulli(torch.sigmoid(x))
            torch.rand_like(x)
            dshard.rand(9, 7, device_mesh=mesh, placements=layout)

    return step


def other_meshes() -> Step:
    """Reshard a tensor to meshes with the ranks in other orders."""
    mesh, whole = grid(), torch.zeros(9, 7, device="cuda")
    with unset_fake_temporarily():
        others = [DeviceMesh("cuda", [*order, 4, 5, 6, 7]) for order in list(permutations(range(4)))[::7]]
    x = dshard.distribute_tensor(whole, mesh, [Shard(0), Shard(1)], src_data_rank=None)

    def step() -> None:
        for other in others:
            x.redistribute(other, [Shard(1)])

    return step


def symmetric_memory() -> Step:
    """Linear layers and their gradients in torch's kernels for symmetric memory, on their Meta forms, and by price."""
    mesh, by_kernel = grid(), dshard.Stream(1, transport="symmetric")
    schedules = [dshard.Schedule(("m", "n"), ("R", "R")), dshard.Schedule(("m", "k"), ("R", "R"))]
    with torch.device("cuda"):
        tensors = (
            torch.zeros(4, 8, 16, dtype=torch.bfloat16),
            torch.zeros(24, 16).bfloat16(),
            torch.zeros(24).bfloat16(),
        )
    layouts = [([Shard(0), Shard(1)], [Replicate(), Shard(0)]), ([Shard(0), Shard(2)], [Replicate(), Shard(1)])]
    ends, transports = [[Shard(0), Shard(2)], [Shard(0), Shard(1)]], list[str]()

    def step() -> None:
        for schedule, (x_at, w_at), end in zip(schedules, layouts, ends, strict=True):
            for panels in (by_kernel, "auto"):
                x, w, bias = (
                    dshard.distribute_tensor(t, mesh, at, src_data_rank=None).requires_grad_()
                    for t, at in zip(tensors, (x_at, w_at, [Replicate()] * 2), strict=True)
                )
                out = dshard.linear(x, w, bias, strategy=schedule, out_placements=end, panels=panels)
                out.sum().backward()

    def first() -> None:
        if not transports:
            report = dshard.explain(step)
            transports.extend(operator.transport for operator in report.operators if operator.op == "linear")
            assert transports[::2] == ["symmetric"] * 2, transports
        step()

    return partial(on_gpus, first)


def on_gpus(step: Step) -> None:
    """Run a step on a topology of one host."""
    with dshard.use_topology(dshard.Topology.preset("dgx-h100")):
        step()


def programs() -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield the name and the maker of each program."""
    for model in MODELS:
        for strategy in STRATEGIES:
            if strategy == "expert" or (model, strategy) == ("vit", "context"):
                continue  # which are refused: there are no experts, and patches are no sequence of the input
            yield f"{model} under {strategy}", partial(training, model, strategy)
    for program in (redistributions, random_numbers, other_meshes, symmetric_memory):
        yield program.__name__, program


def with_a_plain_operand_on_the_cpu() -> Step:
    """A product of what a model gave and a plain tensor on the CPU, which torch refuses for plain tensors, too."""
    with torch.device("cuda"):
        net, x = nn.Linear(8, 8), torch.zeros(8, 8)
    parallelize(net, grid(), "data", x)
    return lambda: net(x) * torch.zeros(8)


def wrong_programs() -> Iterator[tuple[str, Callable[[], Step]]]:
    """Yield programs in which the test must detect a fault."""
    yield "wrong: cpu", lambda: lambda: torch.ones(3)
    yield "wrong: wait", lambda: lambda: torch.linalg.inv(torch.ones(2, 2, device="cuda"))
    yield "wrong: operand", with_a_plain_operand_on_the_cpu
    yield "wrong: mixed", lambda: lambda: dshard.ones(4, 4, device_mesh=grid()).to_local() + torch.ones(4, 4)


def wrong_with(make: Callable[[], Step], rank: int) -> list[str]:
    """Run a program three times as one rank; return the faults of the third run."""
    with fake_cuda_world(rank, RANKS) as mode:
        try:
            step = make()
            step()
            step()
            with mode.watched() as noticed:
                step()
        except Exception:
            return [traceback.format_exc()[-1500:]]
        return [*(f"a CPU tensor of {name}" for name in noticed.on_cpu), *map(str, noticed.waits)]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = wrong_programs() if pattern.startswith("wrong") else programs()
    print(json.dumps({name: wrong_with(make, 1) for name, make in chosen if pattern in name}), flush=True)
    os._exit(0)  # the thread of a backward pass may still free objects, which an interpreter that ends does not let it
