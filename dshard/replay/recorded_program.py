"""A recording that was seen twice, as a function of the tensors of a call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dshard.comm import publish_failure
from dshard.core.wrapper import Wrapper, wrap
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.simplified import simplified, written_by
from dshard.replay.optimizer_options import FUNCTIONS, Term, options_of, values_in, with_values
from dshard.replay.step_call import Call, local_of
from dshard.replay.step_program import StepProgram
from dshard.replay.step_recording import Recording
from dshard.replay.step_state import alike
from dshard.torch_private import increment_version, pytree


class RecordedProgram:
    """A recording as a function of the tensors of a call, and of the options of optimisers."""

    def __init__(self, recording: Recording) -> None:
        self.recording, sources = recording, recording.sources
        self._terms: dict[tuple[type, frozenset[Term]], Slot] = {}
        slots = [slot for slot in recording.results if isinstance(slot, Slot)]
        grads = [leaf.slot for leaf in recording.leaves if leaf.slot is not None]
        views = recording.recorder.views
        instructions, stands_for = simplified(self._with_options(), views, [*slots, *grads])
        fixed = {slot: source.tensor() for slot, source in sources.items() if source.kind in ("owned", "literal")}
        results = [stands_for.get(slot, slot) for slot in (*slots, *grads)]
        self.step = StepProgram(instructions, results, fixed, {*sources, *self._terms.values()} - fixed.keys())
        self._n_results = len(slots)
        self._gradients = {s.number for slot in self.step.inputs if (s := sources.get(slot)) and s.kind == "gradient"}
        owned = [(s.owner, s.tensor()) for s in sources.values() if s.owner is not None]
        self._owned = [(owner, local, local.data_ptr()) for owner, local in owned if local is not None]
        self._others = [source.tensor for source in sources.values() if source.kind == "other"]
        written = written_by(instructions)
        self._written = [source for slot, source in sources.items() if slot in written]
        self._values: dict[Slot, float] = {}
        self.ranks = tuple(recording.recorder.ranks)

    def _with_options(self) -> list[Instruction]:
        """The instructions, with a slot for each argument that follows an option which was seen with two values."""
        recorder, varied = self.recording.recorder, self.recording.varied
        instructions = [*recorder.instructions]
        for (i, j), terms in self.recording.terms.items():
            if any(option in varied for _, option in terms):
                each = instructions[i]
                key = type(values_in(each)[j]), terms
                slot = self._terms.setdefault(key, Slot(len(recorder.views) + len(self._terms)))
                args, kwargs = with_values(each, {j: slot})
                instructions[i] = replace(each, args=args, kwargs=kwargs)
        return instructions

    def why_stale(self) -> str:
        """What changed since the recording; empty if nothing did. Takes the options of the next run."""
        name = self.recording.held.changed() or self._changed_option()
        if name:
            return f"{name} has changed"
        for owner, local, address in self._owned:
            held = owner.__dict__.get("_local_tensor") if isinstance(owner, Wrapper) else owner
            if held is not local or local.data_ptr() != address:
                return f"a tensor of shape {tuple(owner.shape)} was replaced"
        if any(tensor() is None for tensor in self._others):
            return "a tensor that the step made before is gone"
        return ""

    def _changed_option(self) -> str:
        """The name of an option whose present value was not recorded, and which no argument is known to follow."""
        before, now = self.recording.options, options_of(self.recording.groups)
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
            self._values[slot] = values.pop()
        return ""

    def run(self, call: Call) -> Any:
        """Run the step: its result, with the gradients in place."""
        leaves = [leaf.of(call) for leaf in self.recording.leaves]
        inputs = [self._input(slot, call, leaves) for slot in self.step.inputs]
        for i, (x, leaf) in enumerate(zip(leaves, self.recording.leaves, strict=True)):
            if leaf.change != "keeps" and i not in self._gradients:
                x.grad = None  # so that its memory is free
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for device in call.autocast:
                    stack.enter_context(torch.autocast(device, enabled=False))
                outs = self.step.run(*inputs)
        except Exception as error:
            publish_failure(error, self.ranks)
            raise
        written = [call.tensors[s.number] if s.kind == "argument" else s.owner for s in self._written]
        wrappers: list[Tensor] = [
            x for x in written if isinstance(x, Wrapper)
        ]  # others have counted the writes themselves
        if wrappers:
            increment_version(wrappers)
        made = iter(outs[self._n_results :])
        for x, leaf in zip(leaves, self.recording.leaves, strict=True):
            if leaf.change == "sets":
                local = next(made)
                x.grad = local if leaf.spec is None else wrap(local, leaf.spec)
            elif leaf.change == "drops":
                x.grad = None
        return self._result(outs)

    def _input(self, slot: Slot, call: Call, leaves: Sequence[Tensor]) -> Any:
        source = self.recording.sources.get(slot)
        if source is None:
            return self._values[slot]
        if source.kind == "argument":
            return call.locals[source.number]
        if source.kind == "gradient":
            grad = leaves[source.number].grad
            assert grad is not None
            return local_of(grad)
        return source.tensor()

    def _result(self, outs: tuple[Any, ...]) -> Any:
        given, results = iter(outs), list[Any]()
        for result, spec in zip(self.recording.results, self.recording.specs, strict=True):
            local = next(given) if isinstance(result, Slot) else result
            results.append(wrap(local, spec) if spec is not None else local)
        return pytree.tree_unflatten(results, self.recording.structure)
