"""The scaling tables of Optimus and Tesseract, from the planner: predicted beside published, row by row.

Each paper ran on one machine. Three figures of it are fitted to a table as a whole, in the logarithm of the times, over
the rows that are consistent: operations per second of a GPU, bytes per second of a GPU within its node, and of a node.
Nothing is fitted to a row. Rows that contradict themselves or come from another machine are predicted all the same, and
shown apart with the reason.

`python -m benchmarks.papers` writes what it finds into docs/papers.md.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import exp, log, log2
from pathlib import Path
from statistics import correlation
from typing import Literal, TypeAlias

from dshard.layout import Layout, Shape
from dshard.redistribute.price import step_seconds as seconds_of
from dshard.simulate import Event, Model, Setup, form_of, host_tiles
from dshard.simulate.block import BlockCosts
from dshard.simulate.training_step import parts_of
from dshard.step_timeline import Phase
from dshard.topology import Device, Layer, Topology

DATA = Path(__file__).parent / "data"
LAYERS, TOKENS, PER_NODE = 24, 512, 4
Transport: TypeAlias = Literal["gathers", "pipelined", "trees"]
TRANSPORTS: dict[Transport, str] = {
    "gathers": "an all_gather of the panels, as dshard sends them",
    "pipelined": "q broadcasts, each pipelined around a ring, as NCCL sends them",
    "trees": "q broadcasts, each down a binomial tree: equation 4 of Optimus, the papers' own cost model",
}
"""How the panels of a SUMMA product travel along a row or column of the mesh."""

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
        """The same as a setup; Optimus puts a node's GPUs in a block of the mesh (its figure 8).

        Tesseract [q, q, 1] is Optimus on q x q.
        """
        if self.system == "megatron":
            return Setup(form_of("megatron"), self.shape, recompute=True)
        q, depth = self.shape[0], self.shape[2] if len(self.shape) == 3 else 1
        plane = host_tiles(q, q, min(PER_NODE, q * q))
        if depth == 1:
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
def predict(row: Row, machine: Machine, transport: Transport) -> tuple[float, float]:
    """Seconds per sequence, forward and backward; the backward pass runs each block again, as in the papers."""
    times = over_gather(transport, row.shape[0])
    forward, backward = (rest + times * panels for rest, panels in _block(row, machine))
    return LAYERS * forward / row.batch, LAYERS * (forward + backward) / row.batch


@cache
def _block(row: Row, machine: Machine) -> tuple[tuple[float, float], ...]:
    """Of one block, forward and backward: seconds of the panels of SUMMA as an all_gather, after those of all else."""
    model = Model(LAYERS, row.hidden, row.heads, TOKENS, head_size=row.hidden // row.heads, fused=False)
    costs = ByStep(model, row.setup(), machine.topology(row.gpus), "float32", 4, exact=False, regather=True)
    parts = parts_of(costs, row.batch)
    return tuple(
        (sum(e.seconds for e in events if not _panels(e)), sum(e.seconds for e in events if _panels(e)))
        for events in (parts.forward, parts.backward)
    )


class ByStep(BlockCosts):
    """An event for each collective: of a plan over depth and rows, the panels travel in the steps over rows."""

    def moved(
        self, name: str, phase: Phase, src: Layout, dst: Layout, shape: Shape, *, waits: bool = True
    ) -> list[Event]:
        """A redistribution, collective by collective."""
        found = self.plan(src, dst, shape)
        if len(found.steps) < 2:
            return BlockCosts.moved(self, name, phase, src, dst, shape, waits=waits)
        steps = found.stages()
        return [
            Event(
                name,
                phase,
                "network",
                seconds_of(step, layout, shape, self.itemsize, self.topology),
                collectives=1,
                axes=step.axes,
                waits=waits,
            )
            for step, layout in steps
        ]


def _panels(event: Event) -> bool:
    return bool(event.axes) and set(event.axes) <= {"r", "c"} and event.name != "norm"


def over_gather(transport: Transport, q: int) -> float:
    """How much longer the q broadcasts of SUMMA take than the all_gather of the same panels.

    The all_gather brings the q - 1 panels that a rank lacks. A pipelined broadcast takes the time of its bytes, and
    there are q; a binomial tree takes that time log2 q times.

    >>> over_gather("gathers", 4), over_gather("pipelined", 4), over_gather("trees", 4)
    (1.0, 1.3333333333333333, 2.6666666666666665)
    """
    if q == 1 or transport == "gathers":
        return 1.0
    return q / (q - 1) * (log2(q) if transport == "trees" else 1.0)


def misfit(machine: Machine, rows: Sequence[Row], transport: Transport) -> float:
    """The mean square of the logarithm of predicted over published times."""
    total = 0.0
    for row in rows:
        forward, backward = predict(row, machine, transport)
        total += log(forward / row.forward) ** 2 + log(backward / row.backward) ** 2
    return total / (2 * len(rows))


def fit(rows: Sequence[Row], transport: Transport) -> Machine:
    """The machine that fits these rows best: a pattern search, each figure doubled or halved, then by ever less."""
    best = Machine(5e12, 8e9, 8e9)
    least, step = misfit(best, rows, transport), 2.0
    while step > 1.02:
        tried = [
            Machine(best.flops * f, best.inside * i, best.between * b)
            for times in (step, 1 / step)
            for f, i, b in ((times, 1, 1), (1, times, 1), (1, 1, times))
        ]
        found = min(tried, key=lambda machine: misfit(machine, rows, transport))
        if (now := misfit(found, rows, transport)) < least:
            best, least = found, now
        else:
            step = exp(log(step) / 2)
    return best


def step_seconds(row: Row, machine: Machine, transport: Transport) -> float:
    """Predicted seconds per sequence of a training step."""
    return sum(predict(row, machine, transport))


def unflagged(table: str) -> tuple[Row, ...]:
    """The rows of a table that agree with themselves and come from its machine."""
    return tuple(row for row in read(table) if not row.flag)


def misordered(rows: Sequence[Row], predicted: Sequence[float]) -> list[tuple[Row, Row]]:
    """The pairs whose published times are in the other order than the predicted ones, the faster as published first."""
    found = []
    for (a, mine), (b, other) in combinations(zip(rows, predicted, strict=True), 2):
        if (a.seconds - b.seconds) * (mine - other) < 0:
            found.append((a, b) if a.seconds < b.seconds else (b, a))
    return found


def most_with_ties(rows: Sequence[Row]) -> float:
    """The largest rank correlation of any prediction that gives the same time to rows of the same layout and work.

    Tesseract [q, q, 1] and Optimus q x q are one layout. All orders of the layouts are tried.
    """
    works = [(_layout(row), row.batch, row.hidden, row.heads) for row in rows]
    kinds = sorted(set(works))
    if len(kinds) == len(works):
        return 1.0
    published = [row.seconds for row in rows]
    orders = product(range(len(kinds)), repeat=len(kinds))
    tried = ([float(order[kinds.index(work)]) for work in works] for order in orders if len(set(order)) > 1)
    return max(spearman(predicted, published) for predicted in tried)


def _layout(row: Row) -> tuple[str, tuple[int, ...]]:
    if row.system == "tesseract" and row.shape[2] == 1:
        return "optimus", row.shape[:2]
    return row.system, row.shape


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two series.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 40.0, 90.0])
    1.0
    """
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
