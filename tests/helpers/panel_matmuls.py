"""Matmuls in panels, and their reference."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from dshard import DTensor, Mesh, Schedule, Stream
from dshard.ops.matmul.panel_executor import PanelExecutor, PlannedMatmul
from dshard.ops.matmul.ring import executor
from dshard.ops.matmul.rules import matmul_rule
from dshard.redistribute import Plan, plan
from dshard.testing import distribute
from dshard.topology import BYTES

MESHES = [Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 3), ("x", "y")), Mesh((2, 2, 2), ("x", "y", "z"))]
SUMMA = Schedule(("m", "n"), ("k", "k"))
ABT = Schedule(("m", "k"), ("n", "n"))
sizes = st.tuples(*(st.integers(0, 9) for _ in range(3)))


def reals(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(dtype)


def placed(mesh: Mesh, schedule: Schedule, m: int, k: int, n: int) -> list[DTensor]:
    """Return A, B and the gradient of C in the layouts of a schedule."""
    a, b, c = schedule.layouts(mesh)
    return [
        distribute(reals(m, k), a).requires_grad_(),
        distribute(reals(k, n), b).requires_grad_(),
        distribute(reals(m, n), c.cotangent()),
    ]


def expected(m: int, k: int, n: int) -> list[Tensor]:
    a, b, grad = reals(m, k), reals(k, n), reals(m, n)
    return [a @ b, grad @ b.mT, a.mT @ grad]


def plans_of(mesh: Mesh, schedule: Schedule, m: int, k: int, n: int) -> tuple[Plan, Plan, Plan]:
    """Plan the redistributions of A, B and C if every axis ran the schedule's loop."""
    a, b, c = schedule.layouts(mesh)
    none = Schedule(schedule.loops, tuple("P" if loop == "k" else "R" for loop in schedule.loops))
    whole_a, whole_b, partial = none.layouts(mesh)
    moves = ((a, whole_a, (m, k)), (b, whole_b, (k, n)), (partial, c, (m, n)))
    first, second, third = (plan(src, dst, shape, 8, BYTES) for src, dst, shape in moves)
    return first, second, third


def executor_of(mesh: Mesh, schedule: Schedule, shape: tuple[int, int, int], stream: Stream) -> PanelExecutor | None:
    m, k, n = shape
    plans = plans_of(mesh, schedule, m, k, n)
    return executor(PlannedMatmul(matmul_rule((m, k), (k, n)), plans, torch.float64, BYTES), stream)
