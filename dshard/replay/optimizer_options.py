"""Options of optimisers as inputs of a program: a replay takes the rates that a schedule has set.

Operators take the numbers of a group of parameters, or what Python computes of them, such as `1 - beta`. Which argument
follows which option shows when an option has another value in one of two recordings that are the same in all else: an
argument that has changed as well follows an option if it equals that option, by one of few functions, in both. Until an
option was seen with two values, a replay takes no other value of it; and where an argument may follow several options,
as two groups with one rate, none in which these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from dshard.rehearsal.local_recorder import Instruction
from dshard.replay.step_state import is_option

Option: TypeAlias = tuple[int, str, int]
"""A number: that of a group, the name of its entry, and its number there."""
Term: TypeAlias = tuple[str, Option]
"""A function of an option, by its name."""
Place: TypeAlias = tuple[int, int]
"""The number of an instruction, and that of a value among its arguments."""

FUNCTIONS: dict[str, Callable[[float], float]] = {"x": lambda x: x, "-x": lambda x: -x, "1 - x": lambda x: 1 - x}


def options_of(groups: Iterable[dict[str, Any]]) -> dict[Option, int | float]:
    """The numbers among the options of groups of parameters, and the products with which weights decay."""
    numbers: dict[Option, int | float] = {}
    for i, group in enumerate(groups):
        for name, value in group.items():
            if is_option(value):
                numbers |= {(i, name, j): x for j, x in enumerate(value if type(value) is tuple else (value,))}
        if (i, "lr", 0) in numbers and (i, "weight_decay", 0) in numbers:
            numbers[i, "lr * weight_decay", 0] = group["lr"] * group["weight_decay"]
    return numbers


def terms_in(
    instructions: Sequence[Instruction], options: Mapping[Option, int | float]
) -> dict[Place, frozenset[Term]]:
    """The terms that equal arguments of operators, by their places."""
    terms: dict[float, set[Term]] = {}
    for option, number in options.items():
        for name, function in FUNCTIONS.items():
            terms.setdefault(function(number), set()).add((name, option))
    return {
        (i, j): frozenset(terms[value])
        for i, each in enumerate(instructions)
        if each.key is None
        for j, value in enumerate(values_in(each))
        if type(value) in (int, float) and value in terms
    }


def values_in(instruction: Instruction) -> list[Any]:
    """The values among the arguments of an instruction, with those in tuples."""
    values = list[Any]()
    _mapped((instruction.args, instruction.kwargs), values.append)
    return values


def with_values(instruction: Instruction, new: Mapping[int, Any]) -> tuple[Any, Any]:
    """The arguments of an instruction with other values, by their numbers among those of `values_in`."""
    numbers = iter(range(len(values_in(instruction))))
    changed: tuple[Any, Any] = _mapped((instruction.args, instruction.kwargs), lambda x: new.get(next(numbers), x))
    return changed


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    return tuple([_mapped(each, function) for each in value]) if isinstance(value, tuple) else function(value)
