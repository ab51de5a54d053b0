"""Recordings without equal views, and without instructions whose results nobody uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from dshard.rehearsal.local_recorder import Instruction, Slot, View

aten = torch.ops.aten


def slots_in(value: object) -> Iterator[Slot]:
    """The slots among arguments."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from slots_in(each)


def reads(instruction: Instruction) -> Iterator[Slot]:
    """The slots that an instruction reads."""
    yield from slots_in(instruction.args)
    for _, value in instruction.kwargs:
        yield from slots_in(value)


def with_slots(instruction: Instruction, place: Callable[[Slot], object]) -> Instruction:
    """The instruction with other arguments in the places of its slots."""
    kwargs = tuple((name, _with_slots(value, place)) for name, value in instruction.kwargs)
    return replace(instruction, args=_with_slots(instruction.args, place), kwargs=kwargs)


def _with_slots(value: Any, place: Callable[[Slot], object]) -> Any:
    if isinstance(value, Slot):
        return place(value)
    return tuple([_with_slots(each, place) for each in value]) if isinstance(value, tuple) else value


def roots_of(instructions: Iterable[Instruction]) -> dict[Slot, Slot]:
    """The tensor whose memory each view has."""
    roots: dict[Slot, Slot] = {}
    for each in instructions:
        if each.is_view:
            roots |= dict.fromkeys(each.made, roots.get(each.args[0], each.args[0]))
    return roots


def written_by(instructions: Sequence[Instruction]) -> set[Slot]:
    """The slots whose memory operators write to, by themselves or by views of them."""
    roots = roots_of(instructions)
    written = [x for each in instructions if not each.is_view and each.operator is not None for x in each.written()]
    return {slot for x in written for slot in (x, roots.get(x, x))}


def simplified(
    instructions: Iterable[Instruction], views: Sequence[View | None], results: Iterable[Slot]
) -> tuple[list[Instruction], dict[Slot, Slot]]:
    """The instructions that the results need, without views that equal others, and the slots that stand for others.

    `views` says how the tensor of each slot lies in its storage.
    """
    instructions, stands_for = _without_equal_views(instructions, views)
    needed = {stands_for.get(slot, slot) for slot in results}
    kept: list[Instruction] = []
    for instruction in reversed(instructions):
        if instruction.writes or any(out in needed for out in instruction.outs):
            needed.update(reads(instruction))
            kept.append(instruction)
    return kept[::-1], stands_for


def _without_equal_views(
    instructions: Iterable[Instruction], views: Sequence[View | None]
) -> tuple[list[Instruction], dict[Slot, Slot]]:
    """The instructions, each view taken of the first tensor that has its memory, and only once."""
    kept = list[Instruction]()
    stands_for: dict[Slot, Slot] = {}
    roots: dict[Slot, Slot] = {}  # the tensor whose storage a view has
    known: dict[tuple[Slot, View | None], Slot] = {}
    made_of: dict[Slot, Slot] = {}

    def same(slot: Slot) -> Slot:
        return stands_for.get(slot, slot)

    for each in instructions:
        instruction = with_slots(each, same)
        base = instruction.args[0] if instruction.args and isinstance(instruction.args[0], Slot) else None
        if base is None or not instruction.is_view:
            kept.append(instruction)
            continue
        root = roots.get(base, base)
        known.setdefault((root, views[root.number]), root)
        outs: list[Slot | None] = []
        for out in instruction.outs:
            equal = None if out is None else known.setdefault((root, views[out.number]), out)
            if out is not None and equal is not None and equal != out:
                stands_for[out] = equal
            elif out is not None:
                roots[out] = root
            outs.append(out if equal == out else None)
        if any(outs):
            instruction = replace(instruction, outs=tuple(outs))
            by_sizes = instruction.operator is aten.view.default
            kept.append(_of_first(instruction, base, made_of, views) if by_sizes else instruction)
    return kept, stands_for


def _of_first(
    instruction: Instruction, base: Slot, made_of: dict[Slot, Slot], views: Sequence[View | None]
) -> Instruction:
    """A view by sizes of a contiguous tensor, taken of that tensor rather than of another view by sizes."""
    (out,) = instruction.outs
    assert out is not None
    first = made_of.get(base, base)
    view = views[first.number]
    if view is None or not view.is_contiguous:
        first = base
    made_of[out] = first
    return replace(instruction, args=(first, *instruction.args[1:]))


def parted(
    fixed: Iterable[Slot], instructions: Iterable[Instruction]
) -> tuple[list[Instruction], list[Instruction], set[Slot]]:
    """The views of fixed tensors alone, which are made once; other instructions; and all slots that are fixed."""
    known, once, rest = set(fixed), list[Instruction](), list[Instruction]()
    for each in instructions:
        is_fixed = each.is_view and known.issuperset(reads(each))
        (once if is_fixed else rest).append(each)
        if is_fixed:
            known.update(each.made)
    return once, rest, known
