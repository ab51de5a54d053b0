"""Attention that modifies scores or drops weights is what one device computes: by any loops and rings, any layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.attention_cases import MESHES, as_near, drawn, layouts_drawn, leaf, loops_drawn, with_gradients
from helpers.counted_memory import allocated
from helpers.default_cases import THOROUGH, one_in, one_way_each
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import dshard
from dshard import Layout, Mesh, Replicate, Shard, StrategyError, explain, trace, use_strategy
from dshard.comm import run_without_data
from dshard.core.observe import Allocations
from dshard.functional import flex_attention
from dshard.ops.attention.local_attention import Options
from dshard.ops.attention.ring_attention import RingAttention
from dshard.ops.attention.score_functions import Dropout, ScoreFunctions, modified_at
from dshard.ops.random import Draw
from dshard.rules.attention_ring import Ring
from dshard.testing import distribute, simulated, whole

ONE = Mesh((1,), ("one",))
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 3], [0, 1, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1]])
TABLE = torch.linspace(-1, 1, 15, dtype=torch.float64)

Index = Callable[..., Any]
MODIFIES: dict[str, Index | None] = {
    "none": None,
    "alibi": lambda s, b, h, i, j: s + 0.5 ** (h + 1) * (j - i),
    "capped": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "table": lambda s, b, h, i, j: s * (b + 1) + TABLE[i - j + 7],
    "constant": lambda s, b, h, i, j: (i * j + h) % 3 * 0.5,
    "hidden": lambda s, b, h, i, j: torch.where((i + j) % 3 == 1, -torch.inf, s),
}
SEEN: dict[str, Index | None] = {
    "all": None,
    "causal": lambda b, h, i, j: j <= i,
    "window": lambda b, h, i, j: (j <= i) & (i - j < 2),
    "documents": lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b, j],
    "blind": lambda b, h, i, j: ((i - j).abs() < 3) & ~((h == 1) & (i == 2)),
    "nothing": lambda b, h, i, j: i + j < 0,
}


# -- flex_attention


def by_operators(given: list[Any], modify: Index | None, seen: Index | None, scale: float | None) -> Tensor:
    """The definition; a query that sees no key gets zeros."""
    q, k, v = given
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    places = [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(scores.shape)]
    if modify is not None:
        scores = modify(scores, *places).expand(scores.shape).to(scores.dtype)
    if seen is not None:
        scores = scores.masked_fill(seen(*places).logical_not(), -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ v


def flex_differences(seed: int) -> list[str]:
    """Where a call of `flex_attention`, in any layout and with any loops that can be, is not what one device gives."""
    draw = Random(seed)
    dtype = draw.choice([torch.float64, torch.float64, torch.float64, torch.bfloat16])
    given, options = drawn(draw, dtype)
    given, mesh, recorded = (
        [x if x.dim() == 4 else x[None] for x in given[:3]],
        draw.choice(MESHES),
        draw.random() < 0.8,
    )
    queries, keys = given[0].shape[2], given[1].shape[2]
    modify, seen = (draw.choice(list(each)) for each in (MODIFIES, SEEN))
    mask = None
    if SEEN[seen] is not None and queries and keys:
        rows = given[0].shape[0] if seen == "documents" else None
        size = draw.choice([1, 2, 3, 128])
        mask = create_block_mask(SEEN[seen], rows, given[0].shape[1], queries, keys, "cpu", BLOCK_SIZE=size)
    functions, scale = (MODIFIES[modify], None if mask is None else SEEN[seen]), options["scale"]
    grad = torch.randn(*given[0].shape[:-1], given[2].shape[-1], dtype=dtype) if recorded else None

    def alone(operands: list[Tensor]) -> list[Tensor]:
        leaves = list(map(leaf, operands))
        out = by_operators(leaves, *functions, scale)
        return [x.detach().double() for x in with_gradients(out, leaves, None if grad is None else grad.to(out.dtype))]

    def on_mesh(operands: list[Any]) -> list[Any]:
        gqa = options["enable_gqa"]
        return with_gradients(flex_attention(*operands, functions[0], mask, scale, gqa), operands, grad)

    text = f"seed {seed}: {modify} {seen} {options}"
    return compared(draw, mesh, given, on_mesh, alone([x.double() for x in given]), alone(given), text)


# -- dropout


def with_dropout(given: list[Any], options: dict[str, Any], grad: Any, p: float) -> list[Any]:
    dshard.manual_seed(7)
    q, k, v, *mask = given
    return with_gradients(F.scaled_dot_product_attention(q, k, v, *mask, dropout_p=p, **options), given, grad)


def dropped_by_operators(given: list[Any], options: dict[str, Any], grad: Any, p: float) -> list[Any]:
    """The definition, with what dropout leaves of a tensor of ones."""
    q, k, v, *masks = given
    dshard.manual_seed(7)
    with simulated(ONE):
        ones = distribute(torch.ones(*q.shape[:-1], k.shape[-2], dtype=q.dtype), Layout(ONE, (Replicate(),)))
        left = whole(F.dropout(ones, p))
    if options["enable_gqa"]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"])
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    for mask in masks:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    out = (scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) * left) @ v
    return with_gradients(out, given, grad)


def dropout_differences(seed: int) -> list[str]:
    """Where a call with dropout, in any layout and with any loops that can be, is not what one device gives."""
    draw = Random(seed)
    dtype = draw.choice([torch.float64, torch.float64, torch.float64, torch.bfloat16])
    given, options = drawn(draw, dtype)
    mesh, recorded, p = draw.choice(MESHES), draw.random() < 0.8, draw.choice([0.1, 0.5, 0.9, 1.0])
    grad = torch.randn(*given[0].shape[:-1], given[2].shape[-1], dtype=dtype) if recorded else None

    def alone(operands: list[Tensor]) -> list[Tensor]:
        cotangent = None if grad is None else grad.to(operands[0].dtype)
        return [x.detach().double() for x in dropped_by_operators(list(map(leaf, operands)), options, cotangent, p)]

    exact = [x.double() if x.is_floating_point() else x for x in given]
    text = f"seed {seed}: p = {p} {options}"
    return compared(draw, mesh, given, lambda x: with_dropout(x, options, grad, p), alone(exact), alone(given), text)


def compared(
    draw: Random,
    mesh: Mesh,
    given: list[Tensor],
    run: Callable[[list[Any]], list[Any]],
    right: list[Tensor],
    alone: list[Tensor],
    text: str,
) -> list[str]:
    """Where `run`, of tensors in any layout and with any loops that can be, is not as near as it must be."""
    largest = max((x.abs().max().item() for x in right if x.numel()), default=0.0)
    layouts = layouts_drawn(draw, given, mesh)
    for loops in [*(loops_drawn(draw, mesh) for _ in range(20)), None]:
        with suppress(StrategyError), simulated(mesh), use_strategy(attention=loops):
            wrong = []
            for how in ("cold", "warm"):
                laid = [distribute(x, layout) for x, layout in zip(given, layouts, strict=True)]
                found = run([leaf(x) if len(right) > 1 else x for x in laid])
                for i, (mine, *others) in enumerate(zip(found, right, alone, strict=True)):
                    if not as_near(whole(mine.detach()), *others, largest):
                        wrong.append(f"{how}, {i}: {mesh} {loops} {[tuple(x.shape) for x in given]} {layouts} {text}")
            return wrong
    raise AssertionError("the choice is never refused")


@pytest.mark.parametrize("differences", [flex_differences, dropout_differences])
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 21))])
def test_any_loops_and_rings_of_any_layouts_are_what_one_device_computes(
    differences: Callable[[int], list[str]], first: int
) -> None:
    seeds = range(100 * first, 100 * first + (100 if THOROUGH else 8))
    wrong = [text for seed in seeds for text in differences(seed)]

    assert wrong == []


# -- what is sent, and what is held


def laid_out(mesh: Mesh, *tensors: Tensor) -> list[Any]:
    return [distribute(x, Layout(mesh, (Shard(2),) * mesh.ndim)).requires_grad_() for x in tensors]


def sliding(width: int, tokens: int) -> Any:
    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < width)

    return create_block_mask(seen, None, None, tokens, tokens, "cpu", BLOCK_SIZE=2)


def calls(given: list[Any], tokens: int) -> dict[str, Callable[[], Any]]:
    def drop() -> Any:
        dshard.manual_seed(3)
        return F.scaled_dot_product_attention(*given, dropout_p=0.3, is_causal=True, enable_gqa=True)

    alibi = MODIFIES["alibi"]
    return {
        "score_mod": lambda: flex_attention(*given, alibi, enable_gqa=True),
        "window": lambda: flex_attention(*given, alibi, sliding(3, tokens), enable_gqa=True),
        "dropout": drop,
    }


@pytest.mark.parametrize(
    ("call", "asked"), one_way_each(["score_mod", "window", "dropout"], ["ring", "balanced ring", "context"])
)
@pytest.mark.parametrize("tokens", [16, 13])
def test_what_is_sent_is_what_is_planned(call: str, asked: str, tokens: int) -> None:
    mesh = Mesh((4,), ("x",))
    with simulated(mesh), use_strategy(attention=asked):
        given = laid_out(mesh, *(torch.randn(1, heads, tokens, 4) for heads in (4, 2, 2)))
        run = calls(given, tokens)[call]
        with trace() as there:
            run()
        report = explain(run)

    (operator,) = report.operators
    sent = [(event.collective, event.nbytes) for event in there.events]
    assert sent == [(each.collective, each.nbytes) for each in operator.collectives]
    assert report.chosen.bytes_moved == sum(nbytes for _, nbytes in sent)
    assert {"x:ring", "x:balanced ring"} & {each.name for each in report.candidates} or asked == "context"


def test_a_ring_sends_the_panels_that_a_block_mask_reaches() -> None:
    mesh, tokens = Mesh((8,), ("x",)), 32
    with simulated(mesh), use_strategy(attention="ring"):
        given = laid_out(mesh, *(torch.randn(1, 2, tokens, 4) for _ in range(3)))
        with trace() as there:
            out = flex_attention(*given, None, sliding(6, tokens))
        with trace() as back:
            out.backward(distribute(torch.ones(1, 2, tokens, 4), out.layout.cotangent()))
    panel = 2 * 2 * (tokens // 8) * 4 * 4

    # queries reach their own panel and the two before; the last but one comes home while the first is sent on
    assert [event.nbytes for event in there.events if event.nbytes] == [panel] * 2
    assert sorted(event.nbytes for event in back.events if event.nbytes) == [panel] * 3 + [2 * panel]


@pytest.mark.parametrize("call", ["score_mod", "dropout"])
def test_one_block_of_scores_is_held(call: str) -> None:
    ranks, heads, rows, width = 4, 2, 512, 8
    mesh, shape = Mesh((ranks,), ("x",)), (1, heads, rows, width)
    layout = Layout(mesh, (Shard(2),))
    functions = {
        "score_mod": ScoreFunctions(partial(modified_at, MODIFIES["alibi"], None), lambda tensors: None),
        "dropout": ScoreFunctions(Dropout(0.5, Draw(1, 2), (1, heads, rows, rows)).held, lambda tensors: None),
    }[call]
    ring = RingAttention((layout,) * 3, (shape,) * 3, Options(False, None, False), Ring((0,)))
    local = layout.local_shape(shape, (1,))
    q, k, v, grad = (torch.randn(local, dtype=torch.float64) for _ in range(4))
    statistics, memory = grad[..., 0].contiguous(), Allocations()

    block, panel = heads * (rows // ranks) ** 2 * 8, 2 * q.nbytes
    for program, tensors in (
        (partial(ring.forward, functions), (q, k, v)),
        (partial(ring.backward, functions, (True,) * 3), (grad, statistics, statistics, q, k, v)),
    ):
        memory.clear()
        with allocated(memory):
            _, lent = run_without_data(program, tensors, (1,))
        assert lent <= 4 * panel
        assert memory.most - lent < 5 * block + 4 * panel
        assert memory.most < ranks * 2 * block  # the scores of a rank with all keys, and their weights


@pytest.mark.parametrize("call", ["score_mod", "window", "dropout"])
@pytest.mark.parametrize("asked", one_in(2, ["balanced ring", "ring"]))
def test_gradients_have_gradients(call: str, asked: str) -> None:
    mesh, tokens = Mesh((3,), ("x",)), 8
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(1, heads, tokens, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4)]

    def second(given: list[Any], grad: Any) -> list[Any]:
        found = torch.autograd.grad(calls(given, tokens)[call](), given, grad, create_graph=True)
        return [*found, *torch.autograd.grad(sum(x.square().sum() for x in found), [*given, grad])]

    results = []
    for loops, where in ((None, ONE), (asked, mesh)):
        with simulated(where), use_strategy(attention=loops):
            *given, grad = laid_out(where, *values)
            results.append([whole(x.detach()) for x in second(given, grad)])
    for right, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("asked", ["ring", "context"])
def test_checkpoints_drop_the_same_again(asked: str) -> None:
    mesh, gradients = Mesh((2,), ("x",)), list[list[Tensor]]()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    for kept in (False, True):
        with simulated(mesh), use_strategy(attention=asked):
            given = laid_out(mesh, x, x, x)
            dshard.manual_seed(3)
            attend = partial(F.scaled_dot_product_attention, dropout_p=0.5)
            out = attend(*given) if kept else checkpoint(attend, *given, use_reentrant=False)
            gradients.append([whole(each) for each in torch.autograd.grad(out.square().sum(), given)])
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_call_draws_once_by_any_loops() -> None:
    mesh, states = Mesh((2,), ("x",)), []
    for asked in ("ring", "balanced ring", "split-keys", "context", "ulysses"):
        with simulated(mesh), use_strategy(attention=asked):
            x, *_ = laid_out(mesh, torch.randn(1, 2, 5, 4))
            dshard.manual_seed(3)
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5).sum().backward()
        states.append(dshard.get_rng_state().tolist())
    assert states == [[3, 1]] * 5


@pytest.mark.parametrize("asked", ["ring", "context", "heads"])
def test_a_function_in_single_precision_leaves_scores_in_double(asked: str) -> None:
    mesh, x = Mesh((2,), ("x",)), torch.randn(1, 2, 5, 4, dtype=torch.float64)

    def ramp(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j / 4

    with simulated(mesh), use_strategy(attention=asked):
        out = flex_attention(*laid_out(mesh, x, x, x), ramp)

    torch.testing.assert_close(whole(out.detach()), by_operators([x, x, x], ramp, None, None))
