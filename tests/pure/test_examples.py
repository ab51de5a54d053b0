"""Every example runs, as its first lines say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SLOW = (
    *("custom_op", "finetune_llama", "lightning_train", "parallelize_gpt2", "pipeline_unet", "plan_before_launch"),
    *("tensor_parallel", "torchtitan_llama", "train"),
)
"""What they run is tested elsewhere, too; `.ci/run` runs these as well."""
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.thorough] * (path.stem in SLOW))
    for path in sorted((ROOT / "examples").glob("*.py"))
]
LONGEST = {"finetune_llama": 120, "lightning_train": 90, "tensor_parallel": 110, "train": 128}
"""Lines of an example: 80, but for a program that follows one for another library, and a training program."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}

    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=120, env=environment)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert len(example.read_text().splitlines()) <= LONGEST.get(example.stem, 80)
