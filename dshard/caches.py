"""Everything that is remembered to be looked up again: each cache has a name and a bound, and can be looked into."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from weakref import ref

F = TypeVar("F", bound=Callable[..., Any])


class CacheInfo(NamedTuple):
    """How many entries a cache has, how often one was found there or not, and how many it may have at most."""

    entries: int
    hits: int
    misses: int
    bound: int


_FUNCTIONS: dict[str, Any] = {}
_DICTS: dict[str, list[ref[Cache]]] = {}


def cached(name: str, bound: int) -> Callable[[F], F]:
    """`functools.lru_cache`, under a name that `cache_info` shows.

    >>> @cached("squares", 2)
    ... def square(x):
    ...     return x * x
    >>> square(3) + square(3)
    18
    >>> cache_info()["squares"]
    CacheInfo(entries=1, hits=1, misses=1, bound=2)
    """

    def decorate(function: F) -> F:
        found: Any = lru_cache(maxsize=bound)(function)
        _FUNCTIONS[name] = found
        return found  # type: ignore[no-any-return]

    return decorate


class Cache(dict[Any, Any]):
    """A dict that forgets its oldest entry when it is full. Who finds an entry counts a hit.

    Those of one name are counted together.
    """

    def __init__(self, name: str, bound: int = 16384) -> None:
        super().__init__()
        self.bound, self.hits, self.misses = bound, 0, 0
        _DICTS[name] = [*(ref(cache) for cache in _alive(name)), ref(self)]

    def add(self, key: Any, value: Any) -> Any:
        """Remember `value`, which was not found, and return it."""
        self.misses += 1
        if len(self) >= self.bound:
            del self[next(iter(self))]
        self[key] = value
        return value


def _alive(name: str) -> list[Cache]:
    return [cache for each in _DICTS.get(name, ()) if (cache := each()) is not None]


def cache_info() -> dict[str, CacheInfo]:
    """What is remembered, over all topologies: entries, hits, misses and bound of each cache.

    `shortcuts` are calls that go straight to the local operator, `executors` operators, `choices` products and other
    composite operators, `moves` redistributions; the others are what planning uses.
    """
    found = {}
    for name in _DICTS:
        totals = [(len(cache), cache.hits, cache.misses, cache.bound) for cache in _alive(name)]
        if totals:
            found[name] = CacheInfo(*map(sum, zip(*totals, strict=True)))
    for name, function in _FUNCTIONS.items():
        hits, misses, bound, entries = function.cache_info()
        found[name] = CacheInfo(entries, hits, misses, bound)
    return found


def clear_caches() -> None:
    """Forget all of it, and count anew; what is needed again is decided and planned again."""
    for name in _DICTS:
        for cache in _alive(name):
            cache.clear()
            cache.hits = cache.misses = 0
    for function in _FUNCTIONS.values():
        function.cache_clear()
