"""A program in a CUDA graph: its kernels and collectives in one launch, on tensors that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.comm import ENDS
from dshard.rehearsal.local_recorder import Instruction, Slot, View
from dshard.rehearsal.simplified import reads, written_by

DEVICE = "cuda"
"""The type of device on which all of a graph runs."""


def why_not_captured(
    instructions: Iterable[Instruction], views: Sequence[View | None], inputs: Collection[Slot]
) -> str:
    """Why no graph can stand for these instructions on tensors `inputs` of each call; empty if one can.

    `views` says how the tensor of each slot lies in its storage; a slot beyond stands for an option that is a number.
    """
    for each in instructions:
        where = f"{each.name} at {each.line}"
        if each.operator is None and not (each.begins or each.key == ENDS):
            return f"{where} takes other numbers of the host in each call"
        slots = [*reads(each), *each.made]
        if any(slot.number >= len(views) for slot in slots):
            return f"{where} follows an option of an optimiser that is a number: give the option as a tensor"
        kinds = {view.device.type for slot in slots if (view := views[slot.number]) is not None}
        if kinds - {DEVICE}:
            return f"{where} runs on {min(kinds - {DEVICE})}"
        if each.operator is not None and not written_by([each]).isdisjoint(inputs):
            return f"{where} writes to an argument, or adds to a gradient of an earlier call: call zero_grad first"
    return ""


class CapturedProgram:
    """A program that is captured at its first call, and launched from then on.

    Arguments are copied to the graph's own memory. The first `n_copied` results are copies; the others, which are
    gradients, lie in the graph's memory, and the next call overwrites them.
    """

    def __init__(self, run: Callable[..., tuple[Any, ...]], n_copied: int) -> None:
        self._run, self._n_copied = run, n_copied
        self._inputs: list[Tensor] = []
        self._launch: Callable[[], None] | None = None
        self._results: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._launch is None:
            self._inputs = [x.clone(memory_format=torch.preserve_format) for x in inputs]
            self._launch, self._results = captured(self._run, self._inputs)
        elif inputs:
            torch._foreach_copy_(self._inputs, inputs, non_blocking=True)
        self._launch()
        copies = [x.clone() for x in self._results[: self._n_copied]]
        return (*copies, *self._results[self._n_copied :])


def captured(run: Callable[..., tuple[Any, ...]], inputs: Sequence[Tensor]) -> tuple[Callable[[], None], Any]:
    """Capture a run on these tensors, without running it: the function that launches it, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog, another thread, asks for events
        results = run(*inputs)
    return graph.replay, results
