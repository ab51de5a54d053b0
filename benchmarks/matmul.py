"""Products by every schedule, by the dispatcher's choice, and by torch's DTensor, timed in turns.

    python benchmarks/matmul.py [--netlab netlab.py] [--write] [--only N]
    python benchmarks/matmul.py --sweep --netlab netlab.py --json FILE [--write]  # see matmul_sweep.py

On four gloo ranks of this machine, and with --netlab (a program that runs ranks on emulated hosts with slow links, as
root) on two hosts of two ranks. First the topology is measured; then every case runs with every pair of
loops in turn, from the same operands to the same layout of the result. The regret of the choice is its time over that
of the fastest. A turn takes as long as its slowest rank; of the turns the faster half counts. Then the choice and
torch's DTensor run in turn alone, and the ratio is the median of those of neighbours, with quartiles. Short cases get
more turns, as many as fit into some seconds: ranks that share cores wait for each other now and then.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from typing import Any

import torch
from loops import show_rows
from matmul_cases import CASES, Case, product_of
from matmul_sweep import RATES, run_sweep, sweep_rank, tables
from section import write_section
from settings import Setting, in_turns, join_and_run, left_to_run, run_setting
from torch.distributed import tensor as incumbent

from dshard import use_topology
from dshard.calibrate import measure, typical
from dshard.comm import DeviceMesh, bind, init_device_mesh, runtime_of
from dshard.launch.processes import share_cores
from dshard.tools.calibrate.rounds import Clock

THEIRS = {
    "R": incumbent.Replicate(),
    "P": incumbent.Partial(),
    "S0": incumbent.Shard(0),
    "S1": incumbent.Shard(1),
}


SECONDS = 6.0
"""What the turns of a case may take, where they need not take longer."""


SETTINGS = (
    Setting("one host", None, 16, 16),
    Setting("2 hosts, 1gbit", "1gbit", 16, 10),
    Setting("2 hosts, 450mbit", "450mbit", 16, 8),
    Setting("2 hosts, 200mbit", "200mbit", 18, 7),
)


# -- on every rank


def as_rank(seconds: float, turns: int) -> list[dict[str, Any]]:
    """All cases; the same rows on every rank."""
    warnings.simplefilter("ignore")
    share_cores()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    topology = measure(bind(device_mesh), seconds=seconds)
    with use_topology(topology), torch.no_grad():
        return [run_case(case, device_mesh, turns) for case in CASES]


def run_case(case: Case, device_mesh: DeviceMesh, turns: int) -> dict[str, Any]:
    ours = product_of(case, device_mesh)
    runs: dict[str, Callable[[], object]] = {name: each.run for name, each in ours.candidates.items()}
    chosen = ours.chosen
    ends = [THEIRS[word] for word in case.out.split()]
    theirs = [
        incumbent.distribute_tensor(t, device_mesh, [THEIRS[word] for word in text.split()])
        for t, text in ((ours.a, case.a), (ours.b, case.b))
    ]
    clock = clock_of(device_mesh)
    times = in_turns(runs, clock, turns, SECONDS)
    pair = {"dshard": runs[chosen], "torch": lambda: (theirs[0] @ theirs[1]).redistribute(placements=ends)}
    beside = in_turns(pair, clock, 2 * turns, SECONDS)
    low, middle, high = quantiles([a / b for a, b in zip(beside["dshard"], beside["torch"], strict=True)], n=4)
    best = min(times, key=lambda name: typical(times[name]))
    return {
        "case": case.name,
        "chosen": chosen,
        "best": best,
        "strategies": len(times),
        "seconds": typical(times[chosen]),
        "least": typical(times[best]),
        "torch": typical(beside["torch"]),
        "regret": typical(times[chosen]) / typical(times[best]),
        "ratio": middle,
        "quartiles": (low, high),
    }


def clock_of(device_mesh: DeviceMesh) -> Clock:
    mesh = bind(device_mesh)
    return Clock(mesh, runtime_of(mesh))  # type: ignore[arg-type]  # there are processes


# -- on the machine that starts them


def run_rank(kind: str, *given: Any) -> None:
    """What a rank on an emulated host does."""
    (sweep_rank if kind == "sweep" else partial(join_and_run, as_rank))(*given)


HEADER = ("ranks", "case", "chosen", "ms", "fastest of", "ms", "regret", "torch ms", "dshard / torch", "quartiles")


def cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['torch'] * 1e3:.1f}",
        f"{row['ratio']:.2f}",
        "{:.2f} to {:.2f}".format(*row["quartiles"]),
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    regrets, ratios = [row["regret"] for row in rows], [row["ratio"] for row in rows]
    return (
        f"regret median {median(regrets):.2f}, worst {max(regrets):.2f}; dshard / torch geometric mean "
        f"{geometric_mean(ratios):.2f}, worst {max(ratios):.2f}, best {min(ratios):.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--netlab", metavar="FILE", help="the program that emulates hosts")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--only", type=int, metavar="N", help="the N-th setting alone, from 0")
    parser.add_argument("--sweep", action="store_true", help="the regret over a sweep of rates between two hosts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results of a sweep, which goes on from there")
    parser.add_argument("--rates", type=int, nargs="+", default=RATES, metavar="R", help="Mbit/s of a sweep (all)")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(*json.loads(options.rank))
        return
    if options.sweep:
        if options.netlab is None or options.json is None:
            parser.error("--sweep needs --netlab, which emulates the hosts, and --json, which keeps the results")
        text = tables(run_sweep(__file__, options.netlab, options.json, options.rates))
        print(text)
        if options.write:
            write_section("matmul-sweep", text)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for setting in left_to_run(SETTINGS, options.only, {}):
        result = run_setting(setting, options.netlab, as_rank, __file__)
        if result is not None:
            found[setting.name] = result
    show_rows("matmul", found, HEADER, cells, summary, writes=options.write)


if __name__ == "__main__":
    main()
