"""Prices on a measured topology, held against times measured apart from it.

    python benchmarks/calibration.py [--netlab netlab.py] [--write] [--json FILE]

On four gloo ranks of this machine, and with --netlab (a program that runs ranks on emulated hosts with slow links, as
root) on two hosts of two and of four ranks at two rates of their links. First the topology is measured. Then single
collectives are timed at sizes that it was not measured at, and at some that it was; and on every mesh (d1, d2) a chain
of two matrix products as ATP lays them out. All are compared with their prices. Ranks are scheduled as batch work, as
they share the cores. Minutes in all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from section import markdown_table, write_section

from dshard.calibrate import measure, typical
from dshard.comm import bind, init_device_mesh, runner, runtime_of
from dshard.cost import collective_seconds, work_seconds
from dshard.launch.processes import share_cores
from dshard.layout import parse_layout
from dshard.mesh import Mesh
from dshard.redistribute import Plan, plan
from dshard.tables import text_table
from dshard.testing import RankPool
from dshard.tools.calibrate.measure import axes_to_measure
from dshard.tools.calibrate.rounds import COLLECTIVES, Case, Clock, run_rounds
from dshard.topology import Topology

HELD_OUT = tuple(int(mebibytes * 2**20) for mebibytes in (0.01, 0.1, 0.4, 1.4, 2.8, 4.8, 9.5, 13.5))
AGAIN = (2**14, 2**18, 2**20)
"""Sizes of the calibration that are timed again beside the others: how far a time repeats, whatever the model."""

BINS = ((0, 2**16, "< 64 KiB"), (2**16, 2**20, "64 KiB to 1 MiB"), (2**20, 2**62, ">= 1 MiB"))
REDUCTIONS = ("all_reduce", "reduce_scatter", "all_gather")
TOKENS, HIDDEN = 1024, 512
CHAIN_ROUNDS = 6
CLEAR = 0.15
"""Meshes whose measured times differ by more than this part must come in the order of their prices."""


@dataclass(frozen=True)
class Setting:
    """Ranks, and seconds to measure for; without a `rate` they are on this machine, else on two emulated hosts."""

    shape: tuple[int, int]
    rate: str | None
    seconds: float

    @property
    def name(self) -> str:
        where = "one host" if self.rate is None else f"{self.shape[0]} hosts, {self.rate}"
        return f"{self.shape[0]}x{self.shape[1]}, {where}"


SETTINGS = (
    Setting((2, 2), None, 16),
    Setting((2, 2), "1gbit", 16),
    Setting((2, 2), "200mbit", 18),
    Setting((2, 4), "200mbit", 22),
    Setting((2, 4), "100mbit", 28),
)


# -- on every rank


def as_rank(shape: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Measure, then compare; the same rows on all ranks."""
    warnings.simplefilter("ignore")
    share_cores()
    mesh = bind(init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")))
    topology = measure(mesh, seconds=seconds)
    singles = compare_collectives(mesh, topology, seconds)
    return {"singles": singles, "chain": compare_chains(mesh.size, topology, seconds / 3)}


def compare_collectives(mesh: Mesh, topology: Topology, seconds: float) -> list[dict[str, Any]]:
    runtime = runtime_of(mesh)
    assert runtime is not None
    cases = [Case(axes, collective) for axes in axes_to_measure(mesh) for collective in COLLECTIVES]
    times = run_rounds(Clock(mesh, runtime), cases, sorted((*AGAIN, *HELD_OUT)), seconds, quiet)
    return [
        {
            "collective": case.collective,
            "axes": ",".join(case.axes),
            "nbytes": nbytes,
            "again": is_known(topology, mesh, case, nbytes),
            "rounds": len(found),
            "measured": typical(found),
            "predicted": collective_seconds(case.collective, nbytes, mesh, case.axes, topology),
        }
        for case, by_size in times.samples.items()
        for nbytes, found in by_size.items()
    ]


def quiet(done: float, what: str) -> None:
    """Nobody watches."""


def is_known(topology: Topology, mesh: Mesh, case: Case, nbytes: int) -> bool:
    """Whether the calibration timed this case at this size."""
    own = (found for found in topology.measured if (found.mesh, found.axes) == (mesh, case.axes))
    return any(found.collective == case.collective and nbytes in found.sizes for found in own)


def compare_chains(size: int, topology: Topology, seconds: float) -> list[dict[str, Any]]:
    shapes = [(d1, size // d1) for d1 in range(1, size + 1) if size % d1 == 0]
    meshes = [bind(init_device_mesh("cpu", shape, mesh_dim_names=("d1", "d2"))) for shape in shapes]
    for mesh in meshes:
        if min(mesh.shape) > 1:
            topology = measure(mesh, base=topology, seconds=seconds / 2, collectives=REDUCTIONS)
    chains = [Chain(mesh, topology) for mesh in meshes]
    times: list[list[float]] = [[] for _ in chains]
    for turn in range(CHAIN_ROUNDS + 1):
        for chain, found in zip(chains, times, strict=True):
            took = chain.clock.slowest([chain.clock.seconds(chain.run)])[0]
            if turn:
                found.append(took)
    return [
        {"mesh": mesh.shape, "measured": typical(found), "predicted": chain.predicted}
        for mesh, chain, found in zip(meshes, chains, times, strict=True)
    ]


class Chain:
    """Two products as in ATP: column first, its sums over d2, then row first, its sums over d1 (arXiv 2301.08658)."""

    def __init__(self, mesh: Mesh, topology: Topology) -> None:
        runtime = runtime_of(mesh)
        assert runtime is not None
        self.clock = Clock(mesh, runtime)
        d1, d2 = mesh.shape
        wide = 4 * HIDDEN
        self.x = torch.ones(TOKENS, HIDDEN // d2)
        self.weights = torch.ones(HIDDEN // d2, wide // d1), torch.ones(wide // d1, HIDDEN // d2)
        self.plans = (
            reduction(mesh, "d1:S(1) d2:P(sum)", "d1:S(1) d2:R", wide, topology),
            reduction(mesh, "d1:P(sum) d2:S(1)", "d1:R d2:S(1)", HIDDEN, topology),
        )
        self.sends = [runner(moved) for moved in self.plans]
        k, n = self.weights[0].shape
        product = work_seconds(2 * TOKENS * k * n, 4 * (TOKENS * k + k * n + TOKENS * n), topology, "float32")
        self.predicted = 2 * product + sum(moved.seconds for moved in self.plans)

    def run(self) -> None:
        x = self.x
        for weight, send in zip(self.weights, self.sends, strict=True):
            x = send(x @ weight)


def reduction(mesh: Mesh, src: str, dst: str, width: int, topology: Topology) -> Plan:
    return plan(parse_layout(src, mesh), parse_layout(dst, mesh), (TOKENS, width), 4, topology)


# -- on the machine that starts them


def run_setting(setting: Setting, netlab: str | None) -> dict[str, Any] | None:
    """What one setting found, or None where it needs emulated hosts and there is no program for them."""
    if setting.rate is None:
        with RankPool(setting.shape[0] * setting.shape[1], timeout=300) as pool:
            return pool.run(as_rank, setting.shape, setting.seconds)[0]
    if netlab is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        hosts, ranks = setting.shape
        options = f"run --hosts {hosts} --ranks {ranks} --rate {setting.rate} --show rank0 --timeout 240".split()
        own = [sys.executable, __file__, "--rank", json.dumps([setting.shape, setting.seconds, str(result)])]
        subprocess.run([sys.executable, netlab, *options, "--", *own], check=True)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def join_and_run(shape: Sequence[int], seconds: float, result: str) -> None:
    dist.init_process_group("gloo")
    found = as_rank((shape[0], shape[1]), seconds)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def error_rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, result in found.items():
        for low, high, label in BINS:
            here = [row for row in result["singles"] if low <= row["nbytes"] < high]
            new, again = (errors_of(row for row in here if row["again"] == known) for known in (False, True))
            if new:
                p90 = new[min(len(new) - 1, round(0.9 * len(new)))]
                repeat = f"{median(again):.1%}" if again else ""
                rows.append([name, label, str(len(new)), f"{median(new):.1%}", f"{p90:.1%}", repeat])
    return rows


def errors_of(rows: Iterable[dict[str, Any]]) -> list[float]:
    return sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)


def chain_rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for name, result in found.items():
        chain = result["chain"]
        cells = [
            f"({row['mesh'][0]}, {row['mesh'][1]}) {row['measured'] * 1e3:.0f} / {row['predicted'] * 1e3:.0f}"
            for row in sorted(chain, key=lambda row: row["measured"])
        ]
        clear, agree = order(chain)
        rows.append([name, "; ".join(cells), f"{agree} of {clear}"])
    return rows


def order(chain: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """How many pairs of meshes differ clearly in time, and in how many of these the prices differ alike."""
    clear = agree = 0
    for a, b in combinations(chain, 2):
        fast, slow = sorted((a, b), key=lambda row: row["measured"])
        if slow["measured"] > fast["measured"] * (1 + CLEAR):
            clear += 1
            agree += slow["predicted"] > fast["predicted"]
    return clear, agree


ERROR_HEADER = ["ranks", "bytes received", "cases", "median error", "90th percentile", "known sizes again"]
CHAIN_HEADER = ["ranks", "mesh (d1, d2): ms measured / predicted", "clear pairs in order"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", metavar="FILE", help="the program that emulates hosts")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every time and price")
    parser.add_argument("--only", type=int, metavar="N", help="the N-th setting alone, from 0")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        join_and_run(*json.loads(options.rank))
        return
    found: dict[str, dict[str, Any]] = {}
    for setting in SETTINGS if options.only is None else [SETTINGS[options.only]]:
        result = run_setting(setting, options.netlab)
        if result is None:
            print(f"{setting.name}: left out, as it needs --netlab", file=sys.stderr)
        else:
            found[setting.name] = result
    errors, chains = error_rows(found), chain_rows(found)
    print(text_table(ERROR_HEADER, errors), text_table(CHAIN_HEADER, chains), sep="\n\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        tables = markdown_table(ERROR_HEADER, errors), markdown_table(CHAIN_HEADER, chains)
        write_section("calibration", "\n\n".join(tables))


if __name__ == "__main__":
    main()
