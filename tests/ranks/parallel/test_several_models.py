"""Modules that several models have, each laid out by a plan of its own, train as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor, nn

import dshard
from dshard import DTensor, Mesh, plan_model
from dshard.comm import plain
from dshard.testing import RankPool

LayOut = Callable[[nn.Module, Tensor], object]
WAYS: dict[str, tuple[int, ...]] = {"data": (4,), "fsdp": (4,), "megatron": (4,), "fsdp x megatron": (2, 2)}


def trunk() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 6))


def ended(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def actor_and_critic(lay_out: LayOut) -> Iterator[Tensor]:
    """Two models with heads of their own on one trunk, whose weights each gathers."""
    shared, x = trunk(), torch.randn(8, 6)
    actor, critic = (nn.Sequential(shared, nn.Linear(6, n)) for n in (4, 1))
    lay_out(actor, x)
    lay_out(critic, x)
    optimizer = torch.optim.SGD({*actor.parameters(), *critic.parameters()}, lr=0.1)
    for _ in range(4):
        loss = F.cross_entropy(actor(x), torch.arange(8) % 4) + critic(x).square().mean()
        loss.backward()
        ended(optimizer)
        yield loss


def in_one_model(lay_out: LayOut) -> Iterator[Tensor]:
    """A generator and a critic, each laid out, and then the model of both, whose blocks they are."""
    generator, critic, z, real = trunk(), trunk(), torch.randn(8, 6), torch.randn(8, 6)
    lay_out(generator, z)
    lay_out(critic, real)
    both = nn.Sequential(generator, critic)
    lay_out(both, z)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in both]
    for _ in range(4):
        loss = critic(generator(z).detach()).mean() - critic(real).mean()
        loss.backward()
        ended(optimizers[1])
        yield loss
        other = -both(z).mean()
        other.backward()
        ended(*optimizers)
        yield other


def of_a_block(lay_out: LayOut) -> Iterator[Tensor]:
    """A model, and then a block of it, which is called by itself, too."""
    model, x = nn.Sequential(trunk(), nn.Linear(6, 4)), torch.randn(8, 6)
    lay_out(model, x)
    lay_out(model[0], x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = F.cross_entropy(model(x), torch.arange(8) % 4) + model[0](x).square().mean()
        loss.backward()
        ended(optimizer)
        yield loss


PROGRAMS = {program.__name__: program for program in (actor_and_critic, in_one_model, of_a_block)}


def outcome(name: str, lay_out: LayOut) -> list[Tensor]:
    """The losses of a program, and the parameters that it ends with, in double precision."""
    models: list[nn.Module] = []

    def kept(model: nn.Module, x: Tensor) -> None:
        models.append(model)
        lay_out(model, x)

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        losses = [*PROGRAMS[name](kept)]
    finally:
        torch.set_default_dtype(torch.float32)
    found = [*losses, *(p for model in models for p in model.parameters())]
    return [x.full_tensor().detach() if isinstance(x, DTensor) else x.detach() for x in found]


def as_one_device(name: str, strategy: str) -> int:
    shape = WAYS[strategy]
    mesh = dshard.init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    with plain():
        alone = outcome(name, lambda model, x: None)
    found = outcome(name, lambda model, x: dshard.parallelize(model, mesh, strategy, x))
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)
    return len(found)


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "strategy"), one_way_each(PROGRAMS, list(WAYS), every=2))
def test_models_that_share_modules_learn_what_they_learn_on_one_device(
    ranks: RankPool, name: str, strategy: str
) -> None:
    assert min(ranks.run(as_one_device, name, strategy, timeout=120.0)) > 10


def planned_after_a_failed_backward_pass() -> float:
    """The loss of a model that the first rank plans for all, after each rank has failed in a pass of another one."""
    mesh = dshard.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))
    x, failed, model = torch.ones(8, 6), trunk(), trunk()
    dshard.parallelize(failed, mesh, "megatron", x)
    failed[0].weight.register_hook(raise_my_own)
    with pytest.raises(ValueError, match="my hook"):
        failed(x).square().sum().backward()
    dshard.parallelize(model, mesh, "auto", x)
    return float(model(x).square().sum().detach())


def raise_my_own(grad: Tensor) -> None:
    raise ValueError("my hook")


@pytest.mark.ranks
def test_a_model_is_planned_by_one_rank_after_a_backward_pass_that_failed(ranks: RankPool) -> None:
    assert len({*ranks.run(planned_after_a_failed_backward_pass)}) == 1


@pytest.mark.parametrize("strategy", WAYS)
@pytest.mark.filterwarnings("ignore:distribute_tensor on the mesh")
def test_the_plan_of_a_model_is_that_of_its_modules_before_they_had_plans(strategy: str) -> None:
    shape = WAYS[strategy]
    mesh, x = Mesh(shape, ("a", "b")[: len(shape)]), torch.empty(8, 6, device="meta")
    model = nn.Sequential(trunk(), trunk()).to("meta")
    before = plan_model(model, mesh, strategy, x)
    dshard.parallelize(model[0], mesh, strategy, x)
    after = plan_model(model, mesh, strategy, x)
    assert (after.parameters, after.outputs, after.products) == (before.parameters, before.outputs, before.products)
    assert after.cost.moves == before.cost.moves
