"""Products in panels beside the same products in bulk, on ranks that are slow to talk to each other.

    torchrun --nproc-per-node 4 benchmarks/stream.py [--size 2048] [--repeats 9] [--where TEXT] [--write FILE]

Starts no ranks itself: give it four, by torchrun or by anything that sets RANK and WORLD_SIZE, such as an emulated
network. Each form of a product of square fp32 matrices is timed in turn, by the slowest rank; a ratio is of two times
that follow each other, and its spread the quartiles over the repeats. One torch thread for each rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dshard
from dshard import Schedule, Stream, matmul
from dshard.comm import bind
from dshard.comm.workspace import WORKSPACE
from dshard.tables import text_table
from dshard.testing import distribute

CASES: dict[str, tuple[tuple[int, ...], Schedule]] = {
    "summa (2, 2)": ((2, 2), Schedule(("m", "n"), ("k", "k"))),
    "summa-abt (2, 2)": ((2, 2), Schedule(("m", "k"), ("n", "n"))),
    "column-sequence (4)": ((4,), Schedule(("n",), ("m",))),
    "row-sequence (4)": ((4,), Schedule(("k",), ("m",))),
}
FORMS: dict[str, Stream | None] = {
    "bulk": None,
    "2 panels": Stream(2),
    "4 panels": Stream(4),
    "8 panels": Stream(8),
    "broadcast, 2 panels each": Stream(2, None, "broadcast"),
    "ring": Stream(1, None, "ring"),
}
BEGIN, END = "<!-- benchmarks/stream.py -->", "<!-- end of benchmarks/stream.py -->"


def seconds(call: Callable[[], Any]) -> float:
    """One call, by the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def measure(shape: tuple[int, ...], schedule: Schedule, size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each form in turn, over and over; and of the local product and the movement alone."""
    mesh = bind(dshard.init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)]))
    x, y = (distribute(torch.randn(size, size), layout) for layout in schedule.layouts(mesh)[:2])
    parts = mesh.size
    a, b = torch.randn(size, size), torch.randn(size, size // parts)
    calls: dict[str, Callable[[], Any]] = {"local": lambda: a @ b}
    for name, stream in FORMS.items():
        calls[name] = lambda stream=stream: matmul(x, y, strategy=schedule, panels=stream)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            took = seconds(call)
            if turn > 1:
                times[name].append(took)
    return times


def row(case: str, times: dict[str, list[float]]) -> list[list[str]]:
    """Each form of one case: its median, and how many times faster than bulk it is."""
    local = statistics.median(times["local"])
    found = []
    for name in FORMS:
        ratios = [bulk / took for bulk, took in zip(times["bulk"], times[name], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(times[name])
        cells = [f"{median * 1e3:.0f}", f"{median / local:.2f}", f"{middle:.2f}", f"{low:.2f} to {high:.2f}"]
        found.append([case, name, *cells])
    return found


def write(path: Path, text: str) -> None:
    """Put `text` between the markers of a document."""
    before, _, rest = path.read_text().partition(BEGIN)
    after = rest.partition(END)[2] if rest else "\n"
    path.write_text(f"{before.rstrip()}\n\n{BEGIN}\n{text}\n{END}{after}")


def section(rows: list[list[str]], size: int, repeats: int, where: str) -> str:
    """The section of the document."""
    lines = [
        "## Streamed products",
        "",
        f"`benchmarks/stream.py --size {size} --repeats {repeats}`, fp32, four ranks, {where}.",
        "`over local` is the time over that of the local products alone, all ranks at once; `faster` the time in bulk",
        "over that of the form, the median of pairs that follow each other, with quartiles.",
        "",
        "On gloo the bulk form gathers by broadcasts, panels by gloo's ring, which crosses the link between hosts less",
        "often: on one axis of four ranks that is part of the gain.",
        "",
        "| product | form | ms | over local | faster | quartiles |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(cells) + " |" for cells in rows),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--where", default="on one host", help="what the ranks run on, for the document")
    parser.add_argument("--write", type=Path, help="the document to put the table in")
    parser.add_argument("--case", help="only this product")
    parser.add_argument("--json", action="store_true", help="print the seconds as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows: list[list[str]] = []
    for case, (shape, schedule) in CASES.items():
        if options.case in (None, case):
            times = measure(shape, schedule, options.size, options.repeats)
            rows += row(case, times)
            if options.json and dist.get_rank() == 0:
                print(json.dumps({case: times}))
            WORKSPACE.clear()
    if dist.get_rank() == 0:
        print(text_table(["product", "form", "ms", "over local", "faster", "quartiles"], rows))
        if options.write is not None:
            write(options.write, section(rows, options.size, options.repeats, options.where))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
