"""A write to what is detached from a tensor reaches the views of the tensor whose memory is their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import dshard
from dshard import Shard, distribute_tensor
from dshard.testing import RankPool

WRITES: dict[str, Callable[[Tensor], object]] = {
    "detached": lambda h: h.detach().zero_(),
    "data": lambda h: h.data.zero_(),
    "detached twice": lambda h: h.detach().detach().zero_(),
    "a view of what is detached": lambda h: h.detach().view(-1).zero_(),
    "a sent view of what is detached": lambda h: h.detach()[2:4].zero_(),
    "a view of the data": lambda h: h.data.view(-1).zero_(),
    "what is detached of the data": lambda h: h.data.detach().zero_(),
}


def stale() -> list[str]:
    mesh, wrong = dshard.init_device_mesh("cpu", (4,)), []
    for (name, write), first, inference in product(WRITES.items(), (False, True), (False, True)):
        right, h = torch.ones(6, 2), distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        with torch.inference_mode(inference):  # in which what is detached of `h` counts writes with it
            early = h.detach(), h.data
            expected, g = right[1:3], h[1:3]
            for x, of in ((right, None), (h, early)):
                write(of[0] if first and of is not None else x)
            wrong += [f"{name}: {first}, {inference}"] * (not torch.equal(g.full_tensor(), expected))
            wrong += [f"{name}, itself: {first}, {inference}"] * (not torch.equal(h.full_tensor(), right))
            wrong += [f"{name}: of inference"] * early[0].is_inference()
        del early
    return wrong


@pytest.mark.ranks
def test_views_see_what_is_written_to_a_detached_tensor(ranks: RankPool) -> None:
    assert ranks.run(stale, timeout=60) == [[]] * 4
