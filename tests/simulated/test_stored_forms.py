"""Parameters that the files of a pretrained model hold in another form: how they are cut, and moved afterwards."""

from __future__ import annotations

import pytest
import torch

from dshard import DTensor, Layout, Mesh, Placement, Replicate, Shard, distribute_tensor
from dshard.parallel.integrations.pretrained import StoredForm, as_planned, form_of
from dshard.testing import simulated

GRID = Mesh((2, 2), ("a", "b"))
STACKED = StoredForm((".experts.down_proj",), ("MergeModulelist",), 1, None)
JOINED = StoredForm((".experts.gate_up_proj",), ("MergeModulelist", "Concatenate"), 2, 1)
SPLIT = StoredForm(("q_proj.weight", "k_proj.weight"), ("Chunk",), 1, None)
S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()


@pytest.mark.parametrize(
    ("form", "shape", "planned", "read"),
    [
        (STACKED, (4, 6, 5), (S0, S1), (S0, S1)),
        (JOINED, (4, 12, 5), (S0, S1), (S0, S1)),
        (JOINED, (4, 16, 5), (S1, S1), (S1, S1)),
        (JOINED, (4, 12, 5), (S1, S1), (R, R)),  # 6 rows of each part, of 4 ranks
        (JOINED, (4, 10, 5), (S0, S1), (S0, R)),
        (JOINED, (4, 10, 5), (S0, S2), (S0, S2)),
        (SPLIT, (8, 8), (S0, S1), (R, R)),
    ],
)
def test_ranks_read_what_they_hold_where_that_can_be_converted(
    form: StoredForm, shape: tuple[int, ...], planned: tuple[Placement, ...], read: tuple[Placement, ...]
) -> None:
    assert form.while_loading(shape, planned, GRID) == read


def test_the_form_of_a_parameter_is_found_by_its_name() -> None:
    forms = [STACKED, JOINED, SPLIT]
    assert form_of("model.layers.0.mlp.experts.gate_up_proj", forms) is JOINED
    assert form_of("model.layers.0.self_attn.k_proj.weight", forms) is SPLIT
    assert form_of("model.layers.0.self_attn.o_proj.weight", forms) is None


@pytest.mark.parametrize("read", [(S1, R), (S0, S1), (S1, S1), (R, S2), (R, R)], ids=str)
@pytest.mark.parametrize("planned", [(S0, S1), (S1, S1), (R, R)], ids=str)
def test_joined_parts_are_moved_to_where_they_belong(
    read: tuple[Placement, ...], planned: tuple[Placement, ...]
) -> None:
    whole = torch.arange(4 * 16 * 3.0).view(4, 16, 3)
    with simulated(GRID):
        gate, up = (distribute_tensor(part, GRID, read).to_local() for part in whole.split(8, dim=1))
        local = torch.cat([gate, up], dim=1)  # as transformers joins what a rank has cut
        loaded = DTensor.from_local(local, GRID, read, shape=whole.shape)
        moved = as_planned(loaded, JOINED, planned)
        assert moved.layout == Layout(GRID, planned)
        expected = distribute_tensor(whole, GRID, planned)
        torch.testing.assert_close(moved.full_tensor(), expected.full_tensor())
