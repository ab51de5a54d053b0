"""Operators that move elements along a sharded dim, by an exchange of the needed elements instead of a gather.

A call is a list of exchanges along one dim each; an exchange is a list of moves, each a run of indices of one operand
that becomes consecutive in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import swap
from dshard.core.call import Alternative, AlternativePlan, Call, LocalOp
from dshard.core.checks import infer
from dshard.core.context import planning_context
from dshard.core.moves import run_on_ranks
from dshard.core.spec import spec_of
from dshard.core.trees import leaves
from dshard.core.view_sync import part_of
from dshard.core.wrapper import Wrapper, wrap
from dshard.cost import PlannedCollective, planned_collective
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.small_reductions import split_axes
from dshard.placements import Shard
from dshard.rules.rule import Rule
from dshard.rules.strategy import completed_layout


@dataclass(frozen=True, slots=True)
class IndexRun:
    """A run of indices `src` of operand number `operand`, which become the output's indices from `at` on."""

    operand: int
    src: range
    at: int

    def within(self, held: range, needed: range) -> range:
        """The positions in `src` whose index is in `held` and whose output index is in `needed`."""
        step, n = self.src.step, len(self.src)
        ends = sorted((held.start - self.src.start, held.stop - 1 - self.src.start), key=lambda gap: gap * step)
        first, last = -(-ends[0] // step), ends[1] // step
        first, last = max(first, 0, needed.start - self.at), min(last + 1, n, needed.stop - self.at)
        return range(first, last) if held and needed and first < last else range(0)


Moves: TypeAlias = tuple[IndexRun, ...]


@dataclass(frozen=True, slots=True)
class IndexExchange:
    """Moves along `dim` of operands of one layout and these shapes, to an output whose `dim` has `size`."""

    layout: Layout
    shapes: tuple[Shape, ...]
    dim: int
    moves: Moves
    size: int

    def needed(self, at: Coordinate) -> range:
        """The indices of the output that the rank at `at` will hold."""
        return self.layout.dim_range(self.dim, self.size, at)

    def held(self, operand: int, at: Coordinate) -> range:
        """The indices of an operand that the rank at `at` holds."""
        return self.layout.dim_range(self.dim, self.shapes[operand][self.dim], at)

    def pieces(self, source: Coordinate, target: Coordinate) -> list[tuple[IndexRun, range]]:
        """The positions that one rank sends to another, move by move."""
        needed = self.needed(target)
        placed = [(move, move.within(self.held(move.operand, source), needed)) for move in self.moves]
        return [(move, places) for move, places in placed if places]

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes along which elements move."""
        return tuple(self.layout.mesh.names[axis] for axis in sorted(self.layout.axes_of(self.dim)))

    def others(self, at: Coordinate) -> int:
        """The number of elements of a slice of one index."""
        local = self.layout.local_shape(self.shapes[0], at)
        return prod(n for dim, n in enumerate(local) if dim != self.dim)

    @cached("exchanges", 16384)
    def sizes(self, at: Coordinate) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of elements that the rank at `at` sends to, and receives from, each rank of its group."""
        peers, others = self.layout.mesh.peers(self.axes, at), self.others(at)
        send = tuple(sum(len(places) for _, places in self.pieces(at, peer)) * others for peer in peers)
        recv = tuple(sum(len(places) for _, places in self.pieces(peer, at)) * others for peer in peers)
        return send, recv

    @cached("exchanges", 16384)
    def busiest(self) -> int:
        """The number of elements that the busiest rank receives from its peers; 0 if nothing is sent."""
        return max(self._received(at) for at in self.layout.mesh.peers(self.axes, (0,) * self.layout.mesh.ndim))

    def _received(self, at: Coordinate) -> int:
        """The number of elements that a rank needs, less those that it holds."""
        needed = self.needed(at)
        every = sum(len(move.within(range(self.shapes[move.operand][self.dim]), needed)) for move in self.moves)
        own = sum(len(places) for _, places in self.pieces(at, at))
        return (every - own) * self.others(at)

    @cached("exchanges", 16384)
    def pack(self, at: Coordinate) -> LocalOp:
        """Pack the elements that each peer needs from the local operands into a flat buffer."""
        peers = self.layout.mesh.peers(self.axes, at)
        pieces = [piece for peer in peers for piece in self.pieces(at, peer)]
        starts = [self.held(operand, at).start for operand in range(len(self.shapes))]

        def run(*locals_: Tensor) -> Tensor:
            taken = [
                _take(locals_[move.operand], self.dim, move.src[places.start : places.stop], starts[move.operand])
                for move, places in pieces
            ]
            return torch.cat([t.reshape(-1) for t in taken]) if taken else locals_[0].new_empty(0)

        return run

    @cached("exchanges", 16384)
    def unpack(self, at: Coordinate, fill: float) -> LocalOp:
        """Unpack the received elements of each peer into the local output."""
        peers, mine = self.layout.mesh.peers(self.axes, at), self.needed(at)
        pieces = [piece for peer in peers for piece in self.pieces(peer, at)]
        local = self.layout.local_shape(self.shapes[0], at)
        shape = tuple(len(mine) if dim == self.dim else n for dim, n in enumerate(local))
        counts = [len(places) for _, places in pieces]
        others = self.others(at)

        def run(flat: Tensor) -> Tensor:
            out = flat.new_full(shape, fill) if sum(counts) < len(mine) else flat.new_empty(shape)
            parts = flat.split([n * others for n in counts])
            for (move, places), part in zip(pieces, parts, strict=True):
                into = out.narrow(self.dim, move.at + places.start - mine.start, len(places))
                into.copy_(part.view(into.shape))
            return out

        return run


def _take(x: Tensor, dim: int, needed: range, start: int) -> Tensor:
    """Select global indices from a local tensor that begins at `start`."""
    up = needed if needed.step > 0 else needed[::-1]
    selected = x[(slice(None),) * dim + (slice(up.start - start, up[-1] - start + 1, up.step),)]
    return selected if needed.step > 0 else selected.flip(dim)


def exchange_locals(exchange: IndexExchange, locals_: tuple[Tensor, ...], fill: float = 0) -> Tensor:
    """The local output of an exchange of local operands; elements that no move gives have the value `fill`."""
    mesh = exchange.layout.mesh
    flat = run_on_ranks(mesh, exchange.pack, locals_, {})
    moved = swap(flat, mesh, exchange.axes, exchange.sizes) if exchange.busiest() else flat
    local_output: Tensor = run_on_ranks(mesh, lambda at: exchange.unpack(at, fill), (moved,), {})
    return local_output


def planned_exchanges(exchanges: Sequence[IndexExchange], itemsize: int) -> tuple[PlannedCollective, ...]:
    """The collectives of exchanges of elements of `itemsize` bytes."""
    mesh = exchanges[0].layout.mesh
    topology = planning_context().topology_of(mesh)
    return tuple(
        planned_collective("all_to_all", mesh, each.axes, each.busiest() * itemsize, topology)
        for each in exchanges
        if each.busiest()
    )


def index_exchange(plan: Callable[[Call], AlternativePlan | Sequence[AlternativePlan] | None]) -> Alternative:
    """An alternative that moves indices of sharded dims, for operands with elements."""

    def where_sharded(call: Call, rule: Rule) -> AlternativePlan | Sequence[AlternativePlan] | None:
        sharded = any(spec.layout.sharded_dims() and 0 not in spec.shape for spec in call.specs)
        return plan(call) if sharded else None

    return Alternative("index exchange", where_sharded)


def _one_exchange(call: Call, layout: Layout, dim: int, moves: Moves) -> AlternativePlan:
    """One exchange of the operands with all dims, redistributed to `layout`, to an output in that layout."""
    (out,) = call.outs
    read = [i for i, shape in enumerate(call.shapes) if len(shape) == out.dim()]
    exchange = IndexExchange(layout, tuple(call.shapes[i] for i in read), dim, moves, out.shape[dim])
    spec = spec_of(layout, tuple(out.shape), out.stride(), out.dtype, call.specs[0].device)

    def run(*args: object, **_: object) -> Any:
        tensors = [x for x in leaves(args) if isinstance(x, Wrapper)]
        return wrap(exchange_locals(exchange, tuple(tensors[i]._local_tensor.to(out.dtype) for i in read)), spec)

    inputs = tuple(layout if i in read else operand.layout for i, operand in enumerate(call.specs))
    return AlternativePlan(inputs, (layout,), run, exchanges=planned_exchanges([exchange], out.itemsize))


# -- parts


def cut(call: Call) -> AlternativePlan | None:
    """x[start:end:step], marked as a view but with memory of its own."""
    spec, dim, (out,) = call.specs[0], call.dim(), call.outs
    if not split_axes(spec.layout, (dim,)) or not 0 < out.shape[dim] < spec.shape[dim]:
        return None
    start, end, step = (call.argument(name) for name in ("start", "end", "step"))
    needed = range(*slice(start, end, step).indices(spec.shape[dim]))
    exchanged = _one_exchange(call, spec.layout, dim, (IndexRun(0, needed, 0),))

    def run(x: Any, *_: object, **__: object) -> Any:
        view = exchanged.run(x)
        first = x.storage_offset() + out.storage_offset()
        return part_of(x, view._local_tensor, view._spec, first, call.func, (dim, start, end, step))

    return replace(exchanged, run=run)


def cut_backward(call: Call) -> AlternativePlan | None:
    """The backward form of a slice: its gradient within zeros."""
    spec, sizes = call.specs[0], call.argument("input_sizes")
    dim = call.dim()
    if call.argument("step") != 1 or not split_axes(spec.layout, (dim,)) or spec.shape[dim] == sizes[dim]:
        return None
    first = range(*slice(call.argument("start"), call.argument("end")).indices(sizes[dim])).start
    return _one_exchange(call, spec.layout, dim, (IndexRun(0, range(spec.shape[dim]), first),))


def cut_scatter(call: Call) -> AlternativePlan | None:
    """A tensor with a run of indices replaced: the new elements are sent to the ranks that hold these indices."""
    (x, part), dim = call.specs, call.dim()
    n = x.shape[dim]
    put = range(*slice(call.argument("start"), call.argument("end")).indices(n))
    fits = part.dtype == x.dtype and len(part.shape) == len(x.shape) and 0 < part.shape[dim] == len(put)
    if call.argument("step") != 1 or not split_axes(x.layout, (dim,)) or not fits:
        return None
    before, after = range(put.start), range(put.stop, n)
    moves = (IndexRun(0, before, 0), IndexRun(1, range(len(put)), put.start), IndexRun(0, after, put.stop))
    return _one_exchange(call, completed_layout(x.layout), dim, tuple(move for move in moves if move.src))


def concatenate(call: Call) -> list[AlternativePlan]:
    """Tensors concatenated, all in the layout of one of them; tensors that torch skips have another number of dims."""
    (out,) = call.outs
    dim = call.dim(ndim=out.dim())
    joined = [spec for spec in call.specs if len(spec.shape) == out.dim()]
    ends = list(accumulate((spec.shape[dim] for spec in joined), initial=0))
    moves = tuple(IndexRun(i, range(spec.shape[dim]), ends[i]) for i, spec in enumerate(joined))
    layouts = [completed_layout(spec.layout) for spec in joined if 0 not in spec.shape]
    sharded = dict.fromkeys(layout for layout in layouts if split_axes(layout, (dim,)))
    return [_one_exchange(call, layout, dim, moves) for layout in sharded]


# -- dims one by one: an exchange along each sharded one, the operator itself along the others


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """An exchange along one dim, whose size becomes `size`; `alone` are the operator's arguments for this dim only."""

    dim: int
    moves: Moves
    size: int
    alone: tuple[Any, ...]


def _dim_by_dim(
    call: Call, steps: Sequence[ExchangeStep], rest: tuple[object, ...] | None, fill: float = 0
) -> AlternativePlan | None:
    """An exchange for each of `steps`, which are along sharded dims; then the operator with the arguments `rest`."""
    if not steps:
        return None
    func, spec = call.func, call.specs[0]
    layout = completed_layout(spec.layout) if fill else spec.layout
    exchanges: list[IndexExchange] = []
    specs = [spec.with_layout(layout)]
    for step in steps:
        exchanges.append(IndexExchange(layout, (specs[-1].shape,), step.dim, step.moves, step.size))
        out = infer(func, (specs[-1].meta(), *step.alone), {})
        specs.append(spec_of(layout, tuple(out.shape), out.stride(), out.dtype, spec.device))

    def run(x: Any, *_: object, **__: object) -> Any:
        local = x._local_tensor
        for exchange in exchanges:
            local = exchange_locals(exchange, (local,), fill)
        exchanged = wrap(local, specs[-1])
        return exchanged if rest is None else func(exchanged, *rest)

    outputs = _with_leading(layout, call.outs[0].dim() - len(spec.shape))
    sent = planned_exchanges(exchanges, spec.itemsize)
    return AlternativePlan((layout,), (outputs,), run, exchanges=sent)


def pad(call: Call) -> AlternativePlan | None:
    """Dims padded at their ends by a value, or cut: sharded ones one by one, the others on each rank."""
    spec, pads, value = call.specs[0], list(call.argument("pad")), call.argument("value")
    steps, local, ndim = [], list(pads), len(spec.shape)
    for i in range(len(pads) // 2):
        dim, (low, high) = ndim - 1 - i, pads[2 * i : 2 * i + 2]
        kept = range(max(0, -low), spec.shape[dim] - max(0, -high))
        if not (low or high) or not split_axes(spec.layout, (dim,)):
            continue
        if not kept:
            return None
        moves, size = (IndexRun(0, kept, max(0, low)),), spec.shape[dim] + low + high
        steps.append(ExchangeStep(dim, moves, size, ([0, 0] * i + [low, high], value)))
        local[2 * i : 2 * i + 2] = [0, 0]
    return _dim_by_dim(call, steps, (local, value) if any(local) else None, value)


def repeat(call: Call) -> AlternativePlan | None:
    """Dims repeated: sharded ones one by one, the others on each rank."""
    spec, times = call.specs[0], list(call.argument("repeats"))
    steps, ndim = [], len(spec.shape)
    new = len(times) - ndim
    if min(times, default=0) <= 0:
        return None
    for dim, n in enumerate(spec.shape):
        again = times[new + dim]
        if again > 1 and split_axes(spec.layout, (dim,)):
            moves = tuple(IndexRun(0, range(n), i * n) for i in range(again))
            steps.append(ExchangeStep(dim, moves, n * again, ([again if d == dim else 1 for d in range(ndim)],)))
            times[new + dim] = 1
    return _dim_by_dim(call, steps, (times,) if new or max(times) > 1 else None)


def flip(call: Call) -> AlternativePlan | None:
    """Dims in reverse order, one by one."""
    spec, dims = call.specs[0], _named_dims(call)
    split = [dim for dim in dims if split_axes(spec.layout, (dim,))]
    steps = [ExchangeStep(d, (IndexRun(0, range(spec.shape[d] - 1, -1, -1), 0),), spec.shape[d], ([d],)) for d in split]
    others = [dim for dim in dims if dim not in split]
    return _dim_by_dim(call, steps, (others,) if others else None)


def roll(call: Call) -> AlternativePlan | None:
    """Elements shifted along dims, those beyond the end to the beginning; dims one by one."""
    spec, shifts = call.specs[0], call.argument("shifts")
    steps, others = [], []
    for dim, by in zip(_named_dims(call), shifts, strict=False):  # none: of all elements in a row
        if not split_axes(spec.layout, (dim,)):
            others.append((by, dim))
            continue
        n = spec.shape[dim]
        moves = (IndexRun(0, range(n - by % n, n), 0), IndexRun(0, range(n - by % n), by % n))
        steps.append(ExchangeStep(dim, moves, n, ([by], [dim])))
    return _dim_by_dim(call, steps, tuple(map(list, zip(*others, strict=True))) if others else None)


def _named_dims(call: Call) -> list[int]:
    """The argument `dims` counted from 0; unlike `Call.dims`, [] names none."""
    return [dim % len(call.shapes[0]) for dim in call.argument("dims") or ()] if call.shapes[0] else []


def _with_leading(layout: Layout, new: int) -> Layout:
    """The layout of a tensor with `new` leading dims more."""
    placements = tuple(Shard(p.dim + new) if isinstance(p, Shard) else p for p in layout.placements)
    return Layout(layout.mesh, placements, tuple((dim + new, axes) for dim, axes in layout.order))
