"""The least seconds of any sequence of steps between layouts, by the steps between each two of them."""

from __future__ import annotations

from functools import cache
from itertools import permutations, product

import torch
from torch import Tensor

from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Replicate, Shard
from dshard.redistribute import MakePartial
from dshard.redistribute.layout_state import step_seconds
from dshard.redistribute.step import after
from dshard.topology import Topology
from helpers.layout_steps import steps_from, steps_straight


def all_layouts(mesh: Mesh, ndim: int) -> list[Layout]:
    """The layouts of tensors of `ndim` dims, partial sums included, with all orders of the mesh axes of a dim."""
    found = []
    for placements in product([Replicate(), Partial(), *map(Shard, range(ndim))], repeat=mesh.ndim):
        layout = Layout(mesh, placements)
        orders = [[(dim, axes) for axes in permutations(layout.axes_of(dim))] for dim in layout.sharded_dims()]
        found += [Layout(mesh, placements, order) for order in product(*orders)]
    return found


class Closure:
    """The least seconds between all layouts of a tensor of one shape, by sums of steps.

    A step leads to any layout that a single one can lead to; it begins only reductions of the destination, and in a
    lean sequence no layout holds more than the larger end.
    """

    def __init__(self, mesh: Mesh, shape: Shape, topology: Topology, itemsize: int) -> None:
        self.layouts = all_layouts(mesh, len(shape))
        self.index = {layout: i for i, layout in enumerate(self.layouts)}
        self.sizes = torch.tensor([layout.local_numel(shape) for layout in self.layouts])
        count, sums = len(self.layouts), dict.fromkeys(range(mesh.ndim), "sum")
        self.steps = torch.full((count, count), torch.inf, dtype=torch.float64).fill_diagonal_(0)
        self.beginning: list[tuple[set[int], int, int, float]] = []
        for i, src in enumerate(self.layouts):
            straight = [step for dst in self.layouts for step in steps_straight(src, dst)]
            for step in (*steps_from(src, range(len(shape)), sums), *straight):  # type: ignore[arg-type]
                j, seconds = self.index[after(step, src)], step_seconds(step, src, shape, itemsize, topology)
                if isinstance(step, MakePartial):
                    self.beginning.append(({mesh.axis(axis) for axis in step.axes}, i, j, seconds))
                else:
                    self.steps[i, j] = min(self.steps[i, j].item(), seconds)
        self.tables: dict[tuple[frozenset[int], int | None], Tensor] = {}

    def seconds(self, src: Layout, dst: Layout, *, lean: bool = True) -> float:
        """The least seconds from one layout to another."""
        i, j = self.index[src], self.index[dst]
        key = frozenset(dst.partial_axes()), int(max(self.sizes[i], self.sizes[j])) if lean else None
        if key not in self.tables:
            self.tables[key] = self._table(*key)
        return self.tables[key][i, j].item()

    def _table(self, begins: frozenset[int], room: int | None) -> Tensor:
        least = self.steps.clone()
        for axes, i, j, seconds in self.beginning:
            if axes <= begins:
                least[i, j] = min(least[i, j].item(), seconds)
        if room is not None:
            least[self.sizes > room], least[:, self.sizes > room] = torch.inf, torch.inf
        for via in range(len(least)):  # Floyd and Warshall
            least = torch.minimum(least, least[:, via, None] + least[None, via])
        return least


@cache
def closure(mesh: Mesh, shape: Shape, topology: Topology, itemsize: int = 2) -> Closure:
    """The closure of a mesh, shape and topology, made once."""
    return Closure(mesh, shape, topology, itemsize)
