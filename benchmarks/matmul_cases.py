"""Products to compare strategies on: their sizes and layouts, and how to run each by every pair of loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

import dshard
from dshard import DTensor, Partial, Placement, Replicate, Schedule, Shard, matmul
from dshard.comm import DeviceMesh
from dshard.core.observe import Decision, observing
from dshard.rules.matmul_loops import STRATEGIES
from dshard.rules.strategy import Strategy

LETTERS: dict[str, Placement] = {"R": Replicate(), "P": Partial(), "S0": Shard(0), "S1": Shard(1)}
SEED = 5
Run = Callable[[], DTensor]


@dataclass(frozen=True)
class Case:
    """One product: sizes m, k, n, and where operands and result lie on a mesh of two axes."""

    name: str
    sizes: tuple[int, int, int]
    a: str
    b: str
    out: str


CASES = (
    Case("SUMMA layouts", (1024, 1024, 1024), "S0 S1", "S0 S1", "S0 S1"),
    Case("SUMMA layouts, tall", (8192, 256, 256), "S0 S1", "S0 S1", "S0 S1"),
    Case("SUMMA layouts, wide weight", (256, 1024, 4096), "S0 S1", "S0 S1", "S0 S1"),
    Case("SUMMA layouts, deep", (512, 4096, 512), "S0 S1", "S0 S1", "S0 S1"),
    Case("data and column", (1024, 512, 2048), "S0 R", "R S1", "S0 S1"),
    Case("data and row", (1024, 2048, 512), "S0 S1", "R S0", "S0 R"),
    Case("sequence and column", (1024, 512, 2048), "S0 S0", "R S1", "S0 S1"),
    Case("sharded weight", (2048, 1024, 1024), "S0 S0", "S0 S1", "S0 S0"),
    Case("ATP layouts", (1024, 512, 2048), "R S1", "S1 S0", "S1 R"),
    Case("rows by columns", (512, 2048, 512), "S0 S0", "S1 S1", "S0 S0"),
    Case("a small batch", (32, 2048, 2048), "S0 R", "S0 S1", "S0 R"),
)


@dataclass(frozen=True)
class Candidate:
    """One way to run a product, and how it was priced."""

    name: str
    run: Run
    strategy: Strategy


@dataclass(frozen=True)
class Product:
    """A product of distributed operands: its ways by every pair of loops, and the name of the one that is chosen."""

    a: Tensor
    b: Tensor
    candidates: dict[str, Candidate]
    chosen: str


def product_of(case: Case, mesh: DeviceMesh) -> Product:
    """The operands, equal on all ranks, distributed as the case says; each way has run once."""
    m, k, n = case.sizes
    generator = torch.Generator().manual_seed(SEED)
    a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
    x, y = (distributed(t, mesh, text) for t, text in ((a, case.a), (b, case.b)))
    candidates: dict[str, Candidate] = {}
    names: dict[tuple[object, ...], str] = {}
    for loops in product("mnk", repeat=2):
        schedule = Schedule(loops, ("R", "R"))
        found = candidate_of(name_of(schedule), x, y, schedule, placed(case.out))
        candidates[found.name] = found
        names[found.strategy.rows, found.strategy.inputs] = found.name
    free = candidate_of("one more", x, y, None, placed(case.out))
    chosen = names.setdefault((free.strategy.rows, free.strategy.inputs), free.name)
    candidates.setdefault(chosen, free)
    return Product(a, b, candidates, chosen)


def candidate_of(name: str, x: DTensor, y: DTensor, schedule: Schedule | None, out: Sequence[Placement]) -> Candidate:
    """A product by this schedule, or by the cheapest one."""
    run = partial(matmul, x, y, strategy=schedule, out_placements=out)
    decisions: list[Decision] = []
    with observing(decisions.append):
        run()
    (decision,) = decisions
    assert decision.strategy is not None
    return Candidate(name, run, decision.strategy)


def name_of(schedule: Schedule) -> str:
    """The loops of the two axes, and the names that go with them."""
    names = [row.name for row in STRATEGIES.values() if row.schedule.loops == schedule.loops and row.name != "cannon"]
    return " ".join(schedule.loops) + (f" ({', '.join(names)})" if names else "")


def placed(text: str) -> list[Placement]:
    """The placements that `S0 R` writes."""
    return [LETTERS[word] for word in text.split()]


def distributed(x: Tensor, mesh: DeviceMesh, text: str) -> DTensor:
    """A tensor that every rank has, laid out so."""
    return dshard.distribute_tensor(x, mesh, placed(text), src_data_rank=None)
