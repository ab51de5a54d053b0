"""The lower bound of a layer of experts: no placement of pairs does with less, and moving one thing only meets it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import inf
from random import Random

import pytest
from helpers.routed_rows import expert_ranges, routed_rows
from hypothesis import given
from hypothesis import strategies as st

from dshard import Routing
from dshard.routing import Held
from dshard.rules.communication_bounds import busiest_lower_bound, experts_lower_bound, pass_lower_bound

Chosen = list[list[tuple[int, ...]]]
"""The experts of each token of each rank."""


def routed_lower_bound(chosen: Sequence[Sequence[Sequence[int]]], held: Held, row: float, weights: float) -> float:
    """Elements that all ranks together receive in one pass, at least.

    `chosen` are the experts of each token of each rank.
    """
    at_expert, at_token = [0.0] * held[-1].stop, dict[tuple[int, int], float]()
    home = {expert: rank for rank, each in enumerate(held) for expert in each}
    for own, tokens in enumerate(chosen):
        for experts in tokens:
            remote = [expert for expert in experts if home[expert] != own]
            for expert in remote:
                at_expert[expert] += 1 / sum([home[each] == home[expert] for each in remote])
                at_token[own, expert] = at_token.get((own, expert), 0.0) + 1 / len(remote)
    return pass_lower_bound(at_expert, [*at_token.values()], row, weights)


def pairs_of(chosen: Chosen) -> list[tuple[int, int, int]]:
    """Rank and number of the token, and the expert, of each pair."""
    return [(own, i, e) for own, tokens in enumerate(chosen) for i, experts in enumerate(tokens) for e in experts]


def received(chosen: Chosen, held: Held, row: float, weights: float, at: Sequence[int]) -> float:
    """What all ranks receive in a pass if each pair is computed on the rank that `at` says."""
    pairs, home = pairs_of(chosen), {expert: rank for rank, each in enumerate(held) for expert in each}
    visits = {(own, i, rank) for (own, i, _), rank in zip(pairs, at, strict=True) if rank != own}
    moved = {(expert, rank) for (_, _, expert), rank in zip(pairs, at, strict=True) if rank != home[expert]}
    return 2 * row * len(visits) + weights * len(moved)


@st.composite
def routed(draw: st.DrawFn) -> tuple[Chosen, Held]:
    """Up to 6 pairs on 2 or 3 ranks; some have no tokens, some no experts."""
    ranks, experts = draw(st.integers(2, 3)), draw(st.integers(1, 4))
    choices = draw(st.integers(1, min(2, experts)))
    sets = st.sampled_from([*combinations(range(experts), choices)])
    owners = draw(st.lists(st.integers(0, ranks - 1), max_size=6 // choices))
    chosen: Chosen = [[] for _ in range(ranks)]
    for own in owners:
        chosen[own].append(draw(sets))
    return chosen, expert_ranges(experts, ranks)


@given(routed(), st.sampled_from([0.1, 1.0, 2.0]), st.sampled_from([0.5, 1.0, 3.0, 20.0]))
def test_no_placement_of_pairs_receives_less(case: tuple[Chosen, Held], row: float, weights: float) -> None:
    chosen, held = case
    best = inf
    for at in product(range(len(held)), repeat=len(pairs_of(chosen))):
        best = min(best, received(chosen, held, row, weights, at))

    assert routed_lower_bound(chosen, held, row, weights) <= best * (1 + 1e-12)


def drawn(seed: int, ranks: int, experts: int, choices: int, tokens: int) -> tuple[Chosen, Held]:
    random = Random(seed)
    chosen = [[tuple(random.sample(range(experts), choices)) for _ in range(tokens)] for _ in range(ranks)]
    return chosen, expert_ranges(experts, ranks)


def moved_tokens(chosen: Chosen, held: Held) -> list[int]:
    home = {expert: rank for rank, each in enumerate(held) for expert in each}
    return [home[expert] for _, _, expert in pairs_of(chosen)]


@pytest.mark.parametrize(("ranks", "experts", "choices"), [(2, 8, 2), (4, 8, 2), (4, 10, 4), (8, 16, 4), (5, 3, 2)])
def test_one_loop_meets_the_bound_where_it_is_the_cheaper_by_far(ranks: int, experts: int, choices: int) -> None:
    """Where no expert is worth less than its tokens' rows, and where no rank's share of a token is worth a move."""
    chosen, held = drawn(0, ranks, experts, choices, 12)
    tokens, weights = moved_tokens(chosen, held), [own for own, _, _ in pairs_of(chosen)]

    heavy, light = 2.0 * ranks * 12, 2.0 / 12 / experts
    assert routed_lower_bound(chosen, held, 1.0, heavy) == pytest.approx(received(chosen, held, 1.0, heavy, tokens))
    assert routed_lower_bound(chosen, held, 1.0, light) == pytest.approx(received(chosen, held, 1.0, light, weights))


def test_with_one_choice_the_cheaper_loop_is_the_best_schedule() -> None:
    """Top 1 with experts alike: a token's row or an expert's weights move, and nothing between is cheaper."""
    ranks, held, routing = 4, expert_ranges(8, 4), Routing.uniform()
    for weights in (1.0, 10.0, 100.0, 1000.0, 10000.0):
        rows = sum(routed_rows(routing, held, 1, [256] * ranks).received) * 1.0
        gathered = (ranks - 1) * 8 * weights
        assert experts_lower_bound(routing, held, 1, [256] * ranks, 1.0, weights) == pytest.approx(min(rows, gathered))


@pytest.mark.parametrize(
    ("experts", "choices", "ranks", "hidden", "inner", "tokens"),
    [(8, 2, 8, 4096, 14336, 8192), (128, 4, 8, 2880, 2880, 8192), (256, 8, 8, 7168, 2048, 8192)],
)
def test_moving_tokens_meets_the_bound_for_known_models(
    experts: int, choices: int, ranks: int, hidden: int, inner: int, tokens: int
) -> None:
    """Mixtral-8x7B, GPT-OSS-120B and DeepSeek-V3 on 8 ranks with 8,192 tokens each."""
    routing, held = Routing.uniform(), expert_ranges(experts, ranks)
    rows = routed_rows(routing, held, choices, [tokens] * ranks)
    bound = experts_lower_bound(routing, held, choices, [tokens] * ranks, hidden, 3 * hidden * inner)

    assert bound == pytest.approx(sum(rows.received) * hidden)


@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize("weights", [0.5, 8.0, 100.0, 1000.0])
def test_the_bound_of_many_tokens_is_that_of_expected_loads(choices: int, weights: float) -> None:
    """Loads of 2,000 tokens a rank are near their expected ones."""
    chosen, held = drawn(3, 4, 8, choices, 2000)
    bound = experts_lower_bound(Routing.uniform(), held, choices, [2000] * 4, 1.0, weights)

    assert bound == pytest.approx(routed_lower_bound(chosen, held, 1.0, weights), rel=0.02)


def test_nothing_moves_on_one_rank_or_without_tokens() -> None:
    assert routed_lower_bound([[(0, 1)]], expert_ranges(2, 1), 1.0, 1.0) == 0
    assert experts_lower_bound(Routing.uniform(), expert_ranges(2, 1), 1, [8], 1.0, 1.0) == 0
    assert pass_lower_bound([], [], 1.0, 1.0) == 0


# -- the busiest rank


def busiest(chosen: Chosen, held: Held, row: float, weights: float, at: Sequence[int]) -> float:
    """What the busiest rank receives in a pass forward if each pair is computed on the rank that `at` says."""
    pairs, home = pairs_of(chosen), {expert: rank for rank, each in enumerate(held) for expert in each}
    got = [0.0] * len(held)
    for own, _, rank in {(own, i, rank) for (own, i, _), rank in zip(pairs, at, strict=True) if rank != own}:
        got[rank] += row
        got[own] += row
    for _, rank in {(expert, rank) for (_, _, expert), rank in zip(pairs, at, strict=True) if rank != home[expert]}:
        got[rank] += weights
    return max(got)


@pytest.mark.parametrize(("experts", "ranks", "choices"), [(2, 2, 1), (4, 2, 1), (3, 2, 2), (3, 3, 1)])
@pytest.mark.parametrize("weights", [0.3, 1.0, 2.5, 10.0])
def test_no_placement_of_pairs_lets_every_rank_receive_less(
    experts: int, ranks: int, choices: int, weights: float
) -> None:
    """Each rank has a token of every set of experts; all placements of their pairs are tried."""
    held, sets = expert_ranges(experts, ranks), [*combinations(range(experts), choices)]
    chosen: Chosen = [sets for _ in range(ranks)]
    best = min(busiest(chosen, held, 1.0, weights, at) for at in product(range(ranks), repeat=len(pairs_of(chosen))))

    assert 0 < busiest_lower_bound(experts, ranks, choices, len(sets), 1.0, weights) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("experts", "choices", "ranks", "hidden", "inner", "tokens", "most"),
    [
        (8, 2, 8, 4096, 14336, 8192, 1.01),  # Mixtral-8x7B
        (128, 4, 8, 2880, 2880, 8192, 1.01),  # GPT-OSS-120B
        (256, 8, 8, 7168, 2048, 8192, 1.01),  # DeepSeek-V3
        (256, 8, 64, 7168, 2048, 8192, 1.14),
        (128, 8, 8, 2048, 768, 8192, 1.36),  # Qwen3-30B-A3B: between moving tokens and moving experts
        (128, 8, 8, 2048, 768, 262144, 1.01),
        (128, 8, 64, 2048, 768, 8192, 2.14),
    ],
)
def test_the_cheaper_loop_is_near_the_bound_of_the_busiest_rank(
    experts: int, choices: int, ranks: int, hidden: int, inner: int, tokens: int, most: float
) -> None:
    held, weights = expert_ranges(experts, ranks), 3.0 * hidden * inner
    rows = max(routed_rows(Routing.uniform(), held, choices, [tokens] * ranks).received) * hidden
    gathered = (experts - experts // ranks) * weights
    bound = busiest_lower_bound(experts, ranks, choices, tokens, hidden, weights)

    assert 1 - 1e-9 <= min(rows, gathered) / bound < most
