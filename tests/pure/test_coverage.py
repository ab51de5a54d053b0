"""Operators on torch's own samples, as `benchmarks/coverage.py` asks them: some by default, all in a thorough run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from dshard import DTensor

pytest.importorskip("expecttest", reason="torch's list of operators needs expecttest")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import coverage
import operator_cases
import operator_counts

THOROUGH = settings().max_examples > 100
SAMPLES, DRAWS, BAD = (10, 4, 1000) if THOROUGH else (1, 2, 2)
pytestmark = [pytest.mark.thorough] if THOROUGH else []
ALL = operator_cases.operators("")
REFUSING = [op for op in ALL if op.error_inputs_func is not None]


def names(op: Any) -> str:
    return operator_cases.name_of(op)


@pytest.mark.parametrize("op", ALL if THOROUGH else ALL[::60], ids=names)
def test_an_operator_of_torch_gives_what_one_device_gives(op: Any, cases_run: Counter[str]) -> None:
    result = coverage.check_op(op, samples=SAMPLES, draws=DRAWS, seed=int(THOROUGH), bad_inputs=0)

    cases_run["tests/pure/test_coverage.py::operators of torch"] += result.calls
    assert not result.failures


@pytest.mark.parametrize("op", REFUSING if THOROUGH else REFUSING[::48], ids=names)
def test_what_torch_refuses_is_refused_in_its_words_before_anything_is_sent(op: Any, cases_run: Counter[str]) -> None:
    result = coverage.check_op(op, samples=0, draws=0, seed=int(THOROUGH), bad_inputs=BAD)

    cases_run["tests/pure/test_coverage.py::arguments that torch refuses"] += result.bad_inputs
    assert not result.failures


def test_a_wrong_operator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (op,) = operator_cases.operators("^cumsum$")
    right = operator_cases.Case.run

    def wrong(self: Any, tensors: Any, *rest: Any) -> Any:
        found = right(self, tensors, *rest)
        if isinstance(tensors[0], DTensor):
            found.outputs[0] = found.outputs[0] * 2
        return found

    monkeypatch.setattr(operator_cases.Case, "run", wrong)

    assert coverage.check_op(op, samples=2, draws=1).verdict == "wrong"


def test_operators_are_counted_by_the_worst_of_their_calls() -> None:
    seen = {
        "add": [(1, "right", "right"), (2, "right", "right")],
        "max": [(1, "right", "wrong"), (2, "right", "hang")],
        "sign": [(1, "error", ""), (1, "right", "")],
    }

    found = operator_counts.tally(seen, axes=1)

    assert found == {
        "operators": 3,
        "forward": 2,
        "with gradients": 2,
        "both": 1,
        "wrong": 1,
        "hang": 0,
        "error": 1,
        "calls": 4,
        "ok": 2,
    }
    assert operator_counts.tally(seen, axes=2)["hang"] == 1
    header, rows = operator_counts.beside(seen, {"add": [(1, "error", "error")]})
    assert len(header) == len(rows[0])
    assert rows[0][1:] == ["1", "1", "1", "0"]
