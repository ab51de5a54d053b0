"""docs/operators.md shows the rules as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import dshard
from dshard.torch_private import SEEN

DOCS = Path(__file__).parents[2] / "docs"


def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_operators", DOCS / "make_operators.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not torch.__version__.startswith(SEEN), reason=f"the page is of torch {SEEN}")
def test_the_page_shows_the_rules() -> None:
    page = (DOCS / "operators.md").read_text()

    assert maker().table() in page, "run: PYTHONPATH=. python docs/make_operators.py"


def test_each_listed_operator_says_what_its_rule_says() -> None:
    listed = dshard.rules()

    assert [row.op for row in listed] == sorted({row.op for row in listed})
    assert all(row.summary and row.family for row in listed)
    assert next(row for row in listed if row.op == "aten::convolution").family == "convolution"
