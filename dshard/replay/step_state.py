"""State beside its arguments that a step uses, as far as it is cheap to compare before each replay.

That is what the variables of its function lead to, and the modules and optimisers that it calls, by way of modules,
optimisers, dicts and lists. Other objects, tensors too, are compared by identity alone.

Options of optimisers are inputs of a program: a replay takes the rates that a schedule has set. Operators take the
numbers of a group of parameters, or what Python computes of them, such as `1 - beta`. Which argument follows which
option shows when an option has another value in one of two recordings that are the same in all else: an argument that
has changed as well follows an option if it equals that option, by one of few functions, in both. Until an option was
seen with two values, a replay takes no other value of it; and where an argument may follow several options, as two
groups with one rate, none in which these differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from dis import get_instructions
from functools import partial
from inspect import ismethod
from itertools import chain
from operator import attrgetter, is_
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor, is_tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dshard.caches import cached
from dshard.core.wrapper import Wrapper
from dshard.rehearsal.local_recorder import Instruction
from dshard.torch_private import GLOBAL_HOOKS, no_torch_function, pytree

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


_PLAIN = (bool, int, float, complex, str, type(None))
_MANY = 4096
"""Containers of more values are data, not state of a step."""


class StepState:
    """The containers, tensors and groups of parameters that a function leads to, and the modules that it calls.

    `grads` are those of leaves when these were first reached. After the step `keep` compares containers by what they
    hold: numbers and tensors that have changed without that the step did anything else are ignored.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._dicts: list[dict[Any, object]] = []
        self._reads: list[Callable[[], dict[Any, object]]] = [partial(_variables, function)]
        self.tensors: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor | None] = {}
        self.groups: list[dict[str, Any]] = []
        self._options = list[Options]()  # of the groups when they were reached
        self._seen: dict[int, object] = {}
        self.add(*_variables(function).values(), *GLOBAL_HOOKS)

    def add(self, *values: object) -> None:
        """Add what these objects lead to."""
        to_do = [*values]
        while to_do:
            x = to_do.pop()
            if id(x) in self._seen:
                continue
            if isinstance(x, Tensor):
                self.tensors[id(x)] = x
                if x.requires_grad and x.is_leaf:
                    self.grads[id(x)] = x.grad
            elif isinstance(x, nn.Module | Optimizer):
                groups = x.param_groups if isinstance(x, Optimizer) else []
                self.groups += groups
                self._options += [options_of([group]) for group in groups]
                self._reads += [partial(_settings, group) for group in groups]
                to_do += [vars(x), *(group["params"] for group in groups)]
                self._seen |= {id(group): group for group in groups}
            elif isinstance(x, dict | list) and len(x) <= _MANY:
                to_do += x.values() if isinstance(x, dict) else x
                if isinstance(x, dict):
                    self._dicts.append(x)
                else:
                    self._reads.append(partial(_entries, x))
            else:
                continue
            self._seen[id(x)] = x

    @property
    def options_changed(self) -> bool:
        """Whether the step has changed options of its optimisers."""
        return self._options != [options_of([group]) for group in self.groups]

    @contextmanager
    def adding_calls(self) -> Iterator[None]:
        """Within the block, add the modules that are called, and the optimisers that step."""
        on_call = register_module_forward_pre_hook(lambda module, args: self.add(module))
        on_step = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self.add(optimizer))
        try:
            yield
        finally:
            on_call.remove()
            on_step.remove()

    def keep(self, arguments: Iterable[Tensor]) -> None:
        """Keep what the containers hold now, and what decides how tensors are used; nothing of these arguments."""
        own = {id(x) for x in arguments}
        self._used = [x for number, x in self.tensors.items() if number not in own]
        self._before, self._uses, self._ignored = self._now(), _uses(self._used), frozenset[int]()
        self.tensors, self.grads, self._seen = {}, {}, {}

    def _all(self) -> Iterator[dict[Any, object]]:
        return chain(self._dicts, [read() for read in self._reads])

    def _now(self) -> list[object]:
        return [*chain.from_iterable(map(dict.values, self._all()))]

    def changed(self) -> str:
        """The name of what is another now; empty if nothing is."""
        now, before = self._now(), self._before
        if len(now) != len(before) or not all(map(is_, now, before)):
            others = _others(now, before) - (self._ignored if len(now) == len(before) else frozenset())
            if others or len(now) != len(before):
                names = [*chain.from_iterable(self._all()), "an entry"]
                name = names[min(others, default=-1)]
                return "a hook" if type(name) is int else str(name)
        for name, used, uses in zip(_USES, self._uses, _uses(self._used), strict=True):
            if used != uses:
                x = next(x for x, a, b in zip(self._used, used, uses, strict=True) if a != b)
                return f"{name} of a tensor of shape {tuple(x.shape)}"
        return ""

    def ignore_changes(self, last: StepState) -> None:
        """Ignore from now on numbers and tensors that have changed since the `last` time: they do nothing else."""
        now = self._before  # modes such as `training` are no numbers
        if len(now) == len(last._before):
            others = _others(now, last._before)
            self._ignored = last._ignored | {i for i in others if type(now[i]) in (int, float) or is_tensor(now[i])}


def _others(now: list[object], before: list[object]) -> frozenset[int]:
    pairs = enumerate(zip(now, before, strict=False))
    return frozenset(i for i, (a, b) in pairs if a is not b and not alike(a, b))


def _entries(values: list[object]) -> dict[Any, object]:
    return {f"entry {i}": value for i, value in enumerate(values)}


def _uses(tensors: list[Tensor]) -> tuple[list[Any], ...]:
    """Values beside their elements that decide how tensors are used, in the order of `_USES`."""
    with no_torch_function():
        local = [x.__dict__.get("_local_tensor", _NOWHERE) if isinstance(x, Wrapper) else x for x in tensors]
        hooks = [[kind and {**kind} for kind in map(kinds, tensors)] for kinds in _HOOKS]
        return [*map(_REQUIRES_GRAD, tensors)], [*map(id, local)], [*map(Tensor.data_ptr, local)], *hooks


_USES = ("requires_grad", "memory", "memory", "a hook", "a hook")
_REQUIRES_GRAD, *_HOOKS = map(attrgetter, ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"))
_NOWHERE = torch.empty(0)
"""Stands for a local tensor that is in flight."""


def _settings(group: dict[str, object]) -> dict[str, object]:
    """The entries of a group of parameters that are no numbers, which are `options`."""
    return {name: value for name, value in group.items() if not is_option(value)}


def _variables(function: Any) -> dict[str, object]:
    """The variables which a function names, and the attributes of the object that it belongs to."""
    if isinstance(function, partial):
        arguments = {f"argument {i}": value for i, value in enumerate(function.args)}
        return _variables(function.func) | arguments | function.keywords
    if ismethod(function):
        return _variables(function.__func__) | getattr(function.__self__, "__dict__", {})
    if not isinstance(function, FunctionType):
        return getattr(function, "__dict__", {})
    held = {name: function.__globals__.get(name) for name in _globals_read(function.__code__)}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable without a value
            held[name] = cell.cell_contents
    defaults = {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
    return held | defaults | (function.__kwdefaults__ or {})


@cached("global variables of functions", 1024)
def _globals_read(code: CodeType) -> frozenset[str]:
    """The global variables that a function reads, with those of functions and comprehensions within it."""
    names = frozenset(each.argval for each in get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return names.union(*(_globals_read(each) for each in code.co_consts if isinstance(each, CodeType)))


def is_plain(value: object) -> bool:
    """Whether a value is a number or a text, or a tuple of these."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def alike(a: object, b: object) -> bool:
    """Whether two plain values are equal in type and value, zeros in their sign too."""
    return is_plain(a) and type(a) is type(b) and repr(a) == repr(b)
