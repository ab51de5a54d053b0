"""The path of a call is short, as docs/design/0012 describes it: few files, and warm few frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dshard import Replicate, Shard, distribute_tensor, init_device_mesh
from dshard.caches import clear_caches
from dshard.core.spec import is_for_shapes
from dshard.dispatch.fast_path import FAST
from dshard.testing import RankPool

MAX_FILES, MAX_FRAMES = 6, 5
COLLECTIVE = ("comm/run.py", "run_collective")
Stack = list[tuple[str, str]]


@cache
def mesh() -> Any:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def laid(shape: tuple[int, ...], placement: Any, grad: bool) -> Any:
    return distribute_tensor(torch.randn(shape), mesh(), [placement]).requires_grad_(grad)


def walks(grad: bool) -> Iterator[tuple[str, Callable[[], Any], tuple[str, ...]]]:
    """The calls of the page, each with its local operators, or `run_collective`, at which its walk ends."""
    x, y, w = (laid((8, 8), placement, grad) for placement in (Shard(0), Shard(0), Replicate()))
    tall = laid((4096, 256), Shard(0), grad)
    yield "linear", lambda: F.linear(x, w), ("linear",)
    yield "linear that gathers", lambda: F.linear(x, y), ("linear", "run_collective")
    yield "add", lambda: x + y, ("add",)
    yield "torch.add", lambda: torch.add(x, y), ("add",)
    yield "softmax", lambda: x.softmax(1), ("softmax", "_softmax")
    yield "softmax that moves the split", lambda: x.softmax(0), ("_softmax", "run_collective")
    yield "softmax by small reductions", lambda: tall.softmax(0), ("amax", "exp", "run_collective")
    yield "redistribute", lambda: x.redistribute(placements=[Shard(1)]), ("run_collective",)
    yield "redistribute to all", lambda: x.redistribute(placements=[Replicate()]), ("run_collective",)


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
            if at == COLLECTIVE or above[-1][0] != "comm/collective.py":  # which reduces terms that were received
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
    alternative = ("ops/small_reductions.py", "run")
    start = stack.index(alternative) + 1 if alternative in stack else 0
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
                if not found or not found.keys() >= set(ends) & {"run_collective", "amax"}:
                    wrong.append(f"{walk}: of {ends} only {list(found)} were called")
                if len(files) > MAX_FILES:
                    wrong.append(f"{walk}: {len(files)} files: {files}")
                longest = max(map(frames_between, stacks), key=len, default=[])
                if turn == "warm" and len(longest) > MAX_FRAMES:
                    wrong.append(f"{walk}: {len(longest)} frames: {longest}")
    return wrong


@pytest.mark.ranks
@pytest.mark.skipif(not FAST, reason="needs the fast path")
def test_each_walk_is_of_few_files_and_warm_of_few_frames(ranks: RankPool) -> None:
    assert ranks.run(long_walks, timeout=300) == [[]] * 4
