"""Base classes of values that a notebook draws, by reports that are imported lazily."""

from __future__ import annotations

from importlib import import_module


class Drawn:
    """A value that a notebook draws."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        html: str = import_module("dshard.tools.report.notebook_html").html(self)
        return html


class Tabled(Drawn):
    """A value whose text is a table, shown by `print` and at a prompt."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
