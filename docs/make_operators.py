"""Writes the rules into docs/operators.md, each in the notation for an example, and the count on fake CUDA tensors.

    PYTHONPATH=. python docs/make_operators.py [--fake-cuda]

The examples are those of tests/helpers/operator_samples.py, of which every registered operator has one. The count on
fake CUDA tensors takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import dshard
from dshard.dispatch.operator import call_of
from dshard.dispatch.registry import known
from dshard.mesh import Mesh
from dshard.testing.check import _Call, recorded_calls

HERE = Path(__file__).parent
PAGE = HERE / "operators.md"
sys.path.insert(0, str(HERE.parent / "tests"))

from helpers.operator_samples import SAMPLES  # noqa: E402


def examples() -> dict[str, tuple[str, str]]:
    """For each operator the shapes of an example, and its rule."""
    found: dict[str, tuple[str, str]] = {}
    for function, sample in SAMPLES.values():
        expected = _Call.of(function, sample).on_one_device(gradients=True)
        args, kwargs = (sample[:-1], sample[-1]) if isinstance(sample[-1], dict) else (sample, {})
        for func, call_args, call_kwargs in recorded_calls(function, args, kwargs, expected.recorded):
            name = func._schema.name.removesuffix("_")
            if name not in found and known(func).op is not None:
                found[name] = example(func, call_args, call_kwargs)
    return found


def example(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
    call, _ = call_of(func, Mesh((2,)), args, kwargs)
    op = known(func).op
    assert op is not None
    shapes = ", ".join("x".join(map(str, shape)) or "()" for shape in call.shapes)
    return shapes, str(op.rule(call))


def table() -> str:
    """The rules as a table of Markdown."""
    shown = examples()
    rows = ["| operator | what the rule says | shapes | rule |", "|---|---|---|---|"]
    for row in dshard.rules():
        if row.family == "yours":
            continue
        shapes, rule = shown.get(row.op, ("", ""))
        rows.append(f"| `{row.op}` | {row.summary} | {shapes} | {f'`{rule}`' if rule else ''} |")
    return "\n".join(rows)


def fake_cuda() -> str:
    """What was counted on fake CUDA tensors."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent / "tests")])}
    command = [sys.executable, "-m", "helpers.fake_cuda_operators"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    passed = f"**{told['passed']} of {told['counted']}** operators pass"
    return f"{told['draws']:,} calls of {told['samples']} samples: {passed}."


def put(text: str, name: str, body: str) -> str:
    """`text` with what stands between the markers of this name replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{body}\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    PAGE.write_text(put(PAGE.read_text(), "rules", table()))
    if "--fake-cuda" in sys.argv:
        PAGE.write_text(put(PAGE.read_text(), "fake cuda", fake_cuda()))
