"""Programs on fake CUDA tensors that need all their ranks: checkpoints, and pipelines with all stages.

    PYTHONPATH=.:tests python -m helpers.fake_cuda_ranks RANK FOLDER

is one of four ranks, which exchange objects over gloo, and write files in which all numbers are zero; it prints what is
wrong with each program, as JSON.
"""

from __future__ import annotations

from helpers import fake_cuda

if __name__ == "__main__":
    fake_cuda.prepare()

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.checkpoint import filesystem

import dshard
from dshard import DTensor, Partial, Replicate, Shard, checkpoint, init_device_mesh, parallelize
from dshard.comm import DeviceMesh
from dshard.pipeline import Pipeline, Stage
from helpers.fake_cuda_world import FakeCuda, fake_cuda_world
from helpers.transformer_blocks import GPT, TOKENS, WIDTH

RANKS = 4
COPIES = {"aten._to_copy.default", "aten.slice.Tensor"}
"""What makes CPU tensors of a checkpoint: the copies that are written, and the parts of what is read."""


def trained(plan: str, shape: tuple[int, ...], *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a block under a plan and its optimiser, after `steps` training steps."""
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("a", "b")[: len(shape)])
    with torch.device("cuda"):
        model, x = GPT(), torch.zeros(8, TOKENS, WIDTH)
    model = parallelize(model, mesh, plan, x)
    optimiser = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        model(x).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    return model, optimiser


def saved(path: Path) -> None:
    """Save after a step on a mesh of two axes, and a partial tensor of sizes that do not divide."""
    model, optimiser = trained("megatron", (2, 2), steps=1)
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("a", "b"))
    x = dshard.distribute_tensor(torch.zeros(7, 5, device="cuda"), mesh, [Partial(), Shard(1)], src_data_rank=None)
    checkpoint.save({"model": model, "optimiser": optimiser, "x": x, "step": 1}, path)


def loaded(path: Path) -> dict[str, Any]:
    """Load on a mesh of one axis, into an optimiser that has made no step."""
    model, optimiser = trained("fsdp", (4,), steps=0)
    mesh = init_device_mesh("cuda", (4,), mesh_dim_names=("a",))
    x = dshard.distribute_tensor(torch.zeros(7, 5, device="cuda"), mesh, [Replicate()], src_data_rank=None)
    state = {"model": model, "optimiser": optimiser, "x": x, "step": 0}
    checkpoint.load(state, path)
    return state


def tensors_of(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a loaded state by name."""
    yield from state["model"].named_parameters()
    yield "x", state["x"]
    for i, values in enumerate(state["optimiser"].state.values()):
        yield from ((f"state {i} {name}", x) for name, x in values.items())


def checkpoints(path: Path, mode: FakeCuda) -> list[str]:
    """Save on one mesh and load on another; return the faults."""
    with mode.watched() as saving:
        saved(path)
    with mode.watched() as loading:
        state = loaded(path)
    places = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in tensors_of(state)}
    wrong = [f"{name} on {x.device}" for name, x in places.items() if x.device.type != "cuda"]
    copies = saving.on_cpu + loading.on_cpu
    wrong += [f"a CPU tensor of {name}, {count} times" for name, count in copies.items() if name not in COPIES]
    return wrong + ([] if state["step"] == 1 else ["the step was not read"])


def pipeline(schedule: str, mode: FakeCuda) -> list[str]:
    """Run a pipeline of two stages on two ranks each; return the faults of its third step."""
    with unset_fake_temporarily():
        meshes = [DeviceMesh("cuda", ranks, mesh_dim_names=("x",)) for ranks in ([0, 1], [2, 3])]
    number = dist.get_rank() // 2
    with torch.device("cuda"):
        modules = [nn.Sequential(nn.Linear(6, 6), nn.GELU()) if i == number else None for i in range(2)]
        x = torch.zeros(12, 6)
    dshard.distribute_module(modules[number], meshes[number])
    stages = [Stage(module, mesh, placements={"x": [Shard(0)]}) for module, mesh in zip(modules, meshes, strict=True)]
    pipe = Pipeline(stages, n_microbatches=3, schedule=schedule, loss=F.mse_loss)
    for _ in range(2):
        pipe.step(x, x)
    with mode.watched() as noticed:
        pipe.step(x, x)
    return [*(f"a CPU tensor of {name}" for name in noticed.on_cpu), *map(str, noticed.waits)]


def without_numbers(transforms: Any, stream: Any, data: Any, *args: Any) -> Any:
    """Write an item of a checkpoint, as zeros for a fake tensor, which must be on the CPU by then."""
    with unset_fake_temporarily():
        if isinstance(data, Tensor):
            assert data.device.type == "cpu"
            data = torch.zeros(data.shape, dtype=data.dtype)
        return WRITE(transforms, stream, data, *args)


WRITE = filesystem._write_item


class Stream:
    """A stream for torch's checkpoint writer, which copies on it and synchronises it before writing."""

    def synchronize(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    store = dist.FileStore(str(folder / "store"), RANKS)
    with ExitStack() as stack:
        mode = stack.enter_context(fake_cuda_world(rank, RANKS, store))
        stack.enter_context(patch.object(filesystem, "_write_item", without_numbers))
        stream = Stream()
        stack.enter_context(patch.object(torch.cuda, "current_stream", lambda: stream))
        stack.enter_context(patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        wrong = {"checkpoints": checkpoints(folder / "state", mode)}
        wrong |= {f"a pipeline by {schedule}": pipeline(schedule, mode) for schedule in ("gpipe", "eager-1f1b")}
        print(json.dumps(wrong))
