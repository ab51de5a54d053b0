"""Attention by loops: each of them forced, in any layout, is what one device computes; the choice is the cheapest."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.attention_cases import MESHES, as_near, drawn, layouts_drawn, leaf, loops_drawn, with_gradients
from helpers.default_cases import THOROUGH, one_in
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard import (
    Layout,
    Mesh,
    Placement,
    Replicate,
    Shard,
    StrategyError,
    Topology,
    distribute_tensor,
    explain,
    use_strategy,
    use_topology,
)
from dshard.core.observe import Decision, observing
from dshard.functional import flex_attention
from dshard.ops.attention.attention_choice import ABOUT, MERGING
from dshard.testing import distribute, simulated, whole


def run(given: list[Any], options: dict[str, Any], grad: Any) -> list[Any]:
    q, k, v, *mask = given
    return with_gradients(F.scaled_dot_product_attention(q, k, v, *mask, **options), given, grad)


def differences(seed: int) -> list[str]:
    """Where one call on one mesh, in any layout and with any loops that can be, is not what one device gives."""
    draw = Random(seed)
    dtype = draw.choice([torch.float64, torch.float64, torch.float64, torch.bfloat16])
    given, options = drawn(draw, dtype)
    mesh, recorded = draw.choice(MESHES), draw.random() < 0.8
    exact = [x.double() if x.is_floating_point() else x for x in given]
    size = (*given[0].shape[:-1], given[2].shape[-1])
    grad = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)
    right, alone = (
        [x.detach().double() for x in run(list(map(leaf, operands)), options, grad.to(kind) if recorded else None)]
        for operands, kind in ((exact, torch.float64), (given, dtype))
    )
    largest = max((x.abs().max().item() for x in right if x.numel()), default=0.0)
    layouts = layouts_drawn(draw, given, mesh)
    for loops in [*(loops_drawn(draw, mesh) for _ in range(20)), None]:
        with suppress(StrategyError), simulated(mesh), use_strategy(attention=loops):
            text = f"seed {seed}: {mesh} {loops} {options} {[tuple(x.shape) for x in given]} {list(map(str, layouts))}"
            wrong = []
            for how in ("cold", "warm"):
                tensors = [distribute(x, layout) for x, layout in zip(given, layouts, strict=True)]
                found = run([leaf(x) if recorded else x for x in tensors], options, grad if recorded else None)
                for i, (mine, *others) in enumerate(zip(found, right, alone, strict=True)):
                    if not as_near(whole(mine.detach()), *others, largest):
                        wrong.append(f"{how}, {'result' if not i else 'gradient ' + str(i)}: {text}")
            return wrong
    raise AssertionError("the choice is never refused")


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in range(1, 51))])
def test_any_loops_of_any_layouts_are_what_one_device_computes(first: int) -> None:
    seeds = range(100 * first, 100 * first + (100 if THOROUGH else 20))
    wrong = [text for seed in seeds for text in differences(seed)]

    assert wrong == []


def test_a_rank_without_a_batch_has_gradients_of_a_mask() -> None:
    assert differences(231) == []  # an empty shard of the batch, grouped heads, a mask with a gradient


def without_data(mesh: Mesh, shape: tuple[int, ...], placement: Placement) -> Any:
    return distribute_tensor(torch.empty(shape, dtype=torch.bfloat16, device="meta"), mesh, [placement])


def test_long_sequences_that_are_split_come_to_the_heads_and_back() -> None:
    mesh, shape = Mesh((8,), ("cp",)), (1, 8, 65536, 128)
    report = explain(F.scaled_dot_product_attention, *(without_data(mesh, shape, Shard(2)) for _ in range(3)))

    lacked = 2**20 * 128 // 8 * 7 // 8  # of its eighth of a tensor a rank keeps an eighth, and receives the rest
    assert report.chosen.name == "cp:h"
    assert report.chosen.bytes_moved == 4 * lacked == 56 * 2**20
    assert {each.name: each.bytes_moved for each in report.candidates}["cp:q"] == 224 * 2**20
    for preset in ("pcie", "nvlink-pairs", "dgx-a100", "dgx-h100", "gb200-nvl72", "tpu-torus"):
        with use_topology(Topology.preset(preset)):  # where a ring hides all that it sends, or almost
            on = explain(F.scaled_dot_product_attention, *(without_data(mesh, shape, Shard(2)) for _ in range(3)))
        assert (on.chosen.name, on.chosen.bytes_moved) == ("cp:h", 56 * 2**20), preset
    ring = next(each for each in report.candidates if each.name == "cp:ring")
    assert (ring.bytes_moved, ring.messages, ring.peak_bytes) == (224 * 2**20, 7, (4 * 16 + 2 * 32) * 2**20)


@pytest.mark.parametrize("preset", ["pcie", "nvlink-pairs"])
def test_of_candidates_about_as_fast_that_of_half_the_bytes_is_taken(preset: str) -> None:
    mesh, by_bytes = Mesh((8,), ("cp",)), list[str]()
    for exponent, heads, causal in product(range(10, 19), (1, 8, 32), (False, True)):
        x = without_data(mesh, (1, heads, 2**exponent, 64), Shard(2))
        with use_topology(Topology.preset(preset)):
            report = explain(lambda x=x, causal=causal: F.scaled_dot_product_attention(x, x, x, is_causal=causal))
        chosen, fastest = report.chosen, report.candidates[0]
        near = [each for each in report.candidates if each.seconds <= fastest.seconds * (1 + ABOUT)]
        assert chosen in near
        if 2 * chosen.bytes_moved > fastest.bytes_moved:
            assert chosen.seconds == fastest.seconds
            assert all(2 * each.bytes_moved > fastest.bytes_moved for each in near)
        else:
            assert chosen.bytes_moved == min(each.bytes_moved for each in near)
            if chosen.seconds > fastest.seconds:
                by_bytes.append(str(report))
    assert all("about as fast as the fastest" in text for text in by_bytes)
    assert by_bytes


@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_of_queries_find_theirs_among_replicated_key_heads(key_heads: int) -> None:
    mesh = Mesh((4,), ("tp",))
    q, kv = without_data(mesh, (1, 8, 64, 16), Shard(1)), (1, key_heads, 64, 16)
    report = explain(
        lambda: F.scaled_dot_product_attention(q, *(without_data(mesh, kv, Replicate()),) * 2, enable_gqa=True)
    )
    assert report.chosen.bytes_moved == 0

    stored = explain(
        lambda: F.scaled_dot_product_attention(q, *(without_data(mesh, kv, Shard(1)),) * 2, enable_gqa=True)
    )
    assert stored.chosen.bytes_moved <= 2 * key_heads * 64 * 16 * 2


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_ranks_receive_the_key_heads_of_their_queries_alone(key_heads: int) -> None:
    mesh, keys = Mesh((4,), ("x",)), (1, key_heads, 64, 16)
    q, kv = without_data(mesh, (1, 8, 64, 16), Shard(2)), without_data(mesh, keys, Shard(2))
    with use_strategy(attention="ulysses"):
        chosen = explain(lambda: F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)).chosen

    queries, head = 2 * 8 // 4 * 64 * 16 * 3 // 4 * 2, 64 * 16 * 3 // 4 * 2  # bytes: there and back; of a head lacked
    assert chosen.bytes_moved == queries + 2 * max(1, key_heads // 4) * head


@pytest.mark.parametrize("mesh", [Mesh((4,), ("x",)), Mesh((2, 4), ("dp", "x"))], ids=str)
@pytest.mark.parametrize("key_heads", [1, 2])
def test_repeated_key_heads_have_the_gradients_of_one_device(mesh: Mesh, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 7, 4), (2, key_heads, 7, 4), (2, key_heads, 7, 4)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
    options, grad = {"is_causal": True, "enable_gqa": True}, torch.randn(shapes[0], dtype=torch.float64)
    expected = run([x.clone().requires_grad_() for x in given], options, grad)
    placements = (Shard(0), Shard(2))[-mesh.ndim :]
    loops = ("b", "h")[-mesh.ndim :]
    with simulated(mesh), use_strategy(attention=loops):
        laid_out = [distribute(x, Layout(mesh, placements)).requires_grad_() for x in given]
        report = explain(lambda: F.scaled_dot_product_attention(*laid_out, **options))
        found = run(laid_out, options, grad)

    assert report.chosen.name == "own key heads"
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(mine.detach()), right.detach())


@pytest.mark.parametrize("asked", one_in(2, ["ring", "context", "split-keys", None]))
@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((1, 2, 4, 3), (2, 2, 4, 3)),
        ((2, 2, 4, 3), (1, 2, 4, 3)),
        ((2, 1, 4, 3), (2, 2, 4, 3)),
        ((2, 2, 4, 3), (2, 4, 3)),
        ((2, 0, 2, 4, 3), (1, 1, 2, 4, 3)),
    ],
)
def test_batches_and_heads_of_one_are_broadcast(query: tuple[int, ...], key: tuple[int, ...], asked: str) -> None:
    mesh, generator = Mesh((2,), ("x",)), torch.Generator().manual_seed(0)
    given = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in (query, key, key)]
    calls = [F.scaled_dot_product_attention]
    if len(query) == len(key) == 4 and asked != "split-keys":
        calls.append(flex_attention)

    def results(call: Any, tensors: list[Any]) -> list[Tensor]:
        out = call(*tensors)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    expected = results(F.scaled_dot_product_attention, list(map(leaf, given)))
    for call in calls:
        for dim in (0, -2):
            with simulated(mesh), use_strategy(attention=asked):
                laid = [leaf(distribute(x, Layout(mesh, (Shard(dim % x.dim()),)))) for x in given]
                for mine, right in zip(results(call, laid), expected, strict=True):
                    torch.testing.assert_close(whole(mine.detach()), right.detach())


def test_one_query_and_a_split_cache_move_the_result_alone() -> None:
    mesh = Mesh((8,), ("x",))
    q, kv = without_data(mesh, (1, 32, 1, 128), Replicate()), without_data(mesh, (1, 8, 65536, 128), Shard(2))
    report = explain(lambda: F.scaled_dot_product_attention(q, kv, kv, enable_gqa=True))

    result, statistics = 32 * 128 * 4, 2 * 32 * 4  # bytes, in single precision
    assert report.chosen.name == "split keys"
    assert report.chosen.bytes_moved <= 2 * (result + statistics)


def test_the_price_of_split_keys_counts_the_operators_that_merge_results() -> None:
    mesh, found = Mesh((2,), ("x",)), list[Decision]()
    with simulated(mesh), use_strategy(attention="split-keys"):
        x = distribute(torch.randn(1, 2, 4, 3), Layout(mesh, (Shard(2),)))
        with observing(found.append):
            F.scaled_dot_product_attention(x, x, x)

    assert sum(decision.op.startswith("aten.") for decision in found) == MERGING


def test_heads_that_share_keys_have_gradients_where_a_rank_has_no_batch_entries() -> None:
    mesh, shapes = Mesh((2, 2), ("x", "y")), [(1, 4, 7, 1), (1, 2, 7, 1), (1, 2, 7, 1)]
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in values]
    F.scaled_dot_product_attention(*leaves, enable_gqa=True).sum().backward()
    with simulated(mesh), use_strategy(attention=("b", "k")):
        laid = [distribute(x, Layout(mesh, (Shard(0), Shard(2)))).requires_grad_() for x in values]
        F.scaled_dot_product_attention(*laid, enable_gqa=True).sum().backward()
        for x, leaf in zip(laid, leaves, strict=True):
            torch.testing.assert_close(whole(x.grad), leaf.grad)


@pytest.mark.parametrize("asked", ["split-keys", "ring", "balanced ring"])
def test_gradients_have_gradients(asked: str) -> None:
    mesh, generator = Mesh((3,), ("x",)), torch.Generator().manual_seed(0)
    values = [torch.randn(1, 2, 4, 3, dtype=torch.float64, generator=generator) for _ in range(5)]

    def second(tensors: list[Any], grad: Any, other: Any) -> Any:
        out = F.scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], is_causal=True)
        found = torch.autograd.grad(out, tensors, grad, create_graph=True)
        return torch.autograd.grad(sum((x * other).sum() for x in found), [*tensors, grad])

    with sdpa_kernel(SDPBackend.MATH):  # the kernels that hold no scores have none on one device either
        expected = second(*laid_out([x.clone() for x in values]))
    with simulated(mesh), use_strategy(attention=asked), sdpa_kernel(SDPBackend.MATH):
        found = second(*laid_out([distribute(x, Layout(mesh, (Shard(2),))) for x in values]))
        for mine, right in zip(found, expected, strict=True):
            torch.testing.assert_close(whole(mine), right)


def laid_out(values: list[Any]) -> tuple[list[Any], Any, Any]:
    """The operands, the gradient of the result, and weights of the gradients."""
    leaves = [x.requires_grad_() for x in values[:4]]
    return leaves[:3], leaves[3], values[4]


@pytest.mark.parametrize(
    ("asked", "heads", "message"),
    [
        ("ulysses", 1, "attention='ulysses' of 1 query and 1 key heads, .*: no mesh axis can be given these loops"),
        ("ulises", 2, "attention='ulises': use batch, heads, ulysses, .*did you mean 'ulysses'"),
        (("ring", "balanced ring"), 2, "2 loops for the mesh .*; give one for each axis"),
        ("ulysses x context", 2, "needs 2 mesh axes .u, c., but the mesh"),
        (("z",), 2, "use batch, heads, .* or a loop .b, h, q, k, ring, .* for each mesh axis"),
    ],
)
def test_loops_that_cannot_be_say_so(asked: Any, heads: int, message: str) -> None:
    x = without_data(Mesh((4,), ("x",)), (2, heads, 8, 4), Shard(2))
    with pytest.raises(StrategyError, match=message), use_strategy(attention=asked):
        F.scaled_dot_product_attention(x, x, x)


def test_rings_that_cannot_be_say_so() -> None:
    x = without_data(Mesh((1,), ("x",)), (2, 2, 8, 4), Shard(2))
    for asked in ("ring", ("ring",)):
        with (
            pytest.raises(StrategyError, match="a ring goes round an axis of at least two ranks; use 'context'"),
            use_strategy(attention=asked),
        ):
            F.scaled_dot_product_attention(x, x, x)
    x, mask = (without_data(Mesh((2,), ("x",)), shape, Replicate()) for shape in ((2, 2, 8, 4), (8, 8)))
    for dropout in (0.0, 0.5):
        with (
            pytest.raises(StrategyError, match=r"'balanced ring' with attn_mask: .*; use 'ring'"),
            use_strategy(attention="balanced ring"),
        ):
            F.scaled_dot_product_attention(x, x, x, mask, dropout)


def test_half_precision_is_as_near_as_on_one_device() -> None:
    torch.manual_seed(0)
    mesh, exact = Mesh((4,), ("x",)), [torch.randn(2, 4, 16, 8, dtype=torch.float64) for _ in range(3)]
    halves = [x.bfloat16() for x in exact]
    right = F.scaled_dot_product_attention(*exact)
    alone = (F.scaled_dot_product_attention(*halves) - right).abs().max()
    for asked in ("ulysses", "context", "ring", "balanced ring", "split-keys"):
        with simulated(mesh), use_strategy(attention=asked):
            out = whole(F.scaled_dot_product_attention(*(distribute(x, Layout(mesh, (Shard(2),))) for x in halves)))
        assert out.dtype == torch.bfloat16
        assert (out - right).abs().max() <= 2 * alone
