"""Gradients that a backward program computes in the buffer in which they are all-reduced: nothing is copied to it.

Design: docs/design/0025-rehearsed-modules.md
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dshard.comm import JoinedViews, Session
from dshard.rehearsal.local_recorder import Instruction, Slot, View
from dshard.rehearsal.simplified import reads
from dshard.torch_private import OpOverload

_ALIGNED = 64
"""Bytes: torch's own tensors begin at a multiple of it, and libraries may round otherwise elsewhere."""


def pack_gradients(
    instructions: Sequence[Instruction],
    slots: Mapping[Slot, int],
    views: Sequence[View | None],
    shared: Container[Slot],
    new_slots: Iterator[Slot],
) -> tuple[list[Instruction], list[Slot]]:
    """The instructions with these gradients one after the other in one buffer, and their slots then.

    An operator that can writes there. What others make is copied, at the end of the part that gives it, whose number
    `slots` say; so is what is `shared`: something may read it later. Nothing changes where all would be copied, or they
    differ in dtype.
    """
    layouts = [view for slot in slots if (view := views[slot.number]) is not None and view.numel]
    if len(layouts) < len(slots) or len({(view.dtype, view.device) for view in layouts}) > 1:
        return [*instructions], [*slots]
    offsets = accumulate([view.numel * view.dtype.itemsize for view in layouts], initial=0)
    fits = {
        slot
        for slot, view, offset in zip(slots, layouts, offsets, strict=False)
        if slot not in shared and view.is_contiguous and offset % _ALIGNED == 0
    }
    places = dict(zip(slots, new_slots, strict=False))
    done, written = list[Instruction](), set[Slot]()
    for each in instructions:
        slot = each.outs[0] if len(each.outs) == 1 else None
        writing = None if slot not in fits or each.is_tuple or each.is_view else writing_variant(each.operator)
        if slot is not None and writing is not None:
            written.add(slot)
            each = replace(each, function=writing, kwargs=(*each.kwargs, ("out", places[slot])))
        done.append(each)
    if not written:
        return [*instructions], [*slots]
    now = {slot: slot for slot in slots}
    for part in sorted({slots[slot] for slot in slots.keys() - written}):
        copied = [slot for slot in slots if slots[slot] == part and slot not in written]
        now |= zip(copied, new_slots, strict=False)
        args, outs = (tuple(places[slot] for slot in copied), tuple(copied)), tuple(now[slot] for slot in copied)
        each = Instruction(_copied, args, (), outs, is_tuple=True, key="copies to a buffer", call=part)
        done.insert(sum(other.call <= part for other in done), each)
    make = partial(_in_one_buffer, JoinedViews([view.shape for view in layouts]), layouts[0])
    outs = tuple(places.values())
    first = next(i for i, each in enumerate(done) if not {*outs}.isdisjoint(reads(each)))
    call = done[first].call
    done.insert(first, Instruction(make, (), (), outs, is_tuple=True, key="buffer of gradients", call=call))
    return done, [now[slot] for slot in slots]


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
