"""What a product cannot be is refused with the rule and the way out, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dshard import DTensor, LayoutError, Mesh, Replicate, Schedule, Shard, StrategyError, matmul, trace, use_strategy
from dshard.errors import DtypeError, MeshError, MixedError
from dshard.functional import linear
from dshard.layout import Layout
from dshard.testing import distribute, simulated, whole

GRID, LINE = Mesh((2, 3), ("x", "y")), Mesh((6,), ("tp",))


def on(mesh: Mesh, *shape: int, dtype: torch.dtype = torch.float64) -> DTensor:
    """A tensor split over every axis, so that any product of it must send."""
    return distribute(torch.ones(shape, dtype=dtype), Layout(mesh, tuple(Shard(i % 2) for i in range(mesh.ndim))))


TORCH_S_OWN = r"must have same reduction dim, but got \[4, 6\] X \[5, 3\]"
Call = Callable[[], Any]
CASES: dict[str, tuple[Call, type[Exception], str]] = {
    "inner sizes disagree": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 5, 3)),
        RuntimeError,
        TORCH_S_OWN,
    ),
    "inner sizes disagree, with a strategy": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 5, 3), strategy="summa"),
        RuntimeError,
        TORCH_S_OWN,
    ),
    "inner sizes disagree, of a linear layer": (
        lambda: linear(on(GRID, 4, 6), on(GRID, 3, 5)),
        RuntimeError,
        TORCH_S_OWN,
    ),
    "no such strategy": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3), strategy="suma"),
        StrategyError,
        "there is no strategy 'suma': use data, weight-gathered, column",
    ),
    "no such strategy in a block": (
        lambda: use_strategy(matmul="optimus").__enter__(),
        StrategyError,
        "there is no strategy 'optimus': use data",
    ),
    "too few axes": (
        lambda: matmul(on(LINE, 4, 6), on(LINE, 6, 3), strategy="summa"),
        StrategyError,
        r"needs 2 mesh axes \(r, c\), but the mesh \(tp=6\) has 1: use init_device_mesh\(device_type, \(2, 3\)\)",
    ),
    "too few axes for a depth": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3), strategy="tesseract"),
        StrategyError,
        r"needs 3 mesh axes \(depth, r, c\), but the mesh \(x=2 y=3\) has 2: use init_device_mesh\(.*, \(1, 2, 3\)\)",
    ),
    "no square": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3), strategy="cannon"),
        StrategyError,
        r"'cannon' needs two mesh axes of one size, but the mesh is \(x=2 y=3\): use a mesh of .* or 'summa'",
    ),
    "a schedule of another mesh": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3), strategy=Schedule(("m",), ("R",))),
        StrategyError,
        r"the schedule \[m:B R\] is for 1 mesh axes, but the mesh \(x=2 y=3\) has 2: give one loop for each axis",
    ),
    "a storage that a loop has not": (
        lambda: Schedule(("m",), ("m",)),
        LayoutError,
        "under loop m a tensor is not stored 'm': use",
    ),
    "no such thing to save": (
        lambda: use_strategy(saved="all").__enter__(),  # type: ignore[arg-type]
        StrategyError,
        "saved='all': use 'auto', 'moved' or 'stored'",
    ),
    "too many placements": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3), out_placements=[Replicate()]),
        LayoutError,
        "1 placement",
    ),
    "a dim that the result has not": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3), out_placements=[Replicate(), Shard(2)]),
        LayoutError,
        r"S\(2\)",
    ),
    "dtypes disagree": (
        lambda: matmul(on(GRID, 4, 6), on(GRID, 6, 3, dtype=torch.float32), strategy="summa"),
        DtypeError,
        r"operands of dtype float64 and float32; a matmul takes one dtype, so convert with .to\(dtype\)",
    ),
    "whole numbers with real ones": (
        lambda: matmul(on(GRID, 4, 6, dtype=torch.int64), on(GRID, 6, 3)),
        DtypeError,
        "operands of dtype int64 and float64",
    ),
    "a plain tensor": (
        lambda: matmul(on(GRID, 4, 6), torch.ones(6, 3, dtype=torch.float64)),  # type: ignore[arg-type]
        MixedError,
        r"wrap a plain torch.Tensor with distribute_tensor\(x, mesh, placements\)",
    ),
    "two meshes": (
        lambda: matmul(on(GRID, 4, 6), on(LINE, 6, 3)),
        MeshError,
        r"matmul: operands on the meshes .* and .*; redistribute them to one mesh first",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_before_anything_is_sent(case: str) -> None:
    call, error, message = CASES[case]
    with simulated(6), trace() as sent, pytest.raises(error, match=message):
        call()

    assert not sent.events


@pytest.mark.parametrize("strategy", [None, "summa", "summa-abt", "weight-stationary"])
def test_whole_numbers_multiply_as_on_one_device(strategy: str | None) -> None:
    """They are no error: torch multiplies them, too, on a CPU; and they have no gradient."""
    a = torch.arange(24).view(4, 6)
    b: Tensor = torch.arange(18).view(6, 3) - 7
    layout = Layout(GRID, (Shard(0), Shard(1)))
    with simulated(GRID):
        found = whole(matmul(distribute(a, layout), distribute(b, layout), strategy=strategy))
        with pytest.raises(RuntimeError, match="only Tensors of floating point"):
            distribute(a, layout).requires_grad_()

    assert found.dtype == torch.int64
    assert found.equal(a @ b)


def test_the_mesh_that_a_refusal_names_would_do() -> None:
    """What the way out proposes: the same ranks as (2, 3) take SUMMA."""
    mesh = Mesh((2, 3), ("r", "c"))
    with simulated(mesh):
        y = matmul(on(mesh, 4, 6), on(mesh, 6, 3), strategy="summa")

        assert whole(y).equal(torch.full((4, 3), 6.0, dtype=torch.float64))
