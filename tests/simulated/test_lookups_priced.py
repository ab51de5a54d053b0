"""Lookups in a sharded table: the table moves where it is smaller than what is looked up, and the result where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import DTensor, Layout, Mesh, Partial, Shard, explain, trace
from dshard.layout import replicated
from dshard.rules.rule import joined_factors
from dshard.rules.rule_notation import parse_rule
from dshard.testing import distribute, simulated, whole

MESH = Mesh((4,), ("x",))
SPLIT = Layout(MESH, (Shard(0),))
LOOKUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i),
    "embedding": lambda x, i: F.embedding(i, x),
}


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("more", [False, True])
def test_a_table_smaller_than_what_is_looked_up_is_gathered(name: str, rows: int, more: bool) -> None:
    """By price alone, of few and of many rows."""
    n = rows * 4 if more else rows // 4
    x = torch.empty(rows, 96, dtype=torch.float64, device="meta")
    index = torch.empty((n, 96) if name == "gather" else (n,), dtype=torch.int64, device="meta")
    report = explain(LOOKUPS[name], distribute(x, SPLIT), distribute(index, replicated(MESH)))

    assert ("P(sum)" in report.chosen.placements) is not more


def by_hand(x: Tensor, up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """A layer of experts as transformers writes it: tokens sorted by expert, grouped products, a weighted sum."""
    k, experts = index.shape[1], up.shape[0]
    order, permutation = torch.sort(index.reshape(-1))
    ends = torch.histc(order.float(), experts, 0, experts - 1).cumsum(0).int()
    rows = F.silu(F.grouped_mm(x[permutation // k], up.transpose(1, 2), offs=ends))
    rows = F.grouped_mm(rows, down.transpose(1, 2), offs=ends) * weight.reshape(-1)[permutation, None]
    return rows[permutation.argsort()].view(-1, k, x.shape[1]).sum(1)


def test_experts_by_hand_gather_tokens_and_reduce_no_pairs() -> None:
    """Values and gradients of one device; 192 KiB of tokens are received where 768 KiB of pairs were."""
    torch.manual_seed(0)
    tokens, hidden, inner, experts, k = 1024, 64, 16, 8, 2
    x, up, down = torch.randn(tokens, hidden), torch.randn(experts, inner, hidden), torch.randn(experts, hidden, inner)
    weight, index = torch.rand(tokens, experts).topk(k)
    expected = [t.clone().requires_grad_() for t in (x, up, down, weight)]
    out = by_hand(*expected[:3], index, expected[3])
    out.square().sum().backward()
    with simulated(MESH):
        layouts = (SPLIT, replicated(MESH), replicated(MESH), SPLIT)
        mine = [
            distribute(t, layout).requires_grad_() for t, layout in zip((x, up, down, weight), layouts, strict=True)
        ]
        with trace() as sent:
            found = by_hand(*mine[:3], distribute(index, SPLIT), mine[3])
        found.square().sum().backward()
        gathered = [event for event in sent.events if event.nbytes > 2**17]
        assert [(event.collective, event.nbytes) for event in gathered] == [("all_gather", 3 * 1024 * 64 * 4 // 4)]
        assert isinstance(found, DTensor)
        torch.testing.assert_close(whole(found.detach()), out.detach(), rtol=1e-4, atol=1e-4)
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-3, atol=1e-2)


def shared_by_hand(x: Tensor, up: Tensor, down: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """`by_hand` where each rank has a range of the sorted pairs, whose results are added up at their tokens."""
    k, experts = index.shape[1], up.shape[0]
    order, permutation = torch.sort(index.reshape(-1))
    ends = torch.histc(order.float(), experts, 0, experts - 1).cumsum(0).int()
    if isinstance(permutation, DTensor):
        permutation = permutation.redistribute(placements=[Shard(0)])
    token = permutation // k
    rows = F.silu(F.grouped_mm(x[token], up.transpose(1, 2), offs=ends))
    rows = F.grouped_mm(rows, down.transpose(1, 2), offs=ends) * weight.reshape(-1)[permutation, None]
    return (x * 0).index_add(0, token, rows)


def test_pairs_shared_by_hand_divide_the_work() -> None:
    """Each rank multiplies its range of the pairs; tokens are gathered, and sums of tokens are what is reduced."""
    torch.manual_seed(0)
    tokens, hidden, inner, experts, k = 128, 16, 8, 8, 4
    x, up, down = torch.randn(tokens, hidden), torch.randn(experts, inner, hidden), torch.randn(experts, hidden, inner)
    weight, index = torch.rand(tokens, experts).topk(k)
    expected = [t.clone().requires_grad_() for t in (x, up, down, weight)]
    out = shared_by_hand(*expected[:3], index, expected[3])
    out.square().sum().backward()
    with simulated(MESH):
        layouts = (SPLIT, replicated(MESH), replicated(MESH), SPLIT)
        mine = [
            distribute(t, layout).requires_grad_() for t, layout in zip((x, up, down, weight), layouts, strict=True)
        ]
        with trace() as sent:
            found = shared_by_hand(*mine[:3], distribute(index, SPLIT), mine[3])
            assert found.placements == (Partial("sum"),)
            found.square().sum().backward()
        assert max(event.nbytes for event in sent.events if event.op != "gradients") <= 2 * tokens * hidden * 4
        torch.testing.assert_close(whole(found.detach()), out.detach(), rtol=1e-4, atol=1e-4)
        for one, other in zip(mine, expected, strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    ("text", "factors"),
    [
        ("m k, k n -> m n", ["mkn"]),
        ("v d, i -> i d", ["id"]),  # a lookup
        ("v d, i, i d -> v d", ["id", "vd"]),  # a sum of values at indices
        ("i d, i -> [v] d", ["id"]),  # the gradient of an embedding
        ("t k, [e] k n -> t n", ["tkn"]),  # grouped
        ("p m, r m -> p r", ["pmr"]),
        ("n o, n i, o i -> n i, o i", ["noi"]),  # the gradients of a matmul
        ("a b -> a", ["a"]),
        ("a b, b -> a b", ["ab"]),
        ("a -> a", ["a"]),
    ],
)
def test_work_multiplies_over_factors_that_are_joined(text: str, factors: list[str]) -> None:
    sizes = [tuple(2 for _ in term.split()) for term in text.partition(" -> ")[0].split(",")]
    found = joined_factors(parse_rule(text, sizes))

    assert sorted(map(sorted, found)) == sorted(map(sorted, factors))
