"""Prices of the expansions of a rule: of the redistributions around it and of its local work."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from typing import NamedTuple

from dshard.caches import cached
from dshard.cost import together_seconds, work_seconds
from dshard.layout import Layout, Shape
from dshard.mesh import Mesh
from dshard.placements import Partial, Replicate, Shard, nested_chunk
from dshard.redistribute.layout_state import State
from dshard.redistribute.plan import PricedPlan, plan_price, plan_price_within
from dshard.redistribute.space import Space, space_of
from dshard.rules.attention_blocks import (
    ADDED,
    HELD_OPERATORS,
    HELD_PASSES,
    PREPARING,
    PRODUCT,
    Work,
    visible_blocks,
    work_of,
)
from dshard.rules.expand import Expansion, sizes_of
from dshard.rules.rule import MOVES, PassThrough, Rule, joined_factors
from dshard.rules.strategy import Constraints, Question, Strategy, completed_layout


class _Move(NamedTuple):
    """A redistribution of operand `i`, or of its gradient, which runs `times` times."""

    i: int
    src: State
    dst: State
    times: int


def parts_of(size: int, axes: tuple[int, ...], mesh: Mesh) -> list[range]:
    """The indices of a factor of this size that ranks have if these mesh axes shard it."""
    places = product(*(range(mesh.shape[axis]) for axis in axes))
    return [nested_chunk(size, axes, mesh.shape, dict(zip(axes, at, strict=True))) or range(0) for at in places]


@cached("triangles", 256)
def _works(
    sizes: tuple[int, int], axes: tuple[tuple[int, ...], ...], mesh: Mesh, backend: str, narrow: bool
) -> Counter[Work]:
    """The work for blocks of a triangle of these sides, which these mesh axes shard, and how many ranks do each."""
    queries, keys = (parts_of(size, each, mesh) for size, each in zip(sizes, axes, strict=True))
    return Counter(
        [
            work_of([visible_blocks((row,), (column,), True)], len(row), backend, narrow)[0]
            for row in queries
            for column in keys
        ]
    )


class Bound:
    """A lower bound on an expansion's seconds: prices so far, and lower bounds of redistributions not yet priced."""

    def __init__(self, fixed: float, moves: list[_Move]) -> None:
        self.fixed, self.moves = fixed, moves

    def seconds(self, price: Price) -> float:
        """The lower bound, less a margin for rounding."""
        return (self.fixed + sum([price.at_least(move) * move.times for move in self.moves])) * (1 - 1e-12)

    def refine(self, price: Price, slack: float) -> bool:
        """Price one unpriced redistribution, within `slack` seconds above its bound; return False if all have prices.

        If it takes more, the expansion cannot beat the best one so far, and is not considered again.
        """
        for move in self.moves:
            if move[:3] not in price.plans:
                before = price.at_least(move)
                price.within(move, before + slack / move.times)
                if price.at_least(move) <= before:  # no slack, or too little to tell
                    price.plan(*move[:3])
                return True
        return False


class Price:
    """Prices of the expansions of one rule for given operands; shared redistributions are priced once."""

    def __init__(self, question: Question) -> None:
        self.rule, self.operands, self.outputs, self.topology, self.constraints = question
        rule, operands, outputs, topology, constraints = question
        self.sizes, mesh = sizes_of(rule, operands, outputs), operands[0].layout.mesh
        self.spaces = [space_of(mesh, topology, o.shape, o.itemsize) for o in operands]
        self.idle = {*range(mesh.ndim)} - {
            axis for o in operands for axis, p in enumerate(o.layout.placements) if not isinstance(p, Replicate)
        }
        needed = sum(constraints.gradients)
        self.again = [
            needed > 0 and not constraints.kept[i] and needed > constraints.gradients[i] for i in range(len(operands))
        ]
        """Whether each operand is redistributed once more for the gradient of another."""
        self.back = [space.state_of(o.layout.cotangent()) for space, o in zip(self.spaces, operands, strict=True)]
        self.plans: dict[tuple[object, ...], PricedPlan] = {}
        self.leasts: dict[tuple[object, ...], float] = {}
        self.end_leasts: dict[tuple[Layout, tuple[Layout, ...]], float] = {}
        self.known_ends: dict[tuple[int, Layout], tuple[Layout, ...]] = {}

    @property
    def mesh(self) -> Mesh:
        """The mesh of the operands."""
        return self.operands[0].layout.mesh

    # -- the least that an expansion takes

    def bound(self, expansion: Expansion) -> Bound:
        """The lower bound of an expansion before any of its redistributions is priced."""
        gradients = self.constraints.gradients
        moves: list[_Move] = []
        for i, (space, layout) in enumerate(zip(self.spaces, expansion.inputs, strict=True)):
            start = space.state_of(self.operands[i].layout)
            moves.append(_Move(i, start, space.state_of(layout), 1 + self.again[i]))
            if gradients and gradients[i]:
                moves.append(_Move(i, space.state_of(expansion.gradients[i]), self.back[i], 1))
        fixed = sum(self.local_work(expansion)) + self.end_at_least(expansion)
        return Bound(fixed, [move for move in moves if move.src is not move.dst])

    def at_least(self, move: _Move) -> float:
        """The seconds of a redistribution, or a lower bound if it is not priced."""
        key = move[:3]
        seconds = self.leasts.get(key)
        if seconds is None:
            seconds = self.leasts[key] = self.spaces[move.i].least(move.src, move.dst)
        return seconds

    def end_at_least(self, expansion: Expansion) -> float:
        """A lower bound on the seconds to redistribute a matmul's result to its end, and its gradient in backward."""
        if not self.rule.loops:
            return 0.0
        layout, (shape, itemsize) = expansion.outputs[0], self.outputs[0]
        ends = self.ends(0, expansion, layout, shape)
        seconds = self.end_leasts.get((layout, ends))
        if seconds is None:
            space, back = space_of(self.mesh, self.topology, shape, itemsize), layout.cotangent()
            again = any(self.constraints.gradients)
            seconds = self.end_leasts[layout, ends] = min(
                [_least(space, layout, end) + (_least(space, end.cotangent(), back) if again else 0.0) for end in ends]
            )
        return seconds

    # -- the price

    def plan(self, i: int, src: State, dst: State) -> PricedPlan:
        """The priced plan that redistributes operand `i`, or its gradient, from `src` to `dst`."""
        key = (i, src, dst)
        priced = self.plans.get(key)
        if priced is None:
            priced = self.plans[key] = plan_price(src, dst, self.spaces[i])
            self.leasts[key] = priced.seconds
        return priced

    def within(self, move: _Move, most: float) -> None:
        """Price a redistribution, or record that it takes more than `most` seconds; equivalent ones share the price."""
        space = self.spaces[move.i]
        key = (move.i, *space.canonical(move.src, move.dst))
        known = self.plans.get(key)
        if known is None and self.leasts.get(key, 0.0) < most:
            known = plan_price_within(*key[1:], space, most)
        for each in (key, move[:3]):
            if known is not None:
                self.plans[each], self.leasts[each] = known, known.seconds
            else:
                self.leasts[each] = max(most, self.leasts.get(each, 0.0))

    def of(self, expansion: Expansion) -> Strategy:
        """The strategy of an expansion, with its price."""
        (compute, backward), constraints = self.local_work(expansion), self.constraints
        gather, reduce, moves = 0.0, 0.0, 0
        for i, (space, layout) in enumerate(zip(self.spaces, expansion.inputs, strict=True)):
            move = self.plan(i, space.state_of(self.operands[i].layout), space.state_of(layout))
            gather, moves = gather + move.seconds, moves + move.steps
            backward += move.seconds * self.again[i]
        for i, needed in enumerate(constraints.gradients):
            if needed:
                backward += self.plan(i, self.spaces[i].state_of(expansion.gradients[i]), self.back[i]).seconds
        ends = tuple(
            [
                self.end(i, expansion, layout, shape, itemsize)
                for i, ((shape, itemsize), layout) in enumerate(zip(self.outputs, expansion.outputs, strict=True))
            ]
        )
        in_full = self.rule.loops or any(isinstance(row, PassThrough) for row in expansion.rows)
        in_full = in_full or self._grows(expansion)
        for i, ((shape, itemsize), layout, end) in enumerate(zip(self.outputs, expansion.outputs, ends, strict=True)):
            together = i > 0 and self.rule.passes == MOVES  # pieces of one tensor, which may be reduced at once
            debt = self.topology if in_full and not together else self.topology.bytes_only()
            reduce += _seconds(space_of(self.mesh, debt, shape, itemsize), layout, end)
            if any(constraints.gradients):
                space = space_of(self.mesh, self.topology, shape, itemsize)
                backward += _seconds(space, end.cotangent(), layout.cotangent())
        return Strategy(
            expansion.inputs,
            expansion.outputs,
            expansion.rows,
            expansion.gradients,
            ends,
            expansion.order,
            gather,
            compute,
            reduce,
            backward,
            moves,
            held=self.held(expansion) if self.rule.held else 0,
        )

    def _grows(self, expansion: Expansion) -> bool:
        """Whether partial outputs have more elements than the operands that would be redistributed in their place.

        So are those of a lookup with more indices than rows: whatever reduces them later could have had the rows for
        less.
        """
        left = {name for term in self.rule.outputs for dim in term for name in dim}
        summed = {row for row in expansion.rows if isinstance(row, str)} - left
        sharded = [
            prod(operand.shape)
            for operand, term in zip(self.operands, self.rule.inputs, strict=True)
            if not summed.isdisjoint([name for dim in term for name in dim])
        ]
        return 0 < sum(sharded) < sum([prod(shape) for shape, _ in self.outputs])

    def local_work(self, expansion: Expansion) -> tuple[float, float]:
        """Seconds of the local work, and of the backward pass's: as much again for each gradient."""
        nbytes: float = sum(
            [
                space.state_of(layout).numel * space.itemsize
                for space, layout in zip(self.spaces, expansion.inputs, strict=True)
            ]
        )
        for (shape, itemsize), layout in zip(self.outputs, expansion.outputs, strict=True):
            nbytes += layout.local_numel(shape) * itemsize
        if self.rule.chosen is not None:
            return self._of_chosen(expansion, nbytes)
        local = self.local_sizes(expansion)
        matmuls = sum([local.pop(factor) for factor in self.rule.apart]) if self.rule.apart else 1
        if self.rule.held:
            nbytes += HELD_PASSES * self.held(expansion)
            seconds = work_seconds(2.0 * matmuls * prod(local.values()), nbytes, self.topology)
            seconds += (HELD_OPERATORS - 1) * self.topology.launch
            return seconds, seconds * sum(self.constraints.gradients)
        if self.rule.triangle is not None:
            sides = local.pop(self.rule.triangle[0]), local.pop(self.rule.triangle[1])
            return self._triangle(expansion, sides, 2.0 * matmuls * prod(local.values()), nbytes)
        work = prod(local.values()) if self.rule.loops else self._joined_work(local)
        seconds = work_seconds(2.0 * matmuls * work, nbytes, self.topology)
        return seconds, seconds * sum(self.constraints.gradients)

    def _joined_work(self, local: dict[str, int]) -> int:
        """The most products that a local operator makes of factors that are summed together."""
        return max([prod([local.get(name, 1) for name in names]) for names in joined_factors(self.rule)], default=1)

    def _of_chosen(self, expansion: Expansion, nbytes: float) -> tuple[float, float]:
        """The local work of the busiest rank where each row works with some parts of operands, as it chooses.

        In the backward pass it is as much again for the rows, and for all operands that have parts.
        """
        assert self.rule.chosen is not None
        each, parts, n = self.rule.chosen.each, self.rule.chosen.parts, self.sizes[self.rule.chosen.parts]
        local, terms = self.local_sizes(expansion), self.rule.inputs
        rows = prod([local[name] for dim in next(t for t in terms if (each,) in t) for name in dim])
        of_parts = [i for i, term in enumerate(terms) if (parts,) in term]
        held = sum([expansion.inputs[i].local_numel(self.operands[i].shape) for i in of_parts])
        shares = self.rule.chosen.routing.shares(n, min(n, self.sizes[each]))
        busiest = max(
            [sum(shares[part.start : part.stop]) for part in parts_of(n, expansion.order.get(parts, ()), self.mesh)]
        )
        seconds = work_seconds(2.0 * rows * busiest * held / max(1, local[parts]), nbytes, self.topology)
        needed = self.constraints.gradients
        times = (
            any(needed[i] for i in of_parts) + any(n for i, n in enumerate(needed) if i not in of_parts)
            if needed
            else 0
        )
        return seconds, seconds * times

    def local_sizes(self, expansion: Expansion) -> dict[str, int]:
        """The size of each factor on the rank with the most."""
        local, sizes = dict(self.sizes), self.spaces[0].sizes
        for factor, axes in expansion.order.items():
            local[factor] = -(-local[factor] // prod(map(sizes.__getitem__, axes)))
        return local

    def held(self, expansion: Expansion) -> int:
        """Bytes of the tensor that a rank holds between matmuls."""
        sizes = self.local_sizes(expansion)
        return self.rule.held * prod([size for factor, size in sizes.items() if factor not in self.rule.apart])

    def _triangle(
        self, expansion: Expansion, sides: tuple[int, int], flops: float, nbytes: float
    ) -> tuple[float, float]:
        """The local work of the busiest rank by blocks of a triangle: `flops` for each pair, and joining of blocks."""
        assert self.rule.triangle is not None
        device, gradients = self.topology, sum(self.constraints.gradients)
        axes = tuple([expansion.order.get(factor, ()) for factor in self.rule.triangle])
        (shape, itemsize), wide = self.outputs[0], max(self.outputs[0][1], 4)
        rows, columns = (max(1, n) for n in sides)
        result = expansion.outputs[0].local_numel(shape) / rows * wide
        q, k, v = (x.local_numel(o.shape) * wide for x, o in zip(expansion.inputs, self.operands[:3], strict=False))
        sizes = [self.sizes[factor] for factor in self.rule.triangle]
        works = _works((sizes[0], sizes[1]), axes, self.mesh, device.backend, itemsize < wide)
        launch, bandwidth = device.launch, device.memory_bandwidth
        forward, backward = list[float](), list[float]()
        for work, ranks in works.items():
            kernels = work_seconds(flops * work.pairs, nbytes, device)
            beside = max(0, work.operators - 1) * launch + work.rows * result / bandwidth
            back = kernels * gradients
            if gradients and any(axes):  # one kernel of the whole triangle gives the gradients themselves
                operators = work.blocks * (1 + gradients) + PREPARING + PRODUCT  # and sums, beside so many kernels
                added = ADDED * (work.queries * q / rows + work.keys * (k + v) / columns)
                back += operators * launch + added / bandwidth
            forward += [kernels + beside] * ranks
            backward += [back] * ranks
        return together_seconds(forward, device), together_seconds(backward, device)

    def end(self, i: int, expansion: Expansion, layout: Layout, shape: Shape, itemsize: int) -> Layout:
        """The layout to which the price redistributes output `i`: the cheapest of its ends."""
        ends = self.ends(i, expansion, layout, shape)
        if len(ends) == 1:
            return ends[0]
        space = space_of(self.mesh, self.topology, shape, itemsize)
        return min(ends, key=lambda end: _seconds(space, layout, end))

    def ends(self, i: int, expansion: Expansion, layout: Layout, shape: Shape) -> tuple[Layout, ...]:
        """The layouts in which output `i` may end: its partial axes sharded, or replicated."""
        if i == 0 and (self.constraints.result is not None or self.constraints.reduced is not None):
            return (requested_layout(self.rule, self.constraints, expansion, shape),)
        if (i, layout) not in self.known_ends:
            returned = self.constraints.returned if i == 0 else None
            end = layout if returned is None else returned_layout(layout, returned)
            self.known_ends[i, layout] = self._ends(end, shape)
        return self.known_ends[i, layout]

    def _ends(self, layout: Layout, shape: Shape) -> tuple[Layout, ...]:
        completed = completed_layout(layout)
        for axis in self.idle & {axis for axis, p in enumerate(completed.placements) if isinstance(p, Shard)}:
            completed = completed.replace(axis, Replicate())
        partial_axes = [axis for axis in layout.partial_axes() if axis not in self.idle]
        if not partial_axes or not shape:
            return (completed,)
        held = completed.largest_shape(shape)
        dim = max(range(len(shape)), key=lambda dim: (held[dim], -dim))
        return completed.split(dim, partial_axes), completed


def _least(space: Space, src: Layout, dst: Layout) -> float:
    return space.least(space.state_of(src), space.state_of(dst))


def _seconds(space: Space, src: Layout, dst: Layout) -> float:
    return plan_price(space.state_of(src), space.state_of(dst), space).seconds


def requested_layout(rule: Rule, constraints: Constraints, expansion: Expansion, shape: Shape) -> Layout:
    """The layout that `constraints` requests for the result of a matmul."""
    layout = expansion.outputs[0]
    if constraints.result is not None:
        return constraints.result
    assert constraints.reduced is not None
    (out,) = rule.outputs
    first = {name for dim in rule.inputs[0] for name in dim}
    dims = {
        "m": [dim for dim, names in enumerate(out) if names and names[0] in first],
        "n": [dim for dim, names in enumerate(out) if names and names[0] not in first],
    }
    for axis, (row, storage) in enumerate(zip(expansion.rows, constraints.reduced, strict=True)):
        if not isinstance(row, str) or not isinstance(layout.placements[axis], Partial) or storage == "P":
            continue
        candidates = dims.get(storage, [])
        at = max(candidates, key=lambda dim: (shape[dim], -dim), default=None)
        layout = layout.replace(axis, Replicate() if at is None else Shard(at))
    return layout


def returned_layout(layout: Layout, like: Layout) -> Layout:
    """`layout` with the shards of `like` on each mesh axis where that has any."""
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard) and layout.placements[axis] != placement:
            layout = layout.replace(axis, placement)
    return like if layout.placements == like.placements else layout
