"""Seconds of all redistributions of tensors of one shape: lower bounds at first, exact where a plan needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations, product
from math import inf, prod
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.redistribute.blocks import unflattened_shape
from dshard.redistribute.layout_state import COUNTED, Load, State, nested_and_apart_in
from dshard.redistribute.plan import plan, plan_price
from dshard.redistribute.space import Space, space_of
from dshard.redistribute.step import AllGather, AllReduce, Exchange, ReduceExchange, ReduceScatter, Slice
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


# -- lower bounds on the seconds of the cheapest plans between many layouts of tensors of one shape, over arrays
# The layouts are the nodes of a graph, and the steps that a plan may take are its edges: the least seconds along these
# are at most those of a plan, whose search looks at fewer, as in between it shards few dims and holds no larger chunks.
# A step straight to the end, such as an exchange, leads from any layout to any other, so that it is not made: what it
# receives at least is counted for all pairs together.

STATES = 4096
"""The most layouts of a graph."""
ROWS = 64
"""So many rows of a thousand numbers stay in a processor's cache."""


def least_moves(space: Space, ends: Sequence[State]) -> Tensor | None:
    """The least seconds from each of these states to each, none of blocks; None where there are too many layouts.

    Reductions that are left partial are sums.
    """
    whole = dict.fromkeys([*ends, *[each for end in ends for each in _without_sums(space, end)]])
    graph = _steps(space, tuple(whole))
    if graph is None:
        return None
    states, steps = graph
    far = _closed(steps, len(whole))
    last = _Straight(space, states, tuple(whole)).seconds()
    least = far[: len(whole)].T.contiguous()
    for rows, ways in zip(least.split(ROWS), far[:, : len(whole), None].split(ROWS, 1), strict=True):
        total = torch.empty_like(rows)
        for number in range(len(states)):
            torch.add(ways[number], last[number], out=total)
            torch.minimum(rows, total, out=rows)
    numbers = {state: number for number, state in enumerate(whole)}
    for end in ends:  # what is reduced on fewer axes may be reached first, by such a step, too
        for other in _without_sums(space, end):
            at, before = numbers[end], numbers[other]
            least[:, at] = torch.minimum(least[:, at], least[:, before] + least[before, at])
    return least[: len(ends), : len(ends)] if len(whole) > len(ends) else least


def _without_sums(space: Space, state: State) -> Iterator[State]:
    """The states that are partial on fewer axes."""
    axes = [axis for axis, op in enumerate(state.partial) if op is not None]
    for kept in product((False, True), repeat=len(axes)):
        if not all(kept):
            left = {axis for axis, keeps in zip(axes, kept, strict=True) if keeps}
            yield space.state(state.axes, tuple([op if i in left else None for i, op in enumerate(state.partial)]))


_Steps = list[tuple[NDArray[np.int64], NDArray[np.float64]]]
"""From each state the numbers of those to which a step leads, and its seconds: arrays of numpy, as they are small."""


def _steps(space: Space, ends: Sequence[State]) -> tuple[list[State], _Steps] | None:
    """All states that steps lead to from these, which are the first, and the steps from each."""
    dims, begins = tuple(range(len(space.shape))), tuple([(axis, "sum") for axis in range(space.mesh.ndim)])
    numbers, states, steps = {state: number for number, state in enumerate(ends)}, list(ends), _Steps()
    for state in states:  # which grow
        least = dict[int, float]()
        for there, _, seconds in space.successors(state, dims, begins):  # type: ignore[arg-type]
            number = numbers.setdefault(there, len(states))
            if number == len(states):
                states.append(there)
            least[number] = min(seconds, least.get(number, inf))
        if len(states) > STATES:
            return None
        steps.append((np.array([*least], np.int64), np.array([*least.values()], np.float64)))
    return states, steps


def _closed(steps: _Steps, ends: int) -> Tensor:
    """For each state the least seconds of steps to it from each of the first ones."""
    far = np.full((len(steps), ends), inf)
    np.fill_diagonal(far, 0.0)
    waiting = set(range(ends))
    while waiting:
        again = set[int]()
        for number in sorted(waiting):
            there, seconds = steps[number]
            before = far[there]
            after = far[number] + seconds[:, None]
            sooner = (after < before).any(1)
            there, after, before = there[sooner], after[sooner], before[sooner]
            far[there] = np.minimum(before, after)
            again.update(there.tolist())
        waiting = again
    return torch.from_numpy(far)


class _Dim(NamedTuple):
    """What one dim says of all pairs of states, by the number of the mesh axes that shard it in either.

    `of` are these numbers, of states and of ends; `kept` is the most of its size that a rank has before and after,
    `along` that which ranks with its index on a mesh axis have; `senders` is a factor of the ranks that send.
    """

    of: tuple[Tensor, Tensor]
    differs: Tensor
    axes: Tensor
    nested: Tensor
    apart: Tensor
    kept: Tensor
    along: tuple[Tensor, ...]
    senders: Tensor

    def each(self, table: Tensor) -> Tensor:
        """The entries of a table for all pairs."""
        return table[self.of[0]][:, self.of[1]]


class _Straight:
    """Steps straight to an end: at most the seconds of a slice, an exchange or a reduction by one."""

    def __init__(self, space: Space, states: Sequence[State], ends: Sequence[State]) -> None:
        self.space, self.sizes, self.states, self.ends = space, space.sizes, states, ends
        self.dims = [self._dim(dim) for dim in range(len(space.shape))]
        self.partial = [torch.tensor([_bits(x.partial) for x in each]) for each in (states, ends)]
        self.even = [torch.tensor([x.even for x in each]) for each in (states, ends)]
        self.numel = torch.tensor([x.numel for x in ends])
        self.nested = self._all(lambda dim: dim.nested, torch.logical_and)

    def _dim(self, dim: int) -> _Dim:
        numbers: dict[tuple[int, ...], int] = {}
        firsts: list[State] = []
        for state in self.states:  # all ends are among them
            if numbers.setdefault(state.axes[dim], len(numbers)) == len(firsts):
                firsts.append(state)
        pairs = list(product(firsts, repeat=2))
        size, mesh = self.space.shape[dim], range(len(self.sizes))

        def table(value: Callable[[State, State], int]) -> Tensor:
            return torch.tensor([value(*pair) for pair in pairs]).reshape(len(firsts), -1)

        def held(here: State, axis: int) -> int:
            return -(-size // self.sizes[axis]) if axis in here.axes[dim] else size

        def senders(here: State, there: State) -> int:
            have, want = max(here.local[dim], 1), max(there.local[dim], 1)
            return min(-(-size // have), -(-want // have) + (want % have != 0 < have % want))

        return _Dim(
            tuple([torch.tensor([numbers[x.axes[dim]] for x in each]) for each in (self.states, self.ends)]),  # type: ignore[arg-type]
            table(lambda here, there: here.axes[dim] != there.axes[dim]),
            table(lambda here, there: sum([1 << axis for axis in {*here.axes[dim], *there.axes[dim]}])),
            table(lambda here, there: there.axes[dim][: len(here.axes[dim])] == here.axes[dim]),
            table(lambda here, there: nested_and_apart_in(here, there, dim)[1]),
            table(lambda here, there: min(here.local[dim], there.local[dim])),
            tuple([table(lambda here, there, axis=axis: min(there.local[dim], held(here, axis))) for axis in mesh]),  # type: ignore[misc]
            table(senders),
        )

    def _all(self, table: Callable[[_Dim], Tensor], join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What all dims say of each pair, joined."""
        first, *others = [dim.each(table(dim)) for dim in self.dims]
        for each in others:
            first = join(first, each)
        return first

    def seconds(self) -> Tensor:
        """From each state to each end; infinite where no such step leads there."""
        seconds = torch.full((len(self.states), len(self.ends)), inf, dtype=torch.float64)
        partial, size = (self.partial[0][:, None], self.partial[1]), prod(self.sizes)
        alike = partial[0] == partial[1]
        slices = [self.space.seconds(Slice, (), Load(0, n, 0)) for n in self.numel.tolist()]
        if size > 1:
            at = (alike & self.nested).nonzero(as_tuple=True)
            seconds[at] = torch.tensor(slices, dtype=torch.float64)[at[1]]
        self._exchanges(seconds, alike & ~self.nested)
        ended = partial[0] & ~partial[1]
        split = torch.tensor([sum([1 << axis for axis in end.split]) for end in self.ends])
        is_reduced = self.nested & (ended > 0) & (partial[1] & ~partial[0] == 0) & (ended & ~split == 0)
        self._reductions(seconds, is_reduced.nonzero(as_tuple=True), ended)
        return seconds

    def _exchanges(self, seconds: Tensor, which: Tensor) -> None:
        """Put in exchanges, each of the least load that it may have."""
        at = which.nonzero(as_tuple=True)
        axes = self._all(lambda dim: dim.differs * dim.axes, torch.bitwise_or)[at]
        needed, even = self.numel[at[1]], self.even[0][at[0]] & self.even[1][at[1]]
        lacking = needed - self._all(lambda dim: dim.kept, torch.mul)[at]
        apart = self._all(lambda dim: dim.apart, torch.logical_or)[at] & even
        columns = [axes, torch.where(apart, needed, lacking)]
        moved = [dim.each(dim.differs)[at] for dim in self.dims[1:]]
        columns.append(2 * needed * (torch.stack(moved).any(0) if moved else 0))
        columns.append(self._all(lambda dim: dim.senders, torch.mul)[at])
        columns.append(torch.where(even, lacking, 0))
        for axis in range(len(self.sizes)):
            kept = self._all(lambda dim, axis=axis: dim.along[axis], torch.mul)[at]  # type: ignore[misc]
            columns.append(torch.where(even, needed - kept, 0))
        seconds[at] = _by_kind(columns, self._exchange)

    def _exchange(self, bits: int, received: int, copied: int, senders: int, average: int, *along: int) -> float:
        axes = tuple([axis for axis in range(len(self.sizes)) if bits >> axis & 1])
        n = prod([self.sizes[axis] for axis in axes])
        crossing = tuple([(along[axis], along[axis]) for axis in axes]) if len(axes) > 1 and n <= COUNTED else ()
        mean = average if n <= COUNTED else None
        load = Load(received, copied * (n > 1), min(n - 1, senders), mean, crossing)
        return self.space.seconds(Exchange, axes, load)

    def _reductions(self, seconds: Tensor, at: tuple[Tensor, ...], ended: Tensor) -> None:
        """Put in reductions straight to the chunks of an end."""
        seconds[at] = _by_kind([ended[at], self.numel[at[1]], self.even[1][at[1]].long()], self._reduction)

    def _reduction(self, bits: int, numel: int, even: int) -> float:
        axes = tuple([axis for axis in range(len(self.sizes)) if bits >> axis & 1])
        n = prod([self.sizes[axis] for axis in axes])
        return self.space.seconds(ReduceExchange, axes, Load((n - 1) * numel, n * numel, n - 1, even=bool(even)))


def _bits(values: Sequence[object]) -> int:
    return sum([1 << i for i, value in enumerate(values) if value is not None])


def _by_kind(columns: Sequence[Tensor], value: Callable[..., float]) -> Tensor:
    """The value of each row, worked out once for equal rows."""
    kinds = torch.zeros_like(columns[0])
    for column in columns:
        _, own = column.unique(return_inverse=True)
        _, kinds = (kinds * (int(own.max()) + 1 if len(own) else 1) + own).unique(return_inverse=True)
    many = int(kinds.max()) + 1 if len(kinds) else 0
    first = torch.empty(many, dtype=torch.long).scatter_(0, kinds, torch.arange(len(kinds)))
    rows = torch.stack([column[first] for column in columns], 1).tolist() if many else []
    return torch.tensor([value(*row) for row in rows], dtype=torch.float64)[kinds]
