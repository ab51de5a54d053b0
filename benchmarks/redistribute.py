"""Redistributions measured on gloo ranks, beside torch's own DTensor in the same run.

    python benchmarks/redistribute.py [--ranks 4] [--mebibytes 4] [--json]

Every transition between layouts of a square fp32 matrix on a mesh of (2, ranks / 2) that sends anything and that
torch allows: milliseconds of the slowest rank, medians of interleaved repeats; bytes that the plan moves, over the
exact lower bound. One torch thread for each rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
import warnings
from functools import cache
from math import isqrt
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs

import dshard as ours
from dshard.redistribute import plan
from dshard.redistribute.bound import lower_bound
from dshard.tables import text_table
from dshard.testing import RankPool
from dshard.topology import default_topology

REPEATS = 7
WORDS = ("R", "P", "S0", "S1")


def placement(lib: Any, word: str) -> Any:
    return {"R": lib.Replicate(), "P": lib.Partial(), "S0": lib.Shard(0), "S1": lib.Shard(1)}[word]


@cache
def mesh_of(ranks: int) -> Any:
    return ours.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))


def laid(lib: Any, mesh: Any, words: tuple[str, ...], size: int) -> Any:
    """A matrix in this layout; a pending one of random terms."""
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


def milliseconds(x: Any, mesh: Any, target: list[Any]) -> float:
    """One redistribution, by the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    x.redistribute(mesh, target).to_local()
    took = torch.tensor((time.perf_counter() - begin) * 1e3)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(ranks: int, size: int, src: tuple[str, ...], dst: tuple[str, ...]) -> dict[str, float]:
    """Runs on every rank."""
    warnings.simplefilter("ignore")
    mesh = mesh_of(ranks)
    times: dict[str, list[float]] = {"dshard": [], "torch": []}
    tensors = {"dshard": (laid(ours, mesh, src, size), ours), "torch": (laid(theirs, mesh, src, size), theirs)}
    for turn in range(REPEATS + 2):
        for name, (x, lib) in tensors.items():
            took = milliseconds(x, mesh, [placement(lib, word) for word in dst])
            if turn > 1:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def transitions(ranks: int, size: int) -> list[tuple[tuple[str, ...], tuple[str, ...], float]]:
    """The layouts from and to, and the bytes of the plan over the lower bound."""
    mesh = ours.Mesh((2, ranks // 2), ("a", "b"))
    found = []
    for src, dst in itertools.product(itertools.product(WORDS, repeat=2), repeat=2):
        if src == dst or "P" in dst:
            continue
        there, here = (ours.Layout(mesh, tuple(placement(ours, word) for word in words)) for words in (dst, src))
        bound = lower_bound(here, there, (size, size))
        if bound:
            moved = plan(here, there, (size, size), 4, default_topology("cpu"))
            mean = sum(moved.received(at) for at in mesh.coordinates()) / mesh.size
            found.append((src, dst, mean / bound))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mebibytes", type=int, default=4, help="size of the whole matrix")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    size = isqrt(options.mebibytes * 2**20 // 4)
    rows = []
    with RankPool(options.ranks) as pool:
        for src, dst, over in transitions(options.ranks, size):
            times = pool.run(measure, options.ranks, size, src, dst)[0]
            rows.append(
                {
                    "src": " ".join(src),
                    "dst": " ".join(dst),
                    **times,
                    "ratio": times["dshard"] / times["torch"],
                    "bytes_over_bound": over,
                }
            )
    overall = statistics.geometric_mean(row["ratio"] for row in rows)
    if options.json:
        print(json.dumps({"rows": rows, "geometric_mean_ratio": overall}))
        return
    header = ["from", "to", "dshard ms", "torch ms", "dshard / torch", "bytes / bound"]
    cells = [
        [
            row["src"],
            row["dst"],
            f"{row['dshard']:.2f}",
            f"{row['torch']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['bytes_over_bound']:.2f}",
        ]
        for row in rows
    ]
    print(text_table(header, cells))
    print(
        f"{len(rows)} transitions; geometric mean of the ratios {overall:.2f}, "
        f"worst {max(row['ratio'] for row in rows):.2f}"
    )


if __name__ == "__main__":
    main()
