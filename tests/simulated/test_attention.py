"""Attention with heads split sends nothing; with queries split it gathers keys and values alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.default_cases import one_way_each
from torch import Tensor

import dshard
from dshard import Layout, Mesh, Placement, Replicate, Shard, trace, use_strategy
from dshard.testing import distribute, simulated, whole
from dshard.torch_private import no_torch_function
from dshard.trace import Traced

MESH = Mesh((2, 2), ("dp", "tp"))


def reals(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def attended(
    heads: tuple[int, int], placements: tuple[Placement, ...], *, causal: bool, queries: int = 6
) -> tuple[list[Tensor], list[Tensor], list[Traced]]:
    """The result and gradients on ranks, those of one device, and the collectives of both passes."""
    values = [reals(4, n, queries, 8) for n in (heads[0], heads[1], heads[1])]
    grad, options = reals(4, heads[0], queries, 8), {"is_causal": causal, "enable_gqa": heads[0] != heads[1]}
    leaves = [x.clone().requires_grad_() for x in values]
    expected = F.scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
    expected.backward(grad)
    with simulated(MESH):
        laid = [distribute(x, Layout(MESH, placements)).requires_grad_() for x in values]
        with trace() as sent:
            out = F.scaled_dot_product_attention(*laid, **options)  # type: ignore[arg-type]
            out.backward(distribute(grad, out.layout.cotangent()))
        found = [whole(x.detach()) for x in (out, *(x.grad for x in laid))]
    return found, [expected.detach(), *(x.grad for x in leaves)], sent.events


def test_values_may_have_other_heads_than_keys_where_heads_are_grouped() -> None:
    values = [reals(4, n, 6, 8).requires_grad_() for n in (4, 2, 4)]
    expected = F.scaled_dot_product_attention(*values, enable_gqa=True)
    expected.sum().backward()

    with simulated(MESH):
        laid = [distribute(x.detach(), Layout(MESH, (Shard(0), Shard(1)))).requires_grad_() for x in values]
        out = F.scaled_dot_product_attention(*laid, enable_gqa=True)
        out.sum().backward()
        found = [whole(x.detach()) for x in (out, *(x.grad for x in laid))]  # type: ignore[union-attr]

    torch.testing.assert_close(found, [expected.detach(), *(x.grad for x in values)])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 2)], ids=["GPT", "Llama", "uneven groups"])
def test_split_heads_send_nothing(heads: tuple[int, int], causal: bool) -> None:
    found, expected, sent = attended(heads, (Shard(0), Shard(1)), causal=causal)

    assert sent == []
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["GPT", "Llama"])
@pytest.mark.parametrize("queries", [6, 5], ids=["even", "uneven"])
def test_split_queries_gather_keys_and_values_alone(heads: tuple[int, int], queries: int, causal: bool) -> None:
    with use_strategy(attention="context"):
        found, expected, sent = attended(heads, (Replicate(), Shard(2)), causal=causal, queries=queries)

    rows = -(-queries // 2)  # of keys, and of values, that the busiest rank lacks
    assert [event.collective for event in sent] == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert [event.nbytes for event in sent[:2]] == [4 * heads[1] * rows * 8 * 8] * 2
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right)


def test_a_causal_mask_counts_from_the_first_query_of_the_rank() -> None:
    """More queries than ranks divide, more keys than queries, a rank without any."""
    for queries, keys in ((5, 7), (7, 5), (3, 3)):
        values = [reals(2, 3, queries, 4), reals(2, 3, keys, 4), reals(2, 3, keys, 4)]
        mesh = Mesh((4,), ("cp",))
        with simulated(mesh):
            laid = [distribute(x, Layout(mesh, (Shard(2),))) for x in values]
            out = F.scaled_dot_product_attention(laid[0], laid[1], laid[2], is_causal=True)

        assert out.placements == (Shard(2),)
        torch.testing.assert_close(whole(out), F.scaled_dot_product_attention(*values, is_causal=True))  # type: ignore[misc]


@pytest.mark.parametrize("placements", [(Replicate(), Replicate()), (Shard(0), Replicate()), (Replicate(), Shard(1))])
@pytest.mark.parametrize("causal", [False, True])
def test_replicas_of_attention_drop_the_same(placements: tuple[Placement, ...], causal: bool) -> None:
    """With one-hot values the output is the weights: what was dropped shows, the same on all replicas and meshes."""
    q, k = reals(4, 2, 6, 8), reals(4, 2, 6, 8) + 1
    shown = torch.eye(6, dtype=torch.float64).expand(4, 2, 6, 6)
    masks = []
    for mesh, laid in ((MESH, placements), (Mesh((1,), ("one",)), (Replicate(),))):
        with simulated(mesh):
            dshard.manual_seed(5)
            operands = [distribute(x, Layout(mesh, laid)) for x in (q, k, shown)]
            out = F.scaled_dot_product_attention(*operands, dropout_p=0.5, is_causal=causal)
            masks.append(whole(out) == 0)  # whole: replicas are equal to the bit

    assert torch.equal(masks[0], masks[1])
    assert 0.3 < masks[0][..., -1, :].double().mean() < 0.7


@pytest.mark.parametrize(
    ("at", "options"),
    one_way_each([Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)], [{}, {"is_causal": True}, {"scale": 0.3}]),
    ids=str,
)
def test_attention_below_torch_function_is_right(at: Placement, options: dict[str, bool | float]) -> None:
    mesh, values = Mesh((3,), ("x",)), [reals(2, 4, 5, 8), reals(2, 4, 6, 8), reals(2, 4, 6, 8)]
    leaves = [x.clone().requires_grad_() for x in values]
    expected = F.scaled_dot_product_attention(*leaves, **options)  # type: ignore[arg-type]
    expected.sin().sum().backward()
    with simulated(mesh):
        laid = [distribute(x, Layout(mesh, (at,))).requires_grad_() for x in values]
        with no_torch_function():  # as torch's own functions call it
            out = F.scaled_dot_product_attention(*laid, **options)  # type: ignore[arg-type]
        out.sin().sum().backward()

        for mine, right in zip((out, *(x.grad for x in laid)), (expected, *(x.grad for x in leaves)), strict=True):
            torch.testing.assert_close(whole(mine.detach()), right.detach())


@pytest.mark.parametrize("dim", [0, -1, -2])
@pytest.mark.parametrize(
    "shapes", [((2, 4), (3, 7, 4)), ((3, 2, 4), (5, 1, 7, 4)), ((2, 4), (3, 7, 4), (2, 7))], ids=str
)
def test_a_query_has_the_dims_of_the_keys(shapes: tuple[tuple[int, ...], ...], dim: int) -> None:
    query, key, *mask = (reals(*shape) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (query, key, key * 2, *mask)]
    expected = F.scaled_dot_product_attention(*leaves)
    expected.sin().sum().backward()
    mesh = Mesh((2,), ("x",))

    with simulated(mesh):
        laid = [distribute(x.detach(), Layout(mesh, (Shard(dim % x.dim()),))).requires_grad_() for x in leaves]
        out = F.scaled_dot_product_attention(*laid)
        out.sin().sum().backward()
        pairs = [(out.detach(), expected.detach()), *((x.grad, y.grad) for x, y in zip(laid, leaves, strict=True))]
        assert all(torch.allclose(whole(x), y) for x, y in pairs)


def test_keys_of_one_head_are_gathered_once_for_all_heads() -> None:
    mesh = Mesh((4,), ("x",))

    with simulated(mesh), trace() as sent:
        query, key = (distribute(reals(2, heads, 16, 4), Layout(mesh, (Shard(2),))) for heads in (8, 1))
        F.scaled_dot_product_attention(query, key, key)

    assert sum(event.nbytes for event in sent.events) == 2 * 3 * 2 * 4 * 4 * 8  # keys and values of three ranks
