"""Values of which equal ones are one object: they are compared, and found in caches, by identity.

Layouts, meshes, topologies and plans are keys of all caches of planning. An object of these classes is looked up once,
when it is made; from then on its hash and its comparison are those of any object.
"""

from __future__ import annotations

import os
from operator import attrgetter
from threading import RLock
from typing import Any
from weakref import WeakValueDictionary

_VALUES: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
_LOCK = RLock()


def _renew_lock() -> None:
    """Take a new lock in a forked process: no thread of its own can release the one that another thread held."""
    global _LOCK
    _LOCK = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Interning(type):
    """Gives the object made before, if `__init__` and `__post_init__` have left it the same fields."""

    __match_args__: tuple[str, ...]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        with _LOCK:
            return _VALUES.setdefault((cls, attrgetter(*cls.__match_args__)(made)), made)


class Interned(metaclass=_Interning):
    """The base of frozen dataclasses, with `eq=False`, of which equal objects are one.

    Fields must have a hash. Objects of other processes, and copies, are one with this process's.
    """

    __slots__ = ("__weakref__",)
    __match_args__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return type(self), attrgetter(*self.__match_args__)(self)
