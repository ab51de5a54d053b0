"""Layouts for tests of random numbers."""

from __future__ import annotations

from itertools import product
from random import Random

import torch

from dshard import Layout, Mesh, Replicate, Shard

ONE = Mesh((1,), ("x",))
MESHES = (ONE, Mesh((4,), ("x",)), Mesh((2, 2), ("x", "y")), Mesh((2, 2, 2), ("x", "y", "z")))
SHAPE = (5, 7, 6)


def in_blocks(layout: Layout) -> Layout:
    """The layout with the last dim sharded in blocks."""
    last = len(SHAPE) - 1
    placements = [Shard(last, blocks=3) if p == Shard(last) else p for p in layout.placements]
    return Layout(layout.mesh, tuple(placements), layout.order)


def sampled_layouts() -> list[Layout]:
    """Return all layouts on one axis, and as many of other meshes, with nested shards in both orders, and in blocks."""
    sampled: list[Layout] = []
    for mesh in MESHES:
        every = []
        for chosen in product([Replicate(), *map(Shard, range(len(SHAPE)))], repeat=mesh.ndim):
            plain = Layout(mesh, chosen)
            turned = tuple((dim, plain.axes_of(dim)[::-1]) for dim in plain.sharded_dims())
            both = {plain, Layout(mesh, chosen, turned)}
            every += both | {*map(in_blocks, both)}
        every.sort(key=str)
        sampled += every if len(every) <= 7 else Random(0).sample(every, 7)
    return sampled


LAYOUTS = sampled_layouts()
GIVEN = torch.arange(210.0).view(SHAPE).remainder(11.0) / 8
