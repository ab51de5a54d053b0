"""Attention by loops on real ranks: equal to one device, and what is sent is what was planned."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from dshard import Layout, Replicate, Shard, explain, init_device_mesh, manual_seed, trace, use_strategy
from dshard.comm import bind
from dshard.comm.workspace import WORKSPACE
from dshard.functional import flex_attention as dshard_flex_attention
from dshard.testing import RankPool, distribute, whole

LOOPS = ["batch", "ulysses", "context", "ring", "balanced ring", "split-keys", None]


def operands(heads: int, key_heads: int, queries: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, heads, queries, 4), (2, key_heads, 8, 4), (2, key_heads, 8, 4)
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def forced(every: int) -> list[tuple[str, float, list[tuple[str, int]], list[tuple[str, int]]]]:
    """Of each call: how far it is from one device, what this rank received, and what is planned for the busiest one."""
    mesh, found = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",))), []
    for loops, (heads, key_heads), causal in [*product(LOOPS, [(4, 4), (8, 2)], [False, True])][::every]:
        given = operands(heads, key_heads)
        options: dict[str, Any] = {"is_causal": causal, "enable_gqa": heads != key_heads}
        leaves = [x.clone().requires_grad_() for x in given]
        right = F.scaled_dot_product_attention(*leaves, **options)
        right.backward(torch.ones_like(right))
        expected = [right.detach(), *(x.grad for x in leaves)]
        for _ in range(2):  # cold and warm
            laid = [distribute(x, Layout(mesh, (Shard(2),))).requires_grad_() for x in given]
            with use_strategy(attention=loops):
                with trace() as sent:
                    out = F.scaled_dot_product_attention(*laid, **options)
                report = explain(lambda laid=laid, options=options: F.scaled_dot_product_attention(*laid, **options))
            assert out.placements == (Shard(2),)
            out.backward(distribute(torch.ones_like(right), out.layout.cotangent()))
            mine = [out.detach(), *(x.grad for x in laid)]
            far = max((whole(x) - y).abs().max().item() for x, y in zip(mine, expected, strict=True))
            received = [(event.collective, event.nbytes) for event in sent.events]
            planned = [(each.collective, each.nbytes) for call in report.operators for each in call.collectives]
            found.append((f"{loops} {heads} {key_heads} {causal}", far, received, planned))
    return found


def rings() -> list[tuple[str, float, list[int], list[int], int]]:
    """Of each ring: how far it is from one device, the bytes that this rank received, and the most in its buffers."""
    mesh, found = bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))), []
    given = operands(4, 4)
    for name in ("ring x ring", "ulysses x ring"):
        for causal in (False, True):
            leaves = [x.clone().requires_grad_() for x in given]
            right = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            right.backward(torch.ones_like(right))
            laid = [distribute(x, Layout(mesh, (Shard(2), Shard(2)))).requires_grad_() for x in given]
            with use_strategy(attention=name):
                F.scaled_dot_product_attention(*(x.detach() for x in laid), is_causal=causal)
                WORKSPACE.peak = 0
                F.scaled_dot_product_attention(*(x.detach() for x in laid), is_causal=causal)
                peak = WORKSPACE.peak
                with trace() as sent:
                    out = F.scaled_dot_product_attention(*laid, is_causal=causal)
                with trace() as sent_back:
                    out.backward(distribute(torch.ones_like(right), out.layout.cotangent()))
            pairs = zip(
                (out.detach(), *(x.grad for x in laid)), (right.detach(), *(x.grad for x in leaves)), strict=True
            )
            far = max((whole(x) - y).abs().max().item() for x, y in pairs)
            received = [[e.nbytes for e in each.events if e.collective == "permute"] for each in (sent, sent_back)]
            found.append((f"{name} {causal}", far, *received, peak))
    return found


@pytest.mark.ranks
def test_rings_around_two_axes_send_and_hold_their_closed_form(ranks: RankPool) -> None:
    panel = 2 * 2 * 4 * 2 * 4 * 8  # of keys and of values: batch, heads, keys, d, bytes
    of_ranks = ranks.run(rings)
    for found in zip(*of_ranks, strict=True):
        name = found[0][0]
        assert max(far for _, far, *_ in found) < 1e-11, name
        if name == "ring x ring False":
            for _, _, forward, backward, peak in found:
                assert forward == [panel] * 3
                assert sorted(backward) == [panel] * 6
                assert peak == 2 * panel
        if name == "ulysses x ring False":
            for _, _, forward, _, peak in found:
                assert forward == [panel]  # half of the heads, twice the keys
                assert peak == 2 * panel


def compiled() -> tuple[float, str]:
    """How far a compiled region is from one device, and what a ring within one says."""
    mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    attend = torch.compile(F.scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    given = operands(4, 4)
    laid = [distribute(x, Layout(mesh, (Shard(2),))) for x in given]
    far = (whole(attend(*laid)) - F.scaled_dot_product_attention(*given)).abs().max().item()
    try:
        with use_strategy(attention="ring"):
            attend(*laid)
    except Exception as error:  # torch's own, with ours in its message
        return far, str(error)
    return far, ""


@pytest.mark.ranks
@pytest.mark.thorough
def test_compiled_regions_have_no_rings(ranks: RankPool) -> None:
    for far, message in ranks.run(compiled):
        assert far < 1e-11
        assert "attention='ring' in a compiled region: a compiled graph keeps no exchange" in message


def by_torchs_flex_attention(is_compiled: bool) -> tuple[list[float], list[str]]:
    """How far torch's own function of distributed tensors is from one device, and what it says of statistics."""
    mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    given = [x[:, :, :7].float() for x in operands(4, 2)]

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (j - i) / (h + 1)

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < 3)

    mask, far = create_block_mask(window, None, None, 7, 7, "cpu", BLOCK_SIZE=2), list[float]()
    laid = [distribute(x, Layout(mesh, (Shard(2),))) for x in given]
    with warnings.catch_warnings(action="ignore"):  # torch's own, that it is not compiled
        for score_mod in (None, alibi):
            right = flex_attention(*given, score_mod, mask, enable_gqa=True)
            compiled = [torch.compile(flex_attention, backend="aot_eager")] if is_compiled and score_mod else []
            for run in (flex_attention, *compiled):
                out = run(*laid, score_mod, mask, enable_gqa=True)
                far.append((whole(out) - right).abs().max().item())
        try:
            flex_attention(*laid, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
        except Exception as error:  # torch's own, with ours in its message
            return far, [str(error)]
    return far, []


@pytest.mark.ranks
@pytest.mark.thorough  # torch compiles its function, which takes each rank seconds
@pytest.mark.parametrize("is_compiled", [False, True])
def test_torchs_flex_attention_of_distributed_tensors_is_dshards(ranks: RankPool, is_compiled: bool) -> None:
    for far, messages in ranks.run(by_torchs_flex_attention, is_compiled):
        assert max(far) < 1e-5
        assert len(far) == 2 + is_compiled
        assert "with return_aux, or return_lse: it gives the result alone" in messages[0]


def held(every: int) -> list[tuple[str, float, list[tuple[str, int]], list[tuple[str, int]]]]:
    """Of each call that holds scores: as of `forced`; one device is a mesh that shards nothing."""
    mesh = bind(init_device_mesh("cpu", (4,), mesh_dim_names=("x",)))
    split, alone = Layout(mesh, (Shard(2),)), Layout(mesh, (Replicate(),))
    given, found = [x[:, :, :7] for x in operands(4, 2)], []

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + (j - i) / (h + 1)

    def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < 3)

    mask = create_block_mask(window, None, None, 7, 7, "cpu", BLOCK_SIZE=2)
    calls: dict[str, Any] = {
        "flex_attention": lambda q, k, v: dshard_flex_attention(q, k, v, alibi, mask, enable_gqa=True),
        "dropout": partial(F.scaled_dot_product_attention, dropout_p=0.4, is_causal=True, enable_gqa=True),
    }
    for name, loops in [*product(calls, ["ring", "balanced ring", "context", None])][::every]:
        results = []
        for layout, asked in ((alone, None), (split, loops), (split, loops)):  # cold and warm
            manual_seed(5)
            laid = [distribute(x, layout).requires_grad_() for x in given]
            with use_strategy(attention=asked):
                with trace() as sent:
                    out = calls[name](*laid)
                out.square().sum().backward()
                report = explain(calls[name], *laid)
            results.append([whole(x.detach()) for x in (out, *(x.grad for x in laid))])
        far = max((x - y).abs().max().item() for each in results for x, y in zip(each, results[0], strict=True))
        received = [(event.collective, event.nbytes) for event in sent.events]
        planned = [(each.collective, each.nbytes) for call in report.operators for each in call.collectives]
        found.append((f"{name} {loops}", far, received, planned))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("calls", [forced, held])
def test_loops_are_what_one_device_computes_and_send_what_is_planned(ranks: RankPool, calls: Any, every: int) -> None:
    for of_ranks in zip(*ranks.run(calls, every), strict=True):
        name, _, _, planned = of_ranks[0]
        assert max(far for _, far, _, _ in of_ranks) < 1e-11, name
        busiest = [max(each) for each in zip(*(received for _, _, received, _ in of_ranks), strict=True)]
        assert busiest == planned, name
