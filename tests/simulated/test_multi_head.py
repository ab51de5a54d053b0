"""`nn.MultiheadAttention` and `nn.Transformer` of distributed tensors equal one device, and split heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.default_cases import one_in, one_way_each
from torch import Tensor, nn

import dshard
from dshard import Mesh, Replicate, Shard, parallelize, plan_model
from dshard.comm import of_first_rank
from dshard.testing import simulated, whole

ROWS, QUERIES, KEYS, WIDTH, HEADS = 3, 5, 7, 8, 4
PLANS: dict[str, tuple[int, ...]] = {"data": (2,), "megatron": (4,), "fsdp": (2,), "fsdp x megatron": (2, 2)}


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


def padding() -> Tensor:
    return torch.arange(KEYS) >= torch.tensor([7, 5, 2])[:, None]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "weights": ({}, {}),
    "no weights": ({}, {"need_weights": False}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "padding": ({}, {"key_padding_mask": padding()}),
    "padding without weights": ({"bias": False}, {"key_padding_mask": padding(), "need_weights": False}),
    "a mask": ({}, {"attn_mask": torch.ones(QUERIES, KEYS).triu(2).bool(), "need_weights": False}),
    "a mask for each head": ({}, {"attn_mask": drawn(ROWS * HEADS, QUERIES, KEYS)}),
    "both masks": ({}, {"attn_mask": drawn(QUERIES, KEYS), "key_padding_mask": padding().double() * -9.0}),
    "other sizes": ({"kdim": 6, "vdim": 6}, {"need_weights": False}),
    "further keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
}


def moved(module: nn.Module, batch_first: bool, *inputs: Tensor, **options: Any) -> list[Tensor]:
    """The outputs of attention and all gradients; the sequence is the first dim without `batch_first`."""
    given = [(x if batch_first else x.transpose(0, 1)).clone().requires_grad_() for x in inputs]
    out, weights = module(*given, **options)
    loss = out.square().sum() if weights is None else out.square().sum() + weights.square().sum()
    loss.backward()
    outs = [out] if weights is None else [out, weights]
    found: list[Any] = [*outs, *(x.grad for x in (*given, *module.parameters()))]
    return [whole(x.detach()) if isinstance(x, dshard.DTensor) else of_first_rank(x.detach()) for x in found]


@pytest.mark.parametrize(("case", "strategy"), one_way_each(CASES, list(PLANS)))
def test_attention_equals_one_device(strategy: str, case: str) -> None:
    made, asked = CASES[case]
    torch.manual_seed(0)
    batch_first = len(case) % 2 == 0
    alone = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **made).double()
    keys = drawn(ROWS, KEYS, made.get("kdim", WIDTH))
    inputs = (drawn(ROWS, QUERIES, WIDTH), keys, keys.flip(0))
    expected = moved(alone, batch_first, *inputs, **asked)
    shape = PLANS[strategy]
    mesh = Mesh(shape, ("a", "b")[: len(shape)])
    alone.zero_grad()
    with simulated(mesh), dshard.implicit_replication():
        model = copy.deepcopy(alone)
        example = [x if batch_first else x.transpose(0, 1) for x in inputs]
        parallelize(model, mesh, strategy, *example, **asked)
        found = moved(model, batch_first, *inputs, **asked)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("strategy", "batched"), one_way_each(PLANS, [True, False]))
def test_self_attention_with_a_causal_mask(strategy: str, batched: bool) -> None:
    torch.manual_seed(0)
    alone = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    x, mask = drawn(ROWS, KEYS, WIDTH), nn.Transformer.generate_square_subsequent_mask(KEYS, dtype=torch.float64)
    x = x if batched else x[0]
    options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    expected = alone(x, x, x, **options)[0]
    expected.square().sum().backward()
    shape = PLANS[strategy]
    mesh = Mesh(shape, ("a", "b")[: len(shape)])
    with simulated(mesh), dshard.implicit_replication():
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize(model, mesh, strategy, x, x, x, **options)
        out = model(x, x, x, **options)[0]
        out.square().sum().backward()
        torch.testing.assert_close(whole(out.detach()), expected.detach(), rtol=1e-11, atol=1e-11)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strategy", one_in(2, ["fsdp x megatron", "megatron"]))
def test_a_transformer_of_torch_equals_one_device(strategy: str) -> None:
    torch.manual_seed(0)
    alone = nn.Transformer(WIDTH, HEADS, 1, 2, 16, dropout=0.0, batch_first=True, norm_first=True).double()
    source, target = drawn(4, KEYS, WIDTH), drawn(4, QUERIES, WIDTH)
    masks: dict[str, Any] = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64),
        "src_key_padding_mask": torch.arange(KEYS) >= torch.tensor([7, 5, 2, 4])[:, None],
        "tgt_is_causal": True,
    }
    expected = alone(source, target, **masks)
    expected.square().mean().backward()
    shape = PLANS[strategy]
    mesh = Mesh(shape, ("a", "b")[: len(shape)])
    with simulated(mesh), dshard.implicit_replication():
        model = copy.deepcopy(alone)
        model.zero_grad()
        parallelize(model, mesh, strategy, source, target, **masks)
        out = model(source, target, **masks)
        out.square().mean().backward()
        torch.testing.assert_close(whole(out.detach()), expected.detach(), rtol=1e-10, atol=1e-10)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad, rtol=1e-10, atol=1e-10)
        model.eval()
        alone.eval()
        with torch.no_grad():  # where torch has a kernel for the whole layer
            torch.testing.assert_close(whole(model(source, target)), alone(source, target), rtol=1e-10, atol=1e-10)


def test_heads_are_split_as_megatron_splits_them() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plan = plan_model(model, Mesh((4,), ("tp",)), "megatron", torch.empty(2, 8, 16, device="meta"))

    for i in range(2):
        assert plan.parameters[f"layers.{i}.self_attn.in_proj_weight"] == (Shard(0, blocks=3),)
        assert plan.parameters[f"layers.{i}.self_attn.out_proj.weight"] == (Shard(1),)
        assert plan.parameters[f"layers.{i}.self_attn.out_proj.bias"] == (Replicate(),)
    forward = [move for move in plan.cost.moves if move.direction == "forward"]
    # of a layer two sums; of the fused projection a rank has its heads of each of query, key and value
    assert sorted(move.collective for move in forward) == ["all_reduce"] * 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attn_mask": torch.zeros(2, 3)}, RuntimeError, r"an attn_mask of shape \(2, 3\): give one of shape \(7, 7\)"),
        ({"is_causal": True}, RuntimeError, "is_causal says that attn_mask is causal: give that mask, too"),
        ({"key_padding_mask": torch.zeros(7)}, AssertionError, "key_padding_mask"),
    ],
)
def test_calls_that_torch_refuses_are_refused_before_sending(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    mesh = Mesh((2,), ("a",))
    with simulated(mesh), dshard.implicit_replication():
        x = torch.ones(ROWS, KEYS, WIDTH)
        model: Any = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        parallelize(model, mesh, "data", x, x, x)
        with dshard.trace() as sent, pytest.raises(error, match=message):
            model(x, x, x, **options)
        with pytest.raises(AssertionError, match="6 features with 4 heads: the module has 8 features"):
            torch.nn.functional.multi_head_attention_forward(
                *[dshard.ones(7, 3, 6, device_mesh=mesh)] * 3, 8, 4, model.in_proj_weight, None, None, None, False, 0.0,
                model.out_proj.weight, None,
            )  # fmt: skip
        assert not sent.events
