"""DSHARD_DEBUG=1 on real ranks: what differs between them is an error that names it, by rank, on every rank."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dshard
from dshard import DTensor, MeshError, Replicate, Shard, distribute_tensor
from dshard.caches import clear_caches
from dshard.comm.debug import WIDTH, _row, checksum
from dshard.parallel import parallelize
from dshard.testing import RankPool


@functools.cache
def grid() -> Any:
    return dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@contextmanager
def debugging(**environment: str) -> Iterator[None]:
    """Within the block ranks compare; what was prepared before or within is not used outside."""
    clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSHARD_DEBUG", "1")
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
    clear_caches()


def laid(grad: bool = False) -> Any:
    return distribute_tensor(torch.arange(12.0).view(4, 3), grid(), [Shard(0), Replicate()]).requires_grad_(grad)


def model(bias: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4))
    nn.init.constant_(net[0].weight, 1.0)  # type: ignore[arg-type]
    nn.init.constant_(net[0].bias, bias)  # type: ignore[arg-type]
    return net


def parallel(bias: float) -> Any:
    return parallelize(model(bias), grid(), {"0.weight": [Replicate(), Shard(0)]})


Program = Callable[[bool], Any]
DIFFERENT: dict[str, tuple[Program, str, str]] = {
    "distribute_tensor, shape": (
        lambda odd: distribute_tensor(torch.ones(6 if odd else 4), grid(), [Shard(0), Replicate()]),
        r"distribute_tensor of \(4,\)",
        r"distribute_tensor of \(6,\)",
    ),
    "distribute_tensor, dtype": (
        lambda odd: distribute_tensor(torch.ones(4, dtype=torch.float64 if odd else torch.float32), grid()),
        "torch.float32",
        "torch.float64",
    ),
    "distribute_tensor, placements": (
        lambda odd: distribute_tensor(torch.ones(4), grid(), [Shard(0) if odd else Replicate(), Replicate()]),
        r"\[dp:R tp:R\]",
        r"\[dp:S\(0\) tp:R\]",
    ),
    "distribute_tensor, contents": (
        lambda odd: distribute_tensor(torch.full((4,), 1.0 + odd), grid(), [Shard(0), Shard(0)], src_data_rank=None),
        "checksum",
        "checksum",
    ),
    "from_local, placements": (
        lambda odd: DTensor.from_local(torch.ones(2, 2), grid(), [Shard(1 if odd else 0), Replicate()], shape=(4, 4)),
        r"from_local.*\[dp:S\(0\) tp:R\]",
        r"from_local.*\[dp:S\(1\) tp:R\]",
    ),
    "from_local, dtype": (
        lambda odd: DTensor.from_local(torch.ones(2, dtype=torch.int64 if odd else torch.int32), grid()),
        "torch.int32",
        "torch.int64",
    ),
    "from_local, requires_grad": (
        lambda odd: DTensor.from_local(torch.ones(2, requires_grad=odd), grid()),
        "run_check=False, grad_placements=None,? ",
        "requires_grad",
    ),
    "a number": (lambda odd: laid() * (2.5 if odd else 1.5), r"aten.mul.Tensor of \(4, 3\).*1.5", "2.5"),
    "a number, recorded": (lambda odd: laid(True) + (3 if odd else 4), "aten.add.Tensor.*, 4", ", 3"),
    "a dim": (lambda odd: laid().sum(int(odd)), r"aten.sum.dim_IntList of .*, 0", ", 1"),
    "another operator": (lambda odd: laid().sin() if odd else laid().cos(), "aten.cos.default", "aten.sin.default"),
    "a parameter": (lambda odd: parallel(float(odd)), r"parallelize with 0.bias: \(4,\)", "0.bias.*checksum"),
    "a plain input": (
        lambda odd: parallel(0.0)(torch.full((2, 3), 1.0 + odd)),
        r"a parallelized module with a plain input \(2, 3\), checksum",
        "checksum",
    ),
}


def noticed(program: Program, mine: str, other: str) -> str:
    """What is wrong, or nothing."""
    try:
        program(dist.get_rank() == 2)
    except MeshError as error:
        told = str(error)
        right = re.search(f"ranks \\[0, 1, 3\\] call .*{mine}", told) and re.search(
            f"ranks \\[2\\] call .*{other}", told
        )
        return "" if right else told
    return "not noticed"


def compared() -> dict[str, str]:
    """Each program on ranks of which rank 2 does otherwise."""
    found = {}
    with debugging():
        for name, (program, mine, other) in DIFFERENT.items():
            found[name] = noticed(program, mine, other)
    return found


def alike(debug: bool) -> list[float]:
    """A program that all ranks run alike, with everything that is compared, and with what is not."""
    with debugging() if debug else nullcontext():
        x = laid(True)
        for _ in range(3):
            y = (x * 2.5 + 1)[1:].t().sum(0).relu() @ torch.ones_like(x[1:, 0])
            y.backward()
        net = parallel(0.5)
        out = net(torch.ones(2, 3)).sum()
        out.backward()
        local = DTensor.from_local(torch.ones(2, 3) * dist.get_rank(), grid(), [Shard(0), Shard(1)], shape=(4, 6))
        return [x.grad.full_tensor().sum().item(), out.item(), local.sum().item()]


@pytest.mark.ranks
def test_what_differs_between_ranks_is_named_by_rank(ranks: RankPool) -> None:
    for found in ranks.run(compared):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.ranks
def test_what_is_alike_runs_as_without(ranks: RankPool) -> None:
    expected = ranks.run(alike, False)

    assert ranks.run(alike, True) == expected


def test_texts_and_contents_are_told_apart() -> None:
    long = "x" * 2 * WIDTH
    assert len(_row(long)) == len(_row("short")) == WIDTH
    assert _row(long + "a") != _row(long + "b")
    x = torch.arange(10.0)
    for other in (x.flip(0), x + 1, x[:-1], torch.cat([x[1:2], x[:1], x[2:]])):
        assert checksum(other) != checksum(x)
    assert checksum(x[::2]) == checksum(x[::2].clone())
    assert checksum(torch.empty(0)) == checksum(torch.empty(0, 3))
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int8):
        assert checksum(x.to(dtype)) == checksum(x.clone().to(dtype))
