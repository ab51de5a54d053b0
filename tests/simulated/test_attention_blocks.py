"""Attention by blocks of the scores: the blocks are what is seen, and merge into what one device computes."""

from __future__ import annotations

from contextlib import nullcontext
from math import inf, nan
from random import Random

import pytest
import torch
import torch.nn.functional as F
from helpers.counted_memory import allocated
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from dshard import Mesh, Shard, Topology, distribute_tensor, use_strategy, use_topology
from dshard.core.observe import Allocations, Decision, observing
from dshard.ops.attention import block_kernels
from dshard.ops.attention.block_kernels import (
    BlockResult,
    KeyPanel,
    RowGradients,
    accumulate_gradients,
)
from dshard.ops.attention.local_attention import Options, of_queries
from dshard.rules.attention_blocks import Block, Reach, computed_pairs, visible_blocks


def ranges_of(draw: Random, size: int) -> list[range]:
    """Ranges without a common index, in any order, of which some are empty."""
    points = sorted(draw.randrange(size + 1) for _ in range(draw.choice([2, 4, 6])))
    ranges = [range(a, b) for a, b in zip(points[::2], points[1::2], strict=True)]
    draw.shuffle(ranges)
    return ranges


def indices(ranges: list[range]) -> list[int]:
    return [i for each in ranges for i in each]


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_the_pairs_that_see_each_other(causal: bool) -> None:
    draw = Random(0)
    for _ in range(300):
        queries, keys = ranges_of(draw, 9), ranges_of(draw, 9)
        found = torch.zeros(len(indices(queries)), len(indices(keys)), dtype=torch.int)
        for block in visible_blocks(queries, keys, causal):
            part = torch.ones(len(block.queries), len(block.keys), dtype=torch.int)
            here = found[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop]
            assert here.shape == part.shape
            assert part.numel()
            here += part.tril() if block.diagonal else part
        right = [[int(k <= q or not causal) for k in indices(keys)] for q in indices(queries)]
        assert found.tolist() == right
        assert sum(block.pairs for block in visible_blocks(queries, keys, causal)) == found.sum()


def test_blocks_of_a_mask_are_those_of_the_keys_that_queries_reach() -> None:
    draw = Random(0)
    for _ in range(300):
        queries, keys, size = ranges_of(draw, 9), ranges_of(draw, 9), draw.choice([1, 2, 4, 16])
        ends = [sorted((draw.randrange(10), draw.randrange(10))) for _ in range(-(-9 // size))]
        reach = Reach(size, tuple((first, stop) for first, stop in ends))
        found = torch.zeros(len(indices(queries)), len(indices(keys)), dtype=torch.int)
        for block in visible_blocks(queries, keys, False, reach):
            found[block.queries.start : block.queries.stop, block.keys.start : block.keys.stop] += 1
            assert not block.diagonal
            assert block.pairs
        for i, q in enumerate(indices(queries)):
            for j, k in enumerate(indices(keys)):
                assert found[i, j] <= 1
                assert found[i, j] or k not in reach.of(range(q, q + 1))
        if len(queries) == len(keys) == 1 and size == 1:
            (rows,), (columns,) = queries, keys
            reached = [q for q in rows if any(k in reach.of(range(q, q + 1)) for k in columns)]
            assert bool(reached) == bool(found.any())  # what nobody reaches is no block


@pytest.mark.parametrize(
    ("rows", "columns"), [(128, 128), (208, 1024), (512, 512), (1024, 1024), (1040, 1536), (1536, 1024)]
)
def test_the_price_on_cpus_counts_the_tiles_that_the_kernel_computes(rows: int, columns: int) -> None:
    q, k, v = (torch.zeros(1, 1, n, columns // 16) for n in (rows, columns, columns))
    for feature in range(columns // 16):
        v[..., 16 * feature, feature] = nan  # which no weight of 0 hides from the queries of its tile
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    block = Block(range(rows), range(columns), diagonal=True)
    assert 16 * out.isnan().sum() == block.tiled_pairs == computed_pairs([block], "gloo")
    (visible,) = visible_blocks([range(rows)], [range(columns)], True)
    assert computed_pairs([block], "nccl") == block.pairs == visible.pairs


def test_the_price_of_heads_counts_tiles() -> None:
    mesh = Mesh((4,), ("x",))
    x = distribute_tensor(torch.empty(1, 8, 1024, 64, device="meta"), mesh, [Shard(2)])
    topology = Topology.flat(1e9)
    found: list[Decision] = []
    with use_topology(topology), use_strategy(attention="ulysses"), observing(found.append):
        F.scaled_dot_product_attention(x, x, x, is_causal=True)

    (strategy,) = [each.strategy for each in found if each.strategy is not None]
    assert strategy.compute - topology.launch == pytest.approx(2 * 128 * 2 * 1024**2 * 0.75 / topology.flops(""))


def reals(*shape: int, apart: bool = False) -> Tensor:
    """Random numbers; those of the last dim lie `apart` in memory, as those of the last dim but one do else."""
    x = torch.randn(shape, dtype=torch.float64)
    return (x.mT.contiguous().mT if apart else x).requires_grad_()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("kernel", ["flash", "operators"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize(("heads", "values"), [((4, 4), 8), ((4, 2), 8), ((4, 1), 5)])
def test_blocks_merge_into_attention(kernel: str, kind: str, heads: tuple[int, int], values: int, apart: bool) -> None:
    torch.manual_seed(0)
    shapes = (2, heads[0], 7, 8), (2, heads[1], 6, 8), (2, heads[1], 6, values)
    q, k, v = (reals(*shape, apart=apart) for shape in shapes)
    mask = reals(1, heads[0], 7, 6, apart=apart) if kind == "float" else None
    if kind == "bool":
        mask = (torch.randn(7, 6) > 0).index_fill(0, torch.tensor([3]), False)  # a query that sees no key
    causal, queries = kind == "causal", range(7)
    grad = reals(2, heads[0], 7, values, apart=apart).detach()
    right = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=True)
    leaves = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    expected = torch.autograd.grad(right, leaves, grad)
    with sdpa_kernel(SDPBackend.MATH) if kernel == "operators" else nullcontext(), torch.no_grad():
        given = None if mask is None else mask.reshape(1, -1, 7, 6)
        panels = []
        result = BlockResult(q, v)
        for keys in (range(2), range(5, 6), range(2, 5)):
            span = slice(keys.start, keys.stop)
            blocks = visible_blocks([queries], [keys], causal)
            part = None if given is None else given[..., span]
            panels.append((span, KeyPanel(q, k[:, :, span], v[:, :, span], part, blocks, 8**-0.5)))
            result.add(panels[-1][1])
        out, lse = result.complete()
        torch.testing.assert_close(out, right)
        scores = q @ k.repeat_interleave(4 // heads[1], 1).mT * 8**-0.5
        if mask is not None:
            scores = scores + mask if kind == "float" else scores.masked_fill(mask.logical_not(), -inf)
        if causal:
            scores = scores.masked_fill(torch.ones(7, 6, dtype=torch.bool).triu(1), -inf)
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        totals = [torch.zeros_like(x) for x in leaves]
        for span, panel in panels:
            there = [totals[0], *(x[:, :, span] for x in totals[1:3]), *(x[..., span] for x in totals[3:])]
            accumulate_gradients(there, RowGradients(grad, (grad * out).sum(-1), lse), panel)
    for mine, gradient in zip(totals, expected, strict=True):
        torch.testing.assert_close(mine, gradient)


def test_blocks_hold_no_scores() -> None:
    rows, memory = 1024, Allocations()
    q, k, v = (torch.randn(1, 2, rows, 16) for _ in range(3))
    panel = KeyPanel(q, k, v, None, visible_blocks([range(rows)], [range(rows)], True), 0.25)

    with allocated(memory), torch.no_grad():
        result = BlockResult(q, v)
        result.add(panel)
        out, lse = result.complete()
        accumulate_gradients([torch.zeros_like(x) for x in (q, k, v)], RowGradients(out, out.sum(-1), lse), panel)

    assert 0 < memory.most < 16 * q.nbytes < 2 * rows * rows * 4  # the scores of both heads


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 2), (4, 2)])
def test_a_range_of_causal_queries_makes_no_mask(heads: int, key_heads: int) -> None:
    options, rows, n = Options(True, None, heads != key_heads), range(384, 512), 512
    shapes = [(1, heads, n, 4), *[(1, key_heads, n, 4)] * 2]
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=options.gqa)[..., 384:512, :]
    expected = right, *torch.autograd.grad(right.square().sum(), (q, k, v))

    memory = Allocations()
    with allocated(memory):
        out = of_queries(rows, n, options)(q[..., 384:512, :], k, v)
        found = out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert memory.most < 12 * q.nbytes < heads * len(rows) * n * 8  # a mask as the CPU's kernel has it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_a_device_give_tensors_of_that_device(dtype: torch.dtype) -> None:
    blocks = visible_blocks([range(5)], [range(3)], True)
    shapes = (2, 4, 5, 6), (2, 2, 3, 6), (2, 2, 3, 7)
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
        operands = block_kernels._operands(KeyPanel(q, k, v, None, blocks, 1.0), blocks[0])
        kernel = block_kernels._kernel_of(operands)
        out, lse = kernel.forward(operands)
        found = kernel.backward(out, operands, out, lse)

    assert kernel is (block_kernels._FLASH_ON_CUDA if dtype == torch.bfloat16 else block_kernels._EFFICIENT_ON_CUDA)
    assert {x.device.type for x in (out, lse, *found)} == {"cuda"}
    assert [x.shape for x in found] == [x.shape for x in operands[:3]]
    assert (out.shape, lse.shape) == ((4, 2, 5, 7), (4, 2, 5))
