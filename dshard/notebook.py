"""Base classes of values that a notebook draws."""

from __future__ import annotations

from collections.abc import Callable

RENDERERS: list[Callable[[object], str]] = []
"""Functions that draw a value as HTML; the last is used.

A value imports nothing that draws: `dshard` registers the function of `dshard.tools.report` here.
"""


class Drawn:
    """A value that a notebook draws."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return RENDERERS[-1](self)


class Tabled(Drawn):
    """A value whose text is a table, shown by `print` and at a prompt."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
