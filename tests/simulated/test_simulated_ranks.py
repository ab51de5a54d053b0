"""The mode of simulated ranks: where it is disabled, operators run as if it were not there."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dshard import Layout, Mesh, Shard
from dshard.comm import plain
from dshard.testing import distribute, simulated, whole
from dshard.torch_private import current_mode

MESH = Mesh((2,), ("x",))


def test_the_mode_is_left_where_it_is_disabled() -> None:
    with simulated(MESH):
        mode = current_mode()
        with plain():
            assert current_mode() is None
            with plain():
                assert current_mode() is None
            assert current_mode() is None
        assert current_mode() is mode
        with pytest.raises(ZeroDivisionError), plain():
            _ = 1 / 0
        assert current_mode() is mode
    assert current_mode() is None


def test_a_mode_above_it_stays() -> None:
    with simulated(MESH):
        mode = current_mode()
        with FlopCounterMode(display=False):
            above = current_mode()
            with plain():
                assert current_mode() is above is not mode
            x = distribute(torch.ones(4, 2), Layout(MESH, (Shard(0),)))
            assert whole(x * 2).equal(torch.full((4, 2), 2.0))
        assert current_mode() is mode


@pytest.mark.parametrize("fails", [False, True])
def test_functions_of_seeds_are_those_of_torch_again_after_it(fails: bool) -> None:
    before = torch.manual_seed, torch.initial_seed, torch.random.manual_seed, torch.random.initial_seed
    torch.manual_seed(7)
    expected = torch.rand(3)
    try:
        with simulated(MESH):
            with plain():
                torch.manual_seed(7)
                assert torch.initial_seed() == 7
                assert torch.rand(3).equal(expected)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert before == (torch.manual_seed, torch.initial_seed, torch.random.manual_seed, torch.random.initial_seed)
