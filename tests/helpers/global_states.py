"""Training steps in fresh processes, each under one global state: `python -m tests.helpers.global_states NAME...`.

The process imports torch alone; those that it forks enter a state first, and then import dshard.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 2


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def after(function: Callable[..., object], *args: object) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def state() -> Any:
        function(*args)
        yield

    return state


def without_numpy() -> None:
    def numpy(*args: object, **kwargs: object) -> None:
        raise RuntimeError("Numpy is not available")

    Tensor.numpy = numpy  # type: ignore[assignment, method-assign]


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "bfloat16": after(torch.set_default_dtype, torch.bfloat16),
    "float16": after(torch.set_default_dtype, torch.float16),
    "float64": after(torch.set_default_dtype, torch.float64),
    "tensor type": after(torch.set_default_tensor_type, torch.DoubleTensor),
    "meta": after(torch.set_default_device, "meta"),
    "cpu": after(torch.set_default_device, "cpu"),
    "deterministic": after(torch.use_deterministic_algorithms, True),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "anomaly": torch.autograd.detect_anomaly,
    "matmul precision": after(torch.set_float32_matmul_precision, "medium"),
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "saved on cpu": torch.autograd.graph.save_on_cpu,
    "profiler": torch.profiler.profile,
    "warnings": after(warnings.simplefilter, "error"),
    "threads": after(torch.set_num_threads, 3),
    "no numpy": after(without_numpy),
    "swapped parameters": after(torch.__future__.set_swap_module_params_on_conversion, True),
    "denormal numbers": after(torch.set_flush_denormal, True),
}


def net() -> tuple[nn.Module, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    parts = nn.Linear(6, 10, device="cpu"), nn.GELU(), nn.LayerNorm(10, device="cpu"), nn.Linear(10, 4, device="cpu")
    model = nn.Sequential(*parts)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, device="cpu", dtype=p.dtype) * 0.4)
    dtype = next(model.parameters()).dtype
    return model, torch.randn(5, 6, generator=generator, device="cpu", dtype=dtype)


def values(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and where gradients are recorded those of a step, and the parameters after it."""
    y = model(x)
    if not torch.is_grad_enabled():
        return [y]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # one that float16 can do
    y.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer.step()
    return [y, *gradients, *(p.detach() for p in model.parameters())]


def step(rank: int, store: str) -> None:
    """Compare steps of a model that is laid out with those of a plain one, in the state of this process."""
    import dshard  # noqa: PLC0415
    from dshard.autograd.leaf_gradients import _SOLE_OWNER  # noqa: PLC0415
    from dshard.torch_dtensor import IS_TORCHS  # noqa: PLC0415

    assert IS_TORCHS
    assert len(_SOLE_OWNER) == 2
    dist.init_process_group("gloo", store=FileStore(store, RANKS), rank=rank, world_size=RANKS)
    mesh = dshard.init_device_mesh("cpu", (RANKS,))
    for plan in ("megatron", "fsdp"):
        model, x = net()
        alone = copy.deepcopy(model)
        dshard.parallelize(model, mesh, plan, x)
        for got, want in zip(values(model, x), values(alone, x), strict=True):
            assert isinstance(got, dshard.DTensor)
            assert got.dtype == want.dtype
            rounded = torch.get_default_dtype() in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled("cpu")
            error, scale = (got.full_tensor() - want).abs().max().item(), want.abs().max().item()
            assert error <= (0.08 if rounded else 1e-5) * max(scale, 1), (plan, error, scale)
    dist.barrier()


def imports_early() -> None:
    """Check that nothing of torch is imported while peers may wait: by the first operators and the first step."""
    import dshard  # noqa: PLC0415

    mesh = dshard.init_device_mesh("cpu", (1,))
    assert "torch._dynamo" in sys.modules
    _, x = net()
    y = dshard.distribute_tensor(x, mesh, [dshard.Shard(0)])
    before = {*sys.modules}
    (y + y).sum().item()
    late = [name for name in {*sys.modules} - before if name.startswith("torch.")]
    assert not late, late


def start(work: Callable[..., object], *args: object) -> int:
    """The process id of a fork of this process, which runs `work` and ends."""
    process = os.fork()
    if process:
        return process
    try:
        work(*args)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


def in_state(name: str, rank: int, store: str) -> None:
    with STATES[name]():
        step(rank, store)


def main(names: list[str]) -> int:
    first = start(imports_early)
    import torch._dynamo  # noqa: PLC0415  # once, not in each process
    import torch.distributed.tensor  # noqa: PLC0415, F401

    failed = ["imports"] if os.waitpid(first, 0)[1] else []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            ranks = [start(in_state, name, rank, f"{folder}/store") for rank in range(RANKS)]
            codes = [os.waitpid(rank, 0)[1] for rank in ranks]
            if any(codes):
                failed.append(name)
    print("failed:", failed)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
