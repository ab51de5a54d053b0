"""A recorded step as a program: simplified, and compiled to one Python function of its external tensors.

Most instructions of a recording are views, of which many are equal, and operators whose results nobody uses, as those
that only infer shapes. A view of a parameter is made once, not in each step. The function frees each tensor after its
last use. What remains runs below autograd and in the order of the recording, so that its results are the same to the
bit, and its collectives match those of ranks that run the step by Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

import torch

from dshard.replay.step_recorder import Instruction, Slot, StepRecorder, View

aten = torch.ops.aten


FILE = "<replay>"
"""The name of the file of programs, in tracebacks."""


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


def written_by(instructions: Iterable[Instruction]) -> set[Slot]:
    """The slots whose memory operators write to, by themselves or by views of them."""
    roots: dict[Slot, Slot] = {}
    written = set[Slot]()
    for each in instructions:
        if each.is_view:
            base = each.args[0]
            roots |= {out: roots.get(base, base) for out in each.outs if out is not None}
        elif each.operator is not None:
            written.update(slot for x in each.written() for slot in (x, roots.get(x, x)))
    return written


def simplified(recording: StepRecorder, results: Iterable[Slot]) -> tuple[list[Instruction], dict[Slot, Slot]]:
    """The instructions that the results need, without views that equal others, and the slots that stand for others."""
    instructions, stands_for = _without_equal_views(recording)
    needed = {stands_for.get(slot, slot) for slot in results}
    kept: list[Instruction] = []
    for instruction in reversed(instructions):
        if instruction.writes or any(out in needed for out in instruction.outs):
            needed.update(reads(instruction))
            kept.append(instruction)
    return kept[::-1], stands_for


def _without_equal_views(recording: StepRecorder) -> tuple[list[Instruction], dict[Slot, Slot]]:
    """The instructions, each view taken of the first tensor that has its memory, and only once."""
    views, kept = recording.views, list[Instruction]()
    stands_for: dict[Slot, Slot] = {}
    roots: dict[Slot, Slot] = {}  # the tensor whose storage a view has
    known: dict[tuple[Slot, View | None], Slot] = {}
    made_of: dict[Slot, Slot] = {}

    def same(value: Any) -> Any:
        if isinstance(value, Slot):
            return stands_for.get(value, value)
        return tuple([same(each) for each in value]) if isinstance(value, tuple) else value

    for each in recording.instructions:
        kwargs = tuple((name, same(value)) for name, value in each.kwargs)
        instruction = replace(each, args=same(each.args), kwargs=kwargs)
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


class StepProgram:
    """A step as a function of its external tensors.

    `code` is its source. The `inputs` are the slots of the external tensors that it takes, in order; `fixed` tensors
    are part of it, with what is made of them alone.
    """

    def __init__(
        self, instructions: Sequence[Instruction], results: Sequence[Slot], fixed: Mapping[Slot, Any], inputs: set[Slot]
    ) -> None:
        made = {out for each in instructions for out in each.outs if out is not None}
        self.n_collectives = sum(isinstance(each.key, tuple) and each.key[0] == "begin" for each in instructions)
        self.n_operators = sum(each.operator is not None for each in instructions)
        names: dict[str, Any] = {}
        once = _only_of(fixed, instructions)
        used = {slot for each in instructions for slot in reads(each)} | set(results)
        self.inputs = sorted((slot for slot in inputs if slot in used and slot not in made), key=lambda s: s.number)
        names |= {_name(slot): x for slot, x in fixed.items() if slot in used}
        for each in once:
            out = each.function(*_filled(each.args, names), **{k: _filled(v, names) for k, v in each.kwargs})
            for slot, x in zip(each.outs, out if each.is_tuple else (out,), strict=True):
                if slot is not None:
                    names[_name(slot)] = x
        rest = [each for each in instructions if not any(each is other for other in once)]
        lines = _lines(rest, results, names)
        header = f"def step({', '.join(map(_name, self.inputs))}):"
        views = {out for each in instructions if each.is_view for out in each.outs}
        own = (f"{_name(slot)}{'.data' if slot in views else ''}, " for slot in results)  # versions of their own
        result = f"return ({''.join(own)})"
        self.code = "\n    ".join([header, *lines, result])
        exec(compile(self.code, FILE, "exec"), names)  # made above, of numbers and names alone
        self.run: Callable[..., tuple[Any, ...]] = names["step"]


def _only_of(fixed: Mapping[Slot, object], instructions: Sequence[Instruction]) -> list[Instruction]:
    """The views of fixed tensors alone."""
    known, once = set(fixed), list[Instruction]()
    for each in instructions:
        if each.is_view and all(slot in known for slot in reads(each)):
            known.update(out for out in each.outs if out is not None)
            once.append(each)
    return once


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(value, Slot):
        return names[_name(value)]
    return [_filled(each, names) for each in value] if isinstance(value, tuple) else value


def _name(slot: Slot) -> str:
    return f"t{slot.number}"


def _lines(instructions: Sequence[Instruction], results: Sequence[Slot], names: dict[str, Any]) -> list[str]:
    """The lines of the program; constants that Python does not write as numbers are added to `names`."""
    last: dict[Slot, int] = {}
    for i, each in enumerate(instructions):
        for slot in (*reads(each), *(out for out in each.outs if out is not None)):
            last[slot] = i
    ends: dict[int, list[Slot]] = {}
    for slot, i in last.items():
        if slot not in results and _name(slot) not in names:
            ends.setdefault(i, []).append(slot)
    functions: dict[object, str] = {}

    def constant(value: object, prefix: str) -> str:
        name = functions.get((prefix, id(value)))
        if name is None:
            name = functions[prefix, id(value)] = f"{prefix}{len(functions)}"
            names[name] = value
        return name

    def text(value: object) -> str:
        if isinstance(value, Slot):
            return _name(value)
        if isinstance(value, tuple):
            return f"[{', '.join(map(text, value))}]"
        if value is None or type(value) in (bool, int) or (type(value) is float and isfinite(value)):
            return repr(value)
        return constant(value, "c")

    lines, place = list[str](), ""
    for i, each in enumerate(instructions):
        if each.line != place:
            place = each.line
            lines.append(f"# {place}")
        op = each.operator
        function = constant(each.function if op is None else op._op, "f" if op is None else op._schema.name[6:] + "_")
        arguments = [*map(text, each.args), *(f"{name}={text(value)}" for name, value in each.kwargs)]
        outs = ["_" if out is None else _name(out) for out in each.outs]
        target = "" if not any(each.outs) else f"{', '.join(outs)}{',' if each.is_tuple else ''} = "
        lines.append(f"{target}{function}({', '.join(arguments)})")
        if i in ends:
            lines.append(f"del {', '.join(map(_name, ends[i]))}")
    return lines
