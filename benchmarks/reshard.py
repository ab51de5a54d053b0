"""Tensors between meshes on emulated hosts: dshard's plan and simpler ones, run by one executor, timed in turns.

    python benchmarks/reshard.py --netlab netlab.py [--write] [--only NAME ...]

--netlab is a program that runs ranks on emulated hosts with slow links, as root. Hosts have two ranks each and one
network card. Every turn runs each plan once, as long as its slowest rank takes: plain sends (each receiver its own copy
from the first replica), balanced sends (from the sender with the least to send), the local all-gather form (each host
one copy, in pieces, which its ranks exchange), one broadcast chain for each slice in the order of the slices, and
dshard's. Ratios are within a turn: medians, and quartiles. The cases are the nine of "On Optimizing the Communication
of Model Parallelism" (table 2), scaled down, and two of replicated receivers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from section import markdown_table, write_section

from dshard import Layout, Mesh, Placement, Replicate, Shard, Topology
from dshard.comm import DeviceMesh, bind, init_device_mesh, reshard, runtime_of
from dshard.launch.processes import share_cores
from dshard.reshard import ReshardPlan, plan_reshard
from dshard.tables import text_table
from dshard.tools.calibrate.rounds import Clock
from dshard.topology import Layer

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from helpers.plans_of_one_form import plan_of_form

LETTERS: dict[str, Placement] = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "S2": Shard(2)}
PER_HOST = 2
DSHARD = "dshard"
BITS = {"1gbit": 1e9, "200mbit": 2e8, "100mbit": 1e8}


@dataclass(frozen=True)
class Case:
    """Placements on meshes of (hosts, ranks of a host), the source's hosts first; a tensor of fp32."""

    name: str
    hosts: tuple[int, int]
    src: str
    dst: str
    shape: tuple[int, ...]
    rate: str = "100mbit"
    turns: int = 9


NINE = (128, 128, 64)
CASES = (
    Case("replicated receiver", (2, 2), "R R", "R R", (32, 512, 512), "1gbit", 11),
    Case("partly replicated receiver", (2, 2), "S0 R", "S0 R", (32, 512, 512), "1gbit", 11),
    Case("case 1", (2, 2), "S0 R", "S0 R", NINE),
    Case("case 2", (2, 2), "R R", "S0 R", NINE),
    Case("case 3", (2, 2), "S1 R", "S0 R", NINE),
    Case("case 4", (2, 2), "S1 S1", "S0 S0", NINE),
    Case("case 5", (2, 2), "R S0", "S0 R", NINE),
    Case("case 6", (2, 3), "S0 R", "S0 R", NINE),
    Case("cases 7, 8", (1, 2), "R S0", "R R", NINE),
    Case("case 8 of the paper", (2, 3), "R S0", "R R", NINE),
    Case("case 9", (2, 2), "S1 R", "S2 R", NINE),
)


def layouts(case: Case) -> tuple[Layout, Layout]:
    """On the case's meshes."""
    found, first = [], 0
    for hosts, text in zip(case.hosts, (case.src, case.dst), strict=True):
        ranks = tuple(range(first * PER_HOST, (first + hosts) * PER_HOST))
        placements = tuple(LETTERS[word] for word in text.split())
        found.append(Layout(Mesh((hosts, PER_HOST), ("host", "rank"), ranks), placements))
        first += hosts
    return found[0], found[1]


def plans(case: Case) -> dict[str, ReshardPlan]:
    """All plans of a case; equal ones are run once."""
    bandwidth = BITS[case.rate] / 8
    hosts = (Layer("host", sum(case.hosts), bandwidth, 1e-4), Layer("rank", PER_HOST, 2e9, 5e-5))
    problem = (*layouts(case), case.shape, 4, Topology("emulated", hosts))
    return {
        "plain sends": plan_of_form(*problem, "send", balance=False),
        "balanced sends": plan_of_form(*problem, "send", balance=True),
        "local all-gather": plan_of_form(*problem, "local_all_gather", balance=True),
        "broadcasts": plan_of_form(*problem, "broadcast", balance=True),
        DSHARD: plan_reshard(*problem),
    }


def as_rank(case: Case) -> dict[str, Any]:
    """Seconds of each plan in each turn, the slowest rank's; the same on every rank."""
    torch.set_num_threads(1)
    world = bind(init_device_mesh("cpu", (dist.get_world_size(),)))
    src, dst = layouts(case)
    for layout in (src, dst):
        mesh = layout.mesh
        bind(DeviceMesh("cpu", torch.tensor(mesh.ranks).view(mesh.shape), mesh_dim_names=mesh.names))
    rank, value = dist.get_rank(), torch.arange(prod(case.shape), dtype=torch.float32).view(case.shape)
    local = torch.empty(0)
    if rank in src.mesh:
        local = part(value, src, rank)
    found = plans(case)
    runs: dict[str, Callable[[], object]] = {name: partial(reshard, plan, local) for name, plan in found.items()}
    for run in runs.values():
        got = run()
        assert got is None or torch.equal(got, part(value, dst, rank))  # type: ignore[arg-type]
    clock = Clock(world, runtime_of(world))  # type: ignore[arg-type]  # there are processes
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(case.turns + 1):
        names = list(runs) if turn % 2 else list(runs)[::-1]
        took = clock.slowest([clock.seconds(runs[name]) for name in names])
        if turn:
            for name, seconds in zip(names, took, strict=True):
                times[name].append(seconds)
    bytes_of = {name: sum(plan.crossing().values()) for name, plan in found.items()}
    return {"times": times, "bytes": bytes_of, "forms": sorted({chain.form for chain in found[DSHARD].chains})}


def part(value: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What a rank holds."""
    region = layout.region(tuple(value.shape), layout.mesh.coordinate(rank))
    return value[tuple(slice(r.start, r.stop) for r in region)].contiguous()


# -- on the machine that starts them


def run_case(case: Case, netlab: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = f"run --hosts {sum(case.hosts)} --ranks {PER_HOST} --rate {case.rate} --show rank0 --timeout 400"
        own = [sys.executable, __file__, "--rank", json.dumps([case.name, str(result)])]
        subprocess.run([sys.executable, netlab, *options.split(), "--", *own], check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def join_and_run(name: str, result: str) -> None:
    share_cores()
    dist.init_process_group("gloo")
    found = as_rank(next(case for case in CASES if case.name == name))
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


SIMPLE = ("plain sends", "balanced sends", "local all-gather", "broadcasts")
HEADER = (
    "case",
    "rate",
    "dshard ms",
    "link's least",
    *(f"{name} / dshard" for name in SIMPLE),
    "dshard / best of these",
)


def ratio(times: dict[str, list[float]], over: str, under: str) -> str:
    """The median of a ratio within turns, and its quartiles."""
    ratios = [a / b for a, b in zip(times[over], times[under], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


def cells(case: Case, row: dict[str, Any]) -> list[str]:
    times = row["times"]
    best = min(SIMPLE, key=lambda name: median(times[name]))
    return [
        case.name,
        case.rate,
        f"{median(times[DSHARD]) * 1e3:.0f}",
        f"{plans(case)[DSHARD].bound * 1e3:.0f}",
        *(ratio(times, name, DSHARD) for name in SIMPLE),
        f"{ratio(times, DSHARD, best)} {best}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", metavar="FILE", help="the program that emulates hosts")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these cases alone")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        join_and_run(*json.loads(options.rank))
        return
    if options.netlab is None:
        parser.error("reshards cross between hosts: give --netlab, the program that emulates them")
    chosen = [case for case in CASES if options.only is None or case.name in options.only]
    table = [cells(case, run_case(case, options.netlab)) for case in chosen]
    print(text_table(HEADER, table))
    if options.write:
        load = f"Load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, torch {torch.__version__}."
        write_section("reshard", f"{load}\n\n{markdown_table(HEADER, table)}")


if __name__ == "__main__":
    main()
