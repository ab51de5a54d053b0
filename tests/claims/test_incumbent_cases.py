"""Where torch.distributed.tensor of torch 2.13 gives wrong values, raises or hangs: here each case is one device's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.default_cases import one_in
from hypothesis import settings
from torch import Tensor

import dshard
from dshard import DTensor, Layout, Mesh, Partial, Replicate, Shard
from dshard.comm import bind, init_device_mesh
from dshard.testing import RankPool, distribute, simulated, whole
from dshard.testing.rule_rows import layouts_of

THOROUGH = settings().max_examples > 100
MESH = Mesh((4,), ("x",))
SQUARE = Mesh((2, 2), ("x", "y"))
pytestmark = [pytest.mark.thorough] if THOROUGH else []


def laid(x: Tensor, *placements: Any) -> DTensor:
    return distribute(x, Layout(MESH, placements))


def reals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
@pytest.mark.parametrize("dim", [-1, 1, -2, 0])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()])
def test_a_scan_counts_its_dim_from_either_end(scan: Any, dim: int, placement: Any) -> None:
    x = reals(3, 5)
    with simulated(MESH):
        found = whole(scan(laid(x, placement), dim))

    torch.testing.assert_close(found, scan(x, dim))


def test_a_number_out_of_a_partial_sum_is_the_sum() -> None:
    with simulated(MESH):
        total = laid(torch.arange(8.0), Shard(0)).sum().redistribute(placements=[Partial()])

        assert total.placements == (Partial(),)
        assert total.item() == float(total) == 28
        assert f"{total:.1f}" == "28.0"
        assert bool(total == 28)


def test_whole_numbers_stay_whole_numbers() -> None:
    big = torch.tensor([2**24 + 1, 2**53 + 1, -7])
    with simulated(MESH):
        added = laid(big, Partial()) + laid(big, Replicate())
        partial = laid(big, Replicate()).redistribute(placements=[Partial()])

        assert added.dtype == partial.dtype == torch.int64
        assert whole(added).equal(2 * big)
        assert whole(partial).equal(big)
        assert whole(dshard.distribute_tensor(big, MESH, [Partial()])).equal(big)


@pytest.mark.parametrize(("op", "ord"), [("max", float("inf")), ("min", float("-inf")), ("sum", float("inf"))])
def test_a_norm_of_a_partial_tensor(op: Any, ord: float) -> None:
    x = torch.tensor([[1.0, -2.0], [2.0, 0.5]])
    with simulated(MESH):
        found = whole(torch.linalg.vector_norm(laid(x, Partial(op)), ord))

    torch.testing.assert_close(found, torch.linalg.vector_norm(x, ord))


def test_rows_of_a_split_table_serve_many_readers() -> None:
    table, ids = reals(7, 3), torch.tensor([[6, 0, 3], [2, 2, 5]])
    with simulated(MESH):
        weight = laid(table, Shard(0)).requires_grad_()
        rows = F.embedding(laid(ids, Replicate()), weight)
        first, second = rows * 2, rows.relu()
        (first.sum() + second.sum() + rows.exp().sum()).backward()

        assert whole(first).equal(F.embedding(ids, table) * 2)
        assert whole(second).equal(F.embedding(ids, table).relu())
        found = whole(weight.grad)
    one = table.clone().requires_grad_()
    rows = F.embedding(ids, one)
    (2 * rows + rows.relu() + rows.exp()).sum().backward()
    torch.testing.assert_close(found, one.grad)


EXTREMES: list[Callable[[Any], Any]] = [
    torch.max,
    torch.min,
    torch.amax,
    torch.amin,
    torch.argmax,
    torch.argmin,
    lambda x: torch.max(x, 0)[1],
    lambda x: torch.aminmax(x)[1],
]


def extremes_on_ranks() -> list[float]:
    x = torch.tensor([3.0, -1.0, 4.0, 1.5, 2.0])
    split = dshard.distribute_tensor(x, real_mesh(), [Shard(0)])
    return [float(extreme(split)) for extreme in EXTREMES]


@cache
def real_mesh() -> Any:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


@pytest.mark.ranks
def test_a_rank_that_holds_nothing_takes_part_in_extremes(ranks: RankPool) -> None:
    assert ranks.run(extremes_on_ranks) == [[4.0, -1.0, 4.0, -1.0, 2, 1, 2, 4.0]] * 4


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (6, 1)])
def test_a_mean_loss_over_uneven_parts(loss: Any, shape: tuple[int, ...]) -> None:
    x, y = reals(*shape), reals(*shape, seed=1)
    with simulated(MESH):
        a = laid(x, Shard(0)).requires_grad_()
        found = loss(a, laid(y, Shard(0)))
        found.backward()
        value, gradient = whole(found.detach()), whole(a.grad)
    one = x.clone().requires_grad_()
    right = loss(one, y)
    right.backward()
    torch.testing.assert_close(value, right.detach())
    torch.testing.assert_close(gradient, one.grad)


def random_values_on_ranks(seed: int) -> list[Tensor]:
    found = []
    for placement in (Shard(0), Replicate()):
        dshard.manual_seed(seed)
        values = dshard.rand(5, 3, device_mesh=real_mesh(), placements=[placement])
        torch.nn.init.normal_(values)
        found += [values.full_tensor(), F.dropout(values, 0.5).full_tensor()]
    return found


@pytest.mark.ranks
def test_random_values_on_a_cpu_mesh_are_those_of_one_device(ranks: RankPool) -> None:
    found = ranks.run(random_values_on_ranks, 3)

    for values in found:
        split, dropped, whole_values, whole_dropped = values
        assert torch.equal(split, whole_values)
        assert torch.equal(dropped, whole_dropped)
        assert split.unique().numel() == 15
        assert torch.equal(split, found[0][0])


def uneven_parts() -> tuple[Any, ...]:
    rank = dist.get_rank()
    local = torch.full((3 if rank < 3 else 1, 2), float(rank))
    x = DTensor.from_local(local, real_mesh(), [Shard(0)], run_check=True)
    return tuple(x.shape), x.full_tensor()[:, 0].tolist()


@pytest.mark.ranks
def test_uneven_parts_make_one_tensor(ranks: RankPool) -> None:
    assert ranks.run(uneven_parts) == [((10, 2), [0, 0, 0, 1, 1, 1, 2, 2, 2, 3])] * 4


def uneven_parts_refused() -> str:
    try:
        DTensor.from_local(torch.zeros(1 + dist.get_rank(), 2), real_mesh(), [Shard(0)], run_check=True)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.ranks
def test_parts_of_no_tensor_are_refused_on_every_rank(ranks: RankPool) -> None:
    assert all("cannot be the parts of a tensor" in said for said in ranks.run(uneven_parts_refused))


# -- programs of many operators


UNARY: list[Callable[[Any], Any]] = [
    torch.tanh,
    torch.exp,
    torch.abs,
    torch.neg,
    torch.sigmoid,
    F.gelu,
    F.relu,
    lambda x: x * 0.5 + 1,
    lambda x: x / (1 + x.abs()),
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(0),
    lambda x: x.cumsum(-1) * 0.1,
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x / (1 + x.norm()),
    lambda x: x * x.sum(),
    lambda x: x - x.logsumexp(0),
    lambda x: x.var(0) + x,
    lambda x: x.std() * x,
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: x.sort(-1)[0],
    lambda x: x + x.amax(-1, keepdim=True),
    lambda x: x.roll(1, -1),
    lambda x: x.flip(0),
    lambda x: x.tril(),
    lambda x: x.T.contiguous(),
    lambda x: x.reshape(-1).view(x.shape),
    lambda x: x[1:],
    lambda x: x[:, :-1],
    lambda x: torch.cat([x, x * 2]),
    lambda x: F.pad(x, (1, 0)),
    lambda x: x.unsqueeze(1).expand(-1, 2, -1).mean(1),
    lambda x: x.where(x > 0, 0.1 * x),
    lambda x: x.clamp(-1, 1),
    lambda x: torch.stack([x, x]).prod(0).sign() * x,
    lambda x: x @ x.T * 0.1 @ x,
    lambda x: x.index_select(0, (x[:, 0] * 0).long()),
    lambda x: x.gather(0, (x * 0).long()),
]
BINARY: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y.mean(),
    lambda x, y: x * y.sum(0)[:1],
    lambda x, y: x - y.amax(),
    lambda x, y: torch.maximum(x, y.mean()),
    lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)])[: x.numel()].view(x.shape),
    lambda x, y: torch.outer(x[:, 0], y[0]) * 0.1,
    lambda x, y: x.T @ x @ torch.ones_like(x).T * 0.01 + y.mean(),
]


def program(seed: int, length: int) -> Callable[..., Any]:
    """A function of two matrices, of operators drawn at random; the same for the same seed."""

    def run(x: Any, y: Any) -> Any:
        draw, values = Random(seed), [x, y]
        for _ in range(length):
            a, b = draw.choice(values), draw.choice(values)
            n = draw.randrange(len(UNARY) + len(BINARY))
            out = UNARY[n](a) if n < len(UNARY) else BINARY[n - len(UNARY)](a, b)
            if out.numel() == 0 or out.numel() > 400:
                continue
            values.append(out / (1 + out.detach().abs().amax()))
        return sum(value.square().sum() for value in values[2:]) if len(values) > 2 else x.sum()

    return run


def differs(seed: int, mesh: Mesh, length: int) -> bool:
    """Whether a program gives something else, or other gradients, than on one device."""
    draw, run = Random(seed), program(seed, length)
    x, y = reals(draw.randint(2, 6), draw.randint(2, 6), seed=seed), reals(5, draw.randint(2, 5), seed=seed + 1)
    a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
    right = run(a, b)
    right.backward()
    parts = [distribute(t, draw.choice(layouts_of(t, mesh))).requires_grad_() for t in (x, y)]
    found = run(*parts)
    found.backward()
    pairs = [(found.detach(), right.detach()), (parts[0].grad, a.grad), (parts[1].grad, b.grad)]
    values = [(torch.zeros_like(t) if f is None else whole(f), t) for f, t in pairs if t is not None]
    return not all(torch.allclose(f, t, rtol=1e-6, atol=1e-8) for f, t in values)


@pytest.mark.parametrize("mesh", [MESH, SQUARE], ids=str)
def test_random_programs_are_those_of_one_device(mesh: Mesh) -> None:
    wrong = []
    for seed in range(150 if THOROUGH else 2):
        with simulated(mesh):
            if differs(seed, mesh, 10):
                wrong.append(seed)

    assert not wrong


def programs_on_ranks(seeds: list[int], shape: tuple[int, ...]) -> list[int]:
    mesh = bind(init_device_mesh("cpu", shape))
    return [seed for seed in seeds if differs(seed, mesh, 10)]


@pytest.mark.ranks
@pytest.mark.parametrize("shape", one_in(2, [(2, 2), (4,)]))
def test_random_programs_on_real_ranks(ranks: RankPool, shape: tuple[int, ...]) -> None:
    assert ranks.run(programs_on_ranks, list(range(60 if THOROUGH else 2)), shape, timeout=600.0) == [[]] * 4
