"""A recording that was seen twice, as a function of the tensors of a call and of the options of optimisers.

Most instructions of a recording are views, of which many are equal, and operators whose results nobody uses, as those
that only infer shapes. A view of a parameter is made once, not in each step. The function frees each tensor after its
last use. What remains runs below autograd and in the order of the recording, so that its results are the same to the
bit, and its collectives match those of ranks that run the step by Python.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dshard.comm import ENDS, publish_failure
from dshard.core.wrapper import Wrapper, wrap
from dshard.rehearsal.calls import local_of, without_autocast
from dshard.rehearsal.code import Code, results_of, variable
from dshard.rehearsal.local_recorder import Instruction, Slot, View
from dshard.rehearsal.simplified import parted, reads, simplified, written_by
from dshard.replay.step_recording import StepCall, StepRecording
from dshard.replay.step_state import FUNCTIONS, Term, alike, options_of, values_in, with_values
from dshard.torch_private import increment_version, pytree

FILE = "<replay>"
"""The name of the file of programs, in tracebacks."""


class StepProgram:
    """A recording as a function; `code` is its source.

    With `in_graph` it runs in a CUDA graph, unless `why_not_captured` says why it cannot.
    """

    def __init__(self, recording: StepRecording, call: StepCall, *, in_graph: bool = False) -> None:
        self.recording, sources = recording, recording.sources
        self._terms: dict[tuple[type, frozenset[Term]], Slot] = {}
        self._numbers: dict[Slot, float] = {}
        slots = [slot for slot in recording.results if isinstance(slot, Slot)]
        outs = slots + [leaf.slot for leaf in recording.leaves if leaf.slot is not None]
        instructions, stands_for = simplified(self._with_options(), recording.recorder.views, outs)
        self._n_results, results = len(slots), [stands_for.get(slot, slot) for slot in outs]
        self.n_collectives = sum(each.begins for each in instructions)
        self.n_operators = sum(each.operator is not None for each in instructions)
        used = {slot for each in instructions for slot in reads(each)} | set(results)
        inputs = {slot for slot, source in sources.items() if source.kind in ("argument", "gradient")}
        self._inputs = sorted(used & (inputs | set(self._terms.values())), key=lambda slot: slot.number)
        self._read = {sources[slot].of for slot in self._inputs if slot in sources and sources[slot].kind == "gradient"}
        known = {slot: local_of(source.of) for slot, source in sources.items() if source.kind == "tensor"}
        known = {slot: x for slot, x in (known | recording.recorder.literals).items() if slot in used}
        once, rest, _ = parted(known, instructions)
        for each in once:
            known |= results_of(each, known)
        code = Code(variable, {variable(slot): x for slot, x in known.items()})
        lines = code.lines(rest, {*results, *known})
        views = {out for each in instructions if each.is_view for out in each.made}
        own = (f"{variable(slot)}{'.data' if slot in views else ''}, " for slot in results)  # versions of their own
        lines.append(f"return ({''.join(own)})")
        run, self.code = code.function("step", ", ".join(map(variable, self._inputs)), lines, FILE)
        self._run: Callable[..., tuple[Any, ...]] = without_autocast(run, call.autocast)
        written = written_by(instructions)
        self._written = [source for slot, source in sources.items() if slot in written and source.kind != "gradient"]
        self.ranks = tuple(recording.recorder.ranks)
        self.why_not_captured = why_not_captured(rest, recording.recorder.views, self._inputs) if in_graph else ""
        if in_graph and not self.why_not_captured:
            self._run = CapturedProgram(self._run, self._n_results)

    def _with_options(self) -> list[Instruction]:
        """The instructions, with a slot for each argument that follows an option which was seen with two values."""
        recorder = self.recording.recorder
        instructions = [*recorder.instructions]
        for (i, j), terms in self.recording.terms.items():
            if any(option in self.recording.varied for _, option in terms):
                key = type(values_in(instructions[i])[j]), terms
                slot = self._terms.setdefault(key, Slot(len(recorder.views) + len(self._terms)))
                instructions[i] = with_values(instructions[i], {j: slot})
        return instructions

    def why_stale(self) -> str:
        """Name what changed since the recording; empty if nothing did. Takes the options of the next run."""
        name = self.recording.state.changed() or self._changed_option()
        return name and f"{name} has changed"

    def _changed_option(self) -> str:
        """The name of an option whose present value was not recorded, and which no argument is known to follow."""
        before, now = self.recording.options, options_of(self.recording.state.groups)
        if now.keys() != before.keys():
            return "an option of an optimiser"
        for option, number in now.items():
            a, b, varies = number, before[option], option in self.recording.varied
            if not (alike(a, b) or (varies and type(a) is type(b) and bool(a) == bool(b))):
                return option[1]
        for (kind, terms), slot in self._terms.items():
            values = {kind(FUNCTIONS[name](now[option])) for name, option in terms}
            if len(values) > 1:
                return min(option[1] for _, option in terms)
            self._numbers[slot] = values.pop()
        return ""

    def run(self, call: StepCall) -> Any:
        """Run the step: its result, with the gradients in place."""
        leaves: list[Tensor] = [leaf.source.in_call(call) for leaf in self.recording.leaves]
        inputs = [self._input(slot, call, leaves) for slot in self._inputs]
        for i, (x, leaf) in enumerate(zip(leaves, self.recording.leaves, strict=True)):
            if leaf.change != "keeps" and i not in self._read:
                x.grad = None  # so that its memory is free
        try:
            with torch.no_grad():
                outs = self._run(*inputs)
        except Exception as error:
            publish_failure(error, self.ranks)
            raise
        written = [source.in_call(call) for source in self._written]
        wrappers: list[Tensor] = [x for x in written if isinstance(x, Wrapper)]
        if wrappers:  # others have counted the writes themselves
            increment_version(wrappers)
        made = iter(outs[self._n_results :])
        for x, leaf in zip(leaves, self.recording.leaves, strict=True):
            if leaf.change == "sets":
                x.grad = _wrapped(next(made), leaf.spec)
            elif leaf.change == "drops":
                x.grad = None
        given = iter(outs)
        results = [next(given) if isinstance(result, Slot) else result for result in self.recording.results]
        return pytree.tree_unflatten([*map(_wrapped, results, self.recording.specs)], self.recording.structure)

    def _input(self, slot: Slot, call: StepCall, leaves: Sequence[Tensor]) -> Any:
        source = self.recording.sources.get(slot)
        if source is None:
            return self._numbers[slot]
        x = leaves[source.of].grad if source.kind == "gradient" else call.tensors[source.of]
        assert x is not None
        return local_of(x)


def _wrapped(local: Any, spec: Any) -> Any:
    return local if spec is None else wrap(local, spec)


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
