"""The program of docs/train.md learns, and goes on from its checkpoint on another mesh as if nothing had happened."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dshard.testing import RankPool

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "examples" / "train.py"


def printed(options: str, autocast: bool) -> str:
    torch.set_num_threads(1)
    sys.argv = [str(PROGRAM), *options.split("|")]
    out = io.StringIO()
    blocks = torch.autocast if autocast else lambda *args: contextlib.nullcontext()
    with contextlib.redirect_stdout(out), patch.object(torch, "autocast", blocks):
        runpy.run_path(str(PROGRAM), run_name="__main__")
    return out.getvalue()


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", text)]


@pytest.mark.ranks
@pytest.mark.thorough
@pytest.mark.parametrize("autocast", [False, True])
def test_a_run_goes_on_elsewhere(ranks: RankPool, tmp_path: Path, autocast: bool) -> None:
    there = "--mesh|2|2|--strategy|fsdp x megatron|--folder"
    [whole, *others] = ranks.run(printed, f"{there}|{tmp_path}/a|--steps|20", autocast, timeout=300.0)
    assert set(others) == {""}
    ranks.run(printed, f"{there}|{tmp_path}/b|--steps|10", autocast, timeout=300.0)
    resumed, *_ = ranks.run(
        printed, f"--mesh|4|--strategy|fsdp|--steps|20|--folder|{tmp_path}/b", autocast, timeout=300.0
    )

    assert resumed.startswith("step 20:")
    close = {"rel": 0.1, "abs": 0.05} if autocast else {"rel": 1e-3, "abs": 2e-4}
    assert numbers(resumed) == pytest.approx(numbers(whole.splitlines()[-1]), **close)
    losses = [numbers(line)[1] for line in whole.splitlines()]
    assert losses[-1] < losses[0] < 1.0


def test_the_page_shows_the_program() -> None:
    page = (ROOT / "docs" / "train.md").read_text()

    assert f"```py\n{PROGRAM.read_text()}```" in page


@pytest.mark.ranks
@pytest.mark.thorough
def test_blocks_are_compiled(ranks: RankPool, tmp_path: Path) -> None:
    options = f"--mesh|2|2|--strategy|fsdp x megatron|--compile|--steps|10|--folder|{tmp_path}/c"

    first, *_ = ranks.run(printed, options, True, timeout=300.0)

    assert 0 < numbers(first)[1] < 1.0
