"""Run every operator with a sample on fake CUDA tensors, in plain torch and then distributed in several layouts.

    PYTHONPATH=.:tests python -m helpers.fake_cuda_operators [PATTERN]

prints what was seen, as JSON. In each layout it is planned first, and watched when it runs again.
"""

from __future__ import annotations

from helpers import fake_cuda

if __name__ == "__main__":
    fake_cuda.prepare()

import json
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from dshard import DTensor, Layout, Partial, Placement, Replicate, Shard, Topology, init_device_mesh, use_topology
from dshard.comm import DeviceMesh, bind
from dshard.core.trees import replace_tensors, tensors_in
from dshard.dispatch.registry import known
from dshard.errors import DShardError
from dshard.testing.check import _Call, recorded_calls
from helpers.fake_cuda_world import FakeCuda, fake_cuda_world
from helpers.operator_samples import SAMPLES, Sample

DRAWS = 4
TOPOLOGIES = Topology.flat(1e11), Topology.flat(1e4)
"""Links on which little counts but the number of collectives, and on which bytes count: other ways are the cheapest."""


@dataclass
class Seen:
    """The outcome of one sample on fake CUDA tensors.

    `torch` is the error of plain torch, if it cannot run it; `draws` are layouts in which it ran distributed, `refused`
    those that dshard refuses.
    """

    name: str
    torch: str = ""
    draws: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)


def on_cuda(x: Tensor) -> Tensor:
    """Return a fake CUDA tensor with the shape, strides and dtype of `x`."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def drawn(x: Tensor, mesh: DeviceMesh, random: Random) -> DTensor:
    """Return a distributed tensor of the form of `x` in a random layout."""
    options: list[Placement] = [Replicate(), *map(Shard, range(x.ndim)), *map(Shard, range(x.ndim))]
    if x.dtype.is_floating_point:
        options.append(Partial())
    layout = Layout(bind(mesh), tuple(random.choice(options) for _ in range(mesh.ndim)))
    shape = layout.local_shape(x.shape, layout.mesh.coordinate(torch.distributed.get_rank()))
    local = torch.empty(shape, dtype=x.dtype, device="cuda")
    return DTensor.from_local(local, mesh, layout.placements, shape=x.shape, stride=x.stride())


def run(sample: Sample, place: Callable[[Tensor], Any], gradients: Sequence[bool]) -> list[Any]:
    """Run a sample on tensors made by `place`; return its outputs and their gradients."""
    function, args = sample
    args, kwargs = (args[:-1], args[-1]) if args and isinstance(args[-1], dict) else (args, {})
    rest = iter(gradients)
    leaves: list[Any] = []

    def placed(x: Tensor) -> Any:
        out = place(x)
        if next(rest):
            leaves.append(out.requires_grad_())
        return out

    placed_args, placed_kwargs = replace_tensors((args, kwargs), placed)
    outputs = tensors_in(function(*placed_args, **placed_kwargs))
    with_grad = [out for out in outputs if out.requires_grad]
    grads: Sequence[Any] = ()
    if with_grad and leaves:
        grads = torch.autograd.grad(with_grad, leaves, [torch.ones_like(out) for out in with_grad], allow_unused=True)
    return [*outputs, *(grad for grad in grads if grad is not None)]


def form(x: Any) -> tuple[object, ...]:
    """Return the shape, dtype and device type of an output."""
    return tuple(x.shape), x.dtype, x.device.type


def seen_of(name: str, sample: Sample, mesh: DeviceMesh, mode: FakeCuda) -> Seen:
    """Run a sample on plain and on distributed fake CUDA tensors."""
    seen, operands = Seen(name), tensors_in(sample[1])
    gradients = [x.dtype.is_floating_point for x in operands]
    try:
        with mode.watched() as allowed:
            expected = on_plain(sample, gradients)
    except Exception as error:
        try:
            gradients = [False] * len(operands)
            with mode.watched() as allowed:
                expected = on_plain(sample, gradients)
        except Exception:
            seen.torch = _text(error)
            return seen
    random = Random(zlib.crc32(name.encode()))
    for i in range(DRAWS):
        state = random.getstate()
        try:
            with use_topology(TOPOLOGIES[i % 2]):
                run(sample, partial(drawn, mesh=mesh, random=random), gradients)  # plans
                random.setstate(state)
                with mode.watched() as noticed:
                    outputs = run(sample, partial(drawn, mesh=mesh, random=random), gradients)
        except DShardError:
            seen.refused += 1
            continue
        except Exception as error:
            seen.failures.append(_text(error))
            continue
        seen.draws += 1
        seen.failures += differences(outputs, expected) + noticed.beyond(allowed)
    return seen


def on_plain(sample: Sample, gradients: Sequence[bool]) -> list[Any]:
    """Run a sample in plain torch; return its outputs and their gradients."""
    return run(sample, on_cuda, gradients)


def differences(outputs: Sequence[Any], expected: Sequence[Any]) -> list[str]:
    """Describe differences of outputs from those of plain torch; all must be on CUDA."""
    differing = []
    if [form(x) for x in outputs] != [form(x) for x in expected]:
        differing.append(f"{[form(x) for x in outputs]} and not {[form(x) for x in expected]}")
    locals_of = [out.to_local() for out in outputs if isinstance(out, DTensor)]
    differing += [f"a local tensor on {local.device}" for local in locals_of if local.device.type != "cuda"]
    return differing


def summary(seen: Sequence[Seen]) -> tuple[int, int]:
    """Count the registered operators that samples call, forward or backward, and those whose samples all pass.

    An operator passes where each sample that calls it does; those that plain torch cannot run on fake CUDA tensors are
    not counted.
    """
    called: dict[str, bool] = {}
    for each in seen:
        if each.torch:
            continue
        function, sample = SAMPLES[each.name]
        args, kwargs = (sample[:-1], sample[-1]) if sample and isinstance(sample[-1], dict) else (sample, {})
        expected = _Call.of(function, sample).on_one_device(gradients=True)
        for func, *_ in recorded_calls(function, args, kwargs, expected.recorded):
            name = func._schema.name.removesuffix("_")
            if known(func).op is not None:
                called[name] = called.get(name, True) and each.draws > 0 and not each.failures
    return len(called), sum(called.values())


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:400]}"


def sweep(pattern: str = "") -> list[Seen]:
    """Run every sample whose name contains `pattern`."""
    warnings.filterwarnings("ignore")
    with fake_cuda_world(rank=1) as mode:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("x", "y"))
        return [seen_of(name, sample, mesh, mode) for name, sample in SAMPLES.items() if pattern in name]


if __name__ == "__main__":
    samples = sweep(*sys.argv[1:])
    counted, passed = summary(samples)
    failures = {seen.name: seen.failures for seen in samples if seen.failures or not (seen.torch or seen.draws)}
    counts = {
        "samples": len(samples),
        "draws": sum(seen.draws for seen in samples),
        "counted": counted,
        "passed": passed,
    }
    not_by_torch = {seen.name: seen.torch for seen in samples if seen.torch}
    print(json.dumps({**counts, "not_by_torch": not_by_torch, "failures": failures}))
