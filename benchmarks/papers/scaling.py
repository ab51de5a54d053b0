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
from math import exp, isqrt, log, log2, prod
from pathlib import Path
from statistics import correlation
from typing import Literal, TypeAlias

import torch

from benchmarks.papers.traced import Sizes, events_of, gathered_again, passes_of
from dshard import Mesh
from dshard.cost import collective_seconds
from dshard.simulate import Event
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
        return prod(self.shape)

    @property
    def seconds(self) -> float:
        """Published seconds per sequence of a training step."""
        return self.forward + self.backward

    @property
    def strategy(self) -> str:
        """The strategy by name: Tesseract [q, q, 1] is Optimus on q x q."""
        return "optimus" if self.system == "tesseract" and self.shape[2] == 1 else self.system

    def mesh(self) -> Mesh:
        """The mesh of its ranks; Optimus puts a node's GPUs in a block of the mesh (its figure 8)."""
        if self.system == "megatron":
            return Mesh(self.shape, ("tp",))
        q = self.shape[0]
        plane = host_tiles(q, q, min(PER_NODE, q * q))
        if self.strategy == "optimus":
            return Mesh((q, q), ("r", "c"), plane)
        depth = self.shape[2]
        return Mesh((depth, q, q), ("d", "r", "c"), [layer * q * q + rank for layer in range(depth) for rank in plane])


def host_tiles(rows: int, columns: int, per_host: int) -> tuple[int, ...]:
    """The ranks of a mesh (rows, columns) in which each host has a block, as square as the sizes allow.

    With rows of hosts instead, the columns of the mesh would cross as many hosts as there are rows; in blocks, both
    directions cross few (Optimus figure 8).

    >>> host_tiles(4, 4, 4)
    (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
    """
    heights = (h for h in range(isqrt(per_host), 0, -1) if per_host % h == rows % h == columns % (per_host // h) == 0)
    high = next(heights)
    wide = per_host // high

    def rank(row: int, column: int) -> int:
        host = (row // high) * (columns // wide) + column // wide
        return host * per_host + (row % high) * wide + column % wide

    return tuple(rank(row, column) for row in range(rows) for column in range(columns))


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


def _block(row: Row, machine: Machine) -> tuple[tuple[float, float], ...]:
    """Of one block, forward and backward: seconds of the panels of SUMMA as an all_gather, after those of all else."""
    topology, mesh = machine.topology(row.gpus), row.mesh()
    passes = []
    for events in traced(row):
        panels = rest = 0.0
        for e in events:
            if _panels(e):
                panels += collective_seconds(e.name, e.nbytes, mesh, e.axes, topology)  # type: ignore[arg-type]
            elif e.axes:
                rest += collective_seconds(e.name, e.nbytes, mesh, e.axes, topology)  # type: ignore[arg-type]
            else:
                rest += max(e.seconds, topology.device.launch + e.flops / machine.flops)
        passes.append((rest, panels))
    return tuple(passes)


@cache
def traced(row: Row) -> tuple[tuple[Event, ...], ...]:
    """The events of a block forward and backward, their work as on a machine that takes no time for operations."""
    topology = Machine(1e21, 8e9, 8e9).topology(row.gpus)
    sizes = Sizes(row.hidden, row.heads, TOKENS, row.hidden // row.heads)
    forward, both = (
        events_of(step, topology)
        for step in passes_of(sizes, row.batch, row.mesh(), row.strategy, topology, torch.float32, bias=True)
    )
    return forward, (*both[len(forward) :], *gathered_again(forward))


def _panels(event: Event) -> bool:
    return event.name in ("all_gather", "reduce_scatter") and set(event.axes) <= {"r", "c"}


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
        if (now := misfit(found, rows, transport)) < least * (1 - 1e-9):
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
    works = [(row.strategy, row.gpus, row.batch, row.hidden, row.heads) for row in rows]
    kinds = sorted(set(works))
    if len(kinds) == len(works):
        return 1.0
    published = [row.seconds for row in rows]
    orders = product(range(len(kinds)), repeat=len(kinds))
    tried = ([float(order[kinds.index(work)]) for work in works] for order in orders if len(set(order)) > 1)
    return max(spearman(predicted, published) for predicted in tried)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The rank correlation of two series.

    >>> spearman([1.0, 2.0, 3.0], [10.0, 40.0, 90.0])
    1.0
    """
    return correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]
