"""Redistributions measured on gloo ranks, beside torch's own DTensor in the same run.

    python benchmarks/redistribute.py [--ranks 4 8] [--mebibytes 4] [--json] [--write]

Every transition between layouts of a square fp32 matrix on a mesh of (2, ranks / 2) that torch allows, those that send
nothing included. A turn is a block of calls of dshard's and one of torch's, in changing order: milliseconds are those
of a call of the slowest rank, medians of the turns; ratios are within a turn, their median and quartiles. What comes
near to torch's time or above it is measured again, with more turns, and all of them count. Bytes are those received, as
`dshard.testing.count_traffic` counts them below both libraries, over the exact lower bound. One torch thread for each
rank. `--write` puts the figures into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from received_bound import lower_bound
from section import markdown_table, write_section

import dshard as ours
from dshard.tables import text_table
from dshard.testing import RankPool, count_traffic

TURNS, CALLS = 6, 3
AGAIN, MORE = 0.95, 18
"""Where the ratio is above the one, so many turns more are measured."""
WORDS = ("R", "P", "S0", "S1")
LIBRARIES = {"dshard": ours, "torch": theirs}
Words = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One transition: milliseconds, their ratio with its quartiles, and mean bytes received over the lower bound."""

    src: str
    dst: str
    dshard: float
    torch: float
    ratio: float
    quartiles: tuple[float, float]
    nbytes: dict[str, float]
    bound: float

    def over_bound(self, name: str) -> str:
        return f"{self.nbytes[name] / self.bound:.2f}" if self.bound else f"{self.nbytes[name]:.0f} B"


def placement(lib: Any, word: str) -> Any:
    return {"R": lib.Replicate(), "P": lib.Partial(), "S0": lib.Shard(0), "S1": lib.Shard(1)}[word]


@cache
def mesh_of(ranks: int) -> Any:
    return ours.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))


def laid(lib: Any, mesh: Any, words: Words, size: int) -> Any:
    """A matrix in this layout; a partial one of random terms."""
    local = [size, size]
    for axis, word in zip(mesh.shape, words, strict=True):
        if word.startswith("S"):
            local[int(word[1])] //= axis
    return lib.DTensor.from_local(
        torch.randn(local),
        mesh,
        [placement(lib, word) for word in words],
        shape=torch.Size((size, size)),
        stride=(size, 1),
    )


def calls_of(ranks: int, size: int, src: Words, dst: Words) -> dict[str, Callable[[], Any]]:
    """The redistribution by each library."""
    mesh, found = mesh_of(ranks), {}
    for name, lib in LIBRARIES.items():
        x, target = laid(lib, mesh, src, size), [placement(lib, word) for word in dst]
        found[name] = lambda x=x, target=target: x.redistribute(mesh, target).to_local()
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    """One call of a block, by the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    took = torch.tensor((time.perf_counter() - begin) * 1e3 / CALLS)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def turns(ranks: int, size: int, src: Words, dst: Words, count: int) -> list[dict[str, float]]:
    """Milliseconds of each turn; runs on every rank."""
    calls, found = calls_of(ranks, size, src, dst), []
    for turn in range(count + 1):
        names = list(calls) if turn % 2 else list(calls)[::-1]
        took = {name: milliseconds(calls[name]) for name in names}
        if turn:
            found.append(took)
    return found


def nbytes(ranks: int, size: int, src: Words, dst: Words) -> dict[str, int]:
    """Bytes that this rank receives; runs on every rank."""
    warnings.simplefilter("ignore")
    found = {}
    for name, call in calls_of(ranks, size, src, dst).items():
        with count_traffic() as traffic:
            call()
        found[name] = traffic.nbytes
    return found


def measure(pool: RankPool, ranks: int, size: int, src: Words, dst: Words) -> Row:
    """One transition."""
    mesh = ours.Mesh((2, ranks // 2), ("a", "b"))
    here, there = (ours.Layout(mesh, tuple(placement(ours, word) for word in words)) for words in (src, dst))
    counted = pool.run(nbytes, ranks, size, src, dst)
    mean = {name: statistics.mean(count[name] for count in counted) for name in LIBRARIES}
    took = pool.run(turns, ranks, size, src, dst, TURNS)[0]
    if ratio_of(took) > AGAIN:
        took += pool.run(turns, ranks, size, src, dst, MORE)[0]
    low, _, high = statistics.quantiles([turn["dshard"] / turn["torch"] for turn in took], n=4)
    times = {name: statistics.median(turn[name] for turn in took) for name in LIBRARIES}
    bound = lower_bound(here, there, (size, size)) * 4
    return Row(
        " ".join(src), " ".join(dst), **times, ratio=ratio_of(took), quartiles=(low, high), nbytes=mean, bound=bound
    )


def ratio_of(took: list[dict[str, float]]) -> float:
    """The median of the turns' ratios: what slows the machine for a while slows both sides of a turn."""
    return statistics.median(turn["dshard"] / turn["torch"] for turn in took)


def transitions() -> list[tuple[Words, Words]]:
    """The layouts from and to."""
    pairs = itertools.product(itertools.product(WORDS, repeat=2), repeat=2)
    return [(src, dst) for src, dst in pairs if src != dst and "P" not in dst]


def table(rows: list[Row], show: Callable[[list[str], list[list[str]]], str]) -> str:
    header = ["from", "to", "dshard ms", "torch ms", "dshard / torch", "quartiles", "bytes / bound", "torch's"]
    cells = [
        [
            row.src,
            row.dst,
            f"{row.dshard:.2f}",
            f"{row.torch:.2f}",
            f"{row.ratio:.2f}",
            f"{row.quartiles[0]:.2f} to {row.quartiles[1]:.2f}",
            row.over_bound("dshard"),
            row.over_bound("torch"),
        ]
        for row in rows
    ]
    return show(header, cells)


def summary(results: dict[int, list[Row]], show: Callable[[list[str], list[list[str]]], str]) -> str:
    header = ["ranks", "mesh", "transitions", "geometric mean", "best", "worst", "above 1.1", "bytes / torch's bytes"]
    cells = []
    for ranks, rows in results.items():
        ratios = [row.ratio for row in rows]
        sent = [row.nbytes["dshard"] / row.nbytes["torch"] for row in rows if row.bound]
        cells.append(
            [
                str(ranks),
                f"(2, {ranks // 2})",
                str(len(rows)),
                f"{statistics.geometric_mean(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{max(ratios):.2f}",
                str(sum(ratio > 1.1 for ratio in ratios)),
                f"{statistics.geometric_mean(sent):.2f}",
            ]
        )
    return show(header, cells)


def section(results: dict[int, list[Row]], mebibytes: int) -> str:
    """What docs/benchmarks.md says."""
    parts = [
        f"A {mebibytes} MiB fp32 matrix on gloo; {os.cpu_count()} cores, torch {torch.__version__}, "
        f"{datetime.date.today()}. Ratios are\n"
        "dshard / torch DTensor within a turn: medians over interleaved turns.",
        summary(results, markdown_table),
    ]
    for ranks, rows in results.items():
        worst = sorted(rows, key=lambda row: -row.ratio)[:8]
        parts += [
            f"The transitions nearest to torch's time, or above it, on {ranks} ranks:",
            table(worst, markdown_table),
        ]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--mebibytes", type=int, default=4, help="size of the whole matrix")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/benchmarks.md")
    options = parser.parse_args()
    size = isqrt(options.mebibytes * 2**20 // 4)
    os.environ["TORCH_LOGS"] = "-all"  # torch logs each fallback of its own on CPU
    results: dict[int, list[Row]] = {}
    for ranks in options.ranks:
        with RankPool(ranks, timeout=300) as pool:
            results[ranks] = [measure(pool, ranks, size, src, dst) for src, dst in transitions()]
    if options.json:
        print(json.dumps({ranks: [asdict(row) for row in rows] for ranks, rows in results.items()}))
        return
    for ranks, rows in results.items():
        print(f"{ranks} ranks\n{table(rows, text_table)}\n")
    print(summary(results, text_table))
    if options.write:
        write_section("redistribute", section(results, options.mebibytes))


if __name__ == "__main__":
    main()
