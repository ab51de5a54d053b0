"""Selection of a test's cases: the default run takes some of them, a thorough run takes all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import settings

THOROUGH = settings().max_examples > 100


def one_in(n: int, cases: Iterable[object]) -> list[Any]:
    """Parametrize a test with `cases`, of which the default run takes every n-th."""
    return [pytest.param(case, marks=_marks(i % n == 0)) for i, case in enumerate(cases)]


def one_way_each(cases: Iterable[object], ways: Sequence[object], every: int = 1) -> list[Any]:
    """Parametrize a test with all pairs; the default run takes one way, in turn, for each `every`-th case."""
    return [
        pytest.param(case, way, marks=_marks(i % every == 0 and (i // every - j) % len(ways) == 0))
        for i, case in enumerate(cases)
        for j, way in enumerate(ways)
    ]


def _marks(is_default: bool) -> list[pytest.MarkDecorator]:
    return [] if is_default and not THOROUGH else [pytest.mark.thorough]
