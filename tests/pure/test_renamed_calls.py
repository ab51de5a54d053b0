"""Calls that are run once for their price where layouts differ by a permutation of mesh axes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.parallel.trace_step import record_step
from dshard.placements import Replicate, Shard
from dshard.planning.local_seconds import ExecutedCall, executed, run_by_executor
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

    found: ExecutedCall = executed(call, operands, topology)

    alone = run_by_executor(call, operands, topology)
    assert found.outputs == alone.outputs
    assert found.local.both == pytest.approx(alone.local.both)
    assert found.local.saved == alone.local.saved
    assert found.sent == pytest.approx(alone.sent)
