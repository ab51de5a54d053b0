"""Rings that may be the cheapest candidate are priced, whatever the others take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dshard import Mesh, Topology, distribute_tensor, explain, use_topology
from dshard.ops.attention import attention_choice
from dshard.ops.attention.ring_price import ring_strategy
from dshard.placements import Placement, Replicate, Shard
from dshard.rules.strategy import Strategy

TOPOLOGIES = [Topology.preset("cpu"), Topology.preset("dgx-h100"), Topology.preset("dgx-h100", nodes=2, ranks=4)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 8, 64, 16), (1, 2, 8192, 64), (3, 4, 10, 8), (64, 16, 1024, 128)], ids=str)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_ring_takes_at_least_its_bound(
    topology: Topology, shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[tuple[Strategy, Strategy | None]]()

    def priced(call: Any, rows: Any, ring: Any, most: float) -> Strategy | None:
        strategy = ring_strategy(call, rows, ring)
        if strategy is not None:
            asked.append((strategy, ring_strategy(call, rows, ring, strategy.seconds)))
        return strategy

    monkeypatch.setattr(attention_choice, "ring_strategy", priced)
    mesh = Mesh((2, 4), ("x", "y"))
    layouts: list[list[Placement]] = [[Shard(2), Shard(2)], [Shard(0), Shard(2)], [Replicate(), Shard(2)]]
    attention: Callable[..., Any] = F.scaled_dot_product_attention
    with use_topology(topology):
        for layout in layouts:
            x = distribute_tensor(torch.empty(shape, device="meta", requires_grad=True), mesh, layout)
            explain(attention, x, x, x, is_causal=causal)

    assert asked
    assert all(again is not None and again.seconds == strategy.seconds for strategy, again in asked)
