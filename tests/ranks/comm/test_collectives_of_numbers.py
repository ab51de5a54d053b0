"""torch's collectives on whole numbers do what they do to a plain tensor that is alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.set_aside import imports_set_aside
from torch import Tensor, nn

import dshard
from dshard import DTensor, MeshError, Partial, Replicate, Shard, distribute_tensor
from dshard.testing import RankPool

OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "MAX", "MIN", "PRODUCT")}


def averaged(x: Tensor) -> Tensor:
    """The way of most programs: their backend may have no average."""
    dist.all_reduce(x)
    return x / dist.get_world_size()


def reduced(op: Any, asynchronous: bool = False, **options: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        work = dist.all_reduce(x, op, async_op=asynchronous, **options)
        if asynchronous:
            assert work is not None
            work.wait()
        return x

    return call


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.stack(parts)


def gathered_into_one(x: Tensor) -> Tensor:
    if x.dim() == 0:  # which gloo refuses
        return x
    out = torch.empty((dist.get_world_size(), *x.shape), dtype=x.dtype)
    dist.all_gather_into_tensor(out.view(-1), x)
    return out


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, 1)
    return x


def reduced_to_one(x: Tensor) -> Tensor:
    dist.reduce(x, 2)
    return x if dist.get_rank() == 2 else x[..., :0] if x.dim() else x.new_zeros(())  # elsewhere it is not defined


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"all_reduce {name}": reduced(op) for name, op in OPS.items()},
    "averaged by hand": averaged,
    "in the background": reduced(dist.ReduceOp.SUM, asynchronous=True),
    "all_gather": gathered,
    "all_gather_into_tensor": gathered_into_one,
    "broadcast": broadcast,
    "reduce": reduced_to_one,
}
MESHES = ((4,), (2, 2), (4, 1))


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def numbers(mesh: Any) -> dict[str, tuple[Callable[[], Tensor], Tensor]]:
    """Values on a mesh, with what they are on one device."""
    line, given = torch.arange(1.0, 4.0), [Replicate()] * mesh.ndim
    if mesh.size(-1) == 1:
        given[-1] = Shard(0)  # on one rank: it is whole
    return {
        "a vector": (lambda: distribute_tensor(line, mesh, given), line),
        "a number": (lambda: distribute_tensor(line, mesh, given).sum(), line.sum()),
        "a mean of rows": (
            lambda: distribute_tensor(torch.arange(8.0), mesh, [Shard(0)] * mesh.ndim).mean(),
            torch.tensor(3.5),
        ),
    }


def unlike_plain(shape: tuple[int, ...]) -> list[str]:
    """Calls that give another value than for a plain tensor."""
    mesh, wrong = dshard.init_device_mesh("cpu", shape), []
    model = dshard.parallelize(nn.Linear(4, 2), mesh, "data", torch.zeros(8, 4))
    for name, (make, value) in numbers(mesh).items():
        for call_name, call in CALLS.items():
            got, want = whole(call(make())), call(value.clone())
            if got.shape != want.shape or not torch.allclose(got, want):
                wrong.append(f"{call_name} of {name}: {got} for {want}")
    del model
    return wrong


@pytest.mark.ranks
@pytest.mark.parametrize("shape", MESHES)
def test_collectives_do_what_they_do_to_a_plain_tensor(ranks: RankPool, shape: tuple[int, ...]) -> None:
    assert ranks.run(unlike_plain, shape) == [[]] * 4


def trained() -> list[float]:
    """Losses of a step that divides by the number of ranks and sums, and those of one device."""
    mesh, losses = dshard.init_device_mesh("cpu", (4,)), []
    x, y = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    for laid_out in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        if laid_out:
            dshard.parallelize(model, mesh, "data", x)
        with dshard.implicit_replication():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            logged = loss.detach() / 4
            dist.all_reduce(logged)
            value = loss.item()
            dist.all_reduce(loss)  # in place, though autograd has recorded it
        losses += [logged.item(), value, loss.item() / 4, whole(model.weight.grad).norm().item()]
    return losses


@pytest.mark.ranks
def test_a_loss_divided_by_the_ranks_and_summed_is_the_loss(ranks: RankPool) -> None:
    for logged, loss, summed, gradient, *alone in ranks.run(trained):
        assert [logged, loss, summed, gradient] == pytest.approx(alone)
        assert [logged, summed] == pytest.approx([loss] * 2)


@imports_set_aside()
def refused() -> list[str]:
    """Collectives that ought to be refused, and are not."""
    mesh, accepted = dshard.init_device_mesh("cpu", (2, 2), mesh_dim_names=("refused_a", "refused_b")), []
    x = torch.ones(4, 4)

    def check(what: str, value: Tensor, **options: Any) -> None:
        try:
            dist.all_reduce(value, **options)
        except MeshError as error:
            if "its value is that of all ranks already; leave the collective out" in str(error):
                return
        accepted.append(what)

    number = distribute_tensor(x, mesh, [Replicate(), Replicate()]).sum()
    check("nothing is parallelized", number)
    whole_batches = dshard.parallelize(nn.Linear(4, 2), mesh, "data", x)
    check("a split tensor", distribute_tensor(x, mesh, [Shard(0), Replicate()]))
    check("a partial vector", DTensor.from_local(x, mesh, [Replicate(), Partial()]))
    check("over a part of the mesh", number, group=mesh["refused_a"].get_group())
    line = mesh["refused_b"]
    part = dshard.parallelize(nn.Linear(4, 2), line, "data", x)
    check("over more than the mesh", distribute_tensor(x, line, [Replicate()]))
    rows = dshard.parallelize(nn.Linear(4, 2), mesh, "data", x, inputs="per-data-rank")
    check("models of both kinds", number)
    del whole_batches
    check("rows of each data rank", number)
    del rows, part
    return accepted


@pytest.mark.ranks
def test_elsewhere_collectives_are_refused(ranks: RankPool) -> None:
    assert ranks.run(refused) == [[]] * 4
