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
from array import array
from ast import literal_eval
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import _lru_cache_wrapper, partial
from operator import is_not
from types import CellType, CodeType, FrameType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from dshard.torch_private import GLOBAL_HOOKS

_LIBRARIES = frozenset({"torch", "dshard", "numpy", *sys.stdlib_module_names})
"""Packages whose classes and global variables are no state of a model: only their instances and closures are."""

_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()), threading.Thread, threading.Condition)
_LEFT_ALONE: tuple[type, ...] = (ModuleType, CodeType, FrameType, logging.Logger, io.IOBase, *_LOCKS)
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_DESCRIPTIONS = frozenset({"__annotations__", "__dataclass_fields__", "__dataclass_params__", "__doc__", "__module__"})
_METHODS = (FunctionType, property, staticmethod, classmethod)
_ITERATORS: tuple[type, ...] = (itertools.count, type(iter([])), type(iter(())), type(iter(range(0))))
_ABSENT = object()


class _Access(NamedTuple):
    """Functions that read and write the contents of a mutable object."""

    read: Callable[[Any], list[Any]]
    write: Callable[[Any, list[Any]], object]


class ReachableState:
    """All mutable objects that `roots` lead to: attributes, containers, hooks, closures, class and global variables.

    `tensors` are those met. Left out are objects with a lock, which other threads may write, and what they alone lead
    to; and classes and global variables of installed packages that define none of the modules.
    """

    def __init__(self, *roots: object) -> None:
        self.tensors: list[Tensor] = []
        self._holders: list[tuple[Any, _Access, list[Any]]] = []
        self._in_place = _written_in_place()
        self._restorers: list[Callable[[], object]] = []
        self._copies: dict[int, object] = {}
        self._tuples: list[tuple[Any, ...]] = []
        self._variables: defaultdict[str, set[str]] = defaultdict(set)
        self._mentioned: set[str] = set()
        self._unmentioned: defaultdict[str, list[Any]] = defaultdict(list)
        modules = [x for root in roots if isinstance(root, nn.Module) for x in root.modules()]
        self._packages = {cls.__module__.partition(".")[0] for cls in {*map(type, modules)}} - _LIBRARIES
        enter: dict[type, Callable[[Any], Iterable[Any]]] = {}
        seen: dict[int, object] = {}  # which keeps them, so that their ids stay their own
        stack = [*roots, *GLOBAL_HOOKS, *_global_generators()]
        while stack:
            x = stack.pop()
            kind = type(x)  # whatever its `__class__` answers
            if kind not in _ATOMS and id(x) not in seen:
                seen[id(x)] = x
                if kind not in enter:
                    enter[kind] = self._entering(kind)
                stack += enter[kind](x)
        self._seen = seen

    @contextmanager
    def replaced(self, stand_ins: Mapping[int, object]) -> Iterator[None]:
        """Within the block objects are replaced, by their ids, wherever they are held; after it all is as it was."""
        replacements = {**self._copies, **stand_ins}
        replacements |= {id(x): _replaced(x, replacements) for x in self._tuples}
        try:
            for owner, access, contents in self._holders:
                if not replacements.keys().isdisjoint(map(id, contents)):
                    access.write(owner, [replacements.get(id(x), x) for x in contents])
            yield
        finally:
            for owner, access, contents in self._holders:
                now = access.read(owner)
                if len(now) != len(contents) or any(map(is_not, now, contents)):
                    access.write(owner, contents)
            for restore in self._restorers:
                restore()

    def _hold(self, owner: Any, access: _Access) -> list[Any]:
        contents = access.read(owner)
        self._holders.append((owner, access, contents))
        return contents

    def _entering(self, kind: type) -> Callable[[Any], Iterable[Any]]:
        """The function that notes the state of an object of this class, and returns the objects that it leads to."""
        if issubclass(kind, Tensor):
            return self._enter_tensor
        is_own = kind.__module__.partition(".")[0] == "dshard" and not issubclass(kind, nn.Module)
        if is_own or issubclass(kind, _LEFT_ALONE):
            return lambda x: ()
        if issubclass(kind, FunctionType):
            return self._enter_function
        if issubclass(kind, type):
            return lambda x: () if self._is_library(x.__module__) else self._enter_class(x)
        accesses = [access for base, access in _CONTAINERS if issubclass(kind, base)][:1]
        classes = [cls for cls in kind.__mro__ if not self._is_library(cls.__module__)]
        names = [name for cls in classes for name, d in vars(cls).items() if isinstance(d, MemberDescriptorType)]
        names += ["__class__"] * issubclass(kind, nn.Module)  # that of a lazy module changes when it runs
        if names:
            accesses.append(_named(names, _own_value, object.__setattr__, object.__delattr__))
        in_place = [restorer for base, restorer in self._in_place if issubclass(kind, base)]
        return partial(self._enter_instance, accesses, in_place)

    def _enter_tensor(self, x: Tensor) -> Iterable[Any]:
        self.tensors.append(x)
        return [vars(x)] if type(x) in (Tensor, nn.Parameter) else []

    def _enter_function(self, x: FunctionType) -> Iterable[Any]:
        package = str(x.__globals__.get("__name__"))
        if package.partition(".")[0] == "dshard":
            return ()
        inner = [*(x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
        if not self._is_library(package):
            mentioned = _names(x.__code__)
            names = mentioned - self._variables[package]
            self._variables[package] |= names
            inner += self._hold(x.__globals__, _named(names, dict.get, dict.__setitem__, dict.__delitem__))
            inner += [method for name in mentioned - self._mentioned for method in self._unmentioned.pop(name, ())]
            self._mentioned |= mentioned
        return inner

    def _enter_class(self, x: type) -> Iterable[Any]:
        """Note the variables of a class, and return them: its methods once a function that was entered names them."""
        libraries = [base for base in x.__mro__ if self._is_library(base.__module__)]
        codes = [f.__code__ for f in vars(x).values() if isinstance(f, FunctionType)]
        names = {name for name in {*vars(x)}.union(*map(_names, codes)) if not name.startswith("__")}
        self._hold(x, _named(names, _class_value, type.__setattr__, type.__delattr__))
        inner: list[Any] = list(x.__mro__)
        for name, value in vars(x).items():
            is_named = any(hasattr(base, name) for base in libraries) or name in self._mentioned
            if isinstance(value, _METHODS) and not is_named:
                self._unmentioned[name].append(value)
            elif name not in _DESCRIPTIONS:
                inner.append(value)
        return inner

    def _enter_instance(self, accesses: list[_Access], in_place: list[Any], x: Any) -> Iterable[Any]:
        attributes = _own_value(x, "__dict__", None)
        if issubclass(type(x), torch.jit.ScriptModule):  # whose parameters are C++'s
            for own in (x._parameters, x._buffers):
                self.tensors += self._hold(own, _named([*own.keys()], _item, type(own).__setitem__, None))
        elif type(attributes) is dict and not issubclass(type(x), nn.Module) and _has_lock(attributes):
            return ()
        for access in accesses:
            self._hold(x, access)
        self._restorers += [restorer(x) for restorer in in_place]
        if issubclass(type(x), tuple):
            self._tuples.append(x)
        elif type(x) in _ITERATORS:
            self._copies[id(x)] = _copy(x)
        return [attributes, *(each for each in gc.get_referents(x) if not _is_linked(each))]

    def _is_library(self, module: str) -> bool:
        package = module.partition(".")[0]
        if package in _LIBRARIES or package in self._packages:
            return package in _LIBRARIES
        return "-packages" in (getattr(sys.modules.get(module), "__file__", None) or "")


def _own_value(x: object, name: str, default: object) -> Any:
    """An attribute itself, whatever the class of `x` answers for it."""
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return default


def _has_lock(attributes: dict[str, Any]) -> bool:
    return any(issubclass(kind, _LOCKS) for kind in {*map(type, attributes.values())})


def _replaced(x: Any, replacements: Mapping[int, object]) -> Any:
    """A tuple with its items replaced; attributes of its own are kept."""
    if id(x) in replacements:
        return replacements[id(x)]
    if issubclass(type(x), tuple):
        items = [_replaced(item, replacements) for item in x]
        if any(map(is_not, items, x)):
            if hasattr(type(x), "n_sequence_fields"):  # a result of torch, such as that of `max`
                return type(x)(items)
            out: Any = tuple.__new__(type(x), items)
            if _own_value(x, "__dict__", None):
                vars(out).update(vars(x))
            return out
    return x


def _copy(iterator: Any) -> object:
    """A copy of an iterator, which is not advanced."""
    if type(iterator) is itertools.count:  # which new versions of Python do not copy
        return itertools.count(*literal_eval(f"[{repr(iterator)[6:-1]}]"))
    return copy(iterator)


# -- containers, by the methods of their own class, past those of a subclass


def _of_mapping(base: Any) -> _Access:
    def write(x: Any, contents: list[Any]) -> None:
        base.clear(x)
        half = len(contents) // 2
        for key, value in zip(contents[:half], contents[half:], strict=True):
            base.__setitem__(x, key, value)

    return _Access(lambda x: [*base.keys(x), *base.values(x)], write)


def _of_collection(base: Any, extend: Callable[[Any, list[Any]], object]) -> _Access:
    def write(x: Any, contents: list[Any]) -> None:
        base.clear(x)
        extend(x, contents)

    return _Access(lambda x: [*base.__iter__(x)], write)


def _cached(x: Any) -> list[Any]:
    """What a cache of `functools` refers to, in an order that its hits leave: all keys and results if it is bounded."""
    return sorted(gc.get_referents(x), key=id)


def _clear_changed(x: Any, contents: list[Any]) -> None:
    if len(contents) != len(now := _cached(x)) or any(map(is_not, contents, now)):
        x.cache_clear()


def _is_linked(x: object) -> bool:
    """Whether this is the dict of a bounded cache of `functools`: only the cache keeps it in step with its links."""
    return type(x) is dict and any(type(value).__name__ == "_lru_list_elem" for value in x.values())


def _set_cell(x: CellType, contents: list[Any]) -> None:
    if contents:
        x.cell_contents = contents[0]
    else:  # a variable without a value
        del x.cell_contents


_CONTAINERS: tuple[tuple[type, _Access], ...] = (
    *((base, _of_mapping(base)) for base in (OrderedDict, dict)),
    *((base, _of_collection(base, base.extend)) for base in (list, deque)),
    *((set, _of_collection(set, set.update)), (CellType, _Access(gc.get_referents, _set_cell))),
    (_lru_cache_wrapper, _Access(_cached, _clear_changed)),
)


# -- named values: of classes, of slots, of script modules, and global variables


def _names(code: CodeType) -> set[str]:
    """The names of attributes and global variables in a function's code, and in that of functions within it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _class_value(cls: type, name: str, default: object) -> object:
    return vars(cls).get(name, default)


def _item(own: Any, name: str, default: object) -> object:
    return own[name]


def _named(names: Iterable[str], get: Any, put: Any, remove: Any) -> _Access:
    """The values of these names, as `get` reads them; those that are absent are removed."""

    def read(owner: Any) -> list[Any]:
        return [get(owner, name, _ABSENT) for name in names]

    def write(owner: Any, contents: list[Any]) -> None:
        for name, now, value in zip(names, read(owner), contents, strict=True):
            if value is _ABSENT and now is not _ABSENT:
                remove(owner, name)
            elif value is not now:
                put(owner, name, value)

    return _Access(read, write)


# -- what is written in place: generators, arrays and caches

_Restorer: TypeAlias = Callable[[Any], Callable[[], object]]


def _written_in_place() -> list[tuple[type, _Restorer]]:
    """Classes of objects that are written in place; each with what returns the function that puts one back."""
    kinds: list[tuple[type, _Restorer]] = [
        *((kind, lambda x: partial(x.__setitem__, slice(None), x[:])) for kind in (bytearray, array)),
        (torch.Generator, lambda x: partial(x.set_state, x.get_state())),
        (random.Random, lambda x: partial(x.setstate, x.getstate())),
    ]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kinds += [
            (numpy.ndarray, _array_restorer),
            (numpy.random.RandomState, lambda x: partial(x.set_state, x.get_state())),
            (numpy.random.Generator, lambda x: partial(setattr, x.bit_generator, "state", x.bit_generator.state)),
        ]
    return kinds


def _array_restorer(x: Any) -> Callable[[], object]:
    """The function that puts an array of numpy back: if it can be written, and is no file."""
    numpy = sys.modules["numpy"]
    is_kept = x.flags.writeable and not isinstance(x, numpy.memmap)
    return partial(numpy.copyto, x, x.copy()) if is_kept else lambda: None


def _global_generators() -> list[Any]:
    on_devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    numpy: Any = sys.modules.get("numpy")
    methods: list[Any] = [random.getstate] if numpy is None else [random.getstate, numpy.random.get_state]
    return [torch.default_generator, *on_devices, *(method.__self__ for method in methods)]
