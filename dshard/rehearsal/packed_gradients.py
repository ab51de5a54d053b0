"""Gradients that a backward program computes in the buffer in which they are all-reduced: nothing is copied to it.

Design: docs/design/0025-rehearsed-modules.md
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dshard.comm import JoinedViews, Session
from dshard.rehearsal.local_recorder import Instruction, Slot, View
from dshard.rehearsal.simplified import reads
from dshard.torch_private import OpOverload

_ALIGNED = 64
"""Bytes: torch's own tensors begin at a multiple of it, and libraries may round otherwise elsewhere."""


class BufferedGradients:
    """The instructions of a backward program, whose gradients are put into buffers.

    `views` says how the tensor of each slot lies in its storage; those in `borrowed` have no memory that ends here.
    """

    def __init__(self, instructions: Iterable[Instruction], views: Iterable[View | None], borrowed: Set[Slot]) -> None:
        self.instructions, self._views, self._borrowed = [*instructions], [*views], {*borrowed}

    def put(self, slots: Mapping[Slot, int], shared: Container[Slot], given: Container[Slot]) -> list[Slot]:
        """Put gradients into one buffer, one after the other; their slots then.

        `slots` have the number of the part that gives each. An operator that can writes there; what others make is
        copied, at the end of its part. So is what is `shared`: something may read it later. Nothing changes where all
        would be copied, where they differ in dtype, or where the pass would hold more at once than if the buffer were
        packed at its end; so the buffer may begin behind some of its gradients. Those `given` to autograd stay.
        """
        layouts = {slot: view for slot in slots if (view := self._views[slot.number]) is not None and view.numel}
        if len(layouts) < len(slots) or len({(view.dtype, view.device) for view in layouts.values()}) > 1:
            return [*slots]
        offsets = accumulate(map(_bytes_of, layouts.values()), initial=0)
        fits = {
            slot
            for (slot, view), offset in zip(layouts.items(), offsets, strict=False)
            if slot not in shared and view.is_contiguous and offset % _ALIGNED == 0
        }
        makers = {out: i for i, each in enumerate(self.instructions) for out in each.made}
        direct = {makers[slot]: slot for slot in fits if slot in makers and _writing(self.instructions[makers[slot]])}
        last = {slot: i for i, each in enumerate(self.instructions) for slot in reads(each)}
        begin = self._begin(layouts, slots, direct, makers, last, given)
        if begin is None:
            return [*slots]
        places = {slot: self._new_slot(view) for slot, view in layouts.items()}
        call, written = self.instructions[begin].call, {slot for i, slot in direct.items() if i >= begin}
        done = self.instructions[:begin]
        make = partial(
            _in_one_buffer, JoinedViews([view.shape for view in layouts.values()]), next(iter(layouts.values()))
        )
        done.append(
            Instruction(make, (), (), tuple(places.values()), is_tuple=True, key="buffer of gradients", call=call)
        )
        now = {slot: slot for slot in slots}
        over = [slot for slot in slots if _is_over(slot, begin, makers, last) and slot not in shared]
        if over:
            done.append(self._copies(over, places, now, call))
        for i, each in enumerate(self.instructions[begin:], begin):
            if i in direct:
                form: Any = _writing(each)
                each = replace(each, function=form, kwargs=(*each.kwargs, ("out", places[direct[i]])))
                self._borrowed.add(direct[i])
            done.append(each)
        left = [slot for slot in slots if slot not in written and slot not in over]
        for part in sorted({slots[slot] for slot in left}):
            copies = self._copies([slot for slot in left if slots[slot] == part], places, now, part)
            done.insert(sum(other.call <= part for other in done), copies)
        self.instructions = done
        return [now[slot] for slot in slots]

    def _begin(
        self,
        layouts: Mapping[Slot, View],
        slots: Mapping[Slot, int],
        direct: Mapping[int, Slot],
        makers: Mapping[Slot, int],
        last: Mapping[Slot, int],
        given: Container[Slot],
    ) -> int | None:
        """The first instruction that can write to the buffer, without more memory than packing at the end takes."""
        alive, made = self._alive(last, given)
        size = sum(map(_bytes_of, layouts.values()))
        first, end = (
            sum(each.call <= part for each in self.instructions) for part in (min(slots.values()), max(slots.values()))
        )
        most = max(*alive, alive[end - 1] + size)
        for begin in sorted(i for i in direct if i < first):
            over = sum(_bytes_of(view) for slot, view in layouts.items() if _is_over(slot, begin, makers, last))
            held, fits = size, alive[begin] - made[begin] + size <= most
            for i in range(begin, len(alive)):
                held -= _bytes_of(layouts[direct[i]]) if i in direct else 0
                fits = fits and alive[i] + held - over <= most
            if fits:
                return begin
        return None

    def _alive(self, last: Mapping[Slot, int], given: Container[Slot]) -> tuple[list[int], list[int]]:
        """The bytes alive while each instruction runs, beyond those at the begin, and those that it makes."""
        alive, made, now = list[int](), list[int](), 0
        ends: defaultdict[int, list[Slot]] = defaultdict(list)
        for slot, i in last.items():
            ends[i].append(slot)
        for i, each in enumerate(self.instructions):
            made.append(sum(map(self._nbytes, each.made)))
            now += made[-1]
            alive.append(now)
            unread = [slot for slot in each.made if slot not in last]
            now -= sum(self._nbytes(slot) for slot in (*ends[i], *unread) if slot not in given)
        return alive, made

    def _nbytes(self, slot: Slot) -> int:
        view = self._views[slot.number]
        return 0 if view is None or slot in self._borrowed else _bytes_of(view)

    def _new_slot(self, like: View) -> Slot:
        self._views.append(like)
        return Slot(len(self._views) - 1)

    def _copies(
        self, slots: Sequence[Slot], places: Mapping[Slot, Slot], now: dict[Slot, Slot], call: int
    ) -> Instruction:
        """The instruction that copies these gradients to their places, in new slots, which are then those of `now`."""
        for slot in slots:
            view = self._views[slot.number]
            assert view is not None
            now[slot] = self._new_slot(view)
            self._borrowed.add(now[slot])
        args, outs = (tuple(places[slot] for slot in slots), tuple(slots)), tuple(now[slot] for slot in slots)
        return Instruction(_copied, args, (), outs, is_tuple=True, key="copies to a buffer", call=call)


def _is_over(slot: Slot, begin: int, makers: Mapping[Slot, int], last: Mapping[Slot, int]) -> bool:
    """Whether a gradient is made before an instruction, and nothing reads it from there on."""
    return makers.get(slot, begin) < begin and last.get(slot, -1) < begin


def _bytes_of(view: View) -> int:
    return view.numel * view.dtype.itemsize


def _writing(each: Instruction) -> Callable[..., Tensor] | None:
    """The form of an instruction's operator that writes its one result to `out`."""
    return None if each.is_tuple or each.is_view or len(each.outs) != 1 else writing_variant(each.operator)


def writing_variant(op: OpOverload | None) -> Callable[..., Tensor] | None:
    """The form of an operator of one result that writes it to `out`."""
    if op is None or len(op._schema.returns) != 1 or op._schema.is_mutable:
        return None
    own = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    packet = op.overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        if [(argument.name, str(argument.type)) for argument in arguments] == [*own, ("out", "Tensor")]:
            form: Callable[..., Tensor] = getattr(packet, name)
            return form
    return None


def _in_one_buffer(parts: JoinedViews, like: View) -> list[Tensor]:
    return parts.unpack(torch.empty(sum(parts.sizes), dtype=like.dtype, device=like.device), Session())


def _copied(places: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    torch._foreach_copy_(places, values)
    return places
