"""What one operator call costs, beside torch's own DTensor in the same run: microseconds and their ratio.

    python benchmarks/dispatch.py [--json]

A fake process group of four ranks, so that nothing is sent; one thread; medians of interleaved repeats. `listening` is
dshard with a listener that hears every collective: without one, warm calls do not pay for it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F

import dshard as ours
from dshard.comm import listen
from dshard.tables import text_table

REPEATS, CALLS = 9, 200
Call = Callable[[], Any]
MESH: Any = None


def tensor(lib: Any, shape: tuple[int, ...], *placements: Any, grad: bool = False) -> Any:
    laid = lib.distribute_tensor(torch.randn(shape), MESH, list(placements))
    return laid.requires_grad_() if grad else laid


def add(lib: Any) -> Call:
    x = tensor(lib, (8, 8), lib.Shard(0))
    return lambda: x + x


def view(lib: Any) -> Call:
    x = tensor(lib, (8, 8, 8), lib.Shard(0))
    return lambda: x.view(64, 8)


def mm(lib: Any) -> Call:
    x, w = tensor(lib, (8, 8), lib.Replicate()), tensor(lib, (8, 8), lib.Shard(1))
    return lambda: torch.mm(x, w)


def sum_(lib: Any) -> Call:
    x = tensor(lib, (8, 8, 8), lib.Shard(0))
    return lambda: x.sum()


def layer_norm(lib: Any) -> Call:
    x, w = tensor(lib, (8, 8, 8), lib.Shard(0)), tensor(lib, (8,), lib.Replicate())
    return lambda: F.layer_norm(x, (8,), w, w)


def linear(lib: Any) -> Call:
    x, w = tensor(lib, (4, 8, 8), lib.Replicate()), tensor(lib, (16, 8), lib.Shard(0))
    return lambda: F.linear(x, w)


def linear_and_backward(lib: Any) -> Call:
    x, w = tensor(lib, (4, 8, 8), lib.Replicate(), grad=True), tensor(lib, (16, 8), lib.Shard(0), grad=True)
    grad = tensor(lib, (4, 8, 16), lib.Shard(2))

    def run() -> None:
        F.linear(x, w).backward(grad)
        x.grad = w.grad = None

    return run


def from_local(lib: Any) -> Call:
    x = torch.randn(4, 4)
    return lambda: lib.DTensor.from_local(x, MESH, [lib.Shard(0)])


def gather(lib: Any) -> Call:
    x = tensor(lib, (8, 8, 8), lib.Shard(0))
    return lambda: x.redistribute(MESH, [lib.Replicate()])


def all_to_all(lib: Any) -> Call:
    x = tensor(lib, (8, 8, 8), lib.Shard(0))
    return lambda: x.redistribute(MESH, [lib.Shard(1)])


CASES = [add, view, mm, sum_, layer_norm, linear, linear_and_backward, from_local, gather, all_to_all]


def microseconds(call: Call) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def measure(case: Callable[[Any], Call]) -> dict[str, Any]:
    """Medians of interleaved repeats."""
    calls = {"dshard": case(ours), "listening": case(ours), "torch": case(theirs)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            with listen(lambda event: None) if name == "listening" else nullcontext():
                took = microseconds(call)
            if turn:
                times[name].append(took)
    found = {name: statistics.median(values) for name, values in times.items()}
    return {"case": case.__name__.strip("_"), **found, "ratio": found["dshard"] / found["torch"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4)
    global MESH
    MESH = ours.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    rows = [measure(case) for case in CASES]
    overall = statistics.geometric_mean(row["ratio"] for row in rows)
    if options.json:
        print(json.dumps({"rows": rows, "geometric_mean_ratio": overall}))
        return
    cells = [
        [row["case"], *(f"{row[name]:.1f}" for name in ("dshard", "listening", "torch")), f"{row['ratio']:.2f}"]
        for row in rows
    ]
    print(text_table(["case", "dshard us", "listening us", "torch us", "dshard / torch"], cells))
    print(f"geometric mean of the ratios: {overall:.2f}")


if __name__ == "__main__":
    main()
