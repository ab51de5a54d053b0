"""Pieces of a sharded dim have the values, gradients and layout of the whole, and little is sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dshard import Mesh, Replicate, Shard, distribute_tensor, init_device_mesh, trace
from dshard.testing import RankPool, simulated, whole

LAYOUTS = {
    "line": (Mesh((4,)), [Shard(1)]),
    "both axes": (Mesh((2, 2)), [Shard(1), Shard(1)]),
    "rows and columns": (Mesh((2, 2)), [Shard(0), Shard(1)]),
    "three ranks": (Mesh((3,)), [Shard(1)]),
    "one axis": (Mesh((2, 3)), [Replicate(), Shard(1)]),
}
SIZES = [8, 16, 7, [8, 16], [4, 20], [6, 6, 12], [5, 19], [1] * 24]


def rows() -> Tensor:
    return torch.arange(120.0, dtype=torch.float64).view(5, 24)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_one_device(layout: str, sizes: int | list[int]) -> None:
    mesh, placements = LAYOUTS[layout]
    alone = rows().requires_grad_()
    expected = alone.split(sizes, 1)
    sum((i * piece.square()).sum() for i, piece in enumerate(expected, 1)).backward()
    with simulated(mesh):
        x = distribute_tensor(rows(), mesh, placements, src_data_rank=None).requires_grad_()
        found = x.split(sizes, 1)
        sum((i * piece.square()).sum() for i, piece in enumerate(found, 1)).backward()

        assert all(torch.equal(whole(a.detach()), b) for a, b in zip(found, expected, strict=True))
        assert [piece.stride() for piece in found] == [piece.stride() for piece in expected]
        assert torch.equal(whole(x.grad), alone.grad)


@pytest.mark.parametrize("sizes", [8, [8, 16], [5, 19]], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pieces_and_the_whole_are_one_tensor(layout: str, sizes: int | list[int]) -> None:
    mesh, placements = LAYOUTS[layout]
    with simulated(mesh):
        for x in (alone := rows(), laid := distribute_tensor(rows(), mesh, placements, src_data_rank=None)):
            first, second, *_ = x.split(sizes, 1)
            second.add_(100)
            x.mul_(2)
            kept = first if x is alone else whole(first)
            if x is alone:
                expected = x.clone(), kept.clone()

        assert torch.equal(whole(laid), expected[0])
        assert torch.equal(kept, expected[1])


def test_all_pieces_come_in_one_exchange_of_what_is_lacking() -> None:
    """Of 12 blocks of two columns a rank holds 3 in a row and wants each fourth: at most one is there already."""
    mesh = Mesh((4,))
    with simulated(mesh), trace() as sent:
        x = distribute_tensor(rows(), mesh, [Shard(1)], src_data_rank=None)
        pieces = x.split(8, 1)

    assert [event.collective for event in sent.events] == ["all_to_all"]
    assert sent.nbytes == 2 * (5 * 2 * 8)
    assert all(piece.placements == (Shard(1),) for piece in pieces)


def test_many_pieces_that_do_not_divide_are_cut_from_the_whole() -> None:
    mesh = Mesh((4,))
    with simulated(mesh), trace() as sent:
        distribute_tensor(rows(), mesh, [Shard(1)], src_data_rank=None).split(1, 1)

    assert [event.collective for event in sent.events] == ["all_gather"]


def split_on_ranks(sizes: int | Sequence[int]) -> float:
    mesh, alone = init_device_mesh("cpu", (4,)), rows().requires_grad_()
    x = distribute_tensor(rows(), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    for given in (x, alone):
        sum((i * piece.square()).sum() for i, piece in enumerate(given.split(sizes, 1), 1)).backward()
    return (whole(x.grad) - alone.grad).abs().max().item()


@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [8, [5, 19]], ids=str)
def test_real_ranks_split_as_one_device(ranks: RankPool, sizes: int | list[int]) -> None:
    assert ranks.run(split_on_ranks, sizes) == [0.0] * 4
