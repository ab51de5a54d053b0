"""Programs that write through chains of views equal one device: values, gradients, and what is refused."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import pytest
from helpers.view_programs import PLAIN, Program, differs, leaves_of, outcome, program
from torch import Tensor

import dshard
from dshard import DeviceMesh, DTensor, Layout, Mesh, Replicate, Shard, distribute_tensor
from dshard.testing import RankPool, distribute, simulated, whole


def layout_of(made: Program, mesh_shape: tuple[int, ...], draw: Random) -> list[Any]:
    """One placement of the base for each mesh axis, seldom whole."""
    return [draw.choice([Replicate(), *map(Shard, range(len(made.shape))), Shard(0)]) for _ in mesh_shape]


def drawn(seed: int, mesh_shape: tuple[int, ...]) -> tuple[Program, list[Any]]:
    draw = Random(seed)
    made = PLAIN[seed] if seed < len(PLAIN) else program(draw)
    return made, layout_of(made, mesh_shape, draw)


def on_one_device(made: Program) -> list[Tensor | None] | str:
    x, y = leaves_of(made)
    return outcome(made, x.requires_grad_(), y.requires_grad_(), lambda t: None if t is None else t.detach())


@cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return dshard.init_device_mesh("cpu", shape)


def wrong_on_ranks(shape: tuple[int, ...], seeds: range, turns: int) -> list[str]:
    """The programs that come to something else than on one device, when they are met first or again."""
    found = []
    for seed in seeds:
        made, placements = drawn(seed, shape)
        right = on_one_device(made)
        for turn in range(turns):
            x, y = leaves_of(made)
            dx = distribute_tensor(x, mesh_of(shape), placements, src_data_rank=None).requires_grad_()
            dy = distribute_tensor(y, mesh_of(shape), src_data_rank=None).requires_grad_()
            mine = outcome(made, dx, dy, lambda t: t.detach().full_tensor() if isinstance(t, DTensor) else t)
            found += [f"{seed} {made} {placements} {turn}: {how}" for how in [differs(mine, right)] if how]
    return found


def wrong_when_simulated(shape: tuple[int, ...], seeds: range) -> list[str]:
    """The same on simulated ranks."""
    found, mesh = [], Mesh(shape)
    for seed in seeds:
        made, placements = drawn(seed, shape)
        x, y = leaves_of(made)
        with simulated(mesh):
            dx = distribute(x, Layout(mesh, tuple(placements))).requires_grad_()
            dy = distribute(y, Layout(mesh, (Replicate(),) * mesh.ndim)).requires_grad_()
            mine = outcome(made, dx, dy, lambda t: whole(t.detach()) if isinstance(t, DTensor) else t)
        found += [f"{seed} {made} {placements}: {how}" for how in [differs(mine, on_one_device(made))] if how]
    return found


@pytest.mark.ranks
def test_writes_through_views_on_ranks(ranks: RankPool) -> None:
    """Each program when it is met first, when what it comes to is learned, and from then on."""
    assert ranks.run(wrong_on_ranks, (4,), range(16), 3, timeout=150) == [[]] * 4


@pytest.mark.parametrize("shape", [(3,), (2, 2)], ids=str)
def test_writes_through_views_on_simulated_ranks(shape: tuple[int, ...]) -> None:
    assert not wrong_when_simulated(shape, range(14))


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("first", range(50, 2000, 150))
def test_more_writes_through_views_on_ranks(ranks: RankPool, shape: tuple[int, ...], first: int) -> None:
    assert ranks.run(wrong_on_ranks, shape, range(first, first + 150), 3, timeout=600) == [[]] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(50, 1000, 50))
def test_more_writes_through_views_on_simulated_ranks(first: int) -> None:
    assert not wrong_when_simulated((2, 2), range(first, first + 50))
