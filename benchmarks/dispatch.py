"""What one operator call costs, beside torch's own DTensor in the same run: microseconds and their ratio.

    python benchmarks/dispatch.py [--device cuda] [--json] [--write]

A fake process group of eight ranks, so that nothing is sent; one thread; medians of interleaved repeats. Choices are
made by bytes alone, and gradients are brought to the layouts of their tensors by both, so both send the same.
`listening` is dshard with a listener that hears every collective: without one, warm calls do not pay for it. On a
GPU tensors are on it, and the time is that of the host still, which no kernel here keeps waiting. `--write` puts the
tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from gpt import Size, block, block_parameters, distributed, local_part
from section import markdown_table, write_section

import dshard as ours
from dshard.comm import listen
from dshard.topology import BYTES

REPEATS, CALLS = 9, 200
BLOCK_CALLS = 20
Call = Callable[[], Any]
MESH: Any = None
GRID: Any = None


def tensor(lib: Any, shape: tuple[int, ...], *placements: Any, grad: bool = False) -> Any:
    laid = lib.distribute_tensor(torch.randn(shape), MESH, list(placements))
    return laid.requires_grad_() if grad else laid


def settled(lib: Any, *leaves: Any) -> None:
    """Gradients laid out like their tensors, as dshard leaves them, and then forgotten."""
    for leaf in leaves:
        if lib is theirs:
            leaf.grad.redistribute(leaf.device_mesh, leaf.placements)
        leaf.grad = None


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
    """A sum that keeps dims, which both leave partial."""
    x = tensor(lib, (8, 8, 8), lib.Shard(0))
    return lambda: x.sum(0)


def number(lib: Any) -> Call:
    """A sum that every rank can read: dshard reduces it when it is made, torch's DTensor when it is asked for."""
    x = tensor(lib, (8, 8, 8), lib.Shard(0))
    return (lambda: x.sum()) if lib is ours else (lambda: x.sum().full_tensor())


def layer_norm(lib: Any) -> Call:
    x, w = tensor(lib, (8, 8, 8), lib.Shard(0)), tensor(lib, (8,), lib.Replicate())
    return lambda: F.layer_norm(x, (8,), w, w)


def linear(lib: Any) -> Call:
    x, w = tensor(lib, (4, 8, 8), lib.Replicate()), tensor(lib, (128, 8), lib.Shard(0))
    return lambda: F.linear(x, w)


def linear_and_backward(lib: Any) -> Call:
    x, w = tensor(lib, (4, 8, 8), lib.Replicate(), grad=True), tensor(lib, (128, 8), lib.Shard(0), grad=True)
    grad = tensor(lib, (4, 8, 128), lib.Shard(2))

    def run() -> None:
        F.linear(x, w).backward(grad)
        settled(lib, x, w)

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


CASES = [add, view, mm, sum_, number, layer_norm, linear, linear_and_backward, from_local, gather, all_to_all]
LIBRARIES = {"dshard": ours, "torch": theirs}


def gpt_blocks(lib: Any, depth: int) -> tuple[Call, Call]:
    """Blocks on a mesh of 2 x 4 ranks, forward without recording, and forward and backward; `lib` None is one rank."""
    size = Size()
    if lib is None:
        place, complete = local_part(2, 4), lambda x: x
    else:
        layout = [lib.Shard(0), lib.Replicate()]
        place, complete = distributed(lib, GRID), lambda x: x.redistribute(GRID, layout)
    parameters = [block_parameters(size, place) for _ in range(depth)]
    x, grad = (place(torch.randn(size.batch, size.length, size.width), "batch") for _ in range(2))

    def run() -> Any:
        y = x
        for w in parameters:
            y = block(y, w, size.width // size.heads, complete)
        return y

    def forward() -> Any:
        with torch.no_grad():
            return run()

    def both() -> None:
        run().backward(grad)
        settled(lib, *(leaf for w in parameters for leaf in w.values()))

    return forward, both


def microseconds(call: Call, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - begin) / calls * 1e6


def interleaved(calls: dict[str, Call], each: int) -> dict[str, float]:
    """Medians of repeats in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            with listen(lambda event: None) if name == "listening" else nullcontext():
                took = microseconds(call, each)
            if turn:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(case: Callable[[Any], Call]) -> dict[str, Any]:
    with torch.device(MESH.device_type):
        calls = {"dshard": case(ours), "listening": case(ours), "torch": case(theirs)}
    found = interleaved(calls, CALLS)
    return {"case": case.__name__.strip("_"), **found, "ratio": found["dshard"] / found["torch"]}


def measure_blocks() -> list[dict[str, Any]]:
    """The block of a GPT, forward, and forward and backward; beside the block that one rank computes, plain.

    NaN for torch's DTensor where it cannot run the block, as in torch 2.11.
    """
    with torch.device(MESH.device_type):
        made = {"dshard": gpt_blocks(ours, 1), "torch": gpt_blocks(theirs, 1), "plain": gpt_blocks(None, 1)}
    try:
        made["torch"][0]()
    except RuntimeError:
        del made["torch"]
    rows = []
    for i, what in enumerate(("GPT block", "GPT block and backward")):
        found = {"torch": math.nan, **interleaved({name: calls[i] for name, calls in made.items()}, BLOCK_CALLS)}
        ratio, over = found["dshard"] / found["torch"], found["dshard"] / found["plain"]
        rows.append({"case": what, **found, "ratio": ratio, "over_plain": over})
    return rows


def cold(name: str, device: str) -> float:
    """Seconds of the first step of two blocks in a fresh process: all that is planned, looked up and compiled."""
    start(device)
    with torch.device(device):
        step = gpt_blocks(LIBRARIES[name], 2)[1]
    begin = time.process_time()
    step()
    return time.process_time() - begin


def measure_cold(device: str) -> dict[str, float]:
    """Medians of three fresh processes for each library, in turn."""
    times: dict[str, list[float]] = {name: [] for name in LIBRARIES}
    for _ in range(3):
        for name, found in times.items():
            done = subprocess.run(
                [sys.executable, __file__, "--cold", name, "--device", device], capture_output=True, text=True
            )
            found.append(float(done.stdout or "nan"))
    return {name: statistics.median(found) for name, found in times.items()}


def start(device: str) -> None:
    global MESH, GRID
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8)
    MESH = ours.init_device_mesh(device, (8,), mesh_dim_names=("tp",))
    GRID = ours.init_device_mesh(device, (2, 4), mesh_dim_names=("dp", "tp"))


def tables(rows: list[dict[str, Any]], blocks: list[dict[str, Any]], first: dict[str, float], overall: float) -> str:
    names, plain = ("dshard", "listening", "torch"), ("dshard", "torch", "plain")
    cells = [
        [row["case"].replace("_", " "), *(f"{row[name]:.1f}" for name in names), f"{row['ratio']:.2f}"] for row in rows
    ]
    whole = [
        [row["case"], *(f"{row[name]:.0f}" for name in plain), f"{row['ratio']:.2f}", f"{row['over_plain']:.1f}"]
        for row in blocks
    ]
    theirs_first = "" if math.isnan(first["torch"]) else f", torch's DTensor {first['torch']:.2f} s"
    text = "\n\n".join(
        [
            markdown_table(["case", "dshard us", "listening us", "torch DTensor us", "dshard / torch"], cells),
            markdown_table(
                ["case, mesh 2 x 4", "dshard us", "torch DTensor us", "plain us", "dshard / torch", "dshard / plain"],
                whole,
            ),
            f"Geometric mean of the ratios to torch's DTensor: {overall:.2f}. First step of two blocks in a fresh "
            f"process: {first['dshard']:.2f} s{theirs_first}.",
        ]
    )
    return text.replace(" nan |", " - |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    parser.add_argument("--cold", choices=LIBRARIES, help="print the seconds of one library's first step")
    options = parser.parse_args()
    if options.cold:
        with ours.use_topology(BYTES):
            print(cold(options.cold, options.device))
        return
    first = measure_cold(options.device)
    start(options.device)
    with ours.use_topology(BYTES):
        rows, blocks = [measure(case) for case in CASES], measure_blocks()
    ratios = [row["ratio"] for row in (*rows, *blocks)]
    overall = statistics.geometric_mean(ratio for ratio in ratios if not math.isnan(ratio))
    if options.json:
        print(json.dumps({"rows": rows, "blocks": blocks, "cold": first, "geometric_mean_ratio": overall}))
        return
    text = tables(rows, blocks, first, overall)
    print(text)
    if options.write:
        write_section("dispatch" if options.device == "cpu" else "dispatch-cuda", text)


if __name__ == "__main__":
    main()
