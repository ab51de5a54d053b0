"""Owners of matrices on real ranks: a model learns what it learns on one device, and each rank receives its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dshard import Topology, init_device_mesh, trace, use_topology
from dshard.parallel import parallelize, plan_steps
from dshard.testing import RankPool

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(5)
    hidden = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Linear(12, 32), *hidden, nn.Linear(32, 5))


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(6)
    return [(torch.randn(8, 12), torch.randn(8, 5)) for _ in range(STEPS)]


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
@pytest.mark.parametrize(("shape", "plan"), [((4,), "fsdp"), ((2, 2), "fsdp x megatron"), ((2, 2), "data x fsdp")])
def test_a_model_learns_with_owners(ranks: RankPool, shape: tuple[int, ...], plan: str) -> None:
    expected, _ = trained(model())

    for losses, sent in ranks.run(on_ranks, shape, plan):
        assert losses == pytest.approx(expected, rel=1e-2)  # bfloat16, in the first step summed in another order
        for events in sent[1:]:
            assert [collective for collective, _ in events] == ["all_to_all"] * 2
