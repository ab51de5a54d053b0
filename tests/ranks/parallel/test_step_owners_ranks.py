"""Owners of matrices on real ranks: a model learns what it learns on one device, and each rank receives its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from helpers.default_cases import one_way_each
from torch import Tensor, nn

from dshard import Topology, init_device_mesh, trace, use_topology
from dshard.parallel import parallelize, plan_steps
from dshard.testing import RankPool

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(5)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(12, 32), *hidden, nn.Linear(32, 5))


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(6)
    return [(torch.randn(8, 12), torch.randn(8, 5)) for _ in range(count)]


def trained(own: nn.Module) -> tuple[list[float], list[list[tuple[str, int]]]]:
    """The losses of steps with Muon for matrices and AdamW for the rest, and what Muon's steps send."""
    matrices = [p for p in own.parameters() if p.dim() == 2]
    muon = plan_steps(torch.optim.Muon(matrices, lr=0.05))
    rest = torch.optim.AdamW([p for p in own.parameters() if p.dim() != 2], lr=0.01)
    losses, sent = [], []
    for x, y in batches():
        for each in (muon, rest):
            each.zero_grad()
        loss = (own(x) - y).square().mean()
        loss.backward()
        losses.append(loss.item())
        with trace() as events:
            muon.step()
        rest.step()
        sent.append([(event.collective, event.nbytes) for event in events.events])
    return losses, sent


def on_ranks(shape: tuple[int, ...], plan: str) -> tuple[list[float], list[list[tuple[str, int]]]]:
    own, mesh = model(), init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])
    with use_topology(Topology.preset("dgx-h100")):
        parallelize(own, mesh, plan, batches()[0][0])
        return trained(own)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shape", "plan"),
    [
        ((2, 2), "fsdp x megatron"),
        pytest.param((4,), "fsdp", marks=pytest.mark.thorough),
        pytest.param((2, 2), "data x fsdp", marks=pytest.mark.thorough),
    ],
)
def test_a_model_learns_with_owners(ranks: RankPool, shape: tuple[int, ...], plan: str) -> None:
    expected, _ = trained(model())

    for losses, sent in ranks.run(on_ranks, shape, plan):
        assert losses == pytest.approx(expected, rel=1e-2)  # bfloat16, in the first step summed in another order
        for events in sent[1:]:
            assert [collective for collective, _ in events] == ["all_to_all"] * 2


LayOut: TypeAlias = Callable[[nn.Module], nn.Module]


class DoubleMuon(torch.optim.Optimizer):
    """Muon in double precision, where owners and one device agree to its last digits."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p.grad)).lerp_(p.grad, 0.1)
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(4):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.mul_(1 - 0.01 * group["lr"]).add_(x, alpha=-group["lr"])


class Training:
    """A model with its matrices under a planned optimiser, and its other parameters under AdamW."""

    def __init__(self, lay_out: LayOut, seed: int = 5) -> None:
        torch.manual_seed(seed)
        hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
        self.model = lay_out(nn.Sequential(nn.Linear(12, 32), *hidden, nn.Linear(32, 5)).double())
        matrices = [p for p in self.model.parameters() if p.dim() == 2]
        self.muon = plan_steps(DoubleMuon(matrices))
        self.rest = torch.optim.AdamW([p for p in self.model.parameters() if p.dim() != 2], lr=0.01)

    def run(self, steps: int = STEPS, start: int = 0) -> list[float]:
        """The losses of some steps."""
        losses = []
        for x, y in [(x.double(), y.double()) for x, y in batches(start + steps)[start:]]:
            for each in (self.muon, self.rest):
                each.zero_grad()
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            for each in (self.muon, self.rest):
                each.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("model", "muon", "rest")}

    def load(self, state: dict[str, Any]) -> None:
        for name, own in state.items():
            getattr(self, name).load_state_dict(own)


def loaded_on_another_mesh(lay_out: LayOut, other: LayOut) -> list[float]:
    first, second = Training(lay_out), Training(other, seed=9)
    losses = first.run()
    second.load(copy.deepcopy(first.state()))
    return [*losses, *second.run(3, start=STEPS)]


def copied(lay_out: LayOut, other: LayOut) -> list[float]:
    first = Training(lay_out)
    losses = first.run()
    second = copy.deepcopy(first)
    return [*losses, *second.run(3, start=STEPS), *first.run(3, start=STEPS)]


def frozen_for_a_while(lay_out: LayOut, other: LayOut) -> list[float]:
    own = Training(lay_out)
    losses = own.run(3)
    for trained in (False, True):
        own.model[1].weight.requires_grad_(trained)  # type: ignore[union-attr, operator]
        losses += own.run(3)
    return losses


def with_a_late_group(lay_out: LayOut, other: LayOut) -> list[float]:
    own = Training(lay_out)
    last = own.muon.param_groups[0]["params"].pop()
    losses = own.run()
    own.muon.add_param_group({"params": [last], "lr": 0.004})
    return losses + own.run()


def scheduled_and_scaled(lay_out: LayOut, other: LayOut) -> list[float]:
    own, losses = Training(lay_out), []
    schedule = torch.optim.lr_scheduler.OneCycleLR(own.muon, 0.05, total_steps=9, cycle_momentum=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for n, (x, y) in enumerate(batches(6)):
        loss = (own.model(x.double()) - y.double()).square().mean() * (float("inf") if n == 3 else 1.0)
        scaler.scale(loss).backward()
        for each in (own.muon, own.rest):
            scaler.unscale_(each)
        nn.utils.clip_grad_norm_(own.model.parameters(), 0.5)
        for each in (own.muon, own.rest):
            scaler.step(each)
            each.zero_grad()
        scaler.update()
        schedule.step()
        losses += [loss.item(), scaler.get_scale()]
    return losses


PROGRAMS = (loaded_on_another_mesh, copied, frozen_for_a_while, with_a_late_group, scheduled_and_scaled)
MESHES = [((4,), "fsdp"), ((2, 2), "fsdp x megatron"), ((2, 2), "data x fsdp")]


def on_two_meshes(program: Callable[[LayOut, LayOut], list[float]], shape: tuple[int, ...], plan: str) -> list[float]:
    def laid_out(shape: tuple[int, ...], plan: str, own: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("x", "y")[: len(shape)])
        return parallelize(own, mesh, plan, batches()[0][0].double())

    with use_topology(Topology.preset("dgx-h100")):
        return program(partial(laid_out, shape, plan), partial(laid_out, *MESHES[shape == (4,)]))


@pytest.mark.ranks
@pytest.mark.parametrize(("program", "way"), one_way_each(PROGRAMS, MESHES, every=5))
def test_planned_steps_do_what_users_do_with_optimisers(
    ranks: RankPool, program: Callable[[LayOut, LayOut], list[float]], way: tuple[tuple[int, ...], str]
) -> None:
    expected = program(lambda own: own, lambda own: own)

    for found in ranks.run(on_two_meshes, program, *way):
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)
