"""docs/parallelize.md shows what the strategies send."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_the_collectives_of_each_strategy() -> None:
    spec = importlib.util.spec_from_file_location("make_parallelize", DOCS / "make_parallelize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "parallelize.md").read_text()

    assert module.table() in page, "run: PYTHONPATH=. python docs/make_parallelize.py"
