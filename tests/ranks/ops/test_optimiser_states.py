"""What torch's functions load into an optimiser is distributed as its parameters, and its steps are one device's."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.checkpoint import state_dict as states
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from dshard import DTensor, distribute_tensor, init_device_mesh
from dshard.comm import DeviceMesh
from dshard.testing import RankPool
from dshard.torch_dtensor import IS_TORCHS

OPTIMISERS: list[Callable[..., Optimizer]] = [
    lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    lambda p: AdamW(p, lr=0.1, fused=True),
    lambda p: AdamW(p, lr=0.1, foreach=True),
    lambda p: Adam(p, lr=0.1, amsgrad=True, foreach=True),
    lambda p: Adam(p, lr=0.1, fused=True),
    lambda p: RMSprop(p, lr=0.1, momentum=0.5, foreach=True),
    lambda p: Adagrad(p, lr=0.1, foreach=True),
    lambda p: Adagrad(p, lr=0.1, fused=True),
]
OPTIONS = {
    "sharded": states.StateDictOptions(),
    "full": states.StateDictOptions(full_state_dict=True),
    "offloaded": states.StateDictOptions(full_state_dict=True, cpu_offload=True),
    "broadcast": states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


def network(mesh: DeviceMesh | None = None, distribute: Any = distribute_tensor) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(6, 9).double()
    if mesh is not None:
        layer.weight = nn.Parameter(distribute(layer.weight.detach(), mesh, [torch_tensor.Shard(1)]))
        layer.bias = nn.Parameter(distribute(layer.bias.detach(), mesh, [torch_tensor.Shard(0)]))
    return layer


def step(model: nn.Module, optimiser: Optimizer) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = None
        (p.square().sum() * (i + 1) + p.sin().sum()).backward()
    optimiser.step()


def tensors(optimiser: Optimizer) -> list[Tensor]:
    return [x for state in optimiser.state.values() for x in state.values() if isinstance(x, Tensor) and x.dim()]


def continued(cases: list[tuple[int, str]]) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for number, name in cases:
        make, options = OPTIMISERS[number], OPTIONS[name]
        mine, theirs = network(mesh), network()
        steps: list[Optimizer] = [make(model.parameters()) for model in (mine, theirs)]
        step(mine, steps[0]), step(theirs, steps[1])
        saved: Any = deepcopy(states.get_optimizer_state_dict(mine, steps[0], options=options))
        if name == "offloaded":  # what rank 0 has, is for all
            saved = deepcopy(states.get_optimizer_state_dict(theirs, steps[1]))
        mine.zero_grad()
        steps[0] = make(mine.parameters())
        states.set_optimizer_state_dict(mine, steps[0], saved, options=options)
        assert tensors(steps[0])
        assert {type(x) for x in tensors(steps[0])} == {DTensor}, name
        step(mine, steps[0]), step(theirs, steps[1])
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-12, atol=1e-12)  # type: ignore[operator]


def loaded() -> None:
    """`load_state_dict` itself, of plain values, torch's and dshard's, for parameters of either class."""
    mesh = init_device_mesh("cpu", (4,))
    models = [network(), network(mesh), network(mesh, torch_tensor.distribute_tensor)]
    steps = [AdamW(model.parameters(), lr=0.1) for model in models]
    for model, optimiser in zip(models, steps, strict=True):
        step(model, optimiser)
    saved = [deepcopy(optimiser.state_dict()) for optimiser in steps]
    for model, kind, given in ((1, DTensor, 0), (1, DTensor, 2), (2, torch_tensor.DTensor, 1)):
        fresh = AdamW(models[model].parameters(), lr=0.1)
        fresh.load_state_dict(deepcopy(saved[given]))
        for x, y in zip(tensors(fresh), tensors(steps[0]), strict=True):
            assert type(x) is kind
            torch.testing.assert_close(x.full_tensor(), y)  # type: ignore[attr-defined]
    assert [x.placements for x in tensors(fresh)][:2] == [(torch_tensor.Shard(1),)] * 2  # type: ignore[attr-defined]


@pytest.mark.ranks
@pytest.mark.skipif(not IS_TORCHS, reason="torch 2.11 gathers its own distributed tensors alone")
def test_a_loaded_optimiser_continues(ranks: RankPool) -> None:
    ranks.run(continued, list(zip(range(len(OPTIMISERS)), cycle(OPTIONS), strict=False)))


@pytest.mark.ranks
@pytest.mark.thorough
def test_every_loaded_optimiser_continues(ranks: RankPool) -> None:
    ranks.run(continued, list(product(range(len(OPTIMISERS)), OPTIONS)))


@pytest.mark.ranks
def test_loaded_states_are_distributed_as_their_parameters(ranks: RankPool) -> None:
    ranks.run(loaded)
