"""Operators on torch's own samples, as `benchmarks/coverage.py` asks them: some by default, all in a thorough run."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.importorskip("expecttest", reason="torch's list of operators needs expecttest")

THOROUGH = settings().max_examples > 100
PROGRAM = Path(__file__).parent.parent / "benchmarks" / "coverage.py"
pytestmark = [pytest.mark.thorough] if THOROUGH else []


@cache
def coverage() -> Any:
    spec = importlib.util.spec_from_file_location("coverage_of_operators", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def operators() -> list[Any]:
    found: list[Any] = coverage().operators("")
    return found if THOROUGH else found[::9]


@pytest.mark.parametrize("op", operators(), ids=lambda op: coverage().name_of(op))
def test_an_operator_of_torch_gives_what_one_device_gives(op: Any) -> None:
    result = coverage().check_op(op, samples=8 if THOROUGH else 1, draws=4 if THOROUGH else 2, seed=int(THOROUGH))

    assert not result.failures


def test_a_wrong_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    op = next(iter(coverage().operators("^cumsum$")))
    right = coverage().Case.run

    def wrong(self: Any, tensors: Any, *rest: Any) -> Any:
        found = right(self, tensors, *rest)
        if isinstance(tensors[0], coverage().DTensor):
            found.outputs[0] = found.outputs[0] * 2
        return found

    monkeypatch.setattr(coverage().Case, "run", wrong)

    assert coverage().check_op(op, samples=2, draws=1).verdict == "wrong"
