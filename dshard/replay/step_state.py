"""The state beside its arguments on which a step depends: modules, optimisers, tensors, and numbers in Python.

A replay runs no Python of the step, so a recording holds only while this state is as it was: settings of modules and of
optimisers, variables of the function that are numbers, and the tensors that modules and variables hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import ismethod
from operator import itemgetter
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_PLAIN = (bool, int, float, complex, str, type(None))
_MISSING = object()
_LIBRARIES = ("torch", "dshard", "builtins")
_MANY = 4096
"""Containers of more values are data, not state of a step."""
Entry: TypeAlias = tuple[MutableMapping[Any, Any], Any, Any]


class _Read(dict[Any, Any]):
    """A value that a function reads, as a mapping of any name."""

    def __init__(self, read: Callable[[], object]) -> None:
        super().__init__()
        self._read = read

    def get(self, key: object, default: object = None) -> Any:
        """The present value."""
        return self._read()


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return _MISSING


def _hook_count(module: nn.Module) -> Callable[[], int]:
    """A function that counts the hooks of a module; each replay counts those of all modules."""
    read: Callable[[Any], tuple[Any, ...]] = itemgetter(*(n for n in module.__dict__ if n.endswith("_hooks")))
    return lambda: sum(map(len, read(module.__dict__)))


class StepState:
    """The modules, optimisers and variables of a step, gathered while it runs."""

    def __init__(self, function: Callable[..., object]) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.tensors: dict[int, Tensor] = {}
        self.variables: list[tuple[MutableMapping[Any, Any], Any]] = []
        self.grads: dict[int, Tensor | None] = {}  # as they were before the step
        self._known: set[int] = set()
        self._add_function(function)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within the block, add the modules that are called, and the optimisers that step."""
        with ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(lambda module, args: self._add(module)).remove)
            hook = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: self._add(optimizer))
            stack.callback(hook.remove)
            yield

    def _add(self, value: object) -> None:
        if id(value) in self._known:
            return
        if isinstance(value, nn.Module):
            for module in value.modules():
                self._known.add(id(module))
                self.modules[id(module)] = module
                self.add_tensors((*module._parameters.values(), *module._buffers.values()))
        elif isinstance(value, Optimizer):
            self._known.add(id(value))
            self.optimizers[id(value)] = value
            for group in value.param_groups:
                self.add_tensors(group["params"])
        elif isinstance(value, Tensor):
            self.add_tensors([value])
        elif isinstance(value, list | tuple | set | frozenset | dict):
            self._known.add(id(value))
            for each in (value.values() if isinstance(value, dict) else value) if len(value) <= _MANY else ():
                self._add(each)
        elif isinstance(value, FunctionType | partial) or ismethod(value):
            self._add_function(value)
        elif _is_users(value):
            self._known.add(id(value))
            self._add_variables((vars(value), name) for name in vars(value))

    def add_tensors(self, tensors: Iterable[Tensor | None]) -> None:
        """Add tensors, with the gradients of the leaves among them."""
        for x in tensors:
            if x is not None and id(x) not in self.tensors:
                self._known.add(id(x))
                self.tensors[id(x)] = x
                if x.requires_grad and x.is_leaf:
                    self.grads[id(x)] = x.grad

    def _add_function(self, function: Any) -> None:
        """Add what a function refers to: its variables, the object of a method, and the functions among these."""
        if id(function) in self._known:
            return
        self._known.add(id(function))
        if isinstance(function, partial):
            for each in (function.func, *function.args, *function.keywords.values()):
                self._add(each)
        elif ismethod(function):
            self._add_function(function.__func__)
            self._add(function.__self__)
        elif isinstance(function, FunctionType):
            if function.__module__.partition(".")[0] in _LIBRARIES:
                return
            code = function.__code__
            cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
            self._add_variables((_Read(partial(_contents, cell)), name) for name, cell in cells)
            self._add_variables((function.__globals__, name) for name in code.co_names if name in function.__globals__)
            for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self._add(each)
        else:
            self._known.discard(id(function))
            self._add(function)
            if _is_users(function):
                self._add_function(function.__call__)

    def _add_variables(self, variables: Iterable[tuple[MutableMapping[Any, Any], Any]]) -> None:
        for mapping, name in variables:
            self.variables.append((mapping, name))
            self._add(mapping.get(name))

    def entries(self) -> list[Entry]:
        """The present values of the state, each with the mapping that holds it, and its key there."""
        modules = self.modules.values()
        places = [(module.__dict__, name) for module in modules for name in module.__dict__]
        groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        places += [(group, name) for group in groups for name in group if name != "params"]
        entries = [(of, name, of.get(name)) for of, name in (*places, *self.variables)]
        entries = [entry for entry in entries if is_plain(entry[2]) or isinstance(entry[2], Tensor | nn.Module)]
        for module in modules:
            count = _hook_count(module)
            entries.append((_Read(count), "the number of hooks", count()))
            for held in (module._parameters, module._buffers, module._modules):
                entries += [(held, name, value) for name, value in held.items()]
        for x in self.tensors.values():
            entries.append((_Read(partial(getattr, x, "requires_grad")), "requires_grad", x.requires_grad))
        return entries


def _is_users(value: object) -> bool:
    """Whether a value is an object of a class of the program."""
    kind = type(value)
    return hasattr(value, "__dict__") and kind is not ModuleType and kind.__module__.partition(".")[0] not in _LIBRARIES


def is_plain(value: object) -> bool:
    """Whether a value is a number or a text, or a tuple of these."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(is_plain, value)))


def changed(entries: Iterable[Entry]) -> str:
    """The name of an entry whose value is another now; empty if there is none."""
    for mapping, name, value in entries:
        now = mapping.get(name, _MISSING)
        if now is not value and not (is_plain(value) and type(now) is type(value) and now == value):
            return str(name)
    return ""
