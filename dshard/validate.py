"""Checks of callers' arguments: each message says what was passed, the rule, and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from operator import index
from typing import Any, TypeVar

from dshard.errors import ArgumentError, DShardError

T = TypeVar("T")


def of_wrong_type(error: type[DShardError]) -> type[DShardError]:
    """The class of an error about a value of a wrong type: `error` that is an `ArgumentError`, a TypeError, too.

    >>> of_wrong_type(ArgumentError) is ArgumentError
    True
    """
    return _OF_WRONG_TYPE[error]


def _and_argument_error(error: type[DShardError]) -> type[DShardError]:
    if issubclass(error, ArgumentError):
        return error
    # No module has this class by its name, so it is pickled by that of `error`
    reduced = {"__reduce__": lambda self: (_error_of_wrong_type, (error, self.args)), "__module__": error.__module__}
    return type(error.__name__, (error, ArgumentError), {"__doc__": error.__doc__, **reduced})


def _error_of_wrong_type(error: type[DShardError], args: tuple[object, ...]) -> DShardError:
    return of_wrong_type(error)(*args)


_OF_WRONG_TYPE = {error: _and_argument_error(error) for error in DShardError.__subclasses__()}


def as_int(value: Any, what: str, error: type[DShardError] = ArgumentError, *, least: int | None = None) -> int:
    """The whole number that `value` is, numpy's included, a bool not.

    >>> as_int(3, "panels", least=1)
    3
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except (TypeError, ValueError):  # a tensor of several elements is a ValueError
        number = None
    if number is None or (least is not None and number < least):
        rule = "" if least is None else " above 0" if least == 1 else f" of at least {least}"
        kind = of_wrong_type(error) if number is None else error
        raise kind(f"{what}: {shown(value)} is not a whole number{rule}")
    return number


def as_number(
    value: Any, what: str, error: type[DShardError] = ArgumentError, *, zero: bool = False, infinite: bool = False
) -> float:
    """`value`, if it is a number above 0; `zero` and `infinite` allow these too."""
    try:
        number = None if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None or not ((number >= 0 if zero else number > 0) and (infinite or number < float("inf"))):
        kind = of_wrong_type(error) if number is None else error
        raise kind(f"{what}: {shown(value)} is not a number {'of at least' if zero else 'above'} 0")
    return value  # type: ignore[no-any-return]


def as_tuple(value: object, what: str, way_out: str, error: type[DShardError] = ArgumentError) -> tuple[Any, ...]:
    """The items of an iterable other than text and mappings."""
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
        try:
            return tuple(value)
        except TypeError:  # such as a tensor without dims
            pass
    raise of_wrong_type(error)(f"{what}: {shown(value)} is no sequence: {way_out}")


def as_shape(value: object, what: str, error: type[DShardError]) -> tuple[int, ...]:
    """The sizes of a tensor's dims, numpy's integers included; sizes that a graph leaves open stay so."""
    sizes = as_tuple(value, what, "give the size of each dim, such as (4, 8)", error)
    return tuple(size if is_symbolic(size) else as_int(size, what, error, least=0) for size in sizes)


def is_symbolic(size: object) -> bool:
    """Whether this is a size that a traced graph leaves open."""
    return type(size).__name__ == "SymInt"


def check_type(value: object, kind: Any, what: str, way_out: str, error: type[DShardError] = ArgumentError) -> None:
    """Refuse a value of another type."""
    if not isinstance(value, kind):
        raise of_wrong_type(error)(f"{what}: {shown(value)} is {article(value)}: {way_out}")


def check_callable(value: object, what: str, way_out: str) -> None:
    """Refuse a value that is not callable."""
    if not callable(value):
        raise ArgumentError(f"{what}: {shown(value)} cannot be called: {way_out}")


def check_one_of(value: object, known: Iterable[str], what: str, error: type[DShardError] = ArgumentError) -> None:
    """Refuse a value that is none of the `known` names."""
    names = tuple(known)
    if not isinstance(value, str) or value not in names:
        kind = error if isinstance(value, str) else of_wrong_type(error)
        raise kind(f"{what}: {shown(value)} is none: use {', '.join(names)}{suggestion(value, names)}")


def suggestion(value: object, known: Iterable[str]) -> str:
    """The known name closest to a mistyped one, for the end of a message.

    >>> suggestion("suma", ["data", "summa"])
    "; did you mean 'summa'?"
    """
    matches = get_close_matches(value, list(known), n=1) if isinstance(value, str) else []
    return f"; did you mean {matches[0]!r}?" if matches else ""


def article(value: object) -> str:
    """The type of a value, for a message."""
    if isinstance(value, type):
        return f"the class {value.__name__}, not one of its values"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def shown(value: object) -> str:
    """A value in a message, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
