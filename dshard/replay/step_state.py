"""State beside its arguments that a step uses, as far as it is cheap to compare before each replay.

That are the modules which are called, the optimisers which step, and the variables of the function: the objects that
they hold, parameters, buffers and hooks among them. What these objects hold in turn is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dis import get_instructions
from functools import partial
from inspect import ismethod
from itertools import chain, islice
from operator import is_
from types import CellType, CodeType, FunctionType
from typing import Any, TypeAlias

from torch import Tensor, is_tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dshard.torch_private import no_torch_function

_PLAIN = (bool, int, float, complex, str, type(None))
_MANY = 4096
"""Containers of more values are data, not state of a step."""
_GLOBAL_HOOKS = [
    value
    for names in (vars(torch_module), vars(torch_optimizer))
    for name, value in names.items()
    if name.startswith("_global_") and isinstance(value, dict)
]
Read: TypeAlias = Callable[[], dict[Any, object]]


class Held:
    """What a state holds, by identity: the values of dicts, those that functions `read`, and the hooks of tensors.

    Numbers and tensors that have changed without that the step did anything else are ignored: `since` finds them.
    """

    def __init__(self, dicts: list[dict[Any, object]], read: list[Read], tensors: list[Tensor]) -> None:
        self._dicts, self._read, self._tensors = dicts, read, tensors
        self._needs = [f"requires_grad of tensor {i}" for i in range(len(tensors))]
        self._before, self._ignored = self._now(), set[int]()

    def _all(self) -> Iterator[dict[Any, object]]:
        with no_torch_function():
            hooks: list[Any] = [x._backward_hooks for x in self._tensors if x._backward_hooks]
            hooks += [x._post_accumulate_grad_hooks for x in self._tensors if x._post_accumulate_grad_hooks]
            needs = dict(zip(self._needs, [x.requires_grad for x in self._tensors], strict=True))
        return chain(self._dicts, hooks, [read() for read in self._read], [needs])

    def _now(self) -> list[object]:
        return [*chain.from_iterable(map(dict.values, self._all()))]

    def changed(self) -> str:
        """The name of an object that is another now; empty if there is none."""
        now, before = self._now(), self._before
        if len(now) == len(before) and all(map(is_, now, before)):
            return ""
        others = [i for i, (a, b) in enumerate(zip(now, before, strict=False)) if a is not b and not alike(a, b)]
        if len(now) == len(before):
            others = [i for i in others if i not in self._ignored]
            if not others:
                return ""
        name = next(islice(chain.from_iterable(self._all()), min(others, default=len(now)), None), "an entry")
        return "a hook" if type(name) is int else str(name)

    def since(self, last: Held) -> Held:
        """This state, with numbers and tensors ignored that are others than the `last` time."""
        if len(self._before) == len(last._before):
            pairs = enumerate(zip(self._before, last._before, strict=True))
            others = {i for i, (a, b) in pairs if a is not b and not alike(a, b)}
            now = self._before  # modes such as `training` are no numbers
            self._ignored = last._ignored | {i for i in others if type(now[i]) in (int, float) or is_tensor(now[i])}
        return self


class StepState:
    """The modules, optimisers, tensors and variables of a step, gathered while it runs."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.tensors: dict[int, Tensor] = {}
        self.grads: dict[int, Tensor | None] = {}  # as they were before the step
        self._options: list[tuple[str, object]] = []  # before the step
        self._variables = [*_variables(function)]
        held = [value for read in self._variables for value in read().values()]
        self._variables += [partial(_members, x) for x in held if isinstance(x, list | dict) and len(x) <= _MANY]
        for value in (*held, *(x for read in self._variables for x in read().values())):
            self._add(value)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within the block, add the modules that are called, and the optimisers that step."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(lambda module, args: self._add(module)).remove)
            hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._add(optimizer))
            stack.callback(hook.remove)
            yield

    def _add(self, value: object) -> None:
        if isinstance(value, nn.Module) and id(value) not in self.modules:
            for module in value.modules():
                self.modules[id(module)] = module
                self.add_tensors((*module._parameters.values(), *module._buffers.values()))
        elif isinstance(value, Optimizer) and id(value) not in self.optimizers:
            self.optimizers[id(value)] = value
            self._options += _options(value.param_groups)
            for group in value.param_groups:
                self.add_tensors(group["params"])
        elif isinstance(value, Tensor):
            self.add_tensors([value])

    def add_tensors(self, tensors: Iterable[Tensor | None]) -> None:
        """Add tensors, with the gradients of the leaves among them."""
        for x in tensors:
            if x is not None and id(x) not in self.tensors:
                self.tensors[id(x)] = x
                if x.requires_grad and x.is_leaf:
                    self.grads[id(x)] = x.grad

    def groups(self) -> list[dict[str, Any]]:
        """The groups of parameters of the optimisers."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def options_changed(self) -> bool:
        """Whether the step has changed options of its optimisers."""
        return _options(self.groups()) != self._options

    def held(self, arguments: Iterable[Tensor]) -> Held:
        """What the state holds now, without the tensors that are arguments."""
        modules, optimizers = self.modules.values(), self.optimizers.values()
        dicts: list[dict[Any, Any]] = [*map(vars, (*modules, *optimizers))]
        dicts += [each for optimizer in optimizers for each in optimizer.state.values()]
        dicts += [*_GLOBAL_HOOKS, *(value for each in dicts for value in each.values() if isinstance(value, dict))]
        lists = [optimizer.param_groups for optimizer in optimizers] + [group["params"] for group in self.groups()]
        reads: list[Read] = [*self._variables, *(partial(_members, x) for x in lists)]
        reads += [partial(_settings, group) for group in self.groups()]
        tensors = [x for x in self.tensors.values() if not any(x is each for each in arguments)]
        return Held(dicts, reads, tensors)


def _members(values: list[object] | dict[Any, object]) -> dict[Any, object]:
    return values if isinstance(values, dict) else {f"entry {i}": value for i, value in enumerate(values)}


def _options(groups: Iterable[dict[str, object]]) -> list[tuple[str, object]]:
    return [(name, value) for group in groups for name, value in group.items() if is_option(value)]


def _settings(group: dict[str, object]) -> dict[str, object]:
    """The entries of a group of parameters that are no numbers, which are `options`."""
    return {name: value for name, value in group.items() if not is_option(value)}


def _variables(function: Any) -> Iterator[Read]:
    """Functions that read the variables which a function names, and the attributes of the object that it belongs to."""
    if isinstance(function, partial):
        yield from _variables(function.func)
        yield lambda: {**dict(enumerate(function.args)), **function.keywords}
    elif ismethod(function):
        yield from _variables(function.__func__)
        yield lambda: vars(function.__self__) if hasattr(function.__self__, "__dict__") else {}
    elif isinstance(function, FunctionType):
        code, cells = function.__code__, function.__closure__ or ()
        names = [name for name in sorted(_globals_read(code)) if name in function.__globals__]
        yield lambda: dict(zip(code.co_freevars, map(_contents, cells), strict=True))
        yield lambda: {name: function.__globals__.get(name) for name in names}
        yield lambda: {**dict(enumerate(function.__defaults__ or ())), **(function.__kwdefaults__ or {})}
    elif hasattr(function, "__dict__"):
        yield lambda: vars(function)


def _globals_read(code: CodeType) -> set[str]:
    """The global variables that a function reads, with those of functions and comprehensions within it."""
    names = {each.argval for each in get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_read(each) for each in code.co_consts if isinstance(each, CodeType)))


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return None


def is_plain(value: object) -> bool:
    """Whether a value is a number or a text, or a tuple of these."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def alike(a: object, b: object) -> bool:
    """Whether two plain values are equal in type and value, zeros in their sign too."""
    return is_plain(a) and type(a) is type(b) and repr(a) == repr(b)


def is_option(value: object) -> bool:
    """Whether an entry of a group of parameters is a number, or a tuple of numbers."""
    each = value if type(value) is tuple else (value,)
    return all(type(number) in (int, float) for number in each)
