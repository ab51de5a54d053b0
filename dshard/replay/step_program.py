"""A recorded step as a program: simplified, and compiled to one Python function of its external tensors.

Most instructions of a recording are views, of which many are equal, and operators whose results nobody uses, as those
that only infer shapes. A view of a parameter is made once, not in each step. The function frees each tensor after its
last use. What remains runs below autograd and in the order of the recording, so that its results are the same to the
bit, and its collectives match those of ranks that run the step by Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dshard.rehearsal.code import Code, results_of, variable
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.simplified import parted, reads

FILE = "<replay>"
"""The name of the file of programs, in tracebacks."""


class StepProgram:
    """A step as a function of its external tensors.

    `code` is its source. The `inputs` are the slots of the external tensors that it takes, in order; `fixed` tensors
    are part of it, with what is made of them alone.
    """

    def __init__(
        self, instructions: Sequence[Instruction], results: Sequence[Slot], fixed: Mapping[Slot, Any], inputs: set[Slot]
    ) -> None:
        made = {out for each in instructions for out in each.made}
        self.n_collectives = sum(each.begins for each in instructions)
        self.n_operators = sum(each.operator is not None for each in instructions)
        used = {slot for each in instructions for slot in reads(each)} | set(results)
        self.inputs = sorted((slot for slot in inputs if slot in used and slot not in made), key=lambda s: s.number)
        known = {slot: x for slot, x in fixed.items() if slot in used}
        once, rest, _ = parted(fixed, instructions)
        for each in once:
            known |= results_of(each, known)
        code = Code(variable, {variable(slot): x for slot, x in known.items()})
        lines = code.lines(rest, {*results, *known})
        views = {out for each in instructions if each.is_view for out in each.made}
        own = (f"{variable(slot)}{'.data' if slot in views else ''}, " for slot in results)  # versions of their own
        lines.append(f"return ({''.join(own)})")
        self.run: Callable[..., tuple[Any, ...]]
        self.run, self.code = code.function("step", ", ".join(map(variable, self.inputs)), lines, FILE)
