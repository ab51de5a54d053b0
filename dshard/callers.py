"""Who asks: code of several libraries asks a distributed tensor or a model under one name, and means different things.

All that depends on the caller is decided by these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def asked_by(*packages: str, through: tuple[str, ...] = ()) -> bool:
    """Whether the caller of the function that asks is of one of `packages`; code of `through` merely passes on."""
    passing, asking = (tuple([f"{package}." for package in each]) for each in (through, packages))
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(passing):
        frame = frame.f_back
    return frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(asking)


def overrides_method_of(*packages: str, through: tuple[str, ...] = ()) -> bool:
    """Whether the caller of the function that asks overrides a method of a class of `packages`, whose code calls it.

    Code of `through` merely passes on, and has that function.
    """
    frame = next((f for f in callers() if not _is_in(f.f_globals.get("__name__", ""), through)), None)
    if frame is None or not frame.f_code.co_argcount:
        return False
    owner, name = frame.f_locals.get(frame.f_code.co_varnames[0]), frame.f_code.co_name
    return any(name in vars(cls) and _is_in(cls.__module__, packages) for cls in type(owner).__mro__)


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return f"{module}.".startswith(tuple([f"{package}." for package in packages]))


def callers() -> Iterator[FrameType]:
    """The frames of the stack, the innermost first, from the caller of the function that iterates."""
    frame = sys._getframe(1).f_back  # frame 1 is of the function that iterates
    while frame is not None:
        yield frame
        frame = frame.f_back
