"""DSHARD_DEBUG=1 on real ranks: what differs between them is an error that names it, by rank, on every rank."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dshard
from dshard import DTensor, MeshError, Replicate, Shard, distribute_tensor
from dshard.caches import clear_caches
from dshard.comm import peer_failure
from dshard.comm.rank_checks import WIDTH, _row, checksum
from dshard.errors import RankError
from dshard.parallel import parallelize
from dshard.testing import RankPool

SECONDS = 10.0  # for a rank to raise, on a machine with much else to do


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


def second_input(odd: bool) -> None:
    """Inputs of two calls: of the first ranks are compared without the debug mode, too."""
    module = parallel(0.0)
    for value in (1.0, 1.0 + odd):
        module(torch.full((2, 3), value))


def warm_matmul(odd: bool) -> Any:
    """A matmul that was called before, and redistributes; another operator on the odd rank."""
    x = laid(True)
    for _ in range(3):
        F.linear(x, x)
    return x.sin() if odd else F.linear(x, x)


def plain_operand(odd: bool) -> Any:
    with dshard.implicit_replication():
        return laid() * torch.full((3,), 1.0 + odd)


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
    "a warm matmul": (warm_matmul, r"linear of \(4, 3\)", "aten.sin.default"),
    "a parameter": (lambda odd: parallel(float(odd)), r"parallelize with 0.bias: \(4,\)", "0.bias.*checksum"),
    "a plain operand": (
        plain_operand,
        r"mul with a plain tensor that counts as replicated, \(3,\), .*checksum",
        "checksum",
    ),
    "what is copied": (
        lambda odd: laid().copy_(torch.full((4, 3), 1.0 + odd)),
        r"copy_ with a plain tensor that counts as replicated, \(4, 3\), torch.float32, checksum",
        "checksum",
    ),
    "a plain input": (
        second_input,
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
        with dshard.implicit_replication():
            laid(True).add(torch.arange(3.0, requires_grad=True)).sum().backward()
        local = DTensor.from_local(torch.ones(2, 3) * dist.get_rank(), grid(), [Shard(0), Shard(1)], shape=(4, 6))
        rows, classes = (
            laid(True),
            dshard.distribute_tensor(torch.tensor([0, 2, 1, 1]), grid(), [Shard(0), Replicate()]),
        )
        for _ in range(3):
            with dshard.trace() if dist.get_rank() == 0 else nullcontext():
                loss = F.cross_entropy(rows, classes)
                loss.backward()
        return [x.grad.full_tensor().sum().item(), out.item(), local.sum().item(), loss.item()]


def renew_world(name: str, store: Any) -> None:
    """A process group that nothing has put out of step."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=4)
    grid.cache_clear()


def one_more(meet: Callable[[], None]) -> None:
    """Rank 1 calls one operator more than the others, which do something else for longer than it waits."""
    x = laid()
    meet()
    if dist.get_rank() == 1:
        x * 3
    else:
        time.sleep(4)


def others_ended() -> None:
    """Rank 1 calls one operator more than the others, which have ended."""
    peer_failure.PATIENCE = timedelta(seconds=0.3)
    renew_world("ended", dist.distributed_c10d._get_default_store())
    with debugging():
        x = laid()
        dist.barrier()
        if dist.get_rank() != 1:
            time.sleep(3)  # the pool gives rank 1 as long to answer
            os._exit(0)
        x.cos()


def failed_alone(meet: Callable[[], None]) -> None:
    """An operator fails on rank 1 alone, for its values: the others have gone on to the next."""
    table = distribute_tensor(torch.arange(3.0), grid())
    index = DTensor.from_local(torch.full((1,), 2 + (dist.get_rank() == 1)), grid(), [Shard(0), Shard(0)], shape=(4,))
    meet()
    table.index_select(0, index) + 1


def failures(limits: dict[Callable[[Callable[[], None]], None], str]) -> list[tuple[str, float]]:
    """The error of each program in a world of its own, on this rank, and the seconds until then."""
    found, rank, first = [], dist.get_rank(), dist.distributed_c10d._get_default_store()
    for call, seconds in limits.items():

        def meet(place: str, name: str = call.__name__) -> None:
            first.set(f"{name} {place} {rank}", "")
            first.wait([f"{name} {place} {other}" for other in range(4)])

        renew_world(call.__name__, first)
        with debugging(DSHARD_DEBUG_SECONDS=seconds):
            told, begin = "", list[float]()
            laid().cos() * 2  # what is slow the first time
            try:
                call(lambda meet=meet, begin=begin: (meet("begun"), begin.append(time.monotonic())))
            except (MeshError, IndexError) as error:
                told = f"{type(error).__name__}: {error}"
            found.append((told, time.monotonic() - begin[0]))
            meet("over")
    return found


@pytest.mark.ranks
def test_what_differs_between_ranks_is_named_by_rank(ranks: RankPool) -> None:
    for found in ranks.run(compared):
        assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.ranks
def test_what_is_alike_runs_as_without(ranks: RankPool) -> None:
    expected = ranks.run(alike, False)

    assert ranks.run(alike, True) == expected


@pytest.mark.ranks
@pytest.mark.thorough
def test_ranks_that_do_not_come_to_compare_are_named_soon() -> None:
    with RankPool(4, timeout=120) as pool:
        ranks = pool.run(failures, {one_more: "2", failed_alone: "300"})
        with pytest.raises(RankError) as ended:
            pool.run(others_ended)

    for told, called in ((ranks[1][0][0], "mul.Tensor of .*, 3"), (str(ended.value), "cos.default of .*")):
        place = re.escape(__file__)
        assert re.search(rf"rank 1 is about to .*aten.{called} \({place}:\d+\), and not all of ranks \[0, 2, 3\]", told)
        assert "calls one operator less" in told
    for rank, ((more, first), (failed, second)) in enumerate(ranks):
        assert max(first, second) < SECONDS, (rank, first, second)
        assert ("came to compare it within 2 s" in more) == (rank == 1), (rank, more)
        assert re.search("^IndexError: .*(index out of range|out of bounds)", failed), (rank, failed)
        assert ("on rank 1, which this rank waited for" in failed) == (rank != 1), (rank, failed)


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
