"""The caches of dshard: each has a name and a bound, and `cache_info` shows them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from weakref import ref

F = TypeVar("F", bound=Callable[..., Any])


class CacheInfo(NamedTuple):
    """Entries of a cache, hits and misses of look-ups, and the most entries that it may have."""

    entries: int
    hits: int
    misses: int
    bound: int


_FUNCTIONS: dict[str, list[Any]] = {}
"""The cached functions, by the name of their cache."""
_DICTS: dict[str, list[ref[Cache]]] = {}


def cached(name: str, bound: int) -> Callable[[F], F]:
    """`functools.lru_cache`, under a name that `cache_info` shows; functions of one layer share one.

    >>> @cached("squares", 2)
    ... def square(x):
    ...     return x * x
    >>> square(3) + square(3)
    18
    >>> cache_info()["squares"]
    CacheInfo(entries=1, hits=1, misses=1, bound=2)
    """

    def decorate(function: F) -> F:
        cached_function: Any = lru_cache(maxsize=bound)(function)
        _FUNCTIONS.setdefault(name, []).append(cached_function)
        return cached_function  # type: ignore[no-any-return]

    return decorate


class Cache(dict[Any, Any]):
    """A dict that drops its oldest entry when it is full. Callers of `get` count the hits.

    `cache_info` adds up the caches of one name. A `record` holds what living tensors refer to, or what ran before, by
    which ranks agree on what they send next: `clear_caches` leaves it, as it may be called on some ranks alone.
    Who keeps a value beside the cache keeps its `era`, too, another object once the cache has been emptied.
    """

    def __init__(self, name: str, bound: int = 16384, *, record: bool = False) -> None:
        super().__init__()
        self.bound, self.hits, self.misses, self.record, self.era = bound, 0, 0, record, object()
        _DICTS[name] = [*(ref(cache) for cache in _caches_named(name)), ref(self)]

    def clear(self) -> None:
        """Drop all entries and counts."""
        super().clear()
        self.hits, self.misses, self.era = 0, 0, object()

    def add(self, key: object, value: object) -> Any:
        """Count a miss, cache `value`, and return it."""
        self.misses += 1
        if len(self) >= self.bound:
            del self[next(iter(self))]
        self[key] = value
        return value

    def of(self, key: object, make: Callable[[], Any]) -> Any:
        """The value of a key, made and cached at its first look-up."""
        value = self.get(key)
        if value is None:
            return self.add(key, make())
        self.hits += 1
        return value


def _caches_named(name: str) -> list[Cache]:
    return [cache for each in _DICTS.get(name, ()) if (cache := each()) is not None]


def cache_info() -> dict[str, CacheInfo]:
    """Entries, hits, misses and bound of each cache, over all topologies.

    `executors` are operators, `choices` matmuls and other composites, `moves` redistributions; the other caches belong
    to planning.
    """
    infos = {}
    for name in _DICTS.keys() | _FUNCTIONS.keys():
        counts = [(len(cache), cache.hits, cache.misses, cache.bound) for cache in _caches_named(name)]
        for function in _FUNCTIONS.get(name, ()):
            hits, misses, bound, entries = function.cache_info()
            counts.append((entries, hits, misses, bound))
        if counts:
            infos[name] = CacheInfo(*map(sum, zip(*counts, strict=True)))
    return infos


def clear_caches() -> None:
    """Empty all caches and their counts; later calls choose and plan again, and send the same."""
    _clear(records=False)


def clear_records() -> None:
    """Empty all caches, and the records of what ran, as on all ranks when process groups are destroyed."""
    _clear(records=True)


def _clear(*, records: bool) -> None:
    for name in _DICTS:
        for cache in _caches_named(name):
            if records or not cache.record:
                cache.clear()
    for functions in _FUNCTIONS.values():
        for function in functions:
            function.cache_clear()
