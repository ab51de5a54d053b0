"""Short messages between ranks without collectives: values in the store of the world's process group."""

from __future__ import annotations

import contextlib
import pickle
import time
from typing import Any

from dshard.torch_private import default_store

_PAUSE = 0.05  # seconds between two looks, at most


def put(key: str, value: object) -> None:
    """Store a value under a key, for any rank to read; nothing happens where the store is gone."""
    with contextlib.suppress(RuntimeError, OSError):
        default_store().set(key, pickle.dumps(value))


def fetch(key: str, seconds: float, unless: str) -> Any:
    """Wait for the value under a key, and return it.

    Raises:
        RuntimeError: the key `unless` was set first, `seconds` have passed, or the store is gone.
    """
    begin, pause, store = time.monotonic(), 0.001, default_store()
    while not store.check([key]):
        if store.check([unless]):
            raise RuntimeError("another rank has failed")
        if time.monotonic() - begin > seconds:
            raise RuntimeError(f"the sender has not described the next value within {seconds:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)
    return pickle.loads(store.get(key))


def peek(key: str) -> Any:
    """The value under a key, or None if there is none, or the store is gone."""
    try:
        store = default_store()
        return pickle.loads(store.get(key)) if store.check([key]) else None
    except (RuntimeError, OSError):
        return None


def append(key: str, text: str) -> None:
    """Append a text to the one under a key; nothing happens where the store is gone."""
    with contextlib.suppress(RuntimeError, OSError):
        default_store().append(key, text)


def appended(key: str) -> str:
    """The texts appended under a key, or "" if there are none, or the store is gone."""
    try:
        store = default_store()
        return store.get(key).decode() if store.check([key]) else ""
    except (RuntimeError, OSError):
        return ""
