"""Attention with dropout takes every loop, and drops the same under each of them, on any mesh, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import THOROUGH, one_way_each
from torch import Tensor

import dshard
from dshard import Layout, Mesh, Placement, Replicate, Shard, StrategyError, explain, trace, use_strategy
from dshard.rules.attention_loops import RINGS
from dshard.testing import distribute, simulated, whole

ONE = Mesh((1,), ("one",))
MESHES = {
    "b h q k": [(Mesh((3,), ("x",)), (loop,)) for loop in "bhqk"],
    "rings": [
        *((Mesh((3,), ("x",)), (loop,)) for loop in RINGS),
        *((Mesh((2, 2), ("x", "y")), loops) for loops in [("ring", "ring"), ("h", "ring"), ("balanced ring", "q")]),
    ],
    "pairs": [(Mesh((2, 2), ("x", "y")), (first, second)) for first in "bhqk" for second in "bhqk"],
}
CALLS: dict[str, tuple[int, int, dict[str, Any]]] = {  # query heads, keys, options
    "plain": (4, 7, {}),
    "causal": (4, 5, {"is_causal": True, "scale": 0.3}),
    "grouped": (6, 7, {"enable_gqa": True}),
    "masked": (4, 7, {}),
}


def operands(call: str) -> list[Tensor]:
    heads, keys, _ = CALLS[call]
    generator, key_heads = torch.Generator().manual_seed(2), 2 if call == "grouped" else heads
    shapes = [(2, heads, 5, 6), (2, key_heads, keys, 6), (2, key_heads, keys, 3)]
    given = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if call == "masked":
        mask = torch.rand(5, keys, generator=generator) > 0.3
        mask[1] = False  # which sees nothing
        given.append(mask)
    return given


def run(given: list[Any], options: dict[str, Any]) -> list[Tensor]:
    """The result and the gradients of query, key and value."""
    leaves = [x.requires_grad_(x.is_floating_point()) for x in given]
    dshard.manual_seed(7)
    out = F.scaled_dot_product_attention(*leaves, dropout_p=0.4, **options)
    return [whole(x.detach()) for x in (out, *torch.autograd.grad(out.square().sum(), leaves[:3]))]


def on_mesh(call: str, mesh: Mesh, first: Placement, loops: Any) -> list[Tensor]:
    placements = (first, *(Shard(2),) * (mesh.ndim - 1)) if mesh.size > 1 else (Replicate(),)
    whole_mask, given = (Replicate(),) * mesh.ndim, operands(call)
    with simulated(mesh), use_strategy(attention=loops):
        laid = [distribute(x, Layout(mesh, placements if x.dim() == 4 else whole_mask)) for x in given]
        return run(laid, CALLS[call][2])


@pytest.mark.parametrize(("call", "kind"), one_way_each(CALLS, list(MESHES)))
def test_every_loop_drops_the_same_as_one_device(call: str, kind: str) -> None:
    expected = on_mesh(call, ONE, Replicate(), None)
    cases = [(mesh, loops) for mesh, loops in MESHES[kind] if call != "masked" or "balanced ring" not in loops]
    cases = cases if THOROUGH or kind != "pairs" else cases[len(call) % 2 :: 4]
    for mesh, loops in cases:
        for first in (Shard(1), Shard(2)):
            for found, right in zip(on_mesh(call, mesh, first, loops), expected, strict=True):
                torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("loop", "sent"),
    [
        ("h", ["all_to_all"] * 4),  # query, key, value; and the result back
        ("q", ["all_gather"] * 2),  # key and value
        ("ring", ["permute"]),  # key and value
        ("k", ["all_gather", "all_reduce", "all_reduce", "reduce_scatter"]),  # query; two numbers a row; the result
    ],
)
def test_dropout_sends_what_its_loop_sends(loop: str, sent: list[str]) -> None:
    mesh = Mesh((2,), ("x",))
    x = torch.randn(2, 4, 8, 16)
    with simulated(mesh), use_strategy(attention=(loop,)):
        given = [distribute(x, Layout(mesh, (Shard(2),))) for _ in range(3)]
        with trace() as events:
            F.scaled_dot_product_attention(*given, dropout_p=0.5)
        report = explain(lambda: F.scaled_dot_product_attention(*given, dropout_p=0.5))

    assert [event.collective for event in events.events] == sent
    (call,) = report.operators
    assert [(event.collective, event.nbytes) for event in events.events] == [
        (each.collective, each.nbytes) for each in call.collectives
    ]
    assert report.chosen.bytes_moved == sum(event.nbytes for event in events.events)
    assert report.chosen.name == {"k": "split keys"}.get(loop, f"x:{loop}")


def test_dropout_by_loops_that_cannot_be_says_so() -> None:
    x = distribute(torch.randn(2, 1, 8, 4), Layout(Mesh((2,), ("x",)), (Shard(2),)))
    with pytest.raises(StrategyError, match="no mesh axis can be given these loops"), use_strategy(attention="ulysses"):
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
