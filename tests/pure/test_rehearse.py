"""A rehearsed step: what each rank computes is run, what it would send is that of the recorded step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from dshard import Mesh, Replicate, Shard, distribute_tensor, init_device_mesh, use_topology
from dshard.errors import RankError
from dshard.launch import rehearse
from dshard.simulate import record
from dshard.topology import Topology

NETWORK = Topology.preset("cpu")


def on_mesh(mesh: object, device: str) -> Callable[[], None]:
    x = distribute_tensor(torch.ones(8, 6, device=device), mesh, [Shard(0), Replicate()], src_data_rank=None)
    w = distribute_tensor(torch.ones(6, 4, device=device), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    w.requires_grad_()
    return lambda: (x @ w).square().sum().full_tensor().backward()


def product(shape: tuple[int, ...]) -> Callable[[], None]:
    assert dist.get_backend() == "fake"
    assert torch.get_num_threads() == 1
    return on_mesh(init_device_mesh("cpu", shape), "cpu")


def failing() -> Callable[[], None]:
    if dist.get_rank() == 1:
        raise ValueError("no such model")
    return lambda: None


def test_a_rehearsed_step_sends_what_the_recorded_one_does() -> None:
    with use_topology(NETWORK):
        recorded = record(on_mesh(Mesh((2, 2)), "meta"))

    found = rehearse(product, (2, 2), ranks=4, topology=NETWORK, steps=3)

    sent = [slot.event.seconds for slot in recorded.slots if slot.event.queue == "network"]
    assert found.nbytes == recorded.nbytes > 0
    assert found.network == pytest.approx(sum(sent))
    assert len(found.local) == 4
    assert all(0 < seconds < 10 for seconds in found.local)
    assert found.seconds == max(found.local) + found.network


@pytest.mark.thorough
def test_a_model_that_cannot_be_made_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 failed: ValueError: no such model"):
        rehearse(failing, ranks=2, topology=NETWORK)
