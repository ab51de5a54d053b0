"""Which of many cases of one kind the default tests take; a thorough run has the others, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_in(n: int, cases: Iterable[object]) -> list[Any]:
    """Parameters of a test: by default every n-th case, the first included."""
    return [pytest.param(case, marks=_default(i % n == 0)) for i, case in enumerate(cases)]


def one_way_each(cases: Iterable[object], ways: Sequence[object]) -> list[Any]:
    """Pairs of a case and a way to test it: by default each case in one way, and each way in turn."""
    return [
        pytest.param(case, way, marks=_default((i - j) % len(ways) == 0))
        for i, case in enumerate(cases)
        for j, way in enumerate(ways)
    ]


def _default(is_taken: bool) -> list[pytest.MarkDecorator]:
    return [] if is_taken else [pytest.mark.thorough]
