"""Operators on distributed tensors, for torch's DTensor and for dshard's: values, layouts and gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from helpers.dtensor_programs import Library, drawn, kinds, line, on_line, program


@program
def pointwise_of_two_layouts(lib: Library) -> None:
    for left in kinds(lib, 0, 1):
        for right in kinds(lib, 0, 1):
            x, y = on_line(lib, drawn(8, 4), left), on_line(lib, drawn(8, 4, seed=1), right)
            assert_close((x * y + x).full_tensor(), drawn(8, 4) * drawn(8, 4, seed=1) + drawn(8, 4))


@program
def pointwise_of_partial_sums(lib: Library) -> None:
    p = lib.DTensor.from_local(drawn(4, 2), line(lib), [lib.Partial()])
    assert_close((p + p).full_tensor(), 8 * drawn(4, 2))
    assert_close((p * 2).full_tensor(), 8 * drawn(4, 2))
    assert_close((p / 2).full_tensor(), 2 * drawn(4, 2))
    assert_close((p + 1).full_tensor(), 4 * drawn(4, 2) + 1)
    assert_close((-p).full_tensor(), -4 * drawn(4, 2))
    assert_close(p.relu().full_tensor(), (4 * drawn(4, 2)).relu())


@program
def broadcasting_sharded_dims(lib: Library) -> None:
    x, row = on_line(lib, drawn(8, 4), lib.Shard(0)), on_line(lib, drawn(4), lib.Replicate())
    column = on_line(lib, drawn(8, 1), lib.Shard(0))
    assert_close((x + row - column).full_tensor(), drawn(8, 4) + drawn(4) - drawn(8, 1))
    assert (x + row).placements == (lib.Shard(0),)


@program
def in_place_pointwise(lib: Library) -> None:
    x = on_line(lib, drawn(8, 4), lib.Shard(0))
    same = x.add_(on_line(lib, drawn(8, 4), lib.Shard(0))).mul_(0.5)
    assert same is x
    x.clamp_(min=0)
    assert_close(x.full_tensor(), drawn(8, 4).clamp(min=0))
    x.zero_()
    assert x.full_tensor().abs().sum() == 0


@program
def reductions_along_and_across(lib: Library) -> None:
    for placement in kinds(lib, 0, 1):
        x = on_line(lib, drawn(8, 4), placement)
        for reduce in (torch.sum, torch.mean, torch.amax, torch.amin):
            for dim in (0, 1):
                assert_close(reduce(x, dim).full_tensor(), reduce(drawn(8, 4), dim))
        assert_close(x.sum().full_tensor(), drawn(8, 4).sum())
        assert_close(x.mean(1, keepdim=True).full_tensor(), drawn(8, 4).mean(1, keepdim=True))


@program
def sums_of_parts_stay_partial(lib: Library) -> None:
    x = on_line(lib, drawn(8, 4), lib.Shard(0))
    assert x.sum(0).placements[0].is_partial()
    assert x.sum(1).placements == (lib.Shard(0),)
    assert x.max(1).values.placements == (lib.Shard(0),)


@program
def variance_and_norms(lib: Library) -> None:
    x = on_line(lib, drawn(8, 4), lib.Shard(0))
    assert_close(x.var(0).full_tensor(), drawn(8, 4).var(0))
    assert_close(torch.linalg.vector_norm(x, 2).full_tensor(), drawn(8, 4).norm())
    assert_close(torch.linalg.vector_norm(x, float("inf"), 1).full_tensor(), drawn(8, 4).abs().amax(1))


@program
def largest_along_both_dims(lib: Library) -> None:
    for placement in kinds(lib, 0, 1):
        x = on_line(lib, drawn(8, 4), placement)
        for dim in (0, 1):
            values, indices = torch.topk(x, 2, dim)
            expected = torch.topk(drawn(8, 4), 2, dim)
            assert_close(values.full_tensor(), expected.values)
            assert_close(indices.full_tensor(), expected.indices)


@program
def where_and_masks(lib: Library) -> None:
    for placement in kinds(lib, 0, 1):
        x = on_line(lib, drawn(8, 4), placement)
        y = torch.where(x > 0, x, on_line(lib, torch.tensor(-1.0), lib.Replicate()))
        assert_close(y.full_tensor(), torch.where(drawn(8, 4) > 0, drawn(8, 4), -1.0))
        assert_close(x.masked_fill(x < 0, 0).full_tensor(), drawn(8, 4).relu())
        assert_close(torch.tril(x).full_tensor(), drawn(8, 4).tril())


@program
def softmax_along_both_dims(lib: Library) -> None:
    for placement in kinds(lib, 0, 1):
        for dim in (0, 1):
            x = on_line(lib, drawn(8, 4), placement).requires_grad_()
            theirs = drawn(8, 4).requires_grad_()
            x.softmax(dim).square().sum().backward()
            theirs.softmax(dim).square().sum().backward()
            assert_close(x.grad.full_tensor(), theirs.grad)


@program
def gather_and_index_select(lib: Library) -> None:
    index = torch.tensor([[0, 3], [2, 2], [1, 0]])
    for placement in kinds(lib, 0, 1):
        x = on_line(lib, drawn(4, 4), placement)
        found = torch.gather(x, 0, on_line(lib, index, lib.Replicate()))
        assert_close(found.full_tensor(), torch.gather(drawn(4, 4), 0, index))
        rows = x.index_select(0, on_line(lib, index[:, 0], lib.Replicate()))
        assert_close(rows.full_tensor(), drawn(4, 4)[index[:, 0]])


@program
def index_put_of_rows(lib: Library) -> None:
    rows = torch.tensor([0, 2, 5])
    for placement in kinds(lib, 0, 1):
        x = on_line(lib, drawn(8, 4), placement)
        ones = on_line(lib, torch.ones(3, 4), lib.Replicate())
        x = x.index_put((on_line(lib, rows, lib.Replicate()),), ones)
        expected = drawn(8, 4)
        expected[rows] = 1
        assert_close(x.full_tensor(), expected)


@program
def one_hot_targets_with_gradients(lib: Library) -> None:
    target = torch.tensor([1, 0, 3, 2])
    x = on_line(lib, drawn(4, 4), lib.Shard(0)).requires_grad_()
    hot = F.one_hot(on_line(lib, target, lib.Shard(0)), 4).float()
    loss = -(x.log_softmax(-1) * hot).sum()
    loss.backward()
    theirs = drawn(4, 4).requires_grad_()
    F.cross_entropy(theirs, target, reduction="sum").backward()
    assert_close(x.grad.full_tensor(), theirs.grad)


@program
def views_of_sharded_dims(lib: Library) -> None:
    x = on_line(lib, drawn(8, 6), lib.Shard(0))
    assert x.view(8, 2, 3).placements == (lib.Shard(0),)
    assert x.view(48).placements == (lib.Shard(0),)
    assert x.t().placements == (lib.Shard(1),)
    assert x.unsqueeze(0).placements == (lib.Shard(1),)
    assert x.unsqueeze(0).squeeze(0).placements == (lib.Shard(0),)
    assert_close(x.view(8, 2, 3).permute(1, 0, 2).full_tensor(), drawn(8, 6).view(8, 2, 3).permute(1, 0, 2))


@program
def joined_and_taken_apart(lib: Library) -> None:
    for placement in kinds(lib, 0, 1):
        x, y = on_line(lib, drawn(8, 4), placement), on_line(lib, drawn(8, 4, seed=1), placement)
        assert_close(torch.cat([x, y], 1).full_tensor(), torch.cat([drawn(8, 4), drawn(8, 4, seed=1)], 1))
        assert_close(torch.stack([x, y]).full_tensor(), torch.stack([drawn(8, 4), drawn(8, 4, seed=1)]))
        for mine, theirs in zip(x.chunk(2, 1), drawn(8, 4).chunk(2, 1), strict=True):
            assert_close(mine.full_tensor(), theirs)
        for mine, theirs in zip(x.split([3, 5]), drawn(8, 4).split([3, 5]), strict=True):
            assert_close(mine.full_tensor(), theirs)


@program
def products_of_all_layouts(lib: Library) -> None:
    a, b = drawn(8, 4), drawn(4, 8, seed=1)
    for left in kinds(lib, 0, 1):
        for right in kinds(lib, 0, 1):
            x, y = on_line(lib, a, left), on_line(lib, b, right)
            assert_close((x @ y).full_tensor(), a @ b)
            assert_close(torch.addmm(on_line(lib, torch.ones(8), lib.Replicate()), x, y).full_tensor(), a @ b + 1)


@program
def batched_products(lib: Library) -> None:
    a, b = drawn(4, 2, 3), drawn(4, 3, 5, seed=1)
    for placement in kinds(lib, 0, 1):
        x, y = on_line(lib, a, placement), on_line(lib, b, placement)
        assert_close(torch.bmm(x, y).full_tensor(), a @ b)
        assert_close(torch.einsum("bij,bjk->bik", x, y).full_tensor(), a @ b)


@program
def embeddings_by_rows_and_columns(lib: Library) -> None:
    ids = torch.tensor([[0, 5, 3], [7, 1, 1]])
    for placement in kinds(lib, 0, 1):
        table = on_line(lib, drawn(8, 4), placement).requires_grad_()
        theirs = drawn(8, 4).requires_grad_()
        out = F.embedding(on_line(lib, ids, lib.Replicate()), table)
        assert_close(out.full_tensor(), F.embedding(ids, theirs))
        out.sum().backward()
        F.embedding(ids, theirs).sum().backward()
        assert_close(table.grad.full_tensor(), theirs.grad)


@program
def norms_with_gradients(lib: Library) -> None:
    for placement in kinds(lib, 0, 1):
        norm = lib.distribute_module(nn.LayerNorm(4), line(lib))
        x = on_line(lib, drawn(8, 4), placement).requires_grad_()
        theirs, alone = drawn(8, 4).requires_grad_(), nn.LayerNorm(4)
        norm(x).square().sum().backward()
        alone(theirs).square().sum().backward()
        assert_close(x.grad.full_tensor(), theirs.grad, atol=1e-4, rtol=1e-4)
        assert_close(norm.weight.grad.full_tensor(), alone.weight.grad, atol=1e-4, rtol=1e-4)


@program
def comparing_whole_tensors(lib: Library) -> None:
    x = on_line(lib, drawn(8, 4), lib.Shard(0))
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)


@program
def casts_keep_layouts(lib: Library) -> None:
    x = on_line(lib, drawn(8, 4), lib.Shard(0))
    for y in (x.double(), x.to(torch.bfloat16), x.bool(), x.detach(), x.clone(), x.contiguous()):
        assert y.placements == (lib.Shard(0),)
        assert isinstance(y, lib.DTensor)


@program
def items_of_reduced_values(lib: Library) -> None:
    x = on_line(lib, torch.arange(8.0), lib.Shard(0))
    assert x.sum().full_tensor().item() == 28
    assert x.max().full_tensor().item() == 7
    assert on_line(lib, torch.tensor(3.5), lib.Replicate()).item() == 3.5
