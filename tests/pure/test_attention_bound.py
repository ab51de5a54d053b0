"""The lower bound of attention's communication: no schedule does with less, and Ulysses meets it."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
import torch.nn.functional as F

from dshard import Mesh, Shard, distribute_tensor, explain, use_strategy
from dshard.rules.communication_bounds import attention_lower_bound


def subsets(items: list[int]) -> list[tuple[int, ...]]:
    return [each for n in range(len(items) + 1) for each in combinations(items, n)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("ranks", "groups"), [(2, 1), (3, 1), (4, 1), (4, 3), (5, 2)])
def test_no_rank_computes_more_of_attention_for_an_element(ranks: int, groups: int, causal: bool) -> None:
    """All sets of ranges that a rank may receive: its pairs over its elements are at most those of the bound."""
    rows, keys, best = 6.0, 5.0, 0.0
    for rank in range(ranks):
        others = [each for each in range(ranks) if each != rank]
        for a, b in product(subsets(others), repeat=2):
            queries, keys_of = {rank, *a}, {rank, *b}
            count = sum(i != j and (not causal or i > j) for i in queries for j in keys_of)
            if a or b:
                best = max(best, groups * count / ((groups * len(a) * rows + len(b) * keys) / ranks))
    pairs = groups * ranks * (ranks - 1) / (2 if causal else 1)
    bound = attention_lower_bound(rows, keys, groups, ranks, causal)

    assert 0 < bound <= pairs / best * (1 + 1e-12)
    if not causal:
        assert bound == pytest.approx(pairs / best)


def test_ulysses_meets_the_bound() -> None:
    mesh = Mesh((2, 4), ("dp", "cp"))
    q = distribute_tensor(torch.empty(2, 8, 64, 16, device="meta"), mesh, [Shard(0), Shard(2)])
    with use_strategy(attention=("b", "h")):
        assert explain(F.scaled_dot_product_attention, q, q, q).chosen.bound_ratio == 1.0
    with use_strategy(attention=("b", "ring")):
        assert explain(F.scaled_dot_product_attention, q, q, q).chosen.bound_ratio == 2.0
