"""Nothing depends on what a program has set in torch before dshard is first used: a step equals the plain one there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.global_states import STATES


def run(names: list[str], *options: str, **environment: str) -> str:
    command = [sys.executable, *options, "-m", "tests.helpers.global_states", *names]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.stdout[-4000:] + ("" if done.returncode == 0 else done.stderr[-1000:])


@pytest.mark.ranks
@pytest.mark.thorough  # a process of its own imports torch for longer than the steps take
def test_a_step_in_another_global_state_is_the_plain_one() -> None:
    assert run(["meta", "function mode"]) == "failed: []\n"


@pytest.mark.ranks
@pytest.mark.thorough
def test_a_step_in_any_global_state_is_the_plain_one() -> None:
    assert run([*STATES]) == "failed: []\n"


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("options", [["-O"], ["-OO"], ["-W", "error::UserWarning"], ["-X", "dev"]])
def test_a_step_with_options_of_python_is_the_plain_one(options: list[str]) -> None:
    assert run(["none"], *options) == "failed: []\n"


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("seed", ["0", "1", "4000000000"])
def test_a_step_with_other_hashes_of_strings_is_the_plain_one(seed: str) -> None:
    assert run(["none"], PYTHONHASHSEED=seed) == "failed: []\n"
