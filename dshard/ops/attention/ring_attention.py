"""The programs of ring attention: each rank attends to its current panel while it sends the panel on.

The keys and values of a panel are one flat buffer; at most two are held: the one in use, which is being sent, and the
next one. Results of panels are merged by their log-sum-exp. In the backward pass the gradients of a panel follow it
from rank to rank, and end at its owner. Each rank computes its first terms while the sum is in flight, and adds them to
the sum that arrives: at most two sums are held, too, in single precision at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from dshard.caches import cached
from dshard.comm import Program, Request, Session, begin, flat_exchange, has_only_shape, request_alone, sum_dtype
from dshard.layout import Layout, Shape
from dshard.mesh import Coordinate
from dshard.ops.attention.block_kernels import BlockResult, KeyPanel, RowGradients, add_gradients, block_gradients
from dshard.ops.attention.local_attention import Options, four_dims
from dshard.ops.attention.score_functions import Held, Indices, ScoreFunctions
from dshard.rules.attention_blocks import Reach
from dshard.rules.attention_ring import Positions, Ring, RingMessages, RingPlan, halved, ring_plan, swapped


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attention of operands in these layouts around a ring; without axes, of the local operands of each rank.

    `layouts` and `shapes` are those of query, key, value and perhaps mask. Queries, keys and values are sharded over
    the axes of the ring. `reach` says which keys queries may see, where that is known and no causal mask says it.
    """

    layouts: tuple[Layout, ...]
    shapes: tuple[Shape, ...]
    options: Options
    ring: Ring
    reach: Reach | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh axes of the ring."""
        return tuple(self.layouts[0].mesh.names[axis] for axis in self.ring.axes)

    @property
    def scale(self) -> float:
        """The factor of the scores."""
        return float(self.shapes[0][-1] ** -0.5 if self.options.scale is None else self.options.scale)

    def positions(self, operand: int, at: Coordinate) -> tuple[range, ...]:
        """The initial rows of an operand on each rank in the ring of the rank at `at`."""
        layout, shape = self.layouts[operand], self.shapes[operand]
        peers = layout.mesh.peers(self.axes, at)
        return tuple(layout.dim_range(len(shape) - 2, shape[-2], peer) for peer in peers)

    def ranges(self, operand: int, at: Coordinate) -> tuple[Positions, ...]:
        """The rows of an operand with which each rank in the ring of the rank at `at` computes, in order."""
        initial = self.positions(operand, at)
        return swapped(initial) if self.ring.balanced else tuple((each,) for each in initial)

    @cached("rings", 4096)
    def plan(self, at: Coordinate) -> RingPlan:
        """The plan of the ring of the rank at `at`."""
        mesh = self.layouts[0].mesh
        shape = tuple(mesh.shape[axis] for axis in self.ring.axes)
        return ring_plan(shape, self.ranges(0, at), self.ranges(1, at), self.options.causal, self.reach)

    @cached("rings", 4096)
    def busiest(self, at: Coordinate) -> Coordinate:
        """The rank that computes most of those whose local operands are as large as at `at`."""
        mesh, rows = self.layouts[0].mesh, zip(self.layouts[:3], self.shapes[:3], strict=True)
        along = {axis for layout, shape in rows for axis in layout.axes_of(len(shape) - 2)} - {*self.ring.axes}
        busiest, most = at, -1
        for first in product(*[range(n) if axis in along else (at[axis],) for axis, n in enumerate(mesh.shape)]):
            pairs = map(sum, zip(*self.plan(first).pairs, strict=True))
            for peer, seen in zip(mesh.peers(self.axes, first), pairs, strict=True):
                if seen > most and self._sizes(peer) == self._sizes(at):
                    busiest, most = peer, seen
        return busiest

    def _rank(self, functions: ScoreFunctions, at: Coordinate, space: Session, local: Tensor) -> _Rank:
        """The rank at `at`, or, where its tensors have no data, the one for which the others wait."""
        return _Rank(self, functions, self.busiest(at) if has_only_shape(local) else at, space)

    def _sizes(self, at: Coordinate) -> list[Shape]:
        """The shapes of the local operands of the rank at `at`."""
        return [layout.local_shape(shape, at) for layout, shape in zip(self.layouts, self.shapes, strict=True)]

    def forward(
        self, functions: ScoreFunctions, at: Coordinate, space: Session, tensors: Sequence[Tensor]
    ) -> Program[tuple[Tensor, ...]]:
        """The program of one rank, from local operands to the wide local result and the log-sum-exp of its rows."""
        rank = self._rank(functions, at, space, tensors[0])
        q, k, v = yield from rank.swapped(tuple(map(four_dims, tensors[:3])), (0, 1, 2))
        mask = rank.mask_of(tensors)
        result = BlockResult(q, v)
        panels = _Panels(rank, k, v)
        for step in range(rank.plan.ranks):
            keys, values = yield from panels.at_step(step)
            result.add(rank.panel(step, q, keys, values, mask))
        panels.end()
        out, lse = result.complete()
        out = out.to(lse.dtype).contiguous()
        if self.ring.balanced:
            (out,) = yield from rank.swapped((out.to(q.dtype),), (0,), back=True)
            (lse,) = yield from rank.swapped((lse.unsqueeze(-1),), (0,), back=True)
        shape = (*tensors[0].shape[:-1], v.shape[-1])
        return out.reshape(shape), lse.reshape(shape[:-1]).contiguous()

    def backward(
        self,
        functions: ScoreFunctions,
        needed: Sequence[bool],
        at: Coordinate,
        space: Session,
        tensors: Sequence[Tensor],
    ) -> Program[tuple[Tensor, ...]]:
        """The program of one rank that returns the local gradients of all operands, empty ones if not `needed`.

        `tensors` are the gradient of the result, its product with the result summed over the last dim, the log-sum-exp,
        and the operands.
        """
        rank, operands = self._rank(functions, at, space, tensors[0]), tensors[3:]
        q, k, v, grad = yield from rank.swapped(tuple(map(four_dims, (*operands[:3], tensors[0]))), (0, 1, 2, 0))
        statistics = tuple(four_dims(x.unsqueeze(-1)) for x in tensors[1:3])
        delta, lse = (x.squeeze(-1) for x in (yield from rank.swapped(statistics, (0, 0))))
        mask = rank.mask_of(operands)
        rows, of_q = RowGradients(grad, delta, lse), torch.zeros_like(q, dtype=lse.dtype)
        of_mask = None if mask is None or not needed[3] else mask.new_zeros(mask.shape, dtype=lse.dtype)
        panels, sums = _Panels(rank, k, v), _Sums(rank, k, v, needed[1] or needed[2])
        for step in range(rank.plan.ranks):
            keys, values = yield from panels.at_step(step)
            columns = None if of_mask is None else rank.columns(of_mask, step)
            panel = rank.panel(step, q, keys, values, mask)
            for block, gradients in block_gradients(rows, panel, columns is not None):
                of_keys = yield from sums.at_step(step)  # which have had the time of a block to arrive
                add_gradients((of_q, *of_keys, columns), panel, block, gradients)
            yield from sums.sent(step)
        panels.end()
        totals = (of_q, *(yield from sums.end()))
        gradients = yield from rank.swapped(tuple(x.to(q.dtype) for x in totals), (0, 1, 2), back=True)
        results = tuple(
            x.reshape(operand.shape) if is_needed else x.new_empty(0)
            for x, operand, is_needed in zip(gradients, operands, needed, strict=False)
        )
        if of_mask is None:
            return (*results, *(x.new_empty(0) for x in operands[3:]))
        return (*results, _sum_to(of_mask, operands[3], operands[0]))


class _Rank:
    """The rank at a coordinate in one pass around the ring."""

    def __init__(self, attention: RingAttention, functions: ScoreFunctions, at: Coordinate, space: Session) -> None:
        self.attention, self.held_at, self.at, self.space = attention, functions.held, at, space
        self.mesh = attention.layouts[0].mesh
        self.plan = attention.plan(at)
        self.peers = self.mesh.peers(attention.axes, at)
        self.index = self.peers.index(at)

    def length(self, step: int) -> int:
        """The number of keys of this rank's panel in a step; 0 for a panel that no later rank sees."""
        owner = self.plan.owners[step][self.index]
        return self.plan.lengths[owner] if self.plan.last[owner] >= step else 0

    def panel(self, step: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> KeyPanel:
        """The computation of this rank in a step."""
        part = None if mask is None else self.columns(mask, step)
        return KeyPanel(q, k, v, part, self.plan.blocks[step][self.index], self.attention.scale, self.held(step))

    def held(self, step: int) -> Held | None:
        """The functions of this rank's scores in a step."""
        if self.held_at is None:
            return None
        attention, owner = self.attention, self.plan.owners[step][self.index]
        lead = attention.layouts[0].region(attention.shapes[0], self.at)[:-2]
        queries, keys = attention.ranges(0, self.at)[self.index], attention.ranges(1, self.at)[owner]
        return self.held_at(Indices(tuple(lead), queries, keys))

    def mask_of(self, operands: Sequence[Tensor]) -> Tensor | None:
        """The local mask, with four dims."""
        return four_dims(operands[3], operands[0].shape[:-3]) if len(operands) > 3 else None

    def columns(self, mask: Tensor, step: int) -> Tensor:
        """The columns of the mask, or of its gradient, for a step's panel."""
        shape, layout = self.attention.shapes[3], self.attention.layouts[3]
        if shape[-1] == 1:
            return mask
        owner = self.plan.owners[step][self.index]
        keys = self.attention.positions(1, self.at)[owner]
        first = layout.dim_range(len(shape) - 1, shape[-1], self.at).start
        return mask.narrow(-1, min(keys.start - first, mask.shape[-1]), len(keys)) if len(keys) else mask[..., :0]

    def begin(
        self, messages: RingMessages, buffer: Tensor, width: int, loan: Tensor | None
    ) -> Program[Program[Tensor]]:
        """Begin to send `buffer`, and to receive, by `messages`, with `width` elements for each key."""
        axes = self.attention.axes if messages.axis is None else self.attention.axes[messages.axis : messages.axis + 1]
        group = [self.peers.index(peer) for peer in self.mesh.peers(axes, self.at)]
        lengths = self.plan.lengths
        send, recv = (
            tuple(sum(width * lengths[owner] for peer, owner in each if peer == index) for index in group)
            for each in (messages.sent, messages.received)
        )
        return (yield from self.exchange(axes, send, recv, buffer[: sum(send)], loan))

    def exchange(
        self, axes: tuple[str, ...], send: Shape, recv: Shape, buffer: Tensor, loan: Tensor | None
    ) -> Program[Program[Tensor]]:
        """Begin to exchange flat pieces of these sizes; the buffer `loan` is freed when it finishes."""
        step = flat_exchange(self.mesh, axes, self.at, send, recv, "permute")
        request = Request(step, buffer, self.space.take((sum(recv),), buffer), loan)
        return (yield from begin(request_alone(request, self.space)))

    def swapped(
        self, tensors: tuple[Tensor, ...], operands: Sequence[int], back: bool = False
    ) -> Program[tuple[Tensor, ...]]:
        """The tensors, of one dtype, with second halves swapped in a balanced ring; rows are as in `operands`."""
        if not self.attention.ring.balanced:
            return tensors
        other, rows = self.plan.ranks - 1 - self.index, [self.attention.positions(i, self.at) for i in operands]
        firsts = [len(halved(each[self.index])[0]) for each in rows]
        arriving = [len(halved(each[self.index if back else other])[1]) for each in rows]
        shapes = [(*x.shape[:-2], n, x.shape[-1]) for x, n in zip(tensors, arriving, strict=True)]
        buffer = self.packed([x[..., n:, :] for x, n in zip(tensors, firsts, strict=True)])
        there = [index == other != self.index for index in range(self.plan.ranks)]
        sizes = [prod(shape) for shape in shapes]
        send, recv = (tuple(n if here else 0 for here in there) for n in (buffer.numel(), sum(sizes)))
        sent = buffer[: sum(send)]
        arrived = yield from (yield from self.exchange(self.attention.axes, send, recv, sent, buffer))
        if other == self.index:
            return tensors
        parts = [part.view(shape) for part, shape in zip(arrived.split(sizes), shapes, strict=True)]
        joined = [torch.cat([x[..., :n, :], y], -2) for x, n, y in zip(tensors, firsts, parts, strict=True)]
        self.space.give(arrived)
        return tuple(joined)

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """The elements of tensors one after the other, in a buffer."""
        buffer = self.space.take((sum(x.numel() for x in tensors),), tensors[0])
        for x, part in zip(tensors, buffer.split([x.numel() for x in tensors]), strict=True):
            part.view(x.shape).copy_(x)
        return buffer


class _Panels:
    """The keys and values of each step: the rank's own, then those that arrive, each sent on while it is used."""

    def __init__(self, rank: _Rank, k: Tensor, v: Tensor) -> None:
        self.rank, self.own = rank, (k, v)
        self.buffer: Tensor | None = None
        self.arriving: Program[Tensor] | None = None

    def at_step(self, step: int) -> Program[tuple[Tensor, Tensor]]:
        """The keys and values of a step; the next ones are in flight afterwards."""
        rank, (k, v) = self.rank, self.own
        if self.arriving is not None:
            self.buffer = yield from self.arriving
            self.arriving = None
        if step + 1 < rank.plan.ranks:
            buffer = rank.packed((k, v)) if self.buffer is None else self.buffer
            messages, width = rank.plan.panels(rank.index, step + 1), _width(k, v)
            self.arriving = yield from rank.begin(messages, buffer, width, buffer)
        return (k, v) if not step or self.buffer is None else _keys_and_values(self.buffer, rank.length(step), k, v)

    def end(self) -> None:
        """Return the last buffer."""
        if self.buffer is not None:
            self.rank.space.give(self.buffer)


class _Sums:
    """The sums of gradients of keys and values: for a rank's own keys, and for a step's panel, which they follow.

    A rank adds its terms to the sum that arrives, and sends it on while the next sum arrives: two are held.
    """

    def __init__(self, rank: _Rank, k: Tensor, v: Tensor, needed: bool) -> None:
        self.rank, self.like, self.needed = rank, (k, v), needed
        self.own = k.new_zeros(_width(k, v) * k.shape[-2] * needed, dtype=sum_dtype(k.dtype))
        self.buffer: Tensor | None = self.own
        self.loan: Tensor | None = None
        self.arriving: Program[Tensor] | None = None

    def at_step(self, step: int) -> Program[tuple[Tensor | None, Tensor | None]]:
        """The sums for a step's keys and values, after their arrival; the caller adds this rank's terms."""
        k, v = self.like
        if not self.needed:
            return None, None
        buffer = self.own if not step else (yield from self._arrived(step))
        return _keys_and_values(buffer, self.rank.length(step) if step else k.shape[-2], k, v)

    def sent(self, step: int) -> Program[None]:
        """Send the sums of a step's panel to the panel's next rank, or to its owner."""
        if step and self.needed:
            buffer = yield from self._arrived(step)
            messages, width = self.rank.plan.gradients(self.rank.index, step), _width(*self.like)
            self.arriving = yield from self.rank.begin(messages, buffer, width, self.loan)
        self.buffer = self.loan = None

    def end(self) -> Program[tuple[Tensor, Tensor]]:
        """The gradients of a rank's own keys and values."""
        k, v = self.like
        if not self.needed:
            return k[..., :0, :], v[..., :0, :]
        if self.arriving is not None:
            yield from self._arrived(self.rank.plan.ranks)
            if self.loan is not None:
                self.rank.space.give(self.loan)
        return _keys_and_values(self.own, k.shape[-2], k, v)

    def _arrived(self, step: int) -> Program[Tensor]:
        """The sums of the step's panel in a buffer; sums for this rank's keys may arrive with them, and are added."""
        if self.buffer is not None:
            return self.buffer
        plan, width = self.rank.plan, _width(*self.like)
        if self.arriving is not None:
            self.loan, start = (yield from self.arriving), 0
            self.arriving = None
            for _, owner in sorted(plan.gradients(self.rank.index, step - 1).received):
                part = self.loan[start : start + width * plan.lengths[owner]]
                start += len(part)
                if owner == self.rank.index:
                    self.own.add_(part)
                else:
                    self.buffer = part
            if self.buffer is None:
                self.rank.space.give(self.loan)
                self.loan = None
        if self.buffer is None:
            length = self.rank.length(step) if step < plan.ranks else 0
            self.buffer = self.loan = self.rank.space.take((width * length,), self.own)
            self.buffer.zero_()
        return self.buffer


def _width(k: Tensor, v: Tensor) -> int:
    """The elements that one key and its value have."""
    return k.shape[0] * k.shape[1] * (k.shape[-1] + v.shape[-1])


def _keys_and_values(buffer: Tensor, length: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values of a panel in a flat buffer, with the other dims of `k` and `v`."""
    shapes = [(*x.shape[:-2], length, x.shape[-1]) for x in (k, v)]
    first, second = buffer[: sum(map(prod, shapes))].split([prod(shape) for shape in shapes])
    return first.view(shapes[0]), second.view(shapes[1])


def _sum_to(gradient: Tensor, mask: Tensor, q: Tensor) -> Tensor:
    """The gradient of a mask, from the gradient of its four-dim form."""
    if mask.dim() > 4:
        gradient = gradient.reshape(*(q.shape[:-3] if gradient.shape[0] > 1 else mask.shape[:-3]), *gradient.shape[1:])
    else:
        gradient = gradient.reshape(gradient.shape[4 - mask.dim() :])
    return gradient.sum_to_size(mask.shape).to(mask.dtype)
