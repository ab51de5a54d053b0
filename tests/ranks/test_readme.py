"""The README is executed: its Python blocks run, print what they say, and use public names alone."""

from __future__ import annotations

import contextlib
import io
import re
import types
from pathlib import Path

import pytest

import dshard

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TEST_COMMAND = 'pip install -c constraints.txt -e ".[dev]" && pytest'


def execute(source: str) -> str:
    """What a block prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "README.md", "exec"), {"__name__": "readme"})
    return printed.getvalue()


ALONE = [block for block in BLOCKS if "init_device_mesh(" not in block]


@pytest.mark.ranks
def test_your_own_model_learns_and_the_first_rank_tells_the_losses_of_one_device(ranks):
    block = next(block for block in BLOCKS if "parallelize(model, mesh" in block)
    layout = [line for line in block.splitlines() if "mesh" in line]
    plain = "\n".join(line for line in block.splitlines() if line not in layout and "get_rank" not in line)

    printed, *others = ranks.run(execute, block)

    assert set(others) == {""}
    assert printed == execute(plain.replace("        print(", "    print("))
    assert [float(line.split()[-1]) for line in printed.splitlines()] == sorted(
        (float(line.split()[-1]) for line in printed.splitlines()), reverse=True
    )
    assert len(layout) == 3


@pytest.mark.ranks
def test_the_first_example_gives_every_rank_the_same_loss_and_a_gradient_laid_out_like_its_parameter(ranks):
    printed = ranks.run(execute, BLOCKS[0])

    assert len(set(printed)) == 1
    assert "(Replicate(), Shard(dim=0))" in printed[0]


def test_the_other_examples_run_and_print_what_they_show():
    together = "\n".join(ALONE)
    shown = [line[2:] for line in together.splitlines() if line.startswith("# ")]

    printed = execute(together).splitlines()

    assert shown
    assert printed[: len(shown)] == shown


def test_the_public_surface_is_what_all_says():
    public = {
        name
        for name in dir(dshard)  # with what is imported when it is asked for
        if not name.startswith("_") and not isinstance(getattr(dshard, name), types.ModuleType)
    }

    assert public == {*dshard.__all__, "visualize"}  # which `import *` leaves out: it draws


def test_ci_runs_the_test_command_of_the_readme():
    ci = (Path(__file__).parents[2] / ".ci" / "run").read_text()

    assert TEST_COMMAND in README
    assert TEST_COMMAND in ci
