"""The executor of matmuls in panels: gather operands, multiply, reduce results; each panel overlaps the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dshard.comm import (
    Program,
    Runtime,
    Session,
    Steps,
    begin,
    planned_backend,
    redistributed,
    run_program,
    run_without_data,
    same_memory,
    steps_of,
    sum_dtype,
)
from dshard.mesh import Coordinate, Mesh
from dshard.ops.matmul.local import accumulating, local_product, outlined
from dshard.placements import Partial
from dshard.redistribute import Panel, Plan
from dshard.redistribute.panel import Ranges
from dshard.rules.expand import Operand, sizes_of
from dshard.rules.panel_cut import factor_of, panels_of
from dshard.rules.panel_stream import Stream
from dshard.rules.rule import Rule, Term
from dshard.topology import Topology


class PlannedMatmul(NamedTuple):
    """A matmul and the plans that redistribute both operands and the result, and the bias if there is one."""

    rule: Rule
    plans: tuple[Plan, Plan, Plan]
    dtype: torch.dtype
    topology: Topology
    bias: Plan | None = None

    @property
    def mesh(self) -> Mesh:
        """The mesh of the operands."""
        return self.plans[0].src.mesh

    @property
    def terms(self) -> tuple[Term, Term, Term]:
        """The terms of both operands and of the result."""
        return self.rule.inputs[0], self.rule.inputs[1], self.rule.outputs[0]

    def sizes(self) -> dict[str, int]:
        """The size of each factor."""
        operands = [Operand(plan.src, plan.shape, self.dtype.itemsize) for plan in self.plans[:2]]
        return sizes_of(self.rule, operands, [(self.plans[2].shape, self.dtype.itemsize)])


@dataclass(frozen=True, slots=True)
class PanelWork:
    """One rank's work on one panel: its indices in the stored local tensors, and the steps that redistribute it.

    `computed` are its indices in the local result before it is redistributed.
    """

    held: tuple[Ranges | None, ...]
    computed: Ranges | None
    steps: tuple[Steps, ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    """One rank's program data: its panels, and the steps of the tensors that are not cut."""

    parts: tuple[PanelWork, ...]
    uncut: tuple[Steps, ...]
    bias: Steps
    adds: bool
    out: tuple[int, ...]

    def moved(self, space: Session, tensors: Sequence[Tensor]) -> Program[tuple[list[Tensor], Tensor | None]]:
        """The two operands, uncut ones redistributed in bulk, and the bias where this rank adds it."""
        flights = []
        for steps, x in zip((*self.uncut[:2], self.bias), tensors, strict=False):
            flights.append((yield from begin(redistributed(steps, x, space))))
        uncut: list[Tensor] = []
        for rest in flights:
            uncut += [(yield from rest)]
        return uncut[:2], uncut[2] if self.adds else None


class PanelExecutor:
    """A planned matmul in panels.

    If `factor` is None nothing is cut: every tensor is redistributed in bulk. `whole` is the number of an operand that
    a run can return as it was multiplied.
    """

    whole: int | None = None

    def __init__(self, matmul: PlannedMatmul, stream: Stream) -> None:
        rule, self.plans, self.dtype, _, self.bias = matmul
        plans, sizes = self.plans, matmul.sizes()
        self.stream, self.mesh, self.terms = stream, matmul.mesh, matmul.terms
        bulk = stream.panels == 1 and stream.transport == "collective"
        self.factor = None if bulk else factor_of(rule, stream, plans, sizes)
        self.dims = tuple(term.index((self.factor,)) if (self.factor,) in term else None for term in self.terms)
        self.uncut = tuple(dim is None for dim in self.dims)
        self.bias_at = plans[2].src  # the layout of the result when the bias is added
        size = 0 if self.factor is None else sizes[self.factor]
        self.panels: tuple[Ranges, ...] = ()
        if self.factor is not None:
            self.panels = panels_of(self.factor, size, self.terms, plans, stream)
        self.multiply = local_product(*self.terms)
        self.add = accumulating(*self.terms)
        self.known: dict[tuple[Coordinate, bool], Compiled] = {}

    def __call__(self, tensors: Sequence[Tensor], *, whole: bool = False) -> tuple[Tensor, ...]:
        """Run the matmul on the local tensors of the operands, and of the bias if there is one.

        Returns the result and, if asked for and there is one, the `whole` operand.
        """
        plans = self.plans if self.bias is None else (*self.plans, self.bias)
        return run_program(self.mesh, partial(self.whole_program, whole=whole), tensors, plans)

    def whole_program(
        self, at: Coordinate, space: Session, tensors: Sequence[Tensor], *, whole: bool = False
    ) -> Program[tuple[Tensor, ...]]:
        """The program of one rank, from its local operands to its local result."""
        rest = yield from self.program(at, space, tensors)
        return ((yield from rest),)

    def transient_bytes(self, at: Coordinate) -> int:
        """The most bytes of buffers that the rank at `at` holds at once, for contiguous operands; from a rehearsal."""
        plans = self.plans[:2] if self.bias is None else (*self.plans[:2], self.bias)
        tensors = [torch.empty(p.src.local_shape(p.shape, at), dtype=self.dtype, device="meta") for p in plans]
        dry = copy(self)
        dry.multiply, dry.add = outlined(*self.terms), lambda total, x, y: total
        return run_without_data(dry.whole_program, tensors, at)[1]

    def compiled(self, at: Coordinate, runtime: Runtime | None) -> Compiled:
        """The compiled steps of the rank at `at`, on these process groups or on none; cached."""
        key = at, runtime is None
        compiled = self.known.get(key)
        if compiled is None:
            compiled = self.known[key] = self._compile(at, runtime)
        return compiled

    def _compile(self, at: Coordinate, runtime: Runtime | None) -> Compiled:
        backend = planned_backend(self.mesh) if runtime is None else runtime.backend

        def steps(plan: Plan, panel: Panel | None) -> Steps:
            return steps_of(plan, panel, at, self.dtype, backend)

        parts = []
        for ranges in self.panels:
            panels = [None if dim is None else Panel(dim, ranges) for dim in self.dims]
            held = tuple(
                None if panel is None else panel.within((p.src if i < 2 else p.dst).region(p.shape, at)[panel.dim])
                for i, (panel, p) in enumerate(zip(panels, self.plans, strict=True))
            )
            computed = None
            if panels[2] is not None:
                computed = panels[2].within(self.plans[2].src.region(self.plans[2].shape, at)[panels[2].dim])
            moves = (() if panel is None else steps(p, panel) for panel, p in zip(panels, self.plans, strict=True))
            parts.append(PanelWork(held, computed, tuple(moves)))
        uncut = tuple(steps(p, None) if uncut else () for uncut, p in zip(self.uncut, self.plans, strict=True))
        bias = () if self.bias is None else steps(self.bias, None)
        placements = self.bias_at.placements
        adds = self.bias is not None and not any(p == Partial() and at[axis] for axis, p in enumerate(placements))
        return Compiled(tuple(parts), uncut, bias, adds, self.plans[2].dst.local_shape(self.plans[2].shape, at))

    def program(self, at: Coordinate, space: Session, tensors: Sequence[Tensor]) -> Program[Program[Tensor]]:
        """Multiply the local tensors until the last collective is in flight; returns the program of the rest."""
        todo = self.compiled(at, space.runtime)
        uncut, bias = yield from todo.moved(space, tensors)
        if self.dims[2] is None:
            return (yield from self._added(todo, space, uncut, bias))
        return (yield from self._placed(todo, space, uncut, bias))

    def _begin(self, todo: Compiled, t: int, space: Session, uncut: Sequence[Tensor]) -> Program[list[Program[Tensor]]]:
        """Begin to redistribute panel `t` of the operands; returns the programs that finish it."""
        rest = []
        for i, x in enumerate(uncut):
            held, dim = todo.parts[t].held[i], self.dims[i]
            if held is None or dim is None:
                continue
            rest.append((yield from moving_operands(todo.parts[t].steps[i], panel_of(x, dim, held, space), x, space)))
        return rest

    def _panels(
        self, todo: Compiled, space: Session, uncut: Sequence[Tensor], use: Callable[[int, list[Tensor]], Program[None]]
    ) -> Program[None]:
        """Pass panel after panel of the operands to `use`, with the next one in flight."""
        moving = (yield from self._begin(todo, 0, space, uncut)) if todo.parts else []
        for t in range(len(todo.parts)):
            here: list[Tensor] = []
            for rest in moving:
                here += [(yield from rest)]
            if t + 1 < len(todo.parts):
                moving = yield from self._begin(todo, t + 1, space, uncut)
            streamed = iter(here)
            pair = [x if dim is None else next(streamed) for x, dim in zip(uncut, self.dims[:2], strict=True)]
            yield from use(t, pair)
            for x in here:
                space.give(x)

    def _placed(
        self, todo: Compiled, space: Session, uncut: Sequence[Tensor], bias: Tensor | None
    ) -> Program[Program[Tensor]]:
        """Compute the result panel by panel: each is reduced while the next is multiplied."""
        dim = self.dims[2]
        assert dim is not None
        result = uncut[0].new_empty(todo.out)
        waiting: list[tuple[Ranges, Program[Tensor]]] = []

        def land() -> Program[None]:
            ranges, rest = waiting.pop()
            panel = yield from rest
            place(result, dim, ranges, panel)
            space.give(panel)

        def use(t: int, pair: list[Tensor]) -> Program[None]:
            held, computed = todo.parts[t].held[2], todo.parts[t].computed
            assert held is not None
            assert computed is not None
            result_panel = self.multiplied(pair, computed, bias, space)
            if waiting:
                yield from land()
            waiting.append((held, (yield from begin(redistributed(todo.parts[t].steps[2], result_panel, space)))))

        yield from self._panels(todo, space, uncut, use)

        def rest() -> Program[Tensor]:
            if waiting:
                yield from land()
            return result

        return rest()

    def _added(
        self, todo: Compiled, space: Session, uncut: Sequence[Tensor], bias: Tensor | None
    ) -> Program[Program[Tensor]]:
        """Sum the result over the panels, half precision in single, and then redistribute it in bulk."""
        total = [] if todo.parts else [self.multiply(*uncut)]

        def use(t: int, pair: list[Tensor]) -> Program[None]:
            if total and total[0].dtype == pair[0].dtype:
                self.add(total[0], *pair)
            elif total:
                total[0].add_(self.multiply(*pair))
            else:
                first = self.multiply(*pair)
                total.append(first.to(sum_dtype(first.dtype)) if len(todo.parts) > 1 else first)
            return
            yield

        yield from self._panels(todo, space, uncut, use)
        return (yield from self.ending(todo, total[0], bias, space))

    def multiplied(self, pair: Sequence[Tensor], computed: Ranges, bias: Tensor | None, space: Session) -> Tensor:
        """A panel of the result, with these indices along the dim that is cut, and the bias added."""
        panel = self.multiply(*pair)
        if bias is not None:
            panel.add_(panel_of(bias, 0, computed, space) if self.dims[2] == panel.ndim - 1 else bias)
        return panel

    def ending(self, todo: Compiled, total: Tensor, bias: Tensor | None, space: Session) -> Program[Program[Tensor]]:
        """Begin to redistribute the result, to which the bias is added, in bulk; returns the program that finishes."""
        if bias is not None:
            total.add_(bias)
        moving = yield from begin(redistributed(todo.uncut[2], total.to(self.dtype), space))

        def rest() -> Program[Tensor]:
            end: Tensor = yield from moving
            return end.clone() if todo.uncut[2] else end

        return rest()


def moving_operands(steps: Steps, panel: Tensor, x: Tensor, space: Session) -> Program[Program[Tensor]]:
    """Begin to redistribute a panel selected from `x`; returns the program that finishes it."""
    moving = yield from begin(redistributed(steps, panel, space))

    def rest() -> Program[Tensor]:
        moved: Tensor = yield from moving
        if not (same_memory(panel, x) or same_memory(panel, moved)):
            space.give(panel)
        return moved

    return rest()


def panel_of(x: Tensor, dim: int, ranges: Ranges, space: Session) -> Tensor:
    """The indices of `x` in `ranges` along `dim`: a view if they are consecutive."""
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0].start, len(ranges[0]))
    if not ranges:
        return x.narrow(dim, 0, 0)
    shape = (*x.shape[:dim], sum(map(len, ranges)), *x.shape[dim + 1 :])
    out, start = space.take(shape, x), 0
    for part in ranges:
        out.narrow(dim, start, len(part)).copy_(x.narrow(dim, part.start, len(part)))
        start += len(part)
    return out


def place(out: Tensor, dim: int, ranges: Ranges, panel: Tensor) -> None:
    """Write a panel to the indices in `ranges` along `dim`."""
    start = 0
    for part in ranges:
        out.narrow(dim, part.start, len(part)).copy_(panel.narrow(dim, start, len(part)))
        start += len(part)
