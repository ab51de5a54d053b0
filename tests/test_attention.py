"""Attention with heads split sends nothing; with queries split it gathers keys and values alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dshard import Layout, Mesh, Placement, Replicate, Shard, trace
from dshard.testing import distribute, simulated, whole

MESH = Mesh((2, 2), ("dp", "tp"))


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def attended(
    heads: tuple[int, int], placements: tuple[Placement, ...], *, causal: bool
) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """The result and gradients on ranks, those of one device, and the collectives of both passes."""
    values = [reals(4, heads[0], 6, 8), reals(4, heads[1], 6, 8), reals(4, heads[1], 6, 8)]
    grad, options = reals(4, heads[0], 6, 8), {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    leaves = [x.clone().requires_grad_() for x in values]
    expected = F.scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
    expected.backward(grad)
    with simulated(MESH):
        laid = [distribute(x, Layout(MESH, placements)).requires_grad_() for x in values]
        with trace() as sent:
            out = F.scaled_dot_product_attention(*laid, **options)  # type: ignore[arg-type]
            out.backward(distribute(grad, out.layout.cotangent()))
        found = [whole(x.detach()) for x in (out, *(x.grad for x in laid))]
    return found, [expected.detach(), *(x.grad for x in leaves)], [event.collective for event in sent.events]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 2)], ids=["GPT", "Llama", "uneven groups"])
def test_split_heads_send_nothing(heads: tuple[int, int], causal: bool) -> None:
    found, expected, sent = attended(heads, (Shard(0), Shard(1)), causal=causal)

    assert sent == []
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_split_queries_gather_keys_and_values_alone() -> None:
    found, expected, sent = attended((4, 4), (Replicate(), Shard(2)), causal=False)

    assert sent[:2] == ["all_gather", "all_gather"]
    assert "all_gather" not in sent[2:], "going back, only gradients of keys and values are reduced"
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)
