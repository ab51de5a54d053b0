"""Dims of size one that are broadcast, and mesh axes of one rank: as on one device, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.single_device import assert_same_as_single_device
from helpers.view_cases import assert_same, rows
from torch import Tensor

from dshard import Layout, Mesh, Partial, Replicate, Shard
from dshard.testing import distribute, simulated

EINSUMS: dict[str, tuple[Tensor, Tensor]] = {
    "ij,jk->ik": (rows(2, 1), rows(3, 4)),
    "bij,kbj->bik": (rows(3, 2, 4), rows(2, 1, 1)),
    "ij,ik->ijk": (rows(1, 2), rows(5, 3)),
}


def gradients(out: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradients of the squares of `out`, and those of the squares of the first of these."""
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(first[0].square().sum(), leaves)]


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum_broadcasts_dims_of_size_one(equation: str) -> None:
    mesh, operands = Mesh((2,), ("x",)), EINSUMS[equation]
    plain = tuple(x.clone().requires_grad_() for x in operands)
    expected = torch.einsum(equation, *plain)
    expected_gradients = gradients(expected, plain)
    for placements in product(*([Replicate(), Partial(), *map(Shard, range(x.dim()))] for x in operands)):
        with simulated(mesh):
            pairs = zip(operands, placements, strict=True)
            leaves = tuple(distribute(x, Layout(mesh, (placement,))).requires_grad_() for x, placement in pairs)
            out = torch.einsum(equation, *leaves)
            assert_same(out.detach(), expected.detach())
            for actual, gradient in zip(gradients(out, leaves), expected_gradients, strict=True):
                assert_same(actual, gradient)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 5), (3, 1)], ids=str)
def test_linear_broadcasts_its_bias(shape: tuple[int, ...]) -> None:
    operands = tuple(x.requires_grad_() for x in (rows(3, 4), rows(5, 4), rows(*shape)))
    assert_same_as_single_device((F.linear, operands), Mesh((3,), ("x",)), seed=str(shape))


ALONG_BLOCKS: dict[str, Callable[[Any], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "cross_entropy": lambda x: F.cross_entropy(x, x.detach().argmax(1)),
}


@pytest.mark.parametrize("name", ALONG_BLOCKS)
@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (1, 1)])
def test_a_mesh_axis_of_one_rank_may_shard_blocks(name: str, shape: tuple[int, ...]) -> None:
    mesh, function, plain = Mesh(shape, ("x", "y")), ALONG_BLOCKS[name], rows(3, 4).requires_grad_()
    expected = function(plain)
    (gradient,) = torch.autograd.grad(expected.square().sum(), plain)
    with simulated(mesh):
        x = distribute(plain.detach(), Layout(mesh, (Shard(1, blocks=2),) * 2)).requires_grad_()
        out = function(x)
        assert_same(out.detach(), expected.detach())
        assert_same(torch.autograd.grad(out.square().sum(), x)[0], gradient)
