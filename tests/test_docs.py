"""The Python examples of the pages under docs/ run, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCKS = [
    pytest.param(page.name, source, id=f"{page.stem}: {source.split(chr(10))[0]} ({i})")
    for page in sorted(DOCS.rglob("*.md"))
    for i, source in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
]


@pytest.mark.parametrize(("page", "source"), BLOCKS)
def test_an_example_runs_and_prints_what_it_shows(page: str, source: str) -> None:
    shown = [line[2:] for line in source.splitlines() if line.startswith("# ")]
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        exec(compile(source, page, "exec"), {"__name__": "docs"})

    assert printed.getvalue().splitlines()[: len(shown)] == shown
