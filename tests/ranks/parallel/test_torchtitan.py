"""torchtitan's trainer trains a parallelized model alike on all meshes, and goes on from its checkpoints.

torchtitan has no CPU in mind: `main` puts one in the place of its accelerator. Each run has processes of its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
ROWS, LENGTH, WORDS = 8, 16, 64
MESHES = {"alone": (1, 1), "fsdp": (4, 1), "megatron": (1, 2), "fsdp x megatron": (2, 2)}

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("torchtitan", "triton")),
        reason="needs torchtitan and triton",
    ),
]


def trained(mesh: str, steps: int, folder: Path) -> list[tuple[float, float]]:
    """The loss and the norm of the gradient at each step that torchtitan prints."""
    sizes = MESHES[mesh]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(sizes[0] * sizes[1])]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/examples", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [*launch, "--standalone", __file__, *map(str, sizes), str(steps), str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    log = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    shown = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", log)
    return [(float(loss), float(norm)) for _, loss, norm in sorted(set(shown), key=lambda line: int(line[0]))]


def test_torchtitan_trains_alike_on_all_meshes(tmp_path: Path) -> None:
    expected = trained("alone", 4, tmp_path / "alone")

    assert len(expected) == 4
    for mesh in ("fsdp", "megatron", "fsdp x megatron"):
        assert trained(mesh, 4, tmp_path / mesh) == [pytest.approx(step, abs=2e-4) for step in expected], mesh


def test_torchtitan_goes_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    expected = trained("alone", 4, tmp_path / "alone")

    first = trained("fsdp x megatron", 2, tmp_path / "run")
    second = trained("fsdp", 4, tmp_path / "run")

    assert [*first, *second] == [pytest.approx(step, abs=2e-4) for step in expected]


class Cpu(ModuleType):
    """What torchtitan asks of the module of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: object = None) -> str:
        return "cpu"

    def get_device_properties(self, device: object = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=2**33)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...


class Tokens:
    """The same batches whatever the mesh, of which each data rank has its rows."""

    def __init__(self, dp_world_size: int, dp_rank: int, **_: object) -> None:
        rows = ROWS // dp_world_size
        self.rows, self.number = slice(dp_rank * rows, (dp_rank + 1) * rows), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            source = torch.Generator().manual_seed(self.number)
            tokens = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=source)[self.rows]
            self.number += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def main(shards: int, tensor_parallel: int, steps: int, folder: str) -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device=None: Cpu("cpu")
    # they read the accelerator when they are imported
    names = ("torchtitan_llama", "torchtitan.config", "torchtitan.models.llama3", "torchtitan.protocols.train_spec")
    example, config_of, llama3, train_spec = (importlib.import_module(name) for name in names)
    logging, train = (importlib.import_module(name) for name in ("torchtitan.tools.logging", "torchtitan.train"))

    small = llama3.TransformerModelArgs(
        dim=32, n_layers=2, n_heads=4, vocab_size=WORDS, multiple_of=8, max_seq_len=LENGTH
    )
    changes = {"model_args": {"small": small}, "build_dataloader_fn": Tokens, "build_tokenizer_fn": None}
    train_spec.register_train_spec("small", dataclasses.replace(example.SPEC, **changes))
    config = config_of.JobConfig()
    config.model.name, config.model.flavor, config.job.dump_folder = "small", "small", folder
    config.training.seq_len, config.training.local_batch_size, config.training.steps = LENGTH, ROWS // shards, steps
    config.training.mixed_precision_param, config.optimizer.implementation = "float32", "foreach"
    config.lr_scheduler.warmup_steps = 1
    config.lr_scheduler.decay_ratio = 0.0
    config.parallelism.data_parallel_shard_degree = shards
    config.parallelism.tensor_parallel_degree = tensor_parallel
    config.metrics.log_freq, config.debug.seed = 1, 0
    config.checkpoint.enable, config.checkpoint.interval, config.checkpoint.last_save_model_only = True, 2, False
    logging.init_logger()
    trainer = train.Trainer(config)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
