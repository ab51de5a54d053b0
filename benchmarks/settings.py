"""Settings in which strategies are timed: ranks of this machine or of emulated hosts with slow links, and turns."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dshard.testing import RankPool
from dshard.tools.calibrate.rounds import Clock

Rows = list[dict[str, Any]]
AsRank = Callable[[float, int], Rows]
"""What every rank runs, given the seconds to measure the topology and the turns of each case; its rows are JSON."""

UNCOUNTED = 2
"""Turns that come before those that count."""


@dataclass(frozen=True)
class Setting:
    """Two hosts of two ranks, or one of four without a `rate`; seconds to measure the topology, turns of each case."""

    name: str
    rate: str | None
    seconds: float
    turns: int


def choice_cells(name: str, row: dict[str, Any]) -> list[str]:
    """The cells of a table that say what was chosen, what was fastest, and the regret."""
    return [
        name,
        row["case"],
        row["chosen"],
        f"{row['seconds'] * 1e3:.1f}",
        f"{row['best']} of {row['strategies']}",
        f"{row['least'] * 1e3:.1f}",
        f"{row['regret']:.2f}",
    ]


def run_setting(setting: Setting, netlab: str | None, as_rank: AsRank, script: str) -> Rows | None:
    """What one setting found, or None where it needs emulated hosts and there is no program for them.

    On emulated hosts `script` runs again on every rank, with `--rank`, "cases" and what `join_and_run` takes as JSON.
    """
    if setting.rate is None:
        with RankPool(4, timeout=400) as pool:
            return pool.run(as_rank, setting.seconds, setting.turns)[0]
    if netlab is None:
        print(f"{setting.name}: left out, as it needs --netlab", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        options = f"run --hosts 2 --ranks 2 --rate {setting.rate} --show rank0 --timeout 400".split()
        own = [sys.executable, script, "--rank", json.dumps(["cases", setting.seconds, setting.turns, str(result)])]
        subprocess.run([sys.executable, netlab, *options, "--", *own], check=True)
        found: Rows = json.loads(result.read_text())
        return found


def join_and_run(as_rank: AsRank, seconds: float, turns: int, result: str) -> None:
    """Join the other ranks, run with them, and write the rows to a file."""
    dist.init_process_group("gloo")
    found = as_rank(seconds, turns)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def in_turns(runs: dict[str, Callable[[], object]], clock: Clock, turns: int, most: float) -> dict[str, list[float]]:
    """Seconds of each run, all of them once in every turn; the first turns are not counted.

    At least so many turns, and more where they take no more than `most` seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    turn = 0
    while turn < turns + UNCOUNTED:
        took = clock.slowest([clock.seconds(run) for run in runs.values()])
        turn += 1
        if turn == UNCOUNTED:
            turns = max(turns, int(most / sum(took)))
        if turn > UNCOUNTED:
            for name, seconds in zip(runs, took, strict=True):
                times[name].append(seconds)
    return times


def left_to_run(settings: Sequence[Setting], only: int | None, known: dict[str, Rows]) -> list[Setting]:
    """The settings whose rows are not known; of them the N-th of all alone, where `only` says so."""
    return [each for i, each in enumerate(settings) if only in (None, i) and each.name not in known]
