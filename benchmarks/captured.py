"""A training step on one GPU, run by Python and replayed from a CUDA graph: dshard, torch's DTensor, plain torch.

    python benchmarks/captured.py [--json] [--write]

A GPT of two blocks on rank 0 of a mesh of 2 x 4 ranks, by the same lines of code, in a fake process group that sends
nothing: what is timed is the work of one rank and what Python adds to it. Plain torch computes what that rank does.
`eager` is a step run by Python, `captured` the replay of its graph, by CUDA's events: milliseconds in bfloat16, medians
of repeats in turn. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from gpt import GPT, Place, Size, distributed, local_part
from section import markdown_table, write_section

import dshard as ours
from dshard.tools.selftest.selftest_checks import captured

WIDTHS = (512, 1024, 2048, 4096)
DEPTH, WARM, REPEATS, STEPS = 2, 3, 9, 5
Step = Callable[[], Any]


def training_step(size: Size, place: Place, complete: Callable[[Any], Any], end: Callable[[list[Any]], None]) -> Step:
    """A step of AdamW that returns its loss; `end` sees the parameters after the backward pass."""
    torch.manual_seed(0)
    model = GPT(size, DEPTH, place, complete)
    parameters = model.parameters()
    optimiser = torch.optim.AdamW(parameters, lr=1e-3, capturable=torch.cuda.is_available(), foreach=True)
    words = torch.randint(size.words, (size.batch, size.length + 1))
    ids, targets = (place(words[:, i : i + size.length].contiguous(), "batch") for i in (0, 1))

    def step() -> Any:
        optimiser.zero_grad()
        loss = model.loss(ids, targets)
        loss.backward()
        end(parameters)
        optimiser.step()
        return loss.detach()

    return step


def settled(parameters: list[Any]) -> None:
    """Bring gradients of torch's DTensor to the layouts of their parameters, as dshard leaves them."""
    for p in parameters:
        p.grad = p.grad.redistribute(p.device_mesh, p.placements)


def steps_of(size: Size, mesh: Any) -> dict[str, Step]:
    """The same step by both libraries, and what rank 0 computes in it."""
    with torch.device(mesh.device_type):
        made = {"plain": training_step(size, local_part(2, 4), lambda x: x, lambda parameters: None)}
        for name, lib, end in (("dshard", ours, lambda parameters: None), ("torch", theirs, settled)):
            layout = [lib.Shard(0), lib.Replicate()]
            complete = lambda x, layout=layout: x.redistribute(mesh, layout)  # noqa: E731
            made[name] = training_step(size, distributed(lib, mesh), complete, end)
    return made


def milliseconds(run: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(STEPS):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS


def measure(width: int, mesh: Any) -> dict[str, Any]:
    """Milliseconds of each step, eager and captured, and the bytes that eager ones hold at their peak."""
    size = Size(batch=8, length=512, width=width, heads=16, hidden=4 * width, words=8192)
    steps, runs, peaks, failed = steps_of(size, mesh), dict[tuple[str, str], Step](), dict[str, int](), dict[str, str]()
    for name, step in steps.items():
        try:
            for _ in range(WARM):
                step()
        except RuntimeError as error:  # torch's DTensor of torch 2.11
            failed[name] = str(error).splitlines()[0]
            continue
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        runs[name, "eager"] = step
        try:
            runs[name, "captured"] = captured("cuda", step, WARM)
        except RuntimeError as error:
            failed[name] = str(error).splitlines()[0]
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(REPEATS + 1):
        for key, run in runs.items():
            took = milliseconds(run)
            if turn:
                times[key].append(took)
    medians = {" ".join(key): statistics.median(values) for key, values in times.items()}
    return {"width": width, "milliseconds": medians, "peaks": peaks, "failed": failed}


def table(rows: list[dict[str, Any]]) -> str:
    names = [f"{name} {how}" for how in ("eager", "captured") for name in ("plain", "dshard", "torch")]
    header = ["width", *(name.replace("torch", "torch DTensor") for name in names), "dshard / plain, captured"]
    cells = []
    for row in rows:
        took = row["milliseconds"]
        ratio = took["dshard captured"] / took["plain captured"] if "dshard captured" in took else float("nan")
        cells.append([str(row["width"]), *(f"{took[n]:.2f}" if n in took else "fails" for n in names), f"{ratio:.2f}"])
    return markdown_table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("fake", rank=0, world_size=8)
    mesh = ours.init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    rows = [measure(width, mesh) for width in WIDTHS]
    if options.json:
        print(json.dumps(rows))
        return
    text = table(rows)
    print(text)
    if options.write:
        write_section("captured", text)


if __name__ == "__main__":
    main()
