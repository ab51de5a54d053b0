"""The Python examples of the pages under docs/ run, and print what they show."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from dshard.testing import RankPool

DOCS = Path(__file__).parents[3] / "docs"
EVERY = [
    pytest.param(page.name, source, id=f"{page.stem}: {source.split(chr(10))[0]} ({i})")
    for page in sorted(DOCS.rglob("*.md"))
    for i, source in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL), 1)
]
BLOCKS = [block for block in EVERY if "init_device_mesh(" not in block.values[1]]
SLOW = ("transformers", "fullgraph")  # which four ranks take longer to import than to run all other programs
ON_RANKS = [
    pytest.param(*block.values, id=block.id, marks=[pytest.mark.thorough] * any(map(block.values[1].count, SLOW)))
    for block in EVERY
    if "init_device_mesh(" in block.values[1]
]


@pytest.mark.parametrize(("page", "source"), BLOCKS)
def test_an_example_runs_and_prints_what_it_shows(page: str, source: str) -> None:
    shown = [line[2:] for line in source.splitlines() if line.startswith("# ")]

    assert printed_by(page, source)[: len(shown)] == shown


def printed_by(page: str, source: str) -> list[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, page, "exec"), {"__name__": "docs"})
    return printed.getvalue().splitlines()


@pytest.mark.ranks
@pytest.mark.parametrize(("page", "source"), ON_RANKS)
def test_a_program_for_ranks_runs_on_them(ranks: RankPool, page: str, source: str) -> None:
    shown = [line[2:] for line in source.splitlines() if line.startswith("# ")]

    first, *_ = ranks.run(printed_by, page, source)

    assert first[: len(shown)] == shown
    assert first
