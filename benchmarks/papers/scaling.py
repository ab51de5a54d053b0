"""The scaling tables of Optimus and Tesseract, from the planner: predicted beside published, row by row.

Each paper ran on one machine. Three figures of it are fitted to a table as a whole, in the logarithm of the times, over
the rows that are consistent: operations per second of a GPU, bytes per second of a GPU within its node, and of a node.
Nothing is fitted to a row. Rows that contradict themselves or come from another machine are predicted all the same, and
shown apart with the reason.

Run from the repository's root: `python -m benchmarks.papers.scaling`; writes docs/papers.md.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path
from statistics import correlation

from dshard.simulate import Event, Model, Setup, bunched, form_of
from dshard.simulate.block import Costs
from dshard.simulate.step import parts_of
from dshard.topology import Device, Layer, Topology

DATA = Path(__file__).parent / "data"
LAYERS, TOKENS, PER_NODE = 24, 512, 4
TABLES = {
    "optimus_2": "Optimus, table 2: weak scaling",
    "optimus_3": "Optimus, table 3: strong scaling",
    "tesseract_1": "Tesseract, table 1: strong scaling",
    "tesseract_2": "Tesseract, table 2: weak scaling",
}
"""Tesseract does not say its layers and tokens; those of Optimus, from which it copies rows, are taken."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: published seconds per sequence, forward and backward, and why it is left out of the fit."""

    system: str
    shape: tuple[int, ...]
    batch: int
    hidden: int
    heads: int
    forward: float
    backward: float
    flag: str

    @property
    def gpus(self) -> int:
        """How many."""
        found = 1
        for n in self.shape:
            found *= n
        return found

    @property
    def seconds(self) -> float:
        """Published seconds per sequence of a training step."""
        return self.forward + self.backward

    def setup(self) -> Setup:
        """The same as a setup; Optimus puts a node's GPUs in a block of the mesh (its figure 8)."""
        if self.system == "megatron":
            return Setup(form_of("megatron"), self.shape, recompute=True)
        q, depth = self.shape[0], self.shape[2] if len(self.shape) == 3 else 1
        plane = bunched(q, q, min(PER_NODE, q * q))
        if self.system == "optimus":
            return Setup(form_of("optimus"), (q, q), recompute=True, ranks=plane)
        ranks = tuple(layer * q * q + rank for layer in range(depth) for rank in plane)
        return Setup(form_of("tesseract"), (depth, q, q), recompute=True, ranks=ranks)


@dataclass(frozen=True, slots=True)
class Machine:
    """What is fitted: operations per second, and bytes per second of a GPU in its node and of a node."""

    flops: float
    inside: float
    between: float

    def topology(self, gpus: int) -> Topology:
        """So many GPUs of it; latencies of NCCL's model for PCIe and InfiniBand."""
        layers = (
            Layer("node", max(1, gpus // PER_NODE), self.between, latency=4e-6),
            Layer("gpu", min(PER_NODE, gpus), self.inside, latency=2.5e-6),
        )
        device = Device("fitted", (("float32", self.flops),), memory_bandwidth=4.5e11, launch=5e-6)
        return Topology("fitted", layers, device, "nccl")


@cache
def read(table: str) -> tuple[Row, ...]:
    """The rows of one table."""
    with (DATA / f"{table}.csv").open() as lines:
        found = csv.DictReader(line for line in lines if not line.startswith("#"))
        return tuple(
            Row(
                row["system"],
                tuple(int(n) for n in row["shape"].split("x")),
                int(row["batch"]),
                int(row["hidden"]),
                int(row["heads"]),
                float(row["forward"]),
                float(row["backward"]),
                row["flag"],
            )
            for row in found
        )


@cache
def predict(row: Row, machine: Machine) -> tuple[float, float]:
    """Seconds per sequence, forward and backward; the backward pass runs each block again, as in the papers."""
    model = Model(LAYERS, row.hidden, row.heads, TOKENS, head_size=row.hidden // row.heads, fused=False)
    parts = parts_of(Costs(model, row.setup(), machine.topology(row.gpus), "float32", 4, exact=False), row.batch)
    times = broadcast_over_gather(row.shape[0])

    def seconds(event: Event) -> float:
        return event.seconds * (times if event.axes and set(event.axes) <= {"r", "c"} else 1.0)

    forward, backward = (sum(map(seconds, events)) for events in (parts.forward, parts.backward))
    return LAYERS * forward / row.batch, LAYERS * (forward + backward) / row.batch


def broadcast_over_gather(q: int) -> float:
    """How much longer the q broadcasts of SUMMA take than the all_gather of the same panels.

    NCCL pipelines a broadcast around a ring: a panel takes its bytes over the bandwidth, and there are q panels. The
    all_gather of dshard brings the q - 1 panels that a rank lacks.

    >>> broadcast_over_gather(2), broadcast_over_gather(4)
    (2.0, 1.3333333333333333)
    """
    return q / (q - 1) if q > 1 else 1.0


def misfit(machine: Machine, rows: Sequence[Row]) -> float:
    """The mean square of the logarithm of predicted over published times."""
    total = 0.0
    for row in rows:
        forward, backward = predict(row, machine)
        total += log(forward / row.forward) ** 2 + log(backward / row.backward) ** 2
    return total / (2 * len(rows))


def fit(rows: Sequence[Row]) -> Machine:
    """The machine that fits these rows best: a pattern search, each figure doubled or halved, then by ever less."""
    best = Machine(5e12, 8e9, 8e9)
    least, step = misfit(best, rows), 2.0
    while step > 1.02:
        tried = [
            Machine(best.flops * f, best.inside * i, best.between * b)
            for times in (step, 1 / step)
            for f, i, b in ((times, 1, 1), (1, times, 1), (1, 1, times))
        ]
        found = min(tried, key=lambda machine: misfit(machine, rows))
        if (now := misfit(found, rows)) < least:
            best, least = found, now
        else:
            step = exp(log(step) / 2)
    return best


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two series.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 40.0, 90.0])
    1.0
    """
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


if __name__ == "__main__":
    for name, title in TABLES.items():
        rows = [row for row in read(name) if not row.flag]
        machine = fit(rows)
        print(title, machine, f"rms {misfit(machine, rows) ** 0.5:.2f}")
        pred = [sum(predict(row, machine)) for row in rows]
        print("  spearman", spearman(pred, [row.seconds for row in rows]))
        for row in read(name):
            f, b = predict(row, machine)
            times = f"{row.forward:.4f} {f:.4f}  {row.backward:.4f} {b:.4f}  {(f + b) / row.seconds - 1:+.0%}"
            print(f"  {row.system:10} {row.shape!s:10} b={row.batch:4} h={row.hidden:5} {times} {row.flag}")
