"""A U-shaped model as a pipeline on emulated hosts: schedules timed in turns, beside what the simulator says.

    python benchmarks/pipeline.py --netlab netlab.py [--rate 200mbit] [--write]

--netlab is a program that runs ranks on emulated hosts with slow links, as root. Two hosts with one rank each hold one
stage each: encoders, and decoders that take two skips. Every turn runs a step of each schedule, in changing order;
seconds are the slowest rank's, ratios are within a turn: medians, and quartiles. The simulator gets the medians of what
each stage computed in those same steps, and for what crosses its bytes at the rate of the links; the bound is the same
with messages of one byte.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from section import markdown_table, write_section
from torch import Tensor, nn

from dshard import DeviceMesh, distribute_module
from dshard.pipeline import Backward, Costs, Edge, EdgeCost, Forward, Pipeline, Program, Stage, StageCost, simulate
from dshard.tables import text_table

VARIANTS: dict[str, tuple[str, int | None, bool]] = {
    "1F1B, no overlap": ("1f1b", None, False),
    "1F1B": ("1f1b", None, True),
    "eager-1F1B": ("eager-1f1b", None, True),
    "eager-1F1B, split backward": ("eager-1f1b", 0, True),
}
BASE = "1F1B, no overlap"
MICROBATCHES, SAMPLES, SIDE, CHANNELS, WIDTH, TURNS = 16, 4, 64, 8, 128, 7
RATES = {"50mbit": 5e7, "100mbit": 1e8, "200mbit": 2e8, "1gbit": 1e9}


def deep() -> nn.Sequential:
    """Most of the work of a stage, at half the resolution."""
    widths = (CHANNELS, WIDTH, WIDTH, CHANNELS)
    return nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths)))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, CHANNELS, 3, padding=1), deep()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = F.gelu(self.first(x))
        b = F.gelu(self.deep(F.avg_pool2d(a, 2)))
        return F.avg_pool2d(b, 2), a, b


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.deep = nn.Conv2d(2 * CHANNELS, CHANNELS, 1), deep()
        self.first = nn.Conv2d(2 * CHANNELS, 3, 1)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        x = self.deep(F.gelu(self.second(torch.cat([twice(x), b], 1))))
        return self.first(torch.cat([twice(x), a], 1))


def twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


def crossing() -> dict[str, int]:
    """Bytes of one microbatch of what crosses."""
    whole = SAMPLES * CHANNELS * SIDE**2 * 4
    return {"x": whole // 16, "a": whole, "b": whole // 4}


def pipelines() -> dict[str, Pipeline]:
    meshes = [DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])]
    names: Any = (("x",), ("x", "a", "b"))
    found = {}
    for variant, (schedule, delay, overlap) in VARIANTS.items():
        torch.manual_seed(0)
        modules = [Down(), Up()]
        stages = []
        for i, (module, mesh) in enumerate(zip(modules, meshes, strict=True)):
            here = mesh.get_coordinate() is not None
            laid = distribute_module(module, mesh) if here else None
            stages.append(Stage(laid, mesh, takes=names[i], gives=names[1 - i]))
        found[variant] = Pipeline(
            stages, n_microbatches=MICROBATCHES, schedule=schedule, delay=delay, overlap=overlap, loss=F.mse_loss
        )
    return found


def as_rank() -> dict[str, Any]:
    """Seconds of each step of each variant, and of what each stage computed, by kind."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(MICROBATCHES * SAMPLES, 3, SIDE, SIDE)
    found, losses = pipelines(), set()
    times: dict[str, list[float]] = {name: [] for name in found}
    computed: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in found}
    for turn in range(TURNS + 2):
        for name in list(found) if turn % 2 else list(found)[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            losses.add(round(found[name].step(x, x).item(), 4))
            took = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn > 1:
                times[name].append(took.item())
                for compute, seconds in found[name].seconds:
                    computed[name][type(compute).__name__].append(seconds)
    assert len(losses) == 1, losses
    medians = {name: {kind: statistics.median(s) for kind, s in kinds.items()} for name, kinds in computed.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, medians)
    return {"times": times, "computed": everyone}


def simulated(result: dict[str, Any], rate: float) -> dict[str, tuple[float, float]]:
    """Makespan and bound of each variant, in seconds."""
    edges = tuple(EdgeCost(Edge(name, 0, 1), n * 8 / rate, n, 1e-4) for name, n in sorted(crossing().items()))
    found = {}
    for name, (schedule, delay, overlap) in VARIANTS.items():
        stages = [stage_cost(kinds[name]) for kinds in result["computed"]]
        program = Program(schedule, 2, MICROBATCHES, tuple(cost.edge for cost in edges), delay, overlap)
        costs = Costs(tuple(stages), edges)
        found[name] = simulate(program, costs).makespan, simulate(program, costs.signals()).makespan
    return found


def stage_cost(kinds: dict[str, float]) -> StageCost:
    whole = kinds.get(Backward.__name__)
    if whole is not None:
        return StageCost(kinds[Forward.__name__], whole / 2, whole / 2)
    return StageCost(kinds[Forward.__name__], kinds["BackwardInput"], kinds["BackwardWeight"])


def cells(result: dict[str, Any], rate: float) -> list[list[str]]:
    rows, said = [], simulated(result, rate)
    for name, took in result["times"].items():
        ratios = [base / own for base, own in zip(result["times"][BASE], took, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        makespan, bound = said[name]
        rows.append(
            [
                name,
                f"{statistics.median(took) * 1e3:.0f}",
                f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})",
                f"{makespan * 1e3:.0f}",
                f"{said[BASE][0] / makespan:.2f}",
                f"{makespan / bound - 1:.1%}",
            ]
        )
    return rows


HEADER = ["schedule", "step ms", f"faster than {BASE}", "simulated ms", "simulated faster", "above one-byte bound"]


def run_netlab(netlab: str, rate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = f"run --hosts 2 --ranks 1 --rate {rate} --show rank0 --timeout 500"
        own = [sys.executable, __file__, "--rank", str(result)]
        subprocess.run([sys.executable, netlab, *options.split(), "--", *own], check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def join_and_run(result: str) -> None:
    dist.init_process_group("gloo")
    found = as_rank()
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", metavar="FILE", help="the program that emulates hosts")
    parser.add_argument("--rate", choices=RATES, default="200mbit")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks.md")
    options = parser.parse_args()
    if options.rank is not None:
        join_and_run(options.rank)
        return
    if options.netlab is None:
        parser.error("stages talk between hosts: give --netlab, the program that emulates them")
    rows = cells(run_netlab(options.netlab, options.rate), RATES[options.rate])
    print(text_table(HEADER, rows))
    if options.write:
        size = sum(crossing().values()) / 2**20
        told = (
            f"Two stages on two hosts, {options.rate} links, {MICROBATCHES} microbatches, for each of which "
            f"{size:.2f} MiB\ncross each way; {os.cpu_count()} cores, torch {torch.__version__}, "
            f"{datetime.date.today()}."
        )
        write_section("pipeline", f"{told}\n\n{markdown_table(HEADER, rows)}")


if __name__ == "__main__":
    main()
