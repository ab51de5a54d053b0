"""A training step of a small GPT on four gloo ranks, beside torch's DTensor: seconds, and the bytes held at the peak.

    python benchmarks/training.py [--write]

The same lines of code, layouts, parameters and optimiser for both; gradients end in the layouts of their parameters.
The steps of both are interleaved in one run; a step takes as long as its slowest rank. Bytes are those that torch's
allocator has given out at once on a rank, beyond what it had before the step: of several steps the least, as gloo's
threads may let go of a buffer late, of either library. A second table has what it costs to compare inputs and targets
between ranks in one step of 50. `--write` puts the table into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from gpt import GPT, Place, Size, distributed, local_part
from section import markdown_table, write_section

import dshard as ours
from dshard.core.comparisons import EVERY, nothing_compared
from dshard.testing import rank_pool

REPEATS, COUNTED = 9, 5
ROUNDS = 12
"""How often each form of a stretch of steps runs, of which one step compares inputs between ranks."""
SIZES = {
    "small": Size(batch=8, length=32, width=64, heads=4, hidden=256, words=128),
    "wide": Size(batch=8, length=64, width=256, heads=8, hidden=1024, words=512),
}
LIBRARIES = {"dshard": ours, "torch": theirs}


def peak_of(step: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has given out at once within a step, beyond what it had before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0)


def peaks_of(steps: dict[str, Callable[[], float]]) -> dict[str, int]:
    """The same of each library: the least of several steps, taken in turn."""
    found = [{lib: peak_of(step) for lib, step in steps.items()} for _ in range(COUNTED)]
    return {lib: min(each[lib] for each in found) for lib in steps}


def training_step(lib: Any, size: Size, mesh: Any, depth: int) -> Callable[[], float]:
    layout = [lib.Shard(0), lib.Replicate()]

    def end(parameters: list[Any]) -> None:
        if lib is theirs:
            for p in parameters:
                p.grad = p.grad.redistribute(p.device_mesh, p.placements)

    step = _step(size, depth, distributed(lib, mesh), lambda x: x.redistribute(mesh, layout), end)
    return lambda: float(step().full_tensor())


def local_step(size: Size, depth: int) -> Callable[[], float]:
    """The same on plain tensors: what one of 2 x 2 ranks computes with, and nothing sent."""
    step = _step(size, depth, local_part(2, 2), lambda x: x, lambda parameters: None)
    return lambda: float(step())


def _step(
    size: Size, depth: int, place: Place, complete: Callable[[Any], Any], end: Callable[[list[Any]], None]
) -> Callable[[], Any]:
    """A step that gives the loss; `end` sees the parameters after the backward pass."""
    torch.manual_seed(0)
    model = GPT(size, depth, place, complete)
    parameters = model.parameters()
    optimiser = torch.optim.SGD(parameters, lr=0.1)
    words = torch.randint(size.words, (size.batch, size.length + 1))
    ids, targets = (place(words[:, i : i + size.length].contiguous(), "batch") for i in (0, 1))

    def step() -> Any:
        loss = model.loss(ids, targets)
        loss.backward()
        end(parameters)
        optimiser.step()
        optimiser.zero_grad()
        return loss

    return step


def training_steps(size: Size, depth: int = 2) -> dict[str, Callable[[], float]]:
    """A step of `depth` blocks by each library on the same mesh of four ranks."""
    warnings.simplefilter("ignore")
    mesh = ours.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return {name: training_step(lib, size, mesh, depth) for name, lib in LIBRARIES.items()}


def measure(name: str) -> dict[str, Any]:
    """On each rank: seconds of each step, what is held at the peak, and the losses, by library."""
    steps = training_steps(SIZES[name])
    losses = {lib: [step() for _ in range(3)] for lib, step in steps.items()}
    times: dict[str, list[float]] = {lib: [] for lib in steps}
    for _ in range(REPEATS):
        for lib, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            times[lib].append(time.perf_counter() - begin)
    return {"times": times, "peaks": peaks_of(steps), "losses": losses}


def compared_steps(name: str) -> dict[str, list[float]]:
    """Seconds of stretches of as many steps as one comparison between ranks serves, with comparisons and without."""
    warnings.simplefilter("ignore")
    size, mesh = SIZES[name], ours.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(size.width, size.heads, size.hidden, dropout=0.0, batch_first=True)
    x, y = (torch.randn(size.batch, size.length, size.width) for _ in range(2))
    ours.parallelize(layer, mesh, "data", x)
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(EVERY):
            torch.nn.functional.mse_loss(layer(x), y).backward()
            optimiser.step()
            optimiser.zero_grad()

    steps()  # the first passes compare more often
    times: dict[str, list[float]] = {"compared": [], "not compared": []}
    for _ in range(ROUNDS):
        for how, within in (("compared", nullcontext), ("not compared", nothing_compared)):
            dist.barrier()
            begin = time.perf_counter()
            with within():
                steps()
            times[how].append(time.perf_counter() - begin)
    return times


def comparison_row(name: str, found: list[dict[str, list[float]]]) -> list[str]:
    """One row: milliseconds of a step with comparisons and without, and the median of the ratios of neighbours."""
    slowest = {how: [max(each) for each in zip(*(rank[how] for rank in found), strict=True)] for how in found[0]}
    ratios = [a / b for a, b in zip(*slowest.values(), strict=True)]
    step = [statistics.median(times) / EVERY * 1e3 for times in slowest.values()]
    return [name, *(f"{each:.2f}" for each in step), f"{statistics.median(ratios):.3f}"]


def row_of(name: str, found: list[dict[str, Any]]) -> list[str]:
    for ours_loss, their_loss in zip(*(found[0]["losses"][lib] for lib in LIBRARIES), strict=True):
        assert abs(ours_loss - their_loss) < 1e-3 * abs(their_loss), "both libraries train the same model"
    seconds = {
        lib: statistics.median(max(each) for each in zip(*(rank["times"][lib] for rank in found), strict=True))
        for lib in LIBRARIES
    }
    peaks = {lib: max(rank["peaks"][lib] for rank in found) for lib in LIBRARIES}
    least = all(rank["peaks"]["dshard"] <= rank["peaks"]["torch"] for rank in found)
    return [
        name,
        *(f"{seconds[lib] * 1e3:.1f}" for lib in LIBRARIES),
        f"{seconds['dshard'] / seconds['torch']:.2f}",
        *(f"{peaks[lib] / 2**10:.0f}" for lib in LIBRARIES),
        "yes" if least else "no",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    options = parser.parse_args()
    pool = rank_pool(4)
    rows = [row_of(name, pool.run(measure, name, timeout=900.0)) for name in SIZES]
    header = ["GPT", "dshard ms", "torch DTensor ms", "ratio", "dshard KiB", "torch DTensor KiB", "no more on any rank"]
    compared = [comparison_row(name, pool.run(compared_steps, name, timeout=900.0)) for name in SIZES]
    beside = ["transformer layer", "ms, inputs compared", "ms, not compared", "ratio"]
    text = f"{markdown_table(header, rows)}\n\n{markdown_table(beside, compared)}"
    print(text)
    if options.write:
        write_section("training", text)


if __name__ == "__main__":
    main()
