"""The Python state that a module leads to: replaced while its forward pass is planned, and put back after it.

docs/design/0023-nothing-stays-of-planning.md has the reasons.
"""

from __future__ import annotations

import gc
import io
import itertools
import logging
import random
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import _lru_cache_wrapper, partial
from operator import is_not
from types import CellType, CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARIES = frozenset({"torch", "dshard", "numpy", *sys.stdlib_module_names})
"""Packages whose classes and global variables are no state of a model: only their instances and closures are."""

_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition)
_LEFT_ALONE: tuple[type, ...] = (ModuleType, CodeType, FrameType, logging.Logger, io.IOBase, *_LOCKS)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_DESCRIPTIONS = frozenset({"__annotations__", "__dataclass_fields__", "__dataclass_params__", "__doc__", "__module__"})
_METHODS = (FunctionType, property, staticmethod, classmethod)
_ITERATORS: tuple[type, ...] = (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _Holder:
    """A mutable object with its contents as they were, and the functions that read and write them."""

    owner: Any
    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], object]
    contents: list[Any]

    def put(self, contents: list[Any]) -> None:
        """Write these contents, unless the owner has them."""
        now = self.read(self.owner)
        if len(now) != len(contents) or any(map(is_not, now, contents)):
            self.write(self.owner, contents)


class ReachableState:
    """What can be written and `roots` lead to: attributes, containers, hooks, closures, class and global variables.

    `tensors` are those met. Left out are objects with a lock, which other threads may write, and what they alone lead
    to; and classes and global variables of installed packages that define none of the modules.
    """

    def __init__(self, *roots: object) -> None:
        self.tensors: list[Tensor] = []
        self._holders: list[_Holder] = []
        self._restorers = [*_global_generators()]
        self._copies: dict[int, object] = {}
        self._variables: defaultdict[str, set[str]] = defaultdict(set)
        self._mentioned: set[str] = set()
        self._unmentioned: defaultdict[str, list[Any]] = defaultdict(list)
        self._seen: dict[int, object] = {}  # which keeps them, so that their ids stay their own
        stack: list[Any] = list(roots)
        modules = [x for root in roots if isinstance(root, nn.Module) for x in root.modules()]
        self._packages = {cls.__module__.partition(".")[0] for cls in {*map(type, modules)}} - _LIBRARIES
        while stack:
            x = stack.pop()
            if type(x) not in _ATOMS and id(x) not in self._seen and not isinstance(x, _LEFT_ALONE):
                self._seen[id(x)] = x
                stack += self._enter(x)

    @contextmanager
    def replaced(self, stand_ins: Mapping[int, object]) -> Iterator[None]:
        """Within the block objects are replaced, by their ids, wherever they are held; after it all is as it was."""
        replacements = {**self._copies, **stand_ins}
        replacements |= {id(x): _replaced(x, replacements) for x in self._seen.values() if isinstance(x, tuple)}
        try:
            for holder in self._holders:
                if not replacements.keys().isdisjoint(map(id, holder.contents)):
                    holder.put([replacements.get(id(x), x) for x in holder.contents])
            yield
        finally:
            for holder in self._holders:
                holder.put(holder.contents)
            for restore in self._restorers:
                restore()

    def _hold(self, owner: Any, read: Callable[..., list[Any]], write: Callable[..., object]) -> list[Any]:
        contents = read(owner)
        self._holders.append(_Holder(owner, read, write, contents))
        return contents

    def _hold_names(self, owner: Any, names: Iterable[str], get: Any, put: Any, remove: Any) -> list[Any]:
        names = [*names]
        return self._hold(owner, partial(_values_of, names, get), partial(_set_values, names, put, remove, get))

    def _enter(self, x: Any) -> Iterable[Any]:
        """Note the state of one object, and return the objects that it leads to."""
        if isinstance(x, Tensor):
            self.tensors.append(x)
            return [vars(x)] if type(x) in (Tensor, nn.Parameter) else []
        if isinstance(x, FunctionType):
            return self._enter_function(x)
        if isinstance(x, type):
            return () if self._is_library(x.__module__) else self._enter_class(x)
        if isinstance(x, _ITERATORS):
            self._copies[id(x)] = copy(x)
        elif isinstance(x, _lru_cache_wrapper):
            self._restorers.append(partial(_forget_new, x, x.cache_info()))
        return self._enter_instance(x)

    def _enter_function(self, x: FunctionType) -> Iterable[Any]:
        package = str(x.__globals__.get("__name__"))
        if package.partition(".")[0] == "dshard":
            return ()
        inner = [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
        if not self._is_library(package):
            mentioned = _names(x.__code__)
            names = mentioned - self._variables[package]
            self._variables[package] |= names
            inner += self._hold_names(x.__globals__, names, dict.get, dict.__setitem__, dict.__delitem__)
            inner += [method for name in mentioned - self._mentioned for method in self._unmentioned.pop(name, ())]
            self._mentioned |= mentioned
        return inner

    def _enter_class(self, x: type) -> Iterable[Any]:
        """Note the variables of a class, and return them: its methods once a function that was entered names them."""
        libraries = [base for base in x.__mro__ if self._is_library(base.__module__)]
        codes = [f.__code__ for f in vars(x).values() if isinstance(f, FunctionType)]
        names = {name for name in {*vars(x)}.union(*map(_names, codes)) if not name.startswith("__")}
        self._hold_names(x, names, _class_value, type.__setattr__, type.__delattr__)
        inner: list[Any] = list(x.__mro__)
        for name, value in vars(x).items():
            is_named = any(hasattr(base, name) for base in libraries) or name in self._mentioned
            if isinstance(value, _METHODS) and not is_named:
                self._unmentioned[name].append(value)
            elif name not in _DESCRIPTIONS:
                inner.append(value)
        return inner

    def _enter_instance(self, x: Any) -> Iterable[Any]:
        kind, attributes = type(x), _attributes(x)
        if not isinstance(x, nn.Module):
            is_shared = any(isinstance(value, _LOCKS) for value in (attributes or {}).values())
            if is_shared or kind.__module__.partition(".")[0] == "dshard":
                return ()
        elif isinstance(x, torch.jit.ScriptModule):  # whose parameters are C++'s
            for own in (x._parameters, x._buffers):
                self.tensors += self._hold_names(own, own.keys(), _script_value, type(own).__setitem__, None)
        self._restorers += _written_in_place(x)
        for base, add in _CONTAINERS:
            if isinstance(x, base):
                self._hold(x, partial(_contents_of, base), partial(_refill, base, add))
                break
        classes = [cls for cls in kind.__mro__ if not self._is_library(cls.__module__)]
        names = [name for cls in classes for name, d in vars(cls).items() if isinstance(d, MemberDescriptorType)]
        names += ["__class__"] * isinstance(x, nn.Module)  # that of a lazy module changes when it runs
        if names:
            self._hold_names(x, names, getattr, object.__setattr__, object.__delattr__)
        return [attributes, *gc.get_referents(x)]

    def _is_library(self, module: str) -> bool:
        package = module.partition(".")[0]
        if package in _LIBRARIES or package in self._packages:
            return package in _LIBRARIES
        return "-packages" in (getattr(sys.modules.get(module), "__file__", None) or "")


def _attributes(x: object) -> dict[str, Any] | None:
    """The dictionary of an object's attributes itself, whatever its class answers."""
    try:
        attributes = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _replaced(x: Any, replacements: Mapping[int, object]) -> Any:
    if id(x) in replacements:
        return replacements[id(x)]
    if isinstance(x, tuple):
        items = [_replaced(item, replacements) for item in x]
        if any(map(is_not, items, x)):
            return x._make(items) if hasattr(x, "_make") else type(x)(items)
    return x


# -- containers, by the methods of their own class, past those of a subclass


def _contents_of(base: Any, x: Any) -> list[Any]:
    if issubclass(base, dict):
        return [each for item in base.items(x) for each in item]
    return gc.get_referents(x) if base is CellType else [*base.__iter__(x)]


def _refill(base: Any, add: Callable[[Any, list[Any]], object], x: Any, contents: list[Any]) -> None:
    if base is not CellType:
        base.clear(x)
    add(x, contents)


def _set_cell(x: CellType, contents: list[Any]) -> None:
    if contents:
        x.cell_contents = contents[0]
    else:  # a variable without a value
        del x.cell_contents


def _add_items(x: Any, contents: list[Any]) -> None:
    base: Any = OrderedDict if isinstance(x, OrderedDict) else dict
    for key, value in zip(contents[::2], contents[1::2], strict=True):
        base.__setitem__(x, key, value)


_CONTAINERS: tuple[tuple[type, Any], ...] = (
    *((OrderedDict, _add_items), (dict, _add_items), (list, list.extend), (set, set.update)),
    *((deque, deque.extend), (bytearray, bytearray.extend), (CellType, _set_cell)),
)


# -- named values: of classes, of slots, of script modules, and global variables


def _names(code: CodeType) -> set[str]:
    """The names of attributes and global variables in a function's code, and in that of functions within it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _class_value(cls: type, name: str, default: object) -> object:
    return vars(cls).get(name, default)


def _script_value(own: Any, name: str, default: object) -> object:
    return own[name]


def _values_of(names: list[str], get: Callable[..., Any], owner: Any) -> list[Any]:
    return [get(owner, name, _ABSENT) for name in names]


def _set_values(names: list[str], put: Any, remove: Any, get: Any, owner: Any, contents: list[Any]) -> None:
    for name, value in zip(names, contents, strict=True):
        if get(owner, name, _ABSENT) is value:
            continue
        if value is _ABSENT:
            remove(owner, name)
        else:
            put(owner, name, value)


# -- what is written in place: generators, arrays and caches


def _global_generators() -> Iterator[Callable[[], object]]:
    on_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    for generator in (torch.default_generator, *on_devices):
        yield from _written_in_place(generator)
    yield partial(random.setstate, random.getstate())
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield partial(numpy.random.set_state, numpy.random.get_state())


def _written_in_place(x: Any) -> Iterator[Callable[[], object]]:
    """What puts a generator or an array back."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(x, torch.Generator):
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, random.Random):
        yield partial(x.setstate, x.getstate())
    elif numpy is None:
        return
    elif isinstance(x, numpy.ndarray) and x.flags.writeable:
        yield partial(numpy.copyto, x, x.copy())
    elif isinstance(x, numpy.random.RandomState):
        yield partial(x.set_state, x.get_state())
    elif isinstance(x, numpy.random.Generator):
        yield partial(setattr, x.bit_generator, "state", x.bit_generator.state)


def _forget_new(cache: Any, before: Any) -> None:
    """Empty a cache of `functools` in which an entry was made: it may hold tensors without data."""
    if cache.cache_info().misses != before.misses:
        cache.cache_clear()
