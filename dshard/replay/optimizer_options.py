"""Options of optimisers as inputs of a program: a replay takes the rates that a schedule has set.

Operators take the numbers of a group of parameters, or what Python computes of them, such as `1 - beta`. Which argument
follows which option shows when an option has another value in one of two recordings that are the same in all else: an
argument that has changed as well follows an option if it equals that option, by one of few functions, in both. Until an
option was seen with two values, a replay takes no other value of it; and where an argument may follow several options,
as two groups with one rate, none in which these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from dshard.rehearsal.local_recorder import Instruction
from dshard.torch_private import pytree

Option: TypeAlias = tuple[int, str, int]
"""A number: that of a group, the name of its entry, and its number there."""
Options: TypeAlias = dict[Option, int | float]
Term: TypeAlias = tuple[str, Option]
"""A function of an option, by its name."""
Terms: TypeAlias = dict[tuple[int, int], frozenset[Term]]
"""Of arguments, by the numbers of the instruction and of the value in it, the terms that they may follow."""

FUNCTIONS: dict[str, Callable[[float], float]] = {"x": lambda x: x, "-x": lambda x: -x, "1 - x": lambda x: 1 - x}


def is_option(value: object) -> bool:
    """Whether an entry of a group of parameters is a number, or a tuple of numbers."""
    return all(type(number) in (int, float) for number in (value if type(value) is tuple else (value,)))


def options_of(groups: Iterable[dict[str, Any]]) -> Options:
    """The numbers among the options of groups of parameters, and the products with which weights decay."""
    numbers: Options = {}
    for i, group in enumerate(groups):
        for name, value in group.items():
            if is_option(value):
                numbers |= {(i, name, j): x for j, x in enumerate(value if type(value) is tuple else (value,))}
        if (i, "lr", 0) in numbers and (i, "weight_decay", 0) in numbers:
            numbers[i, "lr * weight_decay", 0] = group["lr"] * group["weight_decay"]
    return numbers


def terms_in(instructions: Sequence[Instruction], options: Options) -> Terms:
    """The terms that equal arguments of operators."""
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


def values_in(each: Instruction) -> list[Any]:
    """The values among the arguments of an instruction, with those in tuples."""
    return pytree.tree_leaves((each.args, each.kwargs))  # type: ignore[no-any-return]


def with_values(each: Instruction, new: Mapping[int, Any]) -> Instruction:
    """The instruction with other values among its arguments, by their numbers among those of `values_in`."""
    values, structure = pytree.tree_flatten((each.args, each.kwargs))
    args, kwargs = pytree.tree_unflatten([new.get(j, x) for j, x in enumerate(values)], structure)
    return replace(each, args=args, kwargs=kwargs)
