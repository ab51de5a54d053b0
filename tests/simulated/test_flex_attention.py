"""`flex_attention` by loops b, h and q: functions of scores see global indices, values and gradients of one device."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.default_cases import one_way_each
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs

from dshard import (
    Layout,
    LayoutError,
    Mesh,
    Replicate,
    Shard,
    StrategyError,
    explain,
    trace,
    use_strategy,
    use_topology,
)
from dshard.functional import flex_attention
from dshard.ops.attention.flex import RankScores
from dshard.ops.attention.local_attention import Options
from dshard.testing import distribute, simulated, whole
from dshard.topology import BYTES

BATCH, HEADS, TOKENS = 2, 4, 7
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]])


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPES[h] * (j - i)


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 3 * torch.tanh(score / 3)


def packed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (j <= i)


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() < 3) & ~((h == 1) & (i == 2))  # a row of one head sees nothing


CASES = {"alibi": (alibi, None), "packed": (None, packed), "both": (capped, window), "neither": (None, None)}


def operands(key_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, HEADS, TOKENS, 4), (BATCH, key_heads, TOKENS, 4), (BATCH, key_heads, TOKENS, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def block_mask(mask: Any) -> Any:
    return None if mask is None else create_block_mask(mask, BATCH, HEADS, TOKENS, TOKENS, device="cpu")


def on_one_device(case: str, given: list[Tensor]) -> list[Tensor]:
    """By definition, a score at a time; and gradients."""
    score_mod, mask = CASES[case]
    q, k, v = leaves = [x.clone().requires_grad_() for x in given]
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores, rows = q @ k.mT * 4**-0.5, []
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (BATCH, HEADS, TOKENS, TOKENS))):
        x = scores[b, h, i, j]
        x = x if score_mod is None else score_mod(x, b, h, i, j)
        rows.append(x if mask is None or mask(b, h, i, j) else x * 0 - torch.inf)
    changed = torch.stack(rows).view_as(scores)
    blind = changed.isinf().all(-1, keepdim=True)
    out = changed.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0) @ v
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.parametrize(("case", "key_heads"), one_way_each(CASES, [4, 2]))
def test_functions_of_scores_see_global_indices_under_every_loop(case: str, key_heads: int) -> None:
    given, (score_mod, mask) = operands(key_heads), CASES[case]
    expected, blocks = on_one_device(case, given), block_mask(mask)
    meshes: list[tuple[Mesh, Any]] = [(Mesh((3,), ("x",)), (loop,)) for loop in ("b", "h", "q", None)]
    for mesh, loops in (*meshes, (Mesh((2, 2), ("x", "y")), ("h", "q"))):
        for dim in (1, 2):
            with simulated(mesh), use_strategy(attention=loops):
                layout = Layout(mesh, (Shard(dim), *(Shard(2),) * (mesh.ndim - 1)))
                laid = [distribute(x, layout).requires_grad_() for x in given]
                out = flex_attention(*laid, score_mod, blocks, enable_gqa=key_heads != HEADS)
                found = [out.detach(), *torch.autograd.grad(out.square().sum(), laid)]
                for mine, right in zip(found, expected, strict=True):
                    torch.testing.assert_close(whole(mine), right, rtol=1e-9, atol=1e-11)


def test_split_heads_send_nothing_and_split_queries_gather_keys() -> None:
    mesh, x = Mesh((2,), ("x",)), torch.randn(1, 4, 8, 4)
    sent = {}
    for dim, loop in ((1, "h"), (2, "q")):
        with simulated(mesh), use_strategy(attention=(loop,)), trace() as events:
            laid = [distribute(x, Layout(mesh, (Shard(dim),))) for _ in range(3)]
            flex_attention(*laid, alibi)
        sent[loop] = [event.collective for event in events.events]

    assert sent == {"h": [], "q": ["all_gather"] * 2}


def sliding(width: int, block: int, queries: int) -> BlockMask:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < width)

    return create_block_mask(seen, None, None, queries, queries, "cpu", BLOCK_SIZE=block)


@pytest.mark.parametrize(
    ("layout", "sizes"),
    one_way_each(
        [
            Layout(Mesh((4,), ("x",)), (Shard(2),)),
            Layout(Mesh((3,), ("x",)), (Shard(2),)),
            Layout(Mesh((2, 2), ("x", "y")), (Shard(2), Shard(2))),
            Layout(Mesh((2, 2), ("x", "y")), (Shard(1), Shard(2))),
            Layout(Mesh((2, 2), ("x", "y")), (Replicate(), Shard(2))),
        ],
        [(5, 1), (16, 3)],
        every=2,
    ),
    ids=str,
)
def test_windows_of_keys_are_those_that_queries_reach(layout: Layout, sizes: tuple[int, int]) -> None:
    (tokens, block), mesh, placements = sizes, layout.mesh, layout.placements
    generator = torch.Generator().manual_seed(0)
    loops = tuple({Shard(2): "q", Shard(1): "h"}.get(placement) for placement in placements)
    given = [torch.randn(1, heads, tokens, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    for width in (1, 2, 4, 7, tokens):
        mask = sliding(width, block, tokens)
        leaves = [x.clone().requires_grad_() for x in given]
        right = flex_attention_by_operators(*leaves, width)
        expected = [right, *torch.autograd.grad(right.square().sum(), leaves)]
        with simulated(mesh), use_strategy(attention=loops), use_topology(BYTES):
            laid = [distribute(x, layout).requires_grad_() for x in given]
            with trace() as there:
                out = flex_attention(*laid, None, mask, enable_gqa=True)
            with trace() as back:
                found = [out, *torch.autograd.grad(out.square().sum(), laid)]
            report = explain(lambda laid=laid, mask=mask: flex_attention(*laid, None, mask, enable_gqa=True))
        for mine, one in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine.detach()), one.detach())
        sent = [(event.collective, event.nbytes) for event in there.events]
        assert sent == [(each.collective, each.nbytes) for each in report.operators[0].collectives]
        if "window" in report.chosen.name:
            heads = 2 // mesh.shape[0] if Shard(1) in placements else 2
            (received,) = [e.nbytes for e in back.events if e.op != "aten.sum" and e.collective == "permute"]
            assert received == gradients_received(layout, tokens, width, block) * 2 * heads * 4 * 8
            assert report.chosen.bytes_moved == neighbours(layout, tokens, width, block) * 2 * heads * 4 * 8
        else:
            assert width > block or tokens < 16, "all keys are reached"


def test_the_host_reads_the_blocks_of_a_mask_once() -> None:
    mesh, mask = Mesh((2,), ("x",)), sliding(4, 4, 16)
    with (
        simulated(mesh),
        mock.patch.object(BlockMask, "to_dense", autospec=True, side_effect=BlockMask.to_dense) as read,
    ):
        x = distribute(torch.randn(1, 2, 16, 4), Layout(mesh, (Shard(2),)))
        for _ in range(3):
            flex_attention(x, x, x, None, mask)

    assert read.call_count == 1


def neighbours(layout: Layout, tokens: int, width: int, block: int) -> int:
    """The most keys of other ranks that the queries of a rank reach by their blocks."""
    places = list(product(*map(range, layout.mesh.shape)))
    rows = [layout.dim_range(2, tokens, at) for at in places]
    return max(len(reached(each, tokens, width, block)) - len(each) if each else 0 for each in rows)


def gradients_received(layout: Layout, tokens: int, width: int, block: int) -> int:
    """The most gradients of its keys that a rank receives: one of each by each other rank that reached the key."""
    axes = tuple(axis for axis, p in zip(layout.mesh.names, layout.placements, strict=True) if p == Shard(2))
    most = 0
    for at in product(*map(range, layout.mesh.shape)):
        own, peers = layout.dim_range(2, tokens, at), [peer for peer in layout.mesh.peers(axes, at) if peer != at]
        windows = [reached(layout.dim_range(2, tokens, peer), tokens, width, block) for peer in peers]
        most = max(most, sum(key in window for window in windows for key in own))
    return most


def reached(rows: range, tokens: int, width: int, block: int) -> range:
    """The keys that these queries reach by their blocks."""
    if not rows:
        return rows
    first = max(0, rows.start // block * block - width + 1) // block * block
    return range(first, min(tokens, -(-rows.stop // block) * block))


def flex_attention_by_operators(q: Tensor, k: Tensor, v: Tensor, width: int) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    away = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill((away < 0) | (away >= width), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_range_of_the_scores_by_torch_is_that_of_the_whole(case: str) -> None:
    """What a rank of another device calls."""
    (score_mod, mask), (q, k, v) = CASES[case], [x.float() for x in operands(HEADS)]
    blocks = block_mask(mask)
    expected = torchs(q, k, v, score_mod, blocks)
    rows = range(1, 2), range(1, 4), range(2, 6)
    scores = RankScores(score_mod, blocks, Options(False, None, False), rows, range(TOKENS))
    part = scores.by_torch(q[1:2, 1:4, 2:6], k[1:2, 1:4], v[1:2, 1:4])

    torch.testing.assert_close(part, expected[1:2, 1:4, 2:6])


def test_what_flex_attention_cannot_do_on_a_mesh_says_so() -> None:
    mesh = Mesh((2,), ("x",))
    with simulated(mesh):
        x = distribute(torch.ones(1, 4, 8, 4), Layout(mesh, (Shard(2),)))
        with pytest.raises(LayoutError, match="with return_lse: it takes score_mod, block_mask, scale and enable_gqa"):
            flex_attention(x, x, x, return_lse=True)
        with pytest.raises(StrategyError, match="attention='split-keys'"), use_strategy(attention="split-keys"):
            flex_attention(x, x, x)


def test_plain_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dshard.ops.attention.flex.torch_flex_attention", lambda *args, **kwargs: (args, kwargs))
    x = torch.ones(1, 1, 2, 2)

    assert flex_attention(x, x, x, alibi, return_lse=True) == (
        (x, x, x, alibi, None, None, False),
        {"return_lse": True},
    )
