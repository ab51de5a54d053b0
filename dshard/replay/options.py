"""Options of optimisers as inputs of a program: a replay takes the rates that a schedule has set.

Operators take the numbers of a group of parameters, or what Python computes of them, such as `1 - beta`. Which argument
follows which option shows when an option has another value in one of two recordings that are the same in all else: an
argument that has changed as well follows an option if it equals that option, by one of few functions, in both. Until an
option was seen with two values, a replay takes no other value of it; and where an argument may follow several options,
as two groups with one rate, none in which these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

from dshard.replay.step_recorder import Instruction
from dshard.replay.step_state import is_option

Numbers: TypeAlias = Sequence[int | float]
Place: TypeAlias = tuple[int, int]
"""The number of an instruction, and that of a value among its arguments."""

_FUNCTIONS: dict[str, Callable[[float], float]] = {"x": lambda x: x, "-x": lambda x: -x, "1 - x": lambda x: 1 - x}


class Term(NamedTuple):
    """A function of the product of some options, given by their numbers."""

    function: str
    options: tuple[int, ...]

    def __call__(self, numbers: Numbers) -> float:
        """The value for these options."""
        return _FUNCTIONS[self.function](prod([numbers[i] for i in self.options]))


Terms: TypeAlias = Mapping[Place, frozenset[Term]]
"""The terms that arguments equal, by the places of these."""


class Options:
    """The numbers among the options of groups of parameters: their names, and the functions of them that are known."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self.names: list[str] = []
        self._entries: list[tuple[dict[str, Any], str, int]] = []  # how many numbers each has, or -1 for one
        self._terms: list[Term] = []
        for group in groups:
            first: dict[str, int] = {}
            for name, value in group.items():
                if is_option(value):
                    first[name] = len(self.names)
                    self.names += [name] * (len(value) if isinstance(value, tuple) else 1)
                    self._entries.append((group, name, len(value) if isinstance(value, tuple) else -1))
            products = [(first["lr"], first["weight_decay"])] if first.keys() >= {"lr", "weight_decay"} else []
            alone = [(i,) for i in range(min(first.values(), default=0), len(self.names))]
            self._terms += [Term(function, each) for each in (*alone, *products) for function in _FUNCTIONS]

    def read(self) -> list[int | float] | None:
        """The present numbers; None if an entry is no longer what it was."""
        numbers = list[int | float]()
        for group, name, n in self._entries:
            value = group.get(name)
            if not is_option(value) or (len(value) if type(value) is tuple else -1) != n:
                return None
            numbers += value if type(value) is tuple else (value,)
        return numbers

    def terms_in(self, instructions: Sequence[Instruction], numbers: Numbers) -> dict[Place, frozenset[Term]]:
        """The terms that equal arguments of operators, by their places."""
        by_value: dict[float, set[Term]] = {}
        for term in self._terms:
            by_value.setdefault(term(numbers), set()).add(term)
        return {
            (i, j): frozenset(by_value[value])
            for i, each in enumerate(instructions)
            if each.key is None
            for j, value in enumerate(values_in(each))
            if type(value) in (int, float) and value in by_value
        }


def values_in(instruction: Instruction) -> list[Any]:
    """The values among the arguments of an instruction, with those in tuples."""
    values = list[Any]()

    def add(value: Any) -> None:
        if isinstance(value, tuple):
            for each in value:
                add(each)
        else:
            values.append(value)

    add((instruction.args, tuple(value for _, value in instruction.kwargs)))
    return values


def with_values(instruction: Instruction, new: Mapping[int, Any]) -> tuple[Any, Any]:
    """The arguments of an instruction with other values, by their numbers among those of `values_in`."""
    count = iter(range(len(values_in(instruction))))

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple([changed(each) for each in value])
        return new.get(next(count), value)

    return changed(instruction.args), tuple((name, changed(value)) for name, value in instruction.kwargs)
