"""What attention by blocks does beside its kernels is what the price counts: operators, pass by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor

from dshard import Mesh, Shard, Topology, distribute_tensor, use_strategy, use_topology
from dshard.core.observe import Decision, OperatorMode, observing
from dshard.ops.attention.block_kernels import BlockResult, KeyPanel, RowGradients, accumulate_gradients
from dshard.ops.attention.local_attention import Options, of_queries
from dshard.placements import chunk
from dshard.rules.attention_blocks import (
    COPYING,
    FILLING,
    PREPARING,
    PRODUCT,
    STANDING_IN,
    Block,
    Work,
    visible_blocks,
    work_of,
)
from dshard.rules.attention_ring import ring_plan, swapped

RANKS = 4
SIZES = [(16, 16), (13, 13), (13, 9), (9, 14), (3, 3)]


def operators_of(run: Callable[[], Any]) -> int:
    """How many operators that are no views run."""
    made = list[str]()

    def counted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not func.is_view:
            made.append(str(func))
        return func(*args, **kwargs)

    with OperatorMode(counted), torch.no_grad():
        run()
    return len(made)


def positions_of(sizes: tuple[int, int], form: str) -> tuple[tuple[tuple[range, ...], ...], ...]:
    """The positions of queries, and of keys, that each rank begins with."""
    of_both = [[chunk(size, RANKS, i) for i in range(RANKS)] for size in sizes]
    return tuple(swapped(each) if form == "balanced ring" else tuple((one,) for one in each) for each in of_both)


def rows_at(x: Tensor, positions: Sequence[range]) -> Tensor:
    return x[:, :, [i for each in positions for i in each]]


@pytest.mark.parametrize(("dtype", "causal"), one_way_each([torch.float64, torch.bfloat16], [False, True]))
@pytest.mark.parametrize("form", ["q", "ring", "balanced ring"])
@pytest.mark.parametrize("sizes", SIZES)
def test_the_price_of_a_turn_counts_the_operators_of_each_of_its_blocks(
    sizes: tuple[int, int], form: str, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, n, 4).to(dtype) for n in (sizes[0], sizes[1], sizes[1], sizes[0]))
    queries, keys = positions_of(sizes, form)
    if form == "q":
        keys = ((range(sizes[1]),),) * RANKS
    plan = ring_plan((RANKS,), queries, keys, causal)
    works, steps = plan.works("gloo", dtype == torch.bfloat16), 1 if form == "q" else RANKS
    for rank in range(RANKS):
        mine = rows_at(q, queries[rank])
        result = BlockResult(mine, v)
        panels = []
        for step in range(steps):
            k_, v_ = (rows_at(x, keys[plan.owners[step][rank]]) for x in (k, v))
            panels.append(KeyPanel(mine, k_, v_, None, plan.blocks[step][rank], 0.5))
            made = operators_of(lambda: result.add(panels[-1]))  # noqa: B023
            assert made == works[step][rank].operators
        out, lse = result.complete()
        seen = torch.tensor([[j <= i or not causal for j in range(sizes[1])] for i in range(sizes[0])])
        if dtype == torch.float64:
            right = F.scaled_dot_product_attention(q, k, v, seen, scale=0.5)
            torch.testing.assert_close(out, rows_at(right, queries[rank]))
        gradients = check_gradients(panels, rows_at(grad, queries[rank]), out, lse, [t[rank] for t in works[:steps]])
        assert all(x.isfinite().all() for x in gradients)


def check_gradients(panels: list[KeyPanel], grad: Tensor, out: Tensor, lse: Tensor, works: list[Work]) -> list[Tensor]:
    """Count the operators of the backward pass of these panels; what stands in for the result is made once."""
    found, delta = list[Tensor](), (grad.to(lse.dtype) * out).sum(-1)
    rows = list[RowGradients]()
    assert operators_of(lambda: rows.append(RowGradients(grad, delta, lse))) == PREPARING
    blocks = 0
    for panel, work in zip(panels, works, strict=True):
        totals = [x.new_zeros(x.shape, dtype=lse.dtype) for x in panel[:3]]
        standing_in = STANDING_IN + 2 * (grad.dtype != lse.dtype) if work.blocks and not blocks else 0
        made = operators_of(lambda: accumulate_gradients(totals, rows[0], panel))  # noqa: B023
        assert made == work.blocks * (1 + 3) + standing_in
        blocks += work.blocks
        found += totals
    return found


@pytest.mark.parametrize("rows", [range(4), range(4, 8), range(5, 12), range(8, 12)])
def test_the_price_of_loop_q_counts_the_operators_of_a_rank(rows: range) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 4).requires_grad_() for n in (len(rows), 12, 12))
    attend, found = of_queries(rows, 12, Options(True, None, False)), list[Tensor]()
    (work,) = work_of([visible_blocks([rows], [range(12)], True)], len(rows), "gloo", False)

    assert work.blocks == (1 if rows.start == 0 else 2)
    assert operators_of(lambda: attend(q, k, v)) == work.operators == (1 if rows.start == 0 else 7)
    out = attend(q, k, v)
    made = operators_of(lambda: found.extend(torch.autograd.grad(out, (q, k, v), out.detach())))
    assert made == work.blocks * (1 + 3) + PREPARING + PRODUCT + 3  # three sums are filled


def test_a_block_that_reaches_rows_first_is_not_merged() -> None:
    blocks = [Block(range(2), range(2), True), Block(range(2, 4), range(2)), Block(range(2, 4), range(2, 4), True)]
    x = torch.randn(1, 1, 4, 4)
    result = BlockResult(x, x)
    made = operators_of(lambda: result.add(KeyPanel(x, x, x, None, blocks, 0.5)))

    assert made == 3 + FILLING + 2 * COPYING + 5  # the kernels; a fill of zeros; two copies, one merge
    torch.testing.assert_close(result.complete()[0], F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5))


def test_rows_that_no_block_reaches_see_nothing() -> None:
    x = torch.randn(1, 2, 4, 4)
    result = BlockResult(x, x)
    assert [float(each.amax()) for each in result.complete()] == [0.0, -inf]


@pytest.mark.parametrize("size", [16, 13])
@pytest.mark.parametrize(("form", "loop"), [("q", "context"), ("ring", "ring"), ("balanced ring", "balanced ring")])
@pytest.mark.parametrize("causal", [False, True])
def test_where_launches_alone_take_time_the_work_is_the_operators(
    size: int, form: str, loop: str, causal: bool
) -> None:
    mesh, flat, found = Mesh((RANKS,), ("x",)), Topology.flat(1e9), list[Decision]()
    device = replace(flat.device, flops=(("float32", 1e24),), memory_bandwidth=inf, launch=1.0)
    x = distribute_tensor(torch.empty(1, 2, size, 4, device="meta"), mesh, [Shard(2)])
    with use_topology(replace(flat, device=device)), use_strategy(attention=loop), observing(found.append):
        F.scaled_dot_product_attention(x, x, x, is_causal=causal)

    queries, keys = positions_of((size, size), form)
    plan = ring_plan((RANKS,), queries, ((range(size),),) * RANKS if form == "q" else keys, causal)
    works = plan.works("gloo", False)[: 1 if form == "q" else RANKS]
    (strategy,) = [each.strategy for each in found if each.strategy is not None]
    assert round(strategy.compute) == max(sum(step[rank].operators for step in works) for rank in range(RANKS))


def test_a_turn_of_a_balanced_ring_merges_one_block() -> None:
    queries, keys = positions_of((16, 16), "balanced ring")
    plan = ring_plan((RANKS,), queries, keys, True)

    assert [{len(blocks) for blocks in step} for step in plan.blocks] == [{3}, {1}, {1}, {1}]
