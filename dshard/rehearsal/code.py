"""Python code of recorded instructions: one function of local tensors for a list of instructions."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch

from dshard.core.torch_function import binding_of
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.simplified import reads

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
