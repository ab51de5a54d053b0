"""Expected pairs and rows of a layer of experts: closed forms, enumerations and draws agree with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb, prod
from random import Random

import pytest
from helpers.routed_rows import expert_ranges, routed_rows, rows_by_host
from hypothesis import given, settings
from hypothesis import strategies as st

from dshard import Routing
from dshard.errors import ArgumentError, ShapeError
from dshard.routing import Held, _draws


def ranks_of(held: Held, chosen: Sequence[int]) -> set[int]:
    return {rank for rank, each in enumerate(held) for expert in chosen if expert in each}


@pytest.mark.parametrize(("experts", "ranks", "choices"), [(256, 8, 8), (8, 4, 2), (10, 4, 3), (3, 8, 2), (7, 3, 7)])
def test_without_preference_hits_are_hypergeometric(experts: int, ranks: int, choices: int) -> None:
    held = expert_ranges(experts, ranks)

    expected = [1 - comb(experts - len(each), choices) / comb(experts, choices) for each in held]

    assert Routing.uniform().hits(held, choices) == pytest.approx(expected, rel=1e-12)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=7), st.integers(1, 5), st.data())
def test_shares_are_those_of_the_counts_and_rows_those_of_an_enumeration(
    counts: list[int], ranks: int, data: st.DataObject
) -> None:
    able = sum(count > 0 for count in counts)
    choices, held, routing = data.draw(st.integers(0, able)), expert_ranges(len(counts), ranks), Routing.of(counts)
    shares = routing.shares(len(counts), choices)
    if choices and max(counts) * choices <= sum(counts):
        assert shares == pytest.approx([count / sum(counts) for count in counts], rel=1e-9, abs=1e-12)
    assert not choices or max(shares) <= 1 / choices + 1e-12

    hits, expected, at_experts = routing.hits(held, choices), [0.0] * ranks, [0.0] * len(counts)
    sets = [*combinations(range(len(counts)), choices)]
    chances = probabilities(routing, len(counts), sets, choices)
    for chosen, chance in zip(sets, chances, strict=True):
        for rank in ranks_of(held, chosen):
            expected[rank] += chance
        for expert in chosen:
            at_experts[expert] += chance / max(1, choices)

    assert shares == pytest.approx(at_experts, abs=1e-9)
    assert hits == pytest.approx(expected, abs=1e-9)


def probabilities(routing: Routing, experts: int, sets: Sequence[tuple[int, ...]], choices: int) -> list[float]:
    """The probability of each set of experts: in proportion to the product of its experts' odds.

    That is the distribution of greatest entropy of those with the same shares, whatever the odds.
    """
    draws = _draws(routing, experts, choices)
    chances = [prod(p if expert in chosen else 1 - p for expert, p in enumerate(draws)) for chosen in sets]
    return [chance / sum(chances) for chance in chances]


@given(st.integers(1, 40), st.integers(1, 9), st.floats(0, 2), st.data())
def test_a_row_is_shared_by_the_experts_that_need_it(experts: int, ranks: int, s: float, data: st.DataObject) -> None:
    choices, held = data.draw(st.integers(1, experts)), expert_ranges(experts, ranks)
    routing = Routing.zipf(s)
    rows = routing.row_shares(held, choices)

    assert sum(routing.shares(experts, choices)) == pytest.approx(1)
    assert sum(rows) == pytest.approx(sum(routing.hits(held, choices)))
    assert max(routing.hits(held, choices)) <= 1 + 1e-9
    pairs = [share * choices for share in routing.shares(experts, choices)]
    assert all(row <= pair * (1 + 1e-9) for row, pair in zip(rows, pairs, strict=True))
    one_each = tuple(range(i, i + 1) for i in range(experts))
    assert routing.row_shares(one_each, choices) == pytest.approx(pairs, rel=1e-8)


def drawn_by_noisy_scores(weights: Sequence[float], choices: int, random: Random) -> list[int]:
    """The `choices` greatest of scores with Gumbel noise: those whose exponential clocks ring first."""
    clocks = [random.expovariate(weight) for weight in weights]
    return sorted(range(len(weights)), key=clocks.__getitem__)[:choices]


@pytest.mark.parametrize("s", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("experts", "ranks", "choices"), [(16, 4, 2), (32, 8, 8), (12, 5, 4)])
def test_the_counts_of_noisy_top_k_give_its_rows(experts: int, ranks: int, choices: int, s: float) -> None:
    """Another model of a router, whose tokens are drawn: from its counts alone follow its rows within 3 %."""
    random, tokens, held = Random(0), 4000, expert_ranges(experts, ranks)
    weights = [(1 + expert * 5 % experts) ** -s for expert in range(experts)]
    counts, hits = [0] * experts, [0] * ranks
    for _ in range(tokens):
        chosen = drawn_by_noisy_scores(weights, choices, random)
        for expert in chosen:
            counts[expert] += 1
        for rank in ranks_of(held, chosen):
            hits[rank] += 1

    assert Routing.of(counts).hits(held, choices) == pytest.approx([hit / tokens for hit in hits], rel=0.03)


def test_rows_are_those_of_drawn_tokens() -> None:
    """Uneven ranks, one of them without tokens, two levels: rows counted one token after the other."""
    experts, choices, hosts, tokens = 12, 3, 2, [300, 0, 500, 200, 400, 100]
    random, held, routing = Random(1), expert_ranges(12, 6), Routing.uniform()
    n, within, repeats = len(tokens), len(tokens) // hosts, 10
    pairs, sent, back = [0.0] * n, [0.0] * n, [0.0] * n
    across, inside, returned = [0.0] * n, [0.0] * n, [0.0] * n
    for own in range(n):
        for _ in range(tokens[own] * repeats):
            chosen = random.sample(range(experts), choices)
            for rank, each in enumerate(held):
                pairs[rank] += sum(expert in each for expert in chosen)
            needed = ranks_of(held, chosen)
            for rank in needed - {own}:
                sent[rank] += 1
                back[own] += 1
            for host in {rank // within for rank in needed}:
                landing = host * within + own % within
                across[landing] += landing != own
                for rank in needed:
                    if rank // within == host and rank != landing:
                        inside[rank] += 1
                        returned[landing] += 1
    rows = routed_rows(routing, held, choices, tokens)
    outer, inner = rows_by_host(routing, held, choices, tokens, hosts)

    for expected, drawn in [
        (rows.pairs, pairs),
        (rows.tokens, sent),
        (rows.results, back),
        (outer.tokens, across),
        (inner.tokens, inside),
        (inner.results, returned),
    ]:
        assert expected == pytest.approx([each / repeats for each in drawn], rel=0.06)
    assert sum(rows.received) == pytest.approx(2 * sum(rows.tokens))
    assert sum(outer.tokens) == pytest.approx(sum(outer.results))
    assert sum(inner.tokens) == pytest.approx(sum(inner.results))


def test_figures_of_known_models() -> None:
    """Rows of two levels over one, across 8 hosts of 8: DeepSeek-V3, Qwen3-30B-A3B and GPT-OSS-120B."""
    saved = []
    for experts, choices in [(256, 8), (128, 8), (128, 4)]:
        held, routing = expert_ranges(experts, 64), Routing.uniform()
        across, _ = rows_by_host(routing, held, choices, [1] * 64, 8)
        saved.append(sum(routing.hits(held, choices)) * 56 / 64 / (sum(across.tokens) / 64))

    assert saved == pytest.approx([1.450, 1.457, 1.183], abs=1e-3)
    busiest = routed_rows(Routing.zipf(1), expert_ranges(256, 64), 8, [1] * 64)
    assert busiest.skew == pytest.approx(8.29, abs=0.01)  # the hottest expert has every token


def test_zipf_of_zero_is_uniform_and_values_are_compared_by_content() -> None:
    assert Routing.zipf(0) == Routing.uniform()
    assert Routing.of([1, 2]) == Routing.of((1, 2)) != Routing.of([2, 1])
    assert [str(each) for each in (Routing.uniform(), Routing.zipf(0.5), Routing.of([1, 2]))] == [
        "uniform",
        "zipf(0.5)",
        "counts of 2 experts",
    ]


def test_an_expert_gets_a_token_once() -> None:
    assert Routing.of([100, 1, 1, 2]).shares(4, 2) == pytest.approx([0.5, 0.125, 0.125, 0.25])
    assert Routing.of([100, 1, 1, 2]).hits(expert_ranges(4, 4), 2)[0] == pytest.approx(1)


def test_wrong_counts_and_choices_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"a Routing of 3 counts for a layer of 8 experts: give 8 counts"):
        Routing.of([1, 2, 3]).shares(8, 2)
    with pytest.raises(ShapeError, match=r"a token chooses 2 experts, and 1 of 3 get tokens"):
        Routing.of([0, 2, 0]).shares(3, 2)
    with pytest.raises(ShapeError, match=r"uniform: a token chooses 9 experts, and 8 of 8 get tokens"):
        Routing.uniform().shares(8, 9)
    with pytest.raises(ArgumentError, match=r"Routing.of: -1 is not a number of at least 0"):
        Routing.of([1, -1])
    with pytest.raises(ArgumentError, match=r"Routing.zipf: 'much' is not a number"):
        Routing.zipf("much")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"give the number of tokens of each expert"):
        Routing.of(3)  # type: ignore[arg-type]


@settings(max_examples=10)
@given(st.floats(0, 1.5))
def test_many_experts_on_many_ranks(s: float) -> None:
    held = expert_ranges(512, 512)

    assert sum(Routing.zipf(s).hits(held, 8)) == pytest.approx(8)
