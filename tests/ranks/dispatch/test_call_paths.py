"""Calls pass through few files, and warm ones through few frames, as docs/design/0012 describes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dshard
from dshard import Replicate, Shard, distribute_tensor, init_device_mesh, parallelize
from dshard.caches import clear_caches
from dshard.core.spec import is_for_shapes
from dshard.core.wrapper import Wrapper
from dshard.testing import RankPool

MAX_FILES, MAX_FRAMES, MAX_FRAMES_TO_ALTERNATIVE = 6, 10, 8
ALTERNATIVE = ("ops/small_reductions.py", "run")
COLLECTIVE = ("comm/world.py", "launch")
BESIDE = ("comm/collective.py",)
"""Who calls local operators beside the walk: the reduction of terms received."""
Stack = list[tuple[str, str]]


@cache
def mesh() -> Any:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def laid(shape: tuple[int, ...], placement: Any, grad: bool) -> Any:
    return distribute_tensor(torch.randn(shape), mesh(), [placement]).requires_grad_(grad)


def walks(grad: bool) -> Iterator[tuple[str, Callable[[], Any], tuple[str, ...]]]:
    """The calls of the page, each with its local operators, or `launch`, at which its walk ends."""
    x, y, w = (laid((8, 8), placement, grad) for placement in (Shard(0), Shard(0), Replicate()))
    tall = laid((4096, 256), Shard(0), grad)
    yield "linear", lambda: F.linear(x, w), ("linear",)
    yield "linear that gathers", lambda: F.linear(x, y), ("linear", "launch")
    yield "add", lambda: x + y, ("add",)
    yield "torch.add", lambda: torch.add(x, y), ("add",)
    yield "softmax", lambda: x.softmax(1), ("softmax", "_softmax")
    yield "softmax that moves the split", lambda: x.softmax(0), ("_softmax", "launch")
    yield "softmax by small reductions", lambda: tall.softmax(0), ("amax", "exp", "launch")
    yield "redistribute", lambda: x.redistribute(placements=[Shard(1)]), ("launch",)
    yield "redistribute to all", lambda: x.redistribute(placements=[Replicate()]), ("launch",)


def stacks_at(call: Callable[[], Any], ends: tuple[str, ...]) -> dict[str, list[Stack]]:
    """The frames of dshard, from the entry on, above each call of a local operator, or of a collective."""
    stack: list[tuple[str, str] | None] = []
    found: dict[str, list[Stack]] = {}

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "return":
            stack[-1:] = []
            return
        at: tuple[str, str] | None = None
        name = None
        if event == "c_call" and not isinstance(arg.__self__, set):
            name = arg.__name__
        elif event == "call":
            folder, _, file = frame.f_code.co_filename.rpartition("/dshard/")
            at = (file, frame.f_code.co_name) if folder else None
            if at == COLLECTIVE:
                name = at[1]
            elif frame.f_code is torch.ops.aten.add.Tensor.__call__.__code__:
                name = frame.f_locals["self"].__name__.partition(".")[0]
        if name in ends and any(stack) and not is_for_shapes():
            above = [each for each in stack if each is not None]
            if at == COLLECTIVE or above[-1][0] not in BESIDE:
                found.setdefault(name, []).append(above)
        if event == "call":
            stack.append(at)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def frames_between(stack: Stack) -> Stack:
    """The frames after the entry; an alternative consists of operators that enter at `dispatch` themselves."""
    start = stack.index(ALTERNATIVE) + 1 if ALTERNATIVE in stack else 0
    return stack[start + 1 :]


def long_walks() -> list[str]:
    wrong = []
    for grad in (False, True):
        for name, call, ends in walks(grad):
            call()  # torch imports modules at the first use of some operators
            clear_caches()
            for turn in ("cold", "second", "warm"):
                found = stacks_at(call, ends)
                walk = f"{name}, {turn}, {grad=}"
                stacks = [stack for each in found.values() for stack in each]
                files = sorted({file for stack in stacks for file, _ in stack})
                if not found or not found.keys() >= set(ends) & {"launch", "amax"}:
                    wrong.append(f"{walk}: of {ends} only {list(found)} were called")
                if len(files) > MAX_FILES:
                    wrong.append(f"{walk}: {len(files)} files: {files}")
                longest = max(map(frames_between, stacks), key=len, default=[])
                if turn == "warm" and len(longest) > MAX_FRAMES:
                    wrong.append(f"{walk}: {len(longest)} frames: {longest}")
                before = [stack[1 : stack.index(ALTERNATIVE)] for stack in stacks if ALTERNATIVE in stack]
                if turn == "warm" and any(len(frames) > MAX_FRAMES_TO_ALTERNATIVE for frames in before):
                    wrong.append(f"{walk}: more frames before the alternative: {before}")
    return wrong


@pytest.mark.ranks
def test_each_walk_is_of_few_files_and_warm_of_few_frames(ranks: RankPool) -> None:
    assert ranks.run(long_walks, timeout=300) == [[]] * 4


MAX_COLD_FRAMES, MAX_UNMATCHED_FRAMES, MAX_RAGGED_FRAMES, MAX_CHANGES_OF_FILE = 700, 24, 300, 900


WAITS = "comm/peer_failure.py"


def frames_of(call: Callable[[], object]) -> tuple[int, int]:
    """The frames of dshard that a call passes, and how often it goes from one file of dshard to another.

    Those of waits do not count: a rank has more the longer it waits for others.
    """
    stack: list[str | None] = []
    files: list[str] = []
    frames = 0

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal frames
        if event == "call":
            folder, _, file = frame.f_code.co_filename.rpartition("/dshard/")
            stack.append(file if folder else None)
            frames += bool(folder) and WAITS not in stack[:-1]
        elif event == "return" and stack:
            stack.pop()
        at = None if WAITS in stack else next((file for file in reversed(stack) if file), None)
        if at is not None and files[-1:] != [at]:
            files.append(at)

    gc.collect()
    gc.disable()  # which would call what others have left to be called when an object dies
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return frames, len(files)


def long_paths() -> list[str]:
    """What passes more frames, or changes of file, than it may, in a program that wants no partial gradients."""
    kept, Wrapper.keeps_terms = Wrapper.keeps_terms, False
    try:
        return _long_paths()
    finally:
        Wrapper.keeps_terms = kept


def _long_paths() -> list[str]:
    x, w = laid((8, 8), Replicate(), False), laid((8, 8), Shard(0), True)
    F.linear(x, w)
    clear_caches()
    (cold, _), (warm, _) = (frames_of(lambda: F.linear(x, w)) for _ in range(2))

    tokens, weight = laid((8, 4), Shard(0), True), laid((8, 2), Shard(0), True)
    index, experts = (weight.detach() * 0).long(), [laid((4, 4, 4), Shard(0), True) for _ in range(2)]
    leaves, grad, body = [tokens, weight, *experts], torch.ones_like(tokens).detach(), dshard.mlp_experts()

    def layer() -> None:
        torch.autograd.grad(dshard.experts(body, tokens, index, weight, *experts, loops="ragged"), leaves, grad)

    layer()
    ragged, _ = frames_of(layer)

    def mlp() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    parallelize(mlp(), mesh(), "megatron", torch.randn(4, 8))
    clear_caches()
    model = mlp()
    _, changes = frames_of(lambda: parallelize(model, mesh(), "megatron", torch.randn(4, 8)))
    found = {"cold linear": (cold, MAX_COLD_FRAMES), "warm linear": (warm, MAX_UNMATCHED_FRAMES)}
    found["warm experts, there and back"] = ragged, MAX_RAGGED_FRAMES
    found["parallelize"] = changes, MAX_CHANGES_OF_FILE
    return [f"{name}: {number} > {most}" for name, (number, most) in found.items() if number > most]


@pytest.mark.ranks
def test_planning_passes_few_frames_and_files(ranks: RankPool) -> None:
    assert ranks.run(long_paths, timeout=300) == [[]] * 4


class Computed(TorchDispatchMode):
    """Lists the operators that compute something on local tensors: no views, and none that only infer shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Wrapper) for kind in types):
            return NotImplemented
        is_view = any(result.alias_info is not None for result in func._schema.returns)
        if not is_view and not is_for_shapes():
            self.operators.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def computed(call: Callable[[], Any]) -> list[str]:
    with Computed() as mode:
        call()
    return mode.operators


def computed_cold() -> list[str]:
    wrong = []
    for grad in (False, True):
        x, y, w = (laid((8, 8), placement, grad) for placement in (Shard(0), Shard(0), Replicate()))
        many, weight = laid((4, 8, 8), Shard(0), grad), laid((8,), Replicate(), grad)
        calls = {
            "linear": lambda: F.linear(x, w),  # noqa: B023
            "linear with a bias": lambda: F.linear(many, w, weight),  # noqa: B023
            "matmul": lambda: many @ w,  # noqa: B023
            "matmul that gathers": lambda: x @ y,  # noqa: B023
            "add": lambda: x + y,  # noqa: B023
            "two operators": lambda: F.mse_loss(x, y),  # noqa: B023
            "softmax": lambda: x.softmax(1),  # noqa: B023
            "layer_norm": lambda: F.layer_norm(x, (8,), weight, weight),  # noqa: B023
            "view": lambda: x.t(),  # noqa: B023
        }
        for name, call in calls.items():
            clear_caches()
            cold, warm = computed(call), computed(call)
            if cold != warm:
                wrong.append(f"{name}, {grad=}: {cold} computed cold, {warm} warm")
    return wrong


@pytest.mark.ranks
def test_a_first_call_computes_what_a_warm_one_does(ranks: RankPool) -> None:
    assert ranks.run(computed_cold) == [[]] * 4


def reused() -> list[str]:
    """What a first call computed is the result of its graph, and no more than that: writes to it or its operands."""
    x, w = laid((8, 8), Shard(0), True), laid((8, 8), Replicate(), True)
    wrong = []
    for name, call in {"add": lambda: x + x, "exp": lambda: x.exp(), "linear": lambda: F.linear(x, w)}.items():
        clear_caches()
        results = []
        for _ in range(3):
            x.grad = w.grad = None
            out = call()
            out.backward(out.detach())
            results.append([out.full_tensor(), x.grad.full_tensor()])
        wrong += [name for result in results[1:] if not all(map(torch.equal, result, results[0]))]
        clear_caches()
        out = call()
        with torch.no_grad():
            out.mul_(2)
        if not torch.equal(call().full_tensor() * 2, out.full_tensor()):
            wrong.append(f"{name}: a write to the first result")
    return wrong


@pytest.mark.ranks
def test_results_of_a_first_call_are_its_own(ranks: RankPool) -> None:
    assert ranks.run(reused) == [[]] * 4


ATTRIBUTES = ("shape", "ndim", "dtype", "device", "is_cpu", "is_cuda", "is_meta", "is_sparse")


def slow_attributes() -> list[str]:
    """The attributes that differ from those of a plain tensor, or are read or set by a call of `__torch_function__`."""
    plain, x = torch.zeros(8, 6, dtype=torch.float64), laid((8, 6), Shard(0), True).double().detach().requires_grad_()
    y = (x * 2).exp()
    wrong = [f"{name} of {at}" for at in (x, y) for name in ATTRIBUTES if getattr(at, name) != getattr(plain, name)]
    y.retain_grad()
    y.sum().backward()
    if not torch.equal(x.grad.full_tensor(), 2 * (2 * x).exp().full_tensor()) or not (y.grad == 1).full_tensor().all():
        wrong.append("grad")  # that of y is recorded on its local tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(x), "__torch_function__", classmethod(lambda cls, func, *_: wrong.append(func.__qualname__)))
        for at in (x, y):
            for name in ATTRIBUTES:
                getattr(at, name)
        x.grad = x.grad
        x.grad = None
    if x.grad is not None:
        wrong.append("grad that is set to None")
    for other in ("to", torch.zeros(2)):  # errors are torch's
        with pytest.raises((TypeError, RuntimeError), match="grad"):
            x.grad = other
    x.grad = x.detach()
    del x.grad
    return wrong if x.grad is None else [*wrong, "grad that is deleted"]


@pytest.mark.ranks
def test_attributes_are_read_without_a_call(ranks: RankPool) -> None:
    assert ranks.run(slow_attributes) == [[]] * 4
