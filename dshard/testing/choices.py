"""Layouts in which the operands of an operator are tested."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from random import Random
from typing import Literal, TypeAlias

from torch import Tensor

from dshard.layout import Layout
from dshard.mesh import Mesh
from dshard.placements import Partial, Placement, Replicate, Shard

Choice: TypeAlias = tuple[Layout, ...]


def layouts_of(x: Tensor, mesh: Mesh, placements: Literal["all"] | Sequence[Placement] = "all") -> list[Layout]:
    """All layouts of `x` with these placements; if two axes shard one dim, in both orders."""
    if placements == "all":
        placements = [Replicate(), *map(Shard, range(x.dim())), *([Partial()] if has_gradient(x) else [])]
    legal = [p for p in placements if not isinstance(p, Shard) or p.dim < x.dim()]
    legal = [p for p in legal if not isinstance(p, Partial) or has_gradient(x)]
    layouts: list[Layout] = []
    for combination in product(legal, repeat=mesh.ndim):
        layout = Layout(mesh, combination)
        layouts += dict.fromkeys((layout, in_other_order(layout)))
    return layouts


def in_other_order(layout: Layout) -> Layout:
    """The layout with the axes that shard one dim in reverse order."""
    orders = tuple((dim, tuple(reversed(layout.axes_of(dim)))) for dim in layout.sharded_dims())
    return Layout(layout.mesh, layout.placements, orders)


def sample_combinations(choices: Sequence[Sequence[Layout]], limit: int) -> Iterator[Choice]:
    """All combinations of one layout for each operand, or a fixed sample of `limit` of them."""
    total = prod(map(len, choices))
    numbers: Sequence[int] = range(total) if total <= limit else sorted(Random(0).sample(range(total), limit))
    for number in numbers:
        picked = []
        for options in choices:
            number, i = divmod(number, len(options))
            picked.append(options[i])
        yield tuple(picked)


def has_gradient(x: Tensor) -> bool:
    """Whether tensors of the dtype of `x` can have gradients, and be sums of terms."""
    return x.is_floating_point() or x.is_complex()
