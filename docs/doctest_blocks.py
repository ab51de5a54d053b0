"""Shows the examples of docstrings as code on the site: a paragraph that begins with `>>>` becomes a block."""

from __future__ import annotations

import textwrap
from typing import Any

import griffe


class DoctestBlocks(griffe.Extension):
    """Fences the examples in each docstring that griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = "\n\n".join(map(fenced, obj.docstring.value.split("\n\n")))


def fenced(paragraph: str) -> str:
    """The paragraph as a block of code, if it is an example."""
    if not paragraph.lstrip().startswith(">>> "):
        return paragraph
    return f"```pycon\n{textwrap.dedent(paragraph)}\n```"
