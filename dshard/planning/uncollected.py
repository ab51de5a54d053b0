"""Python's collector rests while a step is recorded or planned.

Both make some hundred thousand small objects that stay, and next to no cycles: the collector would walk them all again
and again, a quarter of the time that it takes to record or plan the step of a large model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it nothing is collected, but by whoever calls the collector.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
