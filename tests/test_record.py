"""A step simulated without processes sends, computes and holds what the same step does on real ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dshard import DeviceMesh, Mesh, use_topology
from dshard.comm import init_device_mesh
from dshard.comm.workspace import WORKSPACE
from dshard.demo.laying import lay_out
from dshard.demo.model import build
from dshard.demo.strategies import find
from dshard.ops.matmul import use_strategy
from dshard.simulate.recording import Recorded, record
from dshard.testing import rank_pool
from dshard.topology import Topology

WAIT = 300.0  # seconds on a busy machine
NETWORK = Topology.preset("cpu")


def step_of(name: str, mesh: DeviceMesh | Mesh, device: str) -> Recorded:
    """A step of the demo's model, recorded."""
    strategy = find(name)
    model: nn.Module = build(0).to(device)
    place = lay_out(model, strategy, mesh)
    images, labels = torch.empty(16, 8, 8, device=device), torch.zeros(16, dtype=torch.long, device=device)
    batch, targets = place(images), place(labels)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(batch), targets).backward()
        optimizer.step()

    with use_topology(NETWORK), use_strategy(matmul=strategy.matmul):
        step()  # workspaces are made in the first step, and stay
        return record(step)


def on_ranks(name: str, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[Recorded, int]:
    """The same, and the bytes of buffers that stay between steps."""
    WORKSPACE.clear()
    recorded = step_of(name, init_device_mesh("cpu", shape, mesh_dim_names=names), "cpu")
    return recorded, sum(x.untyped_storage().nbytes() for free in WORKSPACE.free.values() for x in free)


@pytest.mark.parametrize("name", ["data", "megatron", "data x tensor", "summa", "atp"])
def test_simulated_and_real_steps_are_the_same(name: str) -> None:
    mesh = find(name).on(4)
    assert mesh is not None
    simulated = step_of(name, replace(mesh, device_type="cpu"), "meta")
    real, buffers = rank_pool(4).run(on_ranks, name, mesh.shape, mesh.names, timeout=WAIT)[0]
    assert simulated.nbytes == real.nbytes > 0
    assert simulated.flops == real.flops > 0
    assert [s.event.name for s in simulated.slots if s.event.collectives] == [
        s.event.name for s in real.slots if s.event.collectives
    ]
    if name in ("summa", "atp"):  # what is gathered may lie in buffers, kept or made anew
        assert abs(simulated.held - real.held) <= buffers
        assert abs(simulated.peak - real.peak) <= buffers
    else:
        assert (simulated.peak, simulated.held) == (real.peak, real.held)
