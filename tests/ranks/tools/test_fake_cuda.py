"""On CUDA tensors without numbers: no device is mixed, no CPU tensor made, and the host waits for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from helpers import fake_cuda

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.thorough,  # minutes, in a process of its own
    pytest.mark.skipif(bool(fake_cuda.why_not()), reason=fake_cuda.why_not()),
]


def told_by(program: str, *args: str) -> dict[str, Any]:
    """What a program prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment.pop("DSHARD_TEST_BACKEND", None)
    command = [sys.executable, "-m", f"helpers.{program}", *args]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_every_operator_that_torch_runs_on_fake_cuda_runs_distributed() -> None:
    told = told_by("fake_cuda_operators")

    assert told["failures"] == {}
    assert told["draws"] > told["samples"]
    assert told["passed"] == told["counted"]
    page = (ROOT / "docs" / "operators.md").read_text()
    assert f"**{told['passed']} of {told['counted']}**" in page, (
        "run: PYTHONPATH=. python docs/make_operators.py --fake-cuda"
    )


def test_warm_programs_make_no_cpu_tensor_and_the_host_waits_for_nothing() -> None:
    told = told_by("fake_cuda_programs")

    assert {name: wrong for name, wrong in told.items() if wrong} == {}
    assert sum(" under " in name for name in told) > 20


SENT = {
    "c10d.allreduce_",
    "c10d._allgather_base_",
    "c10d._reduce_scatter_base_",
    "c10d.alltoall_",
    "c10d.alltoall_base_",
}
PACKED = {"cat", "_chunk_cat", "split_with_sizes_copy.out", "new_empty", "_foreach_copy_", "copy_"}
LOOKED_UP = {
    *("lt.Scalar", "ge.Scalar", "bitwise_or.Tensor", "bitwise_and.Tensor", "bitwise_not", "any", "_assert_async.msg"),
    *("sub.Tensor", "where.self", "scalar_tensor", "masked_fill_.Scalar", "masked_fill.Scalar"),
}
"""Kernels of a table of words that is split over the ranks: which rows others have, and that nobody lacks one."""
OURS = {
    "div.Tensor": "a mean loss is a sum over a count, each reduced over all ranks",
    "clone": "gradients of matmuls of batches copy the operands, of which torch saves its copies; and what is reduced",
    "bmm": "the gradient of a linear layer's operand, of one that is no contiguous rows",
    "sum.dim_IntList": "gradients of biases, reduced by themselves",
}


def test_kernels_that_one_of_plain_torch_and_dshard_runs_alone() -> None:
    told = told_by("fake_cuda_kernels")

    assert len(told) == 13
    for case, (plain, ours) in told.items():
        of_matmuls = {"mm", "clone", "new_empty_strided", "copy_"}  # where dshard has another form, or makes no copy
        assert plain.keys() <= of_matmuls, case
        assert ours.keys() <= SENT | PACKED | OURS.keys() | (LOOKED_UP if "megatron" in case else set()), case


def test_checkpoints_and_all_stages_of_pipelines_keep_to_the_device(tmp_path: Path) -> None:
    """Four ranks: saved on one mesh and loaded on another; every stage of a step, whose loss all ranks get."""
    with ThreadPoolExecutor(4) as threads:
        every = list(threads.map(lambda rank: told_by("fake_cuda_ranks", str(rank), str(tmp_path)), range(4)))

    for told in every:
        assert {name: wrong for name, wrong in told.items() if wrong} == {}
        assert len(told) > 2


def test_a_wait_a_cpu_tensor_and_a_mixed_device_are_noticed() -> None:
    told = told_by("fake_cuda_programs", "wrong: ")

    assert any("aten.ones" in text for text in told["wrong: cpu"])
    assert any("whether the factorisation succeeded" in text for text in told["wrong: wait"])
    for name in ("wrong: mixed", "wrong: operand"):
        assert any("Expected all tensors to be on the same device" in text for text in told[name])
