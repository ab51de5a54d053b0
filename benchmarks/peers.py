"""A training step beside what one would use instead: DDP, FSDP2, torch's tensor-parallel styles, FSDP2 over these.

    python benchmarks/peers.py [--models llama,gpt,vit] [--widths 128,256,512,1024] [--rounds 9] [--write] [--json FILE]

Four gloo ranks with one thread each train the same model with AdamW in each way, from the same parameters on the same
batch; dshard lays it out by the strategy of the peer's name, and runs it by Python and, `replayed`, by `dshard.replay`
of the forward and backward passes. Steps of all are interleaved in one run, and a step takes as long as its slowest
rank; ratios are of medians, with the quartiles of the ratios of neighbouring steps. `cpu` is the ratio of the seconds
of all processors, which other work on the machine disturbs less. Bytes and messages are counted below all, from the
arguments of `torch.distributed`; a replay sends what Python does. Peaks are all that torch's allocator has given out at
once since before the model was made, parameters, states and buffers that stay among them: the least of five warm steps.

Under `netlab`, which emulates hosts, start it with its ranks: `netlab.py run ... -- benchmarks/peers.py --join`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from allocator import peaks
from section import markdown_table, write_section
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate as TheirReplicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dshard
from dshard.replay import Replay
from dshard.testing import count_traffic, rank_pool

WORDS, TOKENS, BATCH, DEPTH = 256, 64, 16, 2
WARM = 5
"""Steps before those that are timed, whose losses are compared."""


class Block(nn.Module):
    """A transformer block: of a Llama, with RMS norms and a gated width, or of a GPT or ViT."""

    def __init__(self, width: int, heads: int, gated: bool, causal: bool) -> None:
        super().__init__()
        norm: Any = nn.RMSNorm if gated else nn.LayerNorm
        linear = partial(nn.Linear, bias=not gated)
        self.norm1, self.norm2, self.head, self.causal = norm(width), norm(width), width // heads, causal
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate = linear(width, 2 * width) if gated else None
        self.up, self.down = (
            linear(width, 2 * width if gated else 4 * width),
            linear(width * (2 if gated else 4), width),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class Net(nn.Module):
    """Blocks between an embedding of words, or of patches, and a head."""

    def __init__(self, model: str, width: int) -> None:
        super().__init__()
        heads, self.is_vision = max(4, width // 64), model == "vit"
        self.embed = nn.Linear(48, width) if self.is_vision else nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width, heads, model == "llama", model != "vit") for _ in range(DEPTH))
        self.norm = nn.RMSNorm(width) if model == "llama" else nn.LayerNorm(width)
        self.head = nn.Linear(width, 16 if self.is_vision else WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.is_vision else x)  # type: ignore[no-any-return]


def batch_of(model: str) -> tuple[Tensor, Tensor]:
    if model == "vit":
        return torch.randn(BATCH, TOKENS, 48), torch.randint(16, (BATCH,))
    words = torch.randint(WORDS, (BATCH, TOKENS + 1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(out: Any, targets: Any) -> Any:
    return F.cross_entropy(out, targets) if out.dim() == 2 else F.cross_entropy(out.flatten(0, 1), targets.flatten())


Step = Callable[[], Any]


def stepper(net: nn.Module, x: Any, targets: Any, replays: bool = False) -> Step:
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def gradients(x: Any, targets: Any) -> Any:
        loss = loss_of(net(x), targets)
        loss.backward()
        return loss.detach()

    run, calls = dshard.replay(gradients) if replays else gradients, count()

    def step() -> Any:
        optimiser.zero_grad()
        loss = run(x, targets)
        if isinstance(run, Replay) and next(calls) >= WARM:
            assert not run.why_not, run.why_not
        optimiser.step()
        return loss

    return step


PEERS = {
    "data": ("DDP", (4,), ("dp",)),
    "fsdp": ("FSDP2", (4,), ("dp",)),
    "megatron": ("torch TP", (4,), ("tp",)),
    "fsdp x megatron": ("FSDP2 over TP", (2, 2), ("dp", "tp")),
}


def fresh(model: str, width: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(model, width), *batch_of(model)


def ours(strategy: str, model: str, width: int, replays: bool = False) -> Step:
    net, x, targets = fresh(model, width)
    _, shape, names = PEERS[strategy]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=names)
    dshard.parallelize(net, mesh, strategy, x)
    split = [dshard.Shard(0) if name == "dp" else dshard.Replicate() for name in names]
    return stepper(net, x, dshard.distribute_tensor(targets, mesh, split, src_data_rank=None), replays)


def theirs(strategy: str, model: str, width: int) -> Step:
    net, x, targets = fresh(model, width)
    _, shape, names = PEERS[strategy]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = mesh["dp"] if "dp" in names else None
    if data is not None:
        n, rank = data.size(), data.get_local_rank()
        x, targets = (t.chunk(n)[rank].contiguous() for t in (x, targets))
    if strategy == "data":
        return stepper(DistributedDataParallel(net), x, targets)
    if "tp" in names:
        styles = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        for block in net.blocks:
            own: dict[str, Any] = {name: style for name, style in styles.items() if getattr(block, name) is not None}
            parallelize_module(block, mesh["tp"], own | {"o": RowwiseParallel(), "down": RowwiseParallel()})
        ends: dict[str, Any] = {"head": ColwiseParallel(output_layouts=TheirReplicate())}
        if model != "vit":
            ends["embed"] = RowwiseParallel(input_layouts=TheirReplicate(), output_layouts=TheirReplicate())
        parallelize_module(net, mesh["tp"], ends)
    if data is not None:
        for block in net.blocks:
            fully_shard(block, mesh=data)
        fully_shard(net, mesh=data)
    return stepper(net, x, targets)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw of each: seconds of each step, processor seconds, losses, bytes, messages, peaks."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    losses: dict[str, list[float]]
    nbytes: dict[str, int]
    messages: dict[str, int]
    peaks: dict[str, int]


def measure(strategy: str, model: str, width: int, rounds: int) -> Seen:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    steps = {
        "peer": theirs(strategy, model, width),
        "dshard": ours(strategy, model, width),
        "replayed": ours(strategy, model, width, replays=True),
    }
    wall: dict[str, list[float]] = {name: [] for name in steps}
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + WARM):
        for name, step in steps.items():
            dist.barrier()
            begin, busy = time.perf_counter(), time.process_time()
            loss = step()
            if turn >= WARM:
                wall[name].append(time.perf_counter() - begin)
                cpu[name].append(time.process_time() - busy)
            whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss.clone()
            if name == "peer" and strategy != "megatron":
                dist.all_reduce(whole)
                whole = whole / dist.get_world_size()
            losses[name].append(float(whole))
    nbytes, messages = {}, {}
    for name, step in steps.items():
        with count_traffic() as traffic:
            step()
        nbytes[name], messages[name] = traffic.nbytes, traffic.messages
    makers = {"peer": theirs, "dshard": ours, "replayed": partial(ours, replays=True)}
    held = {name: peak_of(make, strategy, model, width) for name, make in makers.items()}
    return Seen(wall, cpu, losses, nbytes, messages, held)


def peak_of(make: Callable[..., Step], *case: object) -> int:
    """The most bytes that torch's allocator has given out at once in a warm step, since before the model was made."""
    made: list[Step] = []
    warm = {str(number): lambda: made[0]() for number in range(8)}
    return min([*peaks(warm, before=lambda: made.append(make(*case))).values()][3:])


@dataclass(frozen=True, slots=True)
class Row:
    peer: str
    model: str
    width: int
    ratio: float
    low: float
    high: float
    cpu: float
    replayed: tuple[float, float, float]
    nbytes: float
    messages: tuple[int, int]
    peak: float
    replayed_peak: float

    def cells(self) -> list[str]:
        return [
            self.peer,
            self.model,
            str(self.width),
            f"{self.ratio:.2f}",
            f"{self.low:.2f} to {self.high:.2f}",
            f"{self.cpu:.2f}",
            f"{self.replayed[0]:.2f}",
            f"{self.replayed[1]:.2f} to {self.replayed[2]:.2f}",
            f"{self.nbytes:.2f}",
            f"{self.messages[0]} / {self.messages[1]}",
            f"{self.peak:.2f} / {self.replayed_peak:.2f}",
        ]


HEADER = [
    *("peer", "model", "width", "step", "quartiles", "cpu", "replayed step", "quartiles"),
    *("bytes", "messages, dshard / peer", "peak / replayed"),
]


def quartiles(mine: list[float], other: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles([a / b for a, b in zip(mine, other, strict=True)], n=4)
    return low, high


def row_of(strategy: str, model: str, width: int, seen: list[Seen]) -> Row:
    wall = {
        name: [max(each) for each in zip(*(rank.wall[name] for rank in seen), strict=True)] for name in seen[0].wall
    }
    for rank in seen:
        assert rank.losses["replayed"] == rank.losses["dshard"]
        # Later a net that knows its batch by heart makes much of what rounding differs.
        for mine, other in zip(rank.losses["dshard"][:WARM], rank.losses["peer"], strict=False):
            assert abs(mine - other) < 1e-4 * abs(other), "one training"
    low, high = quartiles(wall["dshard"], wall["peer"])
    cpu = {name: sum(statistics.median(rank.cpu[name]) for rank in seen) for name in wall}
    most = {name: max(rank.nbytes[name] for rank in seen) for name in wall}
    held = {name: max(rank.peaks[name] for rank in seen) for name in wall}
    return Row(
        PEERS[strategy][0],
        model,
        width,
        statistics.median(wall["dshard"]) / statistics.median(wall["peer"]),
        low,
        high,
        cpu["dshard"] / cpu["peer"],
        (
            statistics.median(wall["replayed"]) / statistics.median(wall["peer"]),
            *quartiles(wall["replayed"], wall["peer"]),
        ),
        most["dshard"] / max(1, most["peer"]),
        (seen[0].messages["dshard"], seen[0].messages["peer"]),
        held["dshard"] / held["peer"],
        held["replayed"] / held["peer"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,gpt,vit")
    parser.add_argument("--widths", default="128,256,512,1024")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--join", action="store_true", help="be one of the ranks that torchrun or netlab started")
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    if options.join:
        dist.init_process_group("gloo")
        pool = None
    else:
        pool = rank_pool(4)
    rows = []
    for strategy in options.peers.split(","):
        for model in options.models.split(","):
            for width in map(int, options.widths.split(",")):
                case = (strategy, model, width, options.rounds)
                if pool is not None:
                    seen = pool.run(measure, *case, timeout=1200.0)
                else:
                    seen = [None] * dist.get_world_size()  # type: ignore[list-item]
                    dist.all_gather_object(seen, measure(*case))
                rows.append(row_of(strategy, model, width, seen))
                if pool is not None or dist.get_rank() == 0:
                    print(" | ".join(rows[-1].cells()), flush=True)
    if options.join and dist.get_rank():
        return
    text = markdown_table(HEADER, [row.cells() for row in rows])
    print(text)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]))
    if options.write:
        write_section("peers", text)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
