"""The examples of docs/testing.md run, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("source", BLOCKS, ids=lambda source: source.split("\n")[0])
def test_an_example_runs_and_prints_what_it_shows(source: str) -> None:
    shown = [line[2:] for line in source.splitlines() if line.startswith("# ")]
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/testing.md", "exec"), {"__name__": "docs"})

    assert printed.getvalue().splitlines()[: len(shown)] == shown
