"""The README is executed: its Python blocks run, print what they say, and use public names alone."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import get_args

import pytest

import dshard
from dshard.parallel.strategies import STRATEGIES, StrategyName

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
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


@pytest.mark.thorough
def test_a_program_of_its_lines_passes_mypy_strict(tmp_path):
    """Each block that starts ranks by itself, the others together; functions of the reader need no annotations."""
    own = [block for block in BLOCKS if block not in ALONE]
    sources = [*(UNTYPED + block for block in (*own, "\n".join(ALONE))), TYPED]
    files = [tmp_path / f"program{i}.py" for i in range(len(sources))]
    for file, source in zip(files, sources, strict=True):
        file.write_text(source)
    command = [sys.executable, "-m", "mypy", *files]  # strict, and what it knows of dshard, by pyproject.toml

    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert found.returncode == 0, found.stdout


UNTYPED = """\
# mypy: allow-redefinition-new, local-partial-types, allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs
"""
TYPED = """
from collections.abc import Sequence
from torch import Tensor, nn
from dshard import DTensor, DeviceMesh, Mesh, Placement, Shard, distribute_batch, parallelize, plan_model
from dshard.parallel import Auto

class Net(nn.Module):
    width: int = 3

def lay_out(net: Net, mesh: DeviceMesh, name: str, x: Tensor, y: Tensor) -> int:
    found: Net = parallelize(net, mesh, "data x megatron", x, inputs="per-data-rank", outputs="plain")
    parallelize(net, mesh, name, x, outputs=[Shard(0)])
    parallelize(net, mesh, Auto(memory=10**9), x, inputs={"x": "global"})
    parallelize(net, mesh, {"*.weight": [Shard(0)]})
    pair: tuple[Tensor, Tensor] = distribute_batch(found, (x, y))
    batch: dict[str, Tensor] = distribute_batch(found, {"x": x})
    parallelize(net, mesh, "fsdp", x, inputs="per-rank")  # type: ignore[arg-type]
    parallelize(net, mesh, "fsdp", x, outputs="whole")  # type: ignore[arg-type]
    return found.width + plan_model(net, Mesh((2,)), "auto", x).cost.nbytes + len(pair) + len(batch)
"""


def test_the_names_of_strategies_are_those_that_are_typed():
    assert get_args(StrategyName) == ("auto", *STRATEGIES)


def test_the_public_surface_is_what_all_says():
    public = {
        name
        for name in dir(dshard)  # with what is imported when it is asked for
        if not name.startswith("_") and not isinstance(getattr(dshard, name), types.ModuleType)
    }

    assert public == {*dshard.__all__, "visualize"}  # which `import *` leaves out: it draws


def test_ci_runs_the_test_command_of_the_readme():
    ci = (Path(__file__).parents[3] / ".ci" / "run").read_text()

    assert TEST_COMMAND in README
    assert TEST_COMMAND in ci
