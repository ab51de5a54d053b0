"""A training step on eight gloo ranks: its predicted seconds beside the measured ones.

    PYTHONPATH=. python benchmarks/step.py [--ranks 8] [--seconds 20] [--json FILE] [--write]

The ranks are calibrated, all of them at once: collectives along every axis of the meshes, products, copies and what
the host takes for a distributed operator. On that topology `dshard.parallel.plan_table`, which is
`dshard plan model`, finds the fastest plans of a small transformer; the fastest of all, and of a few other strategies,
then train on the same ranks. Three predictions: the price of the plan, a forward and a backward pass; the program
recorded without data, with the optimiser, and rehearsed: its local work on as many ranks without a network, and what it
sends as calibrated. Steps of all plans are interleaved, and a step takes as long as its slowest rank. Into the first
two nothing measured enters but the calibration, which runs another program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from section import markdown_table, write_section
from torch import nn

from dshard import DeviceMesh, Mesh, init_device_mesh, parallelize
from dshard.calibrate import measure
from dshard.core.context import use_topology
from dshard.launch import rehearse
from dshard.launch.processes import share_cores
from dshard.parallel import RankedPlan, plan_table
from dshard.simulate import record
from dshard.tables import text_table
from dshard.testing import RankPool
from dshard.tools.calibrate.block_program import TransformerBlock
from dshard.topology import Topology

ROUNDS = 11
BATCH, TOKENS, HIDDEN, HEADS = 32, 64, 256, 8
PLANS = 4


def transformer() -> nn.Module:
    """The model, where tensors are made by default."""
    return nn.Sequential(*(TransformerBlock(HIDDEN, HEADS) for _ in range(2)))


def stepper(mesh: DeviceMesh | Mesh, strategy: str, device: str) -> Callable[[], None]:
    """A step of the model, laid out by the strategy."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HIDDEN).to(device)
    laid = parallelize(transformer().to(device), mesh, strategy, x)
    optimizer = torch.optim.Adam(laid.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        laid(x).square().mean().backward()
        optimizer.step()

    return step


# -- on the ranks


def on_mesh(shape: tuple[int, ...], names: tuple[str, ...], strategy: str) -> Callable[[], None]:
    """A step of the model on a mesh of all ranks."""
    return stepper(init_device_mesh("cpu", shape, mesh_dim_names=names), strategy, "cpu")


def calibrated(shapes: Sequence[tuple[int, ...]], seconds: float) -> Topology:
    """Figures of all meshes: the same topology on every rank."""
    share_cores()
    topology = None
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "x")[: len(shape)])
        topology = measure(mesh, base=topology, seconds=seconds / len(shapes))
    assert topology is not None
    return topology


def measured(plans: Sequence[tuple[tuple[int, ...], tuple[str, ...], str]], topology: Topology) -> list[list[float]]:
    """Seconds of each step of each plan, on the slowest rank."""
    with use_topology(topology):
        steps = [on_mesh(*plan) for plan in plans]
        times: list[list[float]] = [[] for _ in steps]
        for turn in range(ROUNDS + 2):
            for step, found in zip(steps, times, strict=True):
                dist.barrier()
                begin = time.perf_counter()
                step()
                dist.barrier()
                if turn > 1:
                    found.append(time.perf_counter() - begin)
    return times


# -- where they are started


@dataclass(frozen=True)
class Row:
    setup: str
    priced: float
    recorded: float
    rehearsed: float
    times: list[float]

    @property
    def quartiles(self) -> tuple[float, float, float]:
        low, middle, high = statistics.quantiles(self.times, n=4)
        return low, middle, high

    def cells(self) -> list[str]:
        low, middle, high = self.quartiles
        ms = [f"{seconds * 1e3:.0f}" for seconds in (self.priced, self.recorded, self.rehearsed, middle)]
        return [
            self.setup,
            *ms,
            f"{low * 1e3:.0f} to {high * 1e3:.0f}",
            f"{self.priced / middle:.2f}",
            f"{self.recorded / middle:.2f}",
            f"{self.rehearsed / middle:.2f}",
        ]


HEADER = [
    "plan",
    "priced ms",
    "recorded ms",
    "rehearsed ms",
    "measured ms",
    "quartiles",
    "priced / measured",
    "recorded / measured",
    "rehearsed / measured",
]


def chosen(topology: Topology, ranks: int) -> list[RankedPlan]:
    """The fastest plan of all, and the fastest of each other strategy."""
    x = torch.empty(BATCH, TOKENS, HIDDEN, device="meta")
    first: dict[str, RankedPlan] = {}
    for each in plan_table(transformer().to("meta"), ranks, topology, (x,), {}, dtype="float32").plans:
        first.setdefault(each.plan.strategy, each)
    return list(first.values())[:PLANS]


def recorded(mesh: Mesh, strategy: str, topology: Topology) -> float:
    """The same program without data and processes."""
    with use_topology(topology):
        return record(stepper(mesh, strategy, "meta"), topology).seconds


def rows_of(pool: RankPool, ranks: int, seconds: float) -> tuple[Topology, list[Row]]:
    shapes = [(d, ranks // d) for d in range(2, ranks) if ranks % d == 0] or [(ranks,)]
    topology = pool.run(calibrated, shapes, seconds, timeout=600 + 10 * seconds)[0]
    plans = chosen(topology, ranks)
    prices = [recorded(mesh, plan.strategy, topology) for plan, mesh in plans]
    laid = [(mesh.shape, mesh.names, plan.strategy) for plan, mesh in plans]
    times = pool.run(measured, laid, topology, timeout=1200)
    slowest = [[max(each) for each in zip(*found, strict=True)] for found in zip(*times, strict=True)]
    rows = []
    for (plan, mesh), price, where, found in zip(plans, prices, laid, slowest, strict=True):
        again = rehearse(on_mesh, *where, ranks=ranks, topology=topology).seconds
        rows.append(Row(f"{plan.strategy}, {mesh}", plan.cost.seconds, price, again, found))
    return topology, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=40.0, help="of calibration")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time and price")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    with RankPool(options.ranks, timeout=600) as pool:
        topology, rows = rows_of(pool, options.ranks, options.seconds)
    cells = [row.cells() for row in rows]
    device = topology.device
    said = (
        f"{options.ranks} ranks, each of {device.flops[0][1] / 1e9:.1f} Gflop/s in float32, "
        f"{device.memory_bandwidth / 1e9:.1f} GB/s of memory, {device.dispatch * 1e6:.0f} us for an operator."
    )
    print(text_table(HEADER, cells), said, sep="\n")
    if options.json:
        found: dict[str, Any] = {"topology": json.loads(topology.to_json()), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        write_section("step", f"{markdown_table(HEADER, cells)}\n\n{said}")


if __name__ == "__main__":
    main()
