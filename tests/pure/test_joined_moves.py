"""Tensors are joined into one collective where that takes no longer than collectives of their own."""

from __future__ import annotations

import pytest
import torch

from dshard import Mesh, Partial, Replicate, Shard, Topology, use_topology
from dshard.comm import CommEvent, listen
from dshard.comm.program_steps import moved_in
from dshard.core.moves import begin_together, joined_redistribution
from dshard.core.spec import contiguous_spec
from dshard.layout import Layout

MESH = Mesh((8,), ("x",))
SHARDED, WHOLE = Layout(MESH, (Shard(0),)), Layout(MESH, (Replicate(),))


@pytest.mark.parametrize("size", [2, 4])
def test_what_a_rank_cannot_join_no_rank_joins(size: int) -> None:
    mesh = Mesh((2, 2), ("d", "t"))  # of blocks of one element the first rank has all, and the last has nothing
    spec = contiguous_spec(Layout(mesh, (Partial(), Replicate())), (4, size), torch.float32, torch.device("meta"))
    move = joined_redistribution(spec, Layout(mesh, (Shard(0), Shard(1, blocks=2))))

    assert any(moved_in(move.plan, (i, j)) is None for i in range(2) for j in range(2))
    assert move.lane is None


@pytest.mark.parametrize(
    ("rows", "together"), [((8, 16, 24), [(8 + 16 + 24) * 7]), ((8, 16, 2**17), [(8 + 16) * 7, 2**17 * 7])]
)
def test_a_tensor_whose_copies_take_longer_than_a_collective_begins_has_its_own(
    rows: tuple[int, ...], together: list[int]
) -> None:
    events = list[CommEvent]()
    specs = [contiguous_spec(SHARDED, (8 * each, 1024), torch.bfloat16, torch.device("meta")) for each in rows]
    local = [torch.empty(each, 1024, dtype=torch.bfloat16, device="meta") for each in rows]
    with use_topology(Topology.preset("dgx-a100")), listen(events.append):
        ends = begin_together([joined_redistribution(spec, WHOLE) for spec in specs], local, "gather weights")
        whole = [end() for end in ends]

    assert [tuple(x.shape) for x in whole] == [spec.shape for spec in specs]
    assert [event.nbytes for event in events] == [each * 2 * 1024 for each in together]
    assert {event.collective for event in events} == {"all_gather"}
