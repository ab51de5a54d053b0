"""Seconds of all redistributions of tensors of one shape: lower bounds at first, exact where a plan needs them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import permutations, product

import torch
from torch import Tensor

from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.planning.least_moves import least_moves
from dshard.redistribute.blocks import unflattened_shape
from dshard.redistribute.layout_state import State
from dshard.redistribute.plan import plan, plan_price
from dshard.redistribute.space import space_of
from dshard.redistribute.step import AllGather, AllReduce, ReduceScatter
from dshard.rules.strategy import completed_layout
from dshard.topology import Topology

FEW = 256
"""So many moves are bounded one by one; four times as many for each mesh axis above three, as layouts are then."""


def completion(layout: Layout, shape: Shape, itemsize: int, topology: Topology) -> tuple[Layout, float]:
    """The layout in which a tensor that is left partial is completed for the fewest seconds, its gradient brought back.

    So is what a model returns: whoever reads it needs the sum.
    """
    whole, axes = completed_layout(layout), layout.partial_axes()
    if not axes:
        return layout, 0.0
    space = space_of(layout.mesh, topology, shape, itemsize)
    ends = [whole, *[whole.split(dim, axes) for dim in range(len(shape)) if shape[dim] >= layout.mesh.size]]

    def seconds(end: Layout) -> float:
        moves = (layout, end), (end.cotangent(), layout.cotangent())
        return sum([plan_price(space.state_of(src), space.state_of(dst), space).seconds for src, dst in moves])

    return min([(end, seconds(end)) for end in ends], key=lambda each: each[1])


class MovePrices:
    """A matrix of seconds between the layouts of tensors of one shape, in the order in which they were added.

    An entry is 0 where nobody asked, then at most the seconds of the cheapest plan, and these once it is exact. With
    `joined` a tensor whose plan is of collectives that can be joined moves together with others, `joined` times as many
    bytes in all, and takes its share of that.
    """

    def __init__(
        self, mesh: Mesh, topology: Topology, shape: Shape, itemsize: int, joined: float | None = None
    ) -> None:
        self.is_joined, self.joined, self.itemsize = joined is not None, joined or 1.0, itemsize
        self.space = space_of(mesh, topology, shape, round(itemsize * self.joined))
        self.numbers: dict[Layout, int] = {}
        self.layouts: list[Layout] = []
        self.of_states: dict[State, int] = {}
        self.seconds = torch.zeros(0, 0, dtype=torch.float64)
        self.asked = torch.zeros(0, 0, dtype=torch.bool)
        self.known = torch.zeros(0, 0, dtype=torch.bool)
        self.priced = torch.zeros(0, 0, dtype=torch.bool)

    def add(self, layouts: Iterable[Layout]) -> Tensor:
        """The numbers of these layouts, which are added if they are new."""
        numbers = [self.numbers.setdefault(layout, len(self.numbers)) for layout in layouts]
        new = len(self.numbers) - len(self.layouts)
        if new:
            self.layouts = list(self.numbers)
            self.of_states = {self.space.state_of(layout): i for i, layout in enumerate(self.layouts)}
            grow = torch.nn.functional.pad
            self.seconds, self.asked, self.known, self.priced = (
                grow(table, (0, new, 0, new)) for table in (self.seconds, self.asked, self.known, self.priced)
            )
            self.known.fill_diagonal_(True)
            self.priced.fill_diagonal_(True)
        return torch.tensor(numbers, dtype=torch.long)

    def ask(self, sources: Tensor, destinations: Tensor) -> None:
        """Have the moves from one of the sources to one of the destinations bounded next."""
        self.asked[sources[:, None], destinations] = True

    def bound(self) -> None:
        """Have a lower bound for each move that was asked for."""
        if int((self.asked & ~self.known).sum()) > FEW * 4 ** max(0, self.space.mesh.ndim - 3):
            blocks = dict.fromkeys([tuple(layout.blocks.items()) for layout in self.layouts])
            if all(self._bound_together(dict(cuts)) for cuts in blocks):
                self.known |= self.asked  # by nothing, where blocks become others
        states, space = [self.space.state_of(layout) for layout in self.layouts], self.space
        rows, columns = (self.asked & ~self.known).nonzero(as_tuple=True)
        each = [space.least(states[i], states[j]) for i, j in zip(rows.tolist(), columns.tolist(), strict=True)]
        self.seconds[rows, columns] = torch.tensor(each, dtype=torch.float64) / self.joined
        self.known[rows, columns] = True

    def _bound_together(self, cuts: Mapping[int, int]) -> bool:
        """Bound all moves to, from and between layouts of these blocks at once, unless there are too many."""
        space, mesh = self.space, self.space.mesh
        own = torch.tensor([dict(layout.blocks) == dict(cuts) for layout in self.layouts])
        fits = [own[i] or (not x.blocks and not any(map(x.axes_of, cuts))) for i, x in enumerate(self.layouts)]
        at = torch.tensor(fits).nonzero().squeeze(1)
        whole = space_of(mesh, space.topology, unflattened_shape(space.shape, cuts), space.itemsize)
        least = least_moves(whole, [whole.state_of(self.layouts[i].unflattened(cuts)) for i in at.tolist()])
        if least is None:
            return False
        pairs = torch.meshgrid(at, at, indexing="ij")
        new = (own[at][:, None] | own[at]) & ~self.known[pairs]
        self.seconds[pairs] = torch.where(new, least / self.joined, self.seconds[pairs])
        self.known[pairs] |= new
        return True

    def price(self, src: int, dst: int) -> bool:
        """Price one move exactly, and so those on interchangeable mesh axes; return whether it was not before."""
        if self.priced[src, dst]:
            return False
        before, after = (self.space.state_of(self.layouts[i]) for i in (src, dst))
        seconds = self._seconds(before, after)
        for pair in {(src, dst), *self._renamed(before, after)}:
            self.seconds[pair] = seconds
            self.priced[pair] = self.known[pair] = True
        return True

    def _seconds(self, src: State, dst: State) -> float:
        space = self.space
        if not self.is_joined:
            return plan_price(src, dst, space).seconds
        own = plan(
            space.layout_of(src), space.layout_of(dst), space.shape, self.itemsize, space.topology, search="joined"
        )
        is_joined = all(isinstance(step, AllGather | AllReduce | ReduceScatter) for step in own.steps)
        is_joined = is_joined and own.joined_seconds(self.itemsize, space.topology) <= own.seconds
        return own.seconds_on(space.topology, space.itemsize) / self.joined if is_joined else own.seconds

    def _renamed(self, src: State, dst: State) -> Iterator[tuple[int, int]]:
        """The moves that differ from one in the names of interchangeable mesh axes."""
        space = self.space
        if src.blocked or dst.blocked:
            return
        for ways in product(*map(permutations, space.roles)):
            axes = list(range(space.mesh.ndim))
            for role, way in zip(space.roles, ways, strict=True):
                for axis, other in zip(role, way, strict=True):
                    axes[axis] = other
            ends = [self.of_states.get(space.with_axes(state, axes)) for state in (src, dst)]
            if None not in ends:
                yield ends[0], ends[1]  # type: ignore[misc]
