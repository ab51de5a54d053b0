"""Measured regret of the cheapest plan: a training step under "auto" against every named plan, on real gloo ranks.

    PYTHONPATH=. python benchmarks/models.py [--ranks 4] [--hidden 64] [--json] [--write]

Steps of all plans are interleaved, round by round, so that a busy machine slows all alike; the figure of a plan is its
median, and the regret that of auto over the least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from torch import Tensor, nn

import dshard
from dshard import Mesh, parallelize, plan_model
from dshard.parallel import Plan
from dshard.parallel.auto import foldings, names
from dshard.tables import text_table
from dshard.testing import RankPool

ROUNDS, HEADS = 5, 4


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, hidden), Layer(hidden), Layer(hidden))


def plans(ranks: int, hidden: int, batch: int) -> dict[str, Plan]:
    """The cheapest plan, and all named ones on all foldings."""
    x, line = torch.empty(batch, 16, 32, device="meta"), Mesh((ranks,), ("x",))
    found = {"auto": plan_model(model(hidden), line, "auto", x)}
    for mesh in foldings(line):
        for name in names(mesh.ndim):
            with suppress(dshard.StrategyError):  # more ranks than heads
                found[f"{name} ({mesh})"] = plan_model(model(hidden), mesh, name, x)
    return found


def measured(found: dict[str, Plan], hidden: int, batch: int) -> dict[str, float]:
    """Median seconds of a step under each plan."""
    x, laid = torch.randn(batch, 16, 32, generator=torch.Generator().manual_seed(0)), {}
    for name, plan in found.items():
        ranks = torch.tensor(plan.mesh.ranks).view(plan.mesh.shape)
        mesh = dshard.DeviceMesh("cpu", ranks, mesh_dim_names=plan.mesh.names)
        laid[name] = parallelize(model(hidden), mesh, plan)
    times: dict[str, list[float]] = {name: [] for name in laid}
    for _ in range(ROUNDS + 2):
        for name, laid_model in laid.items():
            dist.barrier()
            begin = time.perf_counter()
            laid_model(x).square().mean().backward()
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds[2:]) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="into docs/benchmarks.md")
    asked = parser.parse_args()
    found = plans(asked.ranks, asked.hidden, asked.batch)
    with RankPool(asked.ranks, timeout=600) as pool:
        seconds = pool.run(measured, found, asked.hidden, asked.batch)[0]
    regret = seconds["auto"] / min(seconds.values())
    if asked.json:
        print(json.dumps({"seconds": seconds, "auto": found["auto"].strategy, "regret": regret}))
        return
    rows = [
        [name, f"{found[name].cost.seconds * 1e3:.2f}", f"{took * 1e3:.2f}"]  # type: ignore[union-attr]
        for name, took in sorted(seconds.items(), key=lambda pair: pair[1])
    ]
    header, said = (
        ["plan", "predicted ms", "measured ms"],
        (f"auto is {found['auto'].strategy} on ({found['auto'].mesh}); regret {regret:.2f}"),
    )
    print(text_table(header, rows))
    print(said)
    if asked.write:
        write_section("models", f"{markdown_table(header, rows)}\n\n{said}")


if __name__ == "__main__":
    main()
