"""Attention of one token to a long cache of keys and values: the cache stays where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dshard import Mesh, Placement, Replicate, Shard, distribute_tensor, explain

HEADS, KEY_HEADS, SIZE, CACHED = 32, 8, 128, 65536
BOTH = Mesh((2, 4), ("cp", "tp"))


def decoding(mesh: Mesh, query: list[Placement], cache: list[Placement]) -> Any:
    """What is planned for a token, in half precision."""
    shapes = [(1, HEADS, 1, SIZE), *[(1, KEY_HEADS, CACHED, SIZE)] * 2]
    empty = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    tensors = [distribute_tensor(x, mesh, p) for x, p in zip(empty, (query, cache, cache), strict=True)]
    with torch.no_grad():
        return explain(F.scaled_dot_product_attention, *tensors, enable_gqa=True)


@pytest.mark.parametrize(
    ("mesh", "query", "cache"),
    [
        (Mesh((8,), ("cp",)), [Replicate()], [Shard(2)]),
        (Mesh((8,), ("cp",)), [Shard(2)], [Shard(2)]),
        (BOTH, [Replicate(), Shard(1)], [Shard(2), Shard(1)]),
        (BOTH, [Shard(2), Shard(1)], [Shard(2), Shard(1)]),
    ],
)
def test_a_cache_that_is_split_over_the_sequence_is_not_moved(mesh: Mesh, query: Any, cache: Any) -> None:
    """At most a rank receives the query, and of each other its result and two numbers a row, in single precision."""
    heads, others = HEADS // (4 if mesh is BOTH else 1), mesh.shape[0] - 1
    report = decoding(mesh, query, cache)

    assert report.chosen.name == "split keys"
    assert report.chosen.bytes_moved <= heads * (2 * SIZE + others * (4 * SIZE + 2 * 4))


@pytest.mark.parametrize("query", [Replicate(), Shard(1)])
def test_a_cache_that_is_split_by_heads_sends_nothing(query: Placement) -> None:
    assert decoding(Mesh((8,), ("tp",)), [query], [Shard(1)]).chosen.bytes_moved <= HEADS * SIZE * 2
