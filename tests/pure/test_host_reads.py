"""Numbers are read on the host by one function, of which recorders know: torch runs no operator for `Tensor.tolist`."""

from __future__ import annotations

import re
from pathlib import Path

import dshard

PACKAGE = Path(dshard.__file__).parent
OWN_STATE = "ops/random"
"""Here the numbers are those of generators, which a step draws anew."""


def test_operators_read_numbers_by_one_function() -> None:
    files = [file for room in ("ops", "dispatch", "core", "autograd") for file in (PACKAGE / room).rglob("*.py")]
    reads = {str(file.relative_to(PACKAGE)) for file in files if re.search(r"\w\.(tolist|numpy)\(\)", file.read_text())}

    assert {each for each in reads if not each.startswith(OWN_STATE)} <= {"ops/matmul/local.py"}  # an example
    assert {"ops/random/state.py"} <= reads
