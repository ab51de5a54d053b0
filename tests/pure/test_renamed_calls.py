"""Calls that are run once for their price where layouts differ by a permutation of mesh axes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.trace_step import record_step
from dshard.placements import Partial, Replicate, Shard
from dshard.planning.local_seconds import ExecutedCall, executed, run_by_executor
from dshard.rules.attention_loops import AttentionLoops
from dshard.topology import Topology

MESH = Mesh((2, 2, 2), ("x", "y", "z"))
TOPOLOGIES = [Topology.preset("dgx-h100"), Topology.preset("dgx-h100", nodes=2, ranks=4)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("rows", [(0, None, 1), (1, 1, None), (None, 0, 0)], ids=str)
def test_a_call_of_renamed_axes_costs_as_much_and_returns_renamed_layouts(
    rows: tuple[int | None, ...], topology: Topology
) -> None:
    with torch.device("meta"):
        graph = record_step(nn.LayerNorm(16), (torch.empty(8, 16, requires_grad=True),), {}).graph()
    (call,) = graph.calls
    placements = tuple([Replicate() if row is None else Shard(row) for row in rows])
    whole = Layout(MESH, (Replicate(),) * 3)
    operands = [Layout(MESH, placements), *[whole] * (len(call.operands) - 1)]

    costs_as_much(executed(call, operands, topology), run_by_executor(call, operands, topology))


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("loops", [("b", None, "k"), ("k", "k", "b"), (None, "h", "k")], ids=str)
def test_attention_has_the_loops_that_a_plan_asks_for(loops: AttentionLoops, topology: Topology) -> None:
    with torch.device("meta"):
        graph = record_step(Attention(), (torch.empty(8, 4, 16, 8, requires_grad=True),), {}).graph()
    (call,) = graph.calls
    keys: dict[str | None, Shard] = {"b": Shard(0), "h": Shard(1), "k": Shard(2)}
    query = Layout(MESH, tuple([keys[loop] if loop in ("b", "h") else Replicate() for loop in loops]))
    operands = [query, *[Layout(MESH, tuple([keys.get(loop, Replicate()) for loop in loops]))] * 2]

    asked = executed(call, operands, topology, loops)

    costs_as_much(asked, run_by_executor(call, operands, topology, loops))
    ends = [Partial() if loop == "k" else at for loop, at in zip(loops, query.placements, strict=True)]
    assert asked.outputs == (Layout(MESH, tuple(ends)),)
    assert asked.sent > 0


def costs_as_much(found: ExecutedCall, alone: ExecutedCall) -> None:
    assert found.outputs == alone.outputs
    assert found.local.both == pytest.approx(alone.local.both)
    assert found.local.saved == alone.local.saved
    assert found.sent == pytest.approx(alone.sent)
