"""Which of many cases of one kind the default tests take; a thorough run takes all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = settings().max_examples > 100


def one_in(n: int, cases: Iterable[object]) -> list[Any]:
    """Parameters of a test: by default every n-th case, the first included."""
    return [pytest.param(case, marks=_marks(i % n == 0)) for i, case in enumerate(cases)]


def one_way_each(cases: Iterable[object], ways: Sequence[object]) -> list[Any]:
    """Pairs of a case and a way to test it: by default each case in one way, and each way in turn."""
    return [
        pytest.param(case, way, marks=_marks((i - j) % len(ways) == 0))
        for i, case in enumerate(cases)
        for j, way in enumerate(ways)
    ]


def _marks(is_default: bool) -> list[pytest.MarkDecorator]:
    return [] if is_default and not THOROUGH else [pytest.mark.thorough]
