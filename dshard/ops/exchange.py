"""Operators that move elements along a sharded dim: each rank sends its peers just what they need, none gathers it.

A call is a list of moves, each a run of indices of one operand that becomes consecutive in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import swap
from dshard.core.call import LocalOp
from dshard.core.checks import infer
from dshard.core.moves import redistributed, run_on_ranks, sending, with_partials_reduced
from dshard.core.observe import OBSERVERS, observed
from dshard.core.spec import Spec, spec_of
from dshard.core.view_sync import PartialView, register_view
from dshard.core.wrapper import Wrapper, wrap
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.custom import Custom
from dshard.ops.reduced_norms import split_axes
from dshard.torch_private import OpOverload


@dataclass(frozen=True, slots=True)
class Move:
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


Moves: TypeAlias = tuple[Move, ...]


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

    def pieces(self, source: Coordinate, target: Coordinate) -> list[tuple[Move, range]]:
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

    def sizes(self, at: Coordinate) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The numbers of elements that the rank at `at` sends to, and receives from, each rank of its group."""
        return _sizes(self, at)

    def busiest(self) -> int:
        """The number of elements that the busiest rank receives from its peers."""
        mesh = self.layout.mesh
        kept = {at: mesh.peers(self.axes, at).index(at) for at in mesh.coordinates()}
        return max(sum(recv) - recv[kept[at]] for at in kept for recv in (self.sizes(at)[1],))

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


@cached("shifts", 16384)
def _sizes(shift: IndexExchange, at: Coordinate) -> tuple[tuple[int, ...], tuple[int, ...]]:
    peers, others = shift.layout.mesh.peers(shift.axes, at), shift.others(at)
    send = tuple(sum(len(places) for _, places in shift.pieces(at, peer)) * others for peer in peers)
    recv = tuple(sum(len(places) for _, places in shift.pieces(peer, at)) * others for peer in peers)
    return send, recv


def _take(x: Tensor, dim: int, wanted: range, start: int) -> Tensor:
    """Select global indices from a local tensor that begins at `start`."""
    up = wanted if wanted.step > 0 else wanted[::-1]
    selected = x[(slice(None),) * dim + (slice(up.start - start, up[-1] - start + 1, up.step),)]
    return selected if wanted.step > 0 else selected.flip(dim)


def exchange_indices(op: str, tensors: Sequence[Any], dim: int, moves: Moves, out: Tensor, fill: float = 0) -> Any:
    """Run an exchange: the output has the shape and dtype of `out` and the layout that all operands share."""
    specs = [t._spec for t in tensors]
    layout, mesh = specs[0].layout, specs[0].layout.mesh
    shift = IndexExchange(layout, tuple(spec.shape for spec in specs), dim, moves, out.shape[dim])

    def run() -> Tensor:
        locals_ = tuple(t._local for t in tensors)
        flat = run_on_ranks(mesh, shift.pack, locals_, {})
        moved = swap(flat, mesh, shift.axes, shift.sizes)
        local_output: Tensor = run_on_ranks(mesh, lambda at: shift.unpack(at, fill), (moved,), {})
        return local_output

    if OBSERVERS:
        exchange = ("all_to_all", shift.axes, shift.busiest() * out.itemsize)
        local = observed(sending(op, specs, [exchange]), run, ())
    else:
        local = run()
    return wrap(local, spec_of(layout, tuple(out.shape), out.stride(), out.dtype, specs[0].device))


# -- the operators


def slice_(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[start:end:step], marked as a view but with memory of its own."""
    x, (dim, start, end, step) = args[0], _slice_arguments(*args[1:], **kwargs)
    dim %= x.dim()
    (out,) = _inferred(func, args, kwargs)
    wanted = range(*slice(start, end, step).indices(x.shape[dim]))
    view = exchange_indices(str(func), [x], dim, (Move(0, wanted, 0),), out)
    view = wrap(view._local, view._spec, x.storage_offset() + out.storage_offset())
    register_view(view, PartialView(x, view._local, view._spec, func, (dim, start, end, step)))
    return view


def _slice_arguments(
    dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, int | None, int | None, int]:
    return dim, start, end, step


def slice_backward(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The backward form of a slice: its gradient within zeros."""
    grad, sizes, dim, start, end, step = args
    dim %= grad.dim()
    (out,) = _inferred(func, args, kwargs)
    first = range(*slice(start, end, step).indices(sizes[dim])).start
    return exchange_indices(str(func), [grad], dim, (Move(0, range(grad.shape[dim]), first),), out)


def slice_scatter(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor with a run of indices replaced: the new elements are sent to the ranks that hold these indices."""
    x, part, dim, start, end, _ = _scatter_arguments(*args, **kwargs)
    (out,) = _inferred(func, args, kwargs)
    dim, x = dim % x.dim(), with_partials_reduced(x, str(func))
    new = redistributed(part, x._spec.layout, str(func))
    put = range(*slice(start, end).indices(x.shape[dim]))
    before, after = range(put.start), range(put.stop, x.shape[dim])
    moves = (Move(0, before, 0), Move(1, range(len(put)), put.start), Move(0, after, put.stop))
    return exchange_indices(str(func), [x, new], dim, tuple(move for move in moves if move.src), out)


def _scatter_arguments(
    x: Any, part: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[Any, Any, int, int | None, int | None, int]:
    return x, part, dim, start, end, step


def pad(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims padded at their ends by a value, or cut: sharded ones one by one, the others on each rank."""
    _inferred(func, args, kwargs)
    x, pads = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    x = with_partials_reduced(x, str(func)) if value else x
    local = list(pads)
    for i in range(len(pads) // 2):
        dim, (low, high) = x.dim() - 1 - i, pads[2 * i : 2 * i + 2]
        if not (low or high) or not split_axes(x._spec.layout, (dim,)):
            continue
        local[2 * i : 2 * i + 2] = [0, 0]
        (out,) = _inferred(func, (x, [0, 0] * i + [low, high], value), {})
        kept = range(max(0, -low), x.shape[dim] - max(0, -high))
        x = exchange_indices(str(func), [x], dim, (Move(0, kept, max(0, low)),), out, value)
    return func(x, local, value) if any(local) else x


def repeat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims repeated: sharded ones one by one, the others on each rank."""
    _inferred(func, args, kwargs)
    x, times = args[0], list(args[1])
    new = len(times) - x.dim()
    for dim in range(x.dim()):
        n = x.shape[dim]
        if times[new + dim] > 1 and split_axes(x._spec.layout, (dim,)):
            (out,) = _inferred(func, (x, [times[new + dim] if d == dim else 1 for d in range(x.dim())]), {})
            x = exchange_indices(
                str(func), [x], dim, tuple(Move(0, range(n), i * n) for i in range(times[new + dim])), out
            )
            times[new + dim] = 1
    return func(x, times)


def flip(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dims in reverse order, one by one."""
    _inferred(func, args, kwargs)
    x = args[0]
    for dim in [d % x.dim() for d in args[1]]:
        n = x.shape[dim]
        moves = (Move(0, range(n - 1, -1, -1), 0),)
        split = split_axes(x._spec.layout, (dim,))
        x = exchange_indices(str(func), [x], dim, moves, x._spec.meta()) if split else func(x, [dim])
    return x


def roll(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Elements shifted along dims, those beyond the end to the beginning; dims one by one."""
    _inferred(func, args, kwargs)
    x, shifts, dims = args
    for dim, by in zip([d % x.dim() for d in dims], shifts, strict=True):
        n = x.shape[dim]
        by %= n
        moves = (Move(0, range(n - by, n), 0), Move(0, range(n - by), by))
        split = split_axes(x._spec.layout, (dim,))
        x = exchange_indices(str(func), [x], dim, moves, x._spec.meta()) if split else func(x, [by], [dim])
    return x


def cat(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Tensors concatenated, all redistributed to the layout of the largest."""
    (out,) = _inferred(func, args, kwargs)
    tensors = [with_partials_reduced(t, str(func)) for t in args[0] if t.dim() == out.dim()]
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.dim()
    layout = max(tensors, key=lambda t: t.numel())._spec.layout
    redistributed_tensors = [
        redistributed(t if t.dtype == out.dtype else t.to(out.dtype), layout, str(func)) for t in tensors
    ]
    moves, start = [], 0
    for i, t in enumerate(redistributed_tensors):
        moves.append(Move(i, range(t.shape[dim]), start))
        start += t.shape[dim]
    return exchange_indices(str(func), redistributed_tensors, dim, tuple(moves), out)


def _inferred(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor]:
    """The result on one device, without data."""

    def meta(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [meta(each) for each in arg]
        return arg._spec.meta() if isinstance(arg, Wrapper) else arg

    return (infer(func, tuple(map(meta, args)), dict(kwargs)),)


# -- when


def cuts_split(x: Any, *dims: int) -> bool:
    """Whether the tensor has elements and one of these dims is sharded over ranks."""
    spec: Spec | None = x._spec if isinstance(x, Wrapper) else None
    if spec is None or not spec.layout.sharded_dims() or 0 in spec.shape:
        return False
    ndim = len(spec.shape)
    if not all(-ndim <= dim < ndim for dim in dims):
        return False
    return bool(split_axes(spec.layout, tuple(dim % ndim for dim in dims)))


def _cuts(args: tuple[Any, ...]) -> bool:
    """Whether a slice takes some, but not all, indices of a sharded dim."""
    dim, start, end, step = _slice_arguments(*args[1:])
    if not cuts_split(args[0], dim):
        return False
    n = args[0].shape[dim]
    return step > 0 and 0 < len(range(*slice(start, end, step).indices(n))) < n


def _fills(args: tuple[Any, ...]) -> bool:
    grad, sizes, dim, _, _, step = args
    return step == 1 and cuts_split(grad, dim) and grad.shape[dim] != sizes[dim]


def _replaces(args: tuple[Any, ...]) -> bool:
    """Whether a run of indices of a sharded dim is replaced."""
    x, part, dim, start, end, step = _scatter_arguments(*args)
    return (
        step == 1
        and isinstance(part, Wrapper)
        and cuts_split(x, dim)
        and part.dim() == x.dim()
        and part.dtype == x.dtype
        and 0 < part.shape[dim] == len(range(*slice(start, end).indices(x.shape[dim])))
    )


def _pads(args: tuple[Any, ...]) -> bool:
    """Whether a sharded dim grows or shrinks, and some of its elements stay."""
    x, pads = args[0], args[1]
    if len(pads) % 2 or len(pads) > 2 * x.dim():
        return False
    changed = {x.dim() - 1 - i: pads[2 * i : 2 * i + 2] for i in range(len(pads) // 2) if any(pads[2 * i : 2 * i + 2])}
    stays = all(max(0, -low) + max(0, -high) < x.shape[dim] for dim, (low, high) in changed.items())
    return stays and cuts_split(x, *changed)


def _repeats(args: tuple[Any, ...]) -> bool:
    """Whether a sharded dim is repeated fewer times than it has shards; else every rank needs nearly all of it."""
    x, times = args
    new = len(times) - x.dim()
    more = [dim for dim in range(x.dim()) if new >= 0 and times[new + dim] > 1]
    return bool(more) and cuts_split(x, *more) and min(times) > 0 and all(_few(x, d, times[new + d]) for d in more)


def _few(x: Any, dim: int, times: int) -> bool:
    layout = x._spec.layout
    axes = split_axes(layout, (dim,))
    return not axes or times < prod(layout.mesh.shape[axis] for axis in axes)


def _turns(args: tuple[Any, ...]) -> bool:
    return cuts_split(args[0], *args[1])


def _rolls(args: tuple[Any, ...]) -> bool:
    return len(args) == 3 and len(args[1]) == len(args[2]) > 0 and cuts_split(args[0], *args[2])


def _joins(args: tuple[Any, ...]) -> bool:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    if not all(isinstance(t, Wrapper) for t in tensors):
        return False
    return cuts_split(max(tensors, key=lambda t: t.numel()), dim)


_ATEN = torch.ops.aten
When: TypeAlias = Callable[[tuple[Any, ...]], bool]

SHIFTS: dict[OpOverload, tuple[When, Custom]] = {
    _ATEN.slice.Tensor: (_cuts, slice_),
    _ATEN.slice_backward.default: (_fills, slice_backward),
    _ATEN.slice_scatter.default: (_replaces, slice_scatter),
    _ATEN.constant_pad_nd.default: (_pads, pad),
    _ATEN.repeat.default: (_repeats, repeat),
    _ATEN.flip.default: (_turns, flip),
    _ATEN.roll.default: (_rolls, roll),
    _ATEN.cat.default: (_joins, cat),
}
"""Operators that move elements along a sharded dim: whether a call does, and its implementation."""
