"""Random values: what each rank computes, beside torch's own generator on a tensor of the same size. Ratios of one run.

    python benchmarks/random_values.py [--json] [--device cuda]

No processes: a part of a tensor is drawn as a rank would draw it. `row shard` is a quarter of the rows, `column shard`
a quarter of the columns; `odd columns` begin and end within pairs of words. The time of torch is that for as many
elements.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dshard.layout import Region
from dshard.ops.random import draw
from dshard.ops.random.distributions import Distribution, bernoulli, normal, uniform
from dshard.ops.random.state import Draw
from dshard.tables import text_table

ROWS, COLUMNS, REPEATS = 1024, 4096, 7
SHAPE = (ROWS, COLUMNS)
PARTS: dict[str, Region] = {
    "whole": (range(ROWS), range(COLUMNS)),
    "row shard": (range(ROWS // 4), range(COLUMNS)),
    "column shard": (range(ROWS), range(COLUMNS // 4)),
    "odd columns": (range(ROWS), range(1, COLUMNS // 4 + 2)),
    "one column": (range(ROWS), range(1)),
}
CASES: dict[str, tuple[torch.dtype, Distribution, Callable[[Tensor], Any]]] = {
    "rand": (torch.float32, uniform(torch.float32), Tensor.uniform_),
    "rand float64": (torch.float64, uniform(torch.float64), Tensor.uniform_),
    "rand bfloat16": (torch.bfloat16, uniform(torch.bfloat16), Tensor.uniform_),
    "randn": (torch.float32, normal(torch.float32), Tensor.normal_),
    "randn float64": (torch.float64, normal(torch.float64), Tensor.normal_),
    "dropout mask": (torch.bool, bernoulli(0.9), lambda x: x.bernoulli_(0.9)),
}


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def measure(case: str, part: str, device: torch.device) -> dict[str, Any]:
    """Medians of interleaved repeats, in ns for each element."""
    dtype, distribution, of_torch = CASES[case]
    region = PARTS[part]
    out = torch.empty([len(held) for held in region], dtype=dtype, device=device)
    calls = {
        "dshard": lambda: draw.fill(out, SHAPE, region, Draw(0, 0), distribution),
        "torch": lambda: of_torch(out),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            took = seconds(call, device)
            if turn:
                times[name].append(took / out.numel() * 1e9)
    ours, theirs = (statistics.median(times[name]) for name in calls)
    return {"case": case, "part": part, "dshard ns": ours, "torch ns": theirs, "dshard / torch": ours / theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(options.device)
    rows = [measure(case, part, device) for case in CASES for part in (PARTS if case == "rand" else ["whole"])]
    if options.json:
        print(json.dumps(rows))
        return
    cells = [[row["case"], row["part"], *(f"{row[name]:.2f}" for name in list(row)[2:])] for row in rows]
    print(text_table(["case", "part", "dshard ns", "torch ns", "dshard / torch"], cells))


if __name__ == "__main__":
    main()
