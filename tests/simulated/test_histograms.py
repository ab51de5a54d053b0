"""Counts of sharded values: those of one device, and small messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dshard import Layout, Mesh, Partial, Replicate, Shard, trace
from dshard.placements import Placement
from dshard.testing import distribute, simulated, whole

MESH = Mesh((4,), ("x",))
WHOLE = torch.tensor([[0.0, 3.0], [-2.0, 5.0], [4.0, 4.0], [1.0, 0.0], [2.0, -2.0]])
IDS = torch.tensor([3, 0, 8, 3, 5])
CALLS: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "bounds": (lambda x: torch.histc(x, 4, -1, 4), WHOLE),
    "no bounds": (lambda x: torch.histc(x, bins=3), WHOLE),
    "equal bounds": (lambda x: torch.histc(x, 5, 2, 2), WHOLE[:3]),
    "one value": (lambda x: x.histc(4), torch.ones(5)),
    "none": (lambda x: torch.histc(x, 4), torch.zeros(0)),
    "counts": (torch.bincount, IDS),
    "more counts": (lambda x: x.bincount(minlength=12), IDS.byte()),
    "weights": (lambda x: torch.bincount(x, x.float() / 2), IDS[:2]),
    "counts of none": (lambda x: torch.bincount(x, minlength=3), IDS[:0]),
}


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()])
@pytest.mark.parametrize("name", CALLS)
def test_counts_are_those_of_one_device(name: str, placement: Placement) -> None:
    call, x = CALLS[name]
    with simulated(MESH):
        counts = call(distribute(x, Layout(MESH, [placement])))
        assert whole(counts).equal(call(x))
        assert counts.dtype == call(x).dtype


@pytest.mark.parametrize("name", ["bounds", "no bounds", "counts", "weights"])
def test_only_extremes_and_counts_are_sent(name: str) -> None:
    """Where there are more values than bins."""
    call, x = CALLS[name]
    with simulated(MESH), trace() as found:
        call(distribute(x.repeat(8, *(1,) * (x.ndim - 1)), Layout(MESH, [Shard(0)]))).redistribute(
            placements=[Replicate()]
        )
    assert [event.collective for event in found.events] == ["all_reduce"] * (1 if name == "bounds" else 2)


def test_values_that_have_no_bin_are_refused() -> None:
    with simulated(MESH):
        for wrong in (torch.tensor([1, -1]), torch.ones(2, 2, dtype=torch.int64), torch.rand(3)):
            with pytest.raises(RuntimeError) as alone:
                torch.bincount(wrong)
            with pytest.raises(RuntimeError) as caught:
                torch.bincount(distribute(wrong, Layout(MESH, [Shard(0)])))
            assert str(caught.value) == str(alone.value)
