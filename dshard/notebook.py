"""Values that a notebook draws: the reports, which are imported when they are asked, know how."""

from __future__ import annotations

from importlib import import_module


class Drawn:
    """A value that a notebook draws."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        html: str = import_module("dshard.report.notebook_html").html(self)
        return html


class Tabled(Drawn):
    """A value whose text is a table, which stands for it where it is printed and at a prompt."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
