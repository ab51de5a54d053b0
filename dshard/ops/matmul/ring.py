"""Matmuls around rings: each rank multiplies the chunk that it holds while sending it to the next.

Of an operand gathered along one mesh axis every rank begins with its own chunk, sends the chunk that it multiplies to
the rank before it and receives that of the rank after it: the collective matmul (Wang et al., ASPLOS 2023). Where both
operands are gathered, along axes of one size, each chunk is first sent to the rank where it meets its counterpart:
Cannon's algorithm. A result that is reduce-scattered goes around itself: each rank adds its term to a chunk and sends
it on, last to its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from torch import Tensor

from dshard.comm import (
    HALF,
    Program,
    Request,
    Session,
    begin,
    program_of,
    request_alone,
    same_memory,
    send_receive,
    sum_dtype,
)
from dshard.layout import Shape
from dshard.mesh import Coordinate
from dshard.ops.matmul.panel_executor import Compiled, PanelExecutor, PlannedMatmul, panel_of, place
from dshard.ops.matmul.symmetric import SymmetricExecutor, changed_axis, check_symmetric, fused_matmul
from dshard.placements import Shard
from dshard.redistribute import Panel, Plan
from dshard.redistribute.panel import Ranges, owned
from dshard.rules.matmul_loops import factors_of
from dshard.rules.panel_cut import have_blocks
from dshard.rules.panel_stream import Stream
from dshard.rules.rule import Rule


@dataclass(frozen=True, slots=True)
class RingStep:
    """The local matmul of a rank in one step of the ring: the panel's indices in each local tensor, and the shapes."""

    held: tuple[Ranges | None, ...]
    shapes: tuple[Shape, ...]


def executor(matmul: PlannedMatmul, stream: Stream) -> PanelExecutor | None:
    """The executor of a matmul in panels, or None if no tensor that could be cut is communicated.

    Collectives replace a ring along several axes, for sums in half precision, which a ring would round at every rank,
    and for replicated results, which a ring would leave different in their last bits. They replace symmetric memory
    where `fused_matmul` finds no kernel.
    """
    if stream.transport == "symmetric":
        check_symmetric(stream, matmul.mesh, matmul.topology)
        fused = fused_matmul(matmul, stream.axis)
        if fused is not None:
            return SymmetricExecutor(matmul, stream, fused)
        stream = replace(stream, transport="collective")
    if stream.transport == "ring":
        axes = ring_axes(matmul, stream)
        if axes:
            return RingExecutor(matmul, stream, axes)
        stream = replace(stream, transport="collective")
    in_panels = PanelExecutor(matmul, stream)
    return None if in_panels.factor is None else in_panels


def ring_axes(matmul: PlannedMatmul, stream: Stream) -> dict[int, int]:
    """The mesh axis around which each tensor is sent, by operand number: one operand, both, or the result (2).

    Both operands, if the same factor of both is gathered along two axes of one size; else the most communicated one.
    """
    rule, plans, dtype, *_ = matmul
    if have_blocks(plans):
        return {}
    allowed = {f for loop, names in factors_of(rule).items() if stream.axis in (None, loop) for f in names}
    axes = {i: axis for i, plan in enumerate(plans) if (axis := changed_axis(plan, reduces=i == 2)) is not None}
    if dtype in HALF:
        axes.pop(2, None)
    axes = {
        i: axis
        for i, axis in axes.items()
        if (factor := _factor(rule, plans[i], i, axis)) in allowed and _same_on_replicas(rule, plans[2], factor, axis)
    }
    if 0 in axes and 1 in axes and _meets(rule, plans, axes[0], axes[1]):
        return {0: axes[0], 1: axes[1]}
    return dict(sorted(axes.items(), key=lambda pair: -plans[pair[0]].busiest())[:1])


def _same_on_replicas(rule: Rule, end: Plan, factor: str, axis: int) -> bool:
    """Whether replicas of the result are bitwise equal: around a ring each rank sums in another order."""
    return (factor,) in rule.outputs[0] or isinstance(end.src.placements[axis], Shard)


def _factor(rule: Rule, plan: Plan, i: int, axis: int) -> str:
    placement = (plan.dst if i == 2 else plan.src).placements[axis]
    assert isinstance(placement, Shard)
    (name,) = (*rule.inputs, *rule.outputs)[i][placement.dim]
    return name


def _meets(rule: Rule, plans: Sequence[Plan], a: int, b: int) -> bool:
    factor = _factor(rule, plans[0], 0, a)
    if a == b or factor != _factor(rule, plans[1], 1, b):
        return False
    dims = [term.index((factor,)) for term in rule.inputs]
    size = plans[0].shape[dims[0]]
    return owned(plans[0].src, dims[0], size, a, 1) == owned(plans[1].src, dims[1], size, b, 1)


class RingExecutor(PanelExecutor):
    """A matmul around rings: one or both operands, or the result, are sent from rank to rank in panels."""

    def __init__(self, matmul: PlannedMatmul, stream: Stream, axes: dict[int, int]) -> None:
        super().__init__(matmul, replace(stream, transport="collective"))
        self.stream, self.axes = stream, axes
        (rule, plans, *_), first = matmul, min(axes)
        self.uncut = tuple(i not in axes for i in range(3))
        self.factor = _factor(rule, plans[first], first, axes[first])
        self.dims = tuple(term.index((self.factor,)) if (self.factor,) in term else None for term in self.terms)
        size, dim = matmul.sizes()[self.factor], self.dims[first]
        assert dim is not None
        stored = plans[2].dst if first == 2 else plans[first].src
        self.length = self.mesh.shape[axes[first]]
        self.owned = owned(stored, dim, size, axes[first], stream.panels)
        self.each = stream.panels
        self.panels = ()
        self.steps: dict[Coordinate, tuple[RingStep, ...]] = {}

    def steps_of(self, at: Coordinate) -> tuple[RingStep, ...]:
        """The steps of the rank at `at`, in order: owner after owner, all panels of each."""
        steps = self.steps.get(at)
        if steps is None:
            steps = self.steps[at] = tuple(self._step(at, ranges) for ranges in self._order(at))
        return steps

    def _order(self, at: Coordinate) -> Iterator[Ranges]:
        n, here = self.length, sum(at[axis] for axis in self.axes.values())
        for hop, panel in product(range(n), range(self.each)):
            owner = (here - 1 - hop if 2 in self.axes else here + hop) % n
            yield self.owned[owner * self.each + panel]

    def _step(self, at: Coordinate, ranges: Ranges) -> RingStep:
        held: list[Ranges | None] = []
        shapes: list[Shape] = []
        for i, (plan, dim) in enumerate(zip(self.plans, self.dims, strict=True)):
            layout = plan.src if i == 2 else plan.dst
            panel = None if dim is None else Panel(dim, ranges)
            held.append(None if panel is None else panel.within(layout.region(plan.shape, at)[panel.dim]))
            shapes.append((panel or Panel(0, ())).shape(layout, plan.shape, at))
        return RingStep(tuple(held), tuple(shapes))

    def program(self, at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[Program[Tensor]]:
        """Multiply the local tensors until the last collective is in flight; returns the program of the rest."""
        todo = self.compiled(at, space.runtime)
        uncut, bias = yield from todo.moved(space, tensors)
        if 2 in self.axes:
            return (yield from self._scattered(at, todo, space, uncut, bias))
        return (yield from self._gathered(at, todo, space, uncut, bias))

    def _gathered(
        self, at: Coordinate, todo: Compiled, space: Session, uncut: Sequence[Tensor], bias: Tensor | None
    ) -> Program[Program[Tensor]]:
        steps = self.steps_of(at)
        out = self.plans[2].src.local_shape(self.plans[2].shape, at)
        dim = self.dims[2]
        total = uncut[0].new_zeros(out, dtype=sum_dtype(self.dtype)) if dim is None else uncut[0].new_empty(out)
        arriving: dict[tuple[int, int], Program[Tensor]] = {}
        for i in self.axes:
            for panel in range(self.each):
                arriving[i, panel] = yield from self._first(i, panel, at, uncut[i], space)
        for number, step in enumerate(steps):
            panel, left = number % self.each, number + self.each < len(steps)
            pair: list[Tensor] = []
            for i in (0, 1):
                if i in self.axes:
                    pair += [(yield from arriving.pop((i, panel)))]
                    if left:
                        arriving[i, panel] = yield from self._pass(
                            i, at, pair[i], steps[number + self.each].shapes[i], space
                        )
                else:
                    pair += [_cut(uncut[i], self.dims[i], step.held[i], space)]
            self._use(total, step, pair, bias if dim is not None else None, space)
            for i, x in enumerate(pair):
                if (i in self.axes and not left) or (i not in self.axes and not same_memory(x, uncut[i])):
                    space.give(x)
        return (yield from self.ending(todo, total, bias if dim is None else None, space))

    def _use(self, total: Tensor, step: RingStep, pair: list[Tensor], bias: Tensor | None, space: Session) -> None:
        dim, held = self.dims[2], step.held[2]
        if dim is None and total.dtype == self.dtype:
            self.add(total, *pair)
        elif dim is None:
            total.add_(self.multiply(*pair))
        else:
            assert held is not None
            place(total, dim, held, self.multiplied(pair, held, bias, space))

    def _first(self, i: int, panel: int, at: Coordinate, x: Tensor, space: Session) -> Program[Program[Tensor]]:
        """Send this rank's own panel to the rank that holds its counterpart: Cannon's initial skew."""
        plan, axis, dim = self.plans[i], self.axes[i], self.dims[i]
        assert dim is not None
        mine = Panel(dim, self.owned[at[axis] * self.each + panel])
        own = panel_of(x, dim, mine.within(plan.src.region(plan.shape, at)[dim]), space)
        skew = sum(at[other] for j, other in self.axes.items() if j != i)
        if len(self.axes) == 1:
            return program_of(own)
        shape = self.steps_of(at)[panel].shapes[i]
        n, here = self.length, at[axis]
        return (yield from self._send(axis, at, (here - skew) % n, (here + skew) % n, own, shape, space))

    def _pass(self, i: int, at: Coordinate, x: Tensor, shape: Shape, space: Session) -> Program[Program[Tensor]]:
        n, axis = self.length, self.axes[i]
        to, source = (at[axis] - 1) % n, (at[axis] + 1) % n
        if i == 2:
            to, source = source, to
        return (yield from self._send(axis, at, to, source, x, shape, space))

    def _send(
        self, axis: int, at: Coordinate, to: int, source: int, x: Tensor, shape: Shape, space: Session
    ) -> Program[Program[Tensor]]:
        """Begin to send `x` to rank `to` and to receive from `source`; the buffer of `x` is freed when it finishes."""
        step = send_receive(self.mesh, axis, at, to, source, x.numel(), shape)
        buffer = space.flat(x)
        request = Request(step, buffer, space.take((prod(shape),), x), buffer)
        return (yield from begin(request_alone(request, space)))

    def _scattered(
        self, at: Coordinate, todo: Compiled, space: Session, uncut: Sequence[Tensor], bias: Tensor | None
    ) -> Program[Program[Tensor]]:
        steps, dim, plan = self.steps_of(at), self.dims[2], self.plans[2]
        assert dim is not None
        result = uncut[0].new_empty(todo.out)
        arriving: dict[int, Program[Tensor]] = {}
        for number, step in enumerate(steps):
            panel, held = number % self.each, step.held[2]
            assert held is not None
            pair = [_cut(x, d, h, space) for x, d, h in zip(uncut, self.dims[:2], step.held[:2], strict=True)]
            term = self.multiplied(pair, held, bias, space)
            for x, y in zip(pair, uncut, strict=True):
                if not same_memory(x, y):
                    space.give(x)
            if panel in arriving:
                other = yield from arriving.pop(panel)
                term.add_(other)
                space.give(other)
            if number + self.each < len(steps):
                shape = steps[number + self.each].shapes[2]
                arriving[panel] = yield from self._pass(2, at, term, shape, space)
            else:
                own = Panel(dim, self.owned[at[self.axes[2]] * self.each + panel])
                place(result, dim, own.within(plan.dst.region(plan.shape, at)[dim]), term)

        return program_of(result)


def _cut(x: Tensor, dim: int | None, ranges: Ranges | None, space: Session) -> Tensor:
    return x if dim is None or ranges is None else panel_of(x, dim, ranges, space)
