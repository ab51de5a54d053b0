"""`linspace` and `logspace`: to the bit torch's, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dshard
from dshard import Mesh, Partial, Placement, Replicate, Shard
from dshard.testing import simulated, whole


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_numbers_evenly_spaced_are_torchs(steps: int, placement: Placement) -> None:
    mesh = Mesh((3,), ("x",))
    made: list[tuple[Any, Any]] = [
        (dshard.linspace, torch.linspace),
        (dshard.logspace, torch.logspace),
        (lambda *a, **k: dshard.logspace(*a, base=2.0, **k), lambda *a, **k: torch.logspace(*a, base=2.0, **k)),
    ]
    with simulated(mesh):
        for mine, theirs in made:
            for options in ({}, {"dtype": torch.float64}):
                found = mine(-1.0, 2.5, steps, device_mesh=mesh, placements=[placement], **options)
                assert torch.equal(whole(found), theirs(-1.0, 2.5, steps, **options))
        ends = [dshard.full((), value, device_mesh=mesh) for value in (0.0, 4.0)]
        assert torch.equal(whole(dshard.linspace(*ends, 5, device_mesh=mesh)), torch.arange(5.0))


def test_options_that_no_factory_has_are_refused() -> None:
    with pytest.raises(dshard.ArgumentError, match="linspace takes no device"):
        dshard.linspace(0, 1, 3, device_mesh=Mesh((2,), ("x",)), device="cpu")
