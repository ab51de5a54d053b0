"""Python code of recorded instructions, simplified: one function of local tensors for a list of instructions."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch

from dshard.comm import DRAW
from dshard.core.torch_function import binding_of
from dshard.rehearsal.local_recorder import Instruction, Slot, View

aten = torch.ops.aten

_OF_SIZES = {aten.view.default: "view", aten.expand.default: "expand"}
"""Methods of a tensor that take sizes, which they parse faster one by one than in a list."""


def function_of(instruction: Instruction) -> Callable[..., Any]:
    """The function that runs an instruction."""
    op = instruction.operator
    return instruction.function if op is None else binding_of(op)


class Code:
    """Lines of one or more functions, and the values that they name: constants that Python does not write as numbers.

    Values are in variables where the slot is in `variables`, others at their `place`.
    """

    def __init__(self, place: Callable[[Slot], str], names: dict[str, Any]) -> None:
        self.names, self._place = names, place
        self.variables, self._placed = set[Slot](), set[Slot]()
        self._known: dict[tuple[str, int], str] = {}

    def constant(self, value: object, prefix: str = "c") -> str:
        """The name of a constant."""
        name = self._known.get((prefix, id(value)))
        if name is None:
            name = self._known[prefix, id(value)] = f"{prefix}{len(self._known)}"
            self.names[name] = value  # which keeps its id its own
        return name

    def place(self, slot: Slot) -> str:
        """How the code names the value of a slot."""
        return variable(slot) if slot in self.variables else self._place(slot)

    def text(self, value: object) -> str:
        """An argument."""
        if isinstance(value, Slot):
            return self.place(value)
        if isinstance(value, tuple):
            return f"[{', '.join(map(self.text, value))}]"
        if value is None or type(value) in (bool, int) or (type(value) is float and isfinite(value)):
            return repr(value)
        return self.constant(value)

    def line(self, each: Instruction) -> str:
        """The line that runs an instruction; its results are named by the numbers of their slots."""
        op = each.operator
        name = "f" if op is None else op._schema.name.partition("::")[2].replace(".", "_") + "_"
        function = self.constant(function_of(each), name)
        arguments = [*map(self.text, each.args), *(f"{name}={self.text(value)}" for name, value in each.kwargs)]
        outs = ["_" if out is None else variable(out) for out in each.outs]
        target = "" if not any(each.outs) else f"{', '.join(outs)}{',' if each.is_tuple else ''} = "
        if op in _OF_SIZES and each.args[1] and not each.kwargs:
            return f"{target}{arguments[0]}.{_OF_SIZES[op]}({', '.join(map(self.text, each.args[1]))})"
        return f"{target}{function}({', '.join(arguments)})"

    def lines(
        self, instructions: Sequence[Instruction], stay: Container[Slot], stored: Container[Slot] = ()
    ) -> list[str]:
        """The lines that run instructions: values are freed after the last that speaks of them, unless they `stay`.

        Those that are `stored` get their place as soon as they are made.
        """
        last = {slot: i for i, each in enumerate(instructions) for slot in (*reads(each), *each.made)}
        ends: dict[int, list[Slot]] = {}
        for slot, i in last.items():
            if slot not in stay:
                ends.setdefault(i, []).append(slot)
        lines, at = list[str](), ""
        for i, each in enumerate(instructions):
            self._placed.update(slot for slot in reads(each) if slot not in self.variables)
            if each.line != at:
                at = each.line
                lines.append(f"# {at}")
            lines.append(self.line(each))
            lines += [f"{self._place(slot)} = {variable(slot)}" for slot in each.made if slot in stored]
            lines += self.freed(slot for slot in each.made if slot in self._placed)  # which is made again
            self.variables.update(each.made)
            lines += self.freed(ends.get(i, ()))
        return lines

    def freed(self, slots: Iterable[Slot]) -> list[str]:
        """The lines that free values."""
        places = [*map(self.place, slots)]
        own = [f"del {', '.join(names)}"] if (names := [each for each in places if each.isidentifier()]) else []
        return own + [f"{each} = None" for each in places if not each.isidentifier()]

    def function(self, name: str, parameters: str, lines: Sequence[str], file: str) -> tuple[Callable[..., Any], str]:
        """The function of these lines, and its source."""
        source = "\n    ".join([f"def {name}({parameters}):", *(lines or ["pass"])])
        exec(compile(source, file, "exec"), self.names)  # made here, of numbers and names alone
        return self.names.pop(name), source  # else the function and the names that it reads would hold each other


def variable(slot: Slot) -> str:
    """The name of a slot's value in the function that makes it."""
    return f"t{slot.number}"


def filled(value: Any, values: Mapping[Slot, Any]) -> Any:
    """An argument with the values of its slots; sequences are lists."""
    if isinstance(value, Slot):
        return values[value]
    return [filled(each, values) for each in value] if isinstance(value, tuple) else value


def results_of(each: Instruction, values: Mapping[Slot, Any]) -> dict[Slot, Any]:
    """Run an instruction on the values of its slots: those of its new tensors."""
    out = each.function(*filled(each.args, values), **{name: filled(x, values) for name, x in each.kwargs})
    return each.values_of(out)


# -- recordings without equal views, and without instructions whose results nobody uses


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


def unread_draws(instructions: Iterable[Instruction]) -> list[Instruction]:
    """The draws of random numbers that no instruction reads: what Python made of them would be the same each time."""
    read, draws = set[Slot](), list[Instruction]()
    for each in instructions:
        read.update(reads(each))
        if each.key == DRAW:
            draws.append(each)
    return [each for each in draws if read.isdisjoint(each.made)]


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
