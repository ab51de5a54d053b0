"""What a module did with inputs of one kind: a function for each of its calls, of local tensors alone.

Values are in a list, by the numbers of their slots: those of parameters and of views of them, which are made once, and
those that later calls or the backward pass read. What autograd had saved when the module was recorded is kept for the
backward pass, nothing else; each other value is freed after the last call that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from sys import getrefcount
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import getweakrefcount

import torch
from torch import Tensor

from dshard.comm import ENDS
from dshard.core.wrapper import Wrapper
from dshard.rehearsal.calls import (
    MISS,
    Autocast,
    Call,
    Comparison,
    Kind,
    Ref,
    kind_of,
    local_of,
    without_autocast,
)
from dshard.rehearsal.code import Code, run_once, variable
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.region_recording import Recording, instructions_of
from dshard.rehearsal.session import OWN_CALLS
from dshard.rehearsal.simplified import only_of, reads, simplified, slots_in, written_by
from dshard.torch_private import increment_version, no_torch_function, pytree, tensor_references

FILE = "<rehearsed>"
"""The name of the file of the code of calls, in tracebacks."""
_ONE = pytree.tree_structure(0)


class Step(NamedTuple):
    """What answers a call: the function called, the state it was recorded in, and the function that runs it.

    `run(args, kwargs, tensors, values)` returns the result, or MISS if the arguments differ.
    """

    func: Any
    grad: bool
    settings: list[object]
    checkpoint: bool
    autocast: Autocast
    run: Callable[..., Any]


class Fixed:
    """The values of a module's own tensors, and of views of them, by slot; valid while their local tensors stay."""

    def __init__(self, record: Record) -> None:
        self.locals = record.local_tensors()
        self.values: list[Any] = [None] * record.n_slots
        self._known: dict[Slot, Any] = dict(record.literals)
        self._known |= {slot: self.locals[i] for slot, i in record.leaf_slots.items()}
        self._n_once = 0
        self.extend(record)

    def extend(self, record: Record) -> None:
        """Make the views that came to the record since."""
        run_once(record.once[self._n_once :], self._known)
        self._n_once = len(record.once)
        self.values += [None] * (record.n_slots - len(self.values))
        for slot, x in self._known.items():
            self.values[slot.number] = x


class Record:
    """A recording as functions of its calls; `why_not` says why there are no more, or none.

    Attributes:
        calls: The calls that are answered, in order.
        steps: What answers each.
        leaves: The module's own tensors among the operands, and leaves of autograd, by number.
        made: The kinds of results, by number; `needing` are those that need a gradient.
        trained: The numbers of leaves and inputs that need one.
        kept: The slots that a backward pass may read.
        tensors: The objects of this record, by number: results that no program holds are used again.
    """

    def __init__(self, recording: Recording) -> None:
        recorder = recording.recorder
        self.why_not = recording.ended
        self.calls = self._answerable(recording)
        self.n_inputs, self.n_tensors, self.n_slots = len(recording.inputs), recording.n_tensors, len(recorder.views)
        self.views, self.literals = recorder.views, recorder.literals
        self.storages = recorder.storages
        made_here = {ref.number for call in self.calls for ref in call.outs if isinstance(ref, Ref)}
        used = made_here | set(range(self.n_inputs)) | {n for call in self.calls for n in call.refs}
        ahead = {recording.sources.get(slot) for each in instructions_of(self.calls) for slot in reads(each)} - used
        self.leaves = {n: x for n, x in recording.leaves.items() if n in used | ahead}  # some are gathered ahead
        self.leaf_kinds = {n: kind_of(x) for n, x in self.leaves.items()}
        self._leaf_states = [(x, self.leaf_kinds[n]) for n, x in self.leaves.items()]
        self.gradient_leaves: list[Any] = []
        for x in self.leaves.values():
            if isinstance(x, Wrapper) and x._gradient_leaf is not None:
                self.gradient_leaves.append(x._gradient_leaf)
        self._wrapped = [isinstance(x, Wrapper) for x in self.leaves.values()]
        self.made = {n: kind for n, kind in recording.made.items() if n in made_here}
        self.locals = {n: slot for n, slot in recording.locals.items() if n in made_here}
        self.offsets, self.dropped = recording.offsets, recording.dropped
        self.first_use = {n: i for i, call in reversed([*enumerate(self.calls)]) for n in call.refs}
        self.optional = self._optional()
        self.late = {n for call in self.calls for n in call.late}
        self.needing = [n for n, kind in self.made.items() if _needs_grad(kind)]
        needing_inputs = [n for n, x in enumerate(recording.inputs) if _needs_grad(kind_of(x))]
        self.trained = [n for n in self.leaves if n in used and _needs_grad(self.leaf_kinds[n])] + needing_inputs
        self.sources = {slot: n for slot, n in recording.sources.items() if n in used | ahead}
        numbers = [*self.leaves]
        self.leaf_slots = {slot: numbers.index(n) for slot, n in self.sources.items() if n in self.leaves}
        self.version_slots = {n: self.n_slots + i for i, n in enumerate(sorted(self.late))}
        self.n_slots += len(self.late)
        self.makers = {out: each for each in instructions_of(self.calls) for out in each.outs if out is not None}
        raw = instructions_of(self.calls)
        self.ended_in = {
            each.args[0]: [x for x in each.returned if isinstance(x, Slot)] for each in raw if each.key == ENDS
        }
        own = [call for call in self.calls if call.func in OWN_CALLS and not isinstance(call.args[0], Ref)]
        self.gathered = {ref.number for call in own for ref in call.outs if isinstance(ref, Ref)}
        self.ranks = tuple(recorder.ranks)
        self.once: list[Instruction] = []
        self._plan(recording)
        self.tensors: list[Any] = [None] * self.n_tensors
        self.absent = [n for n, kind in self.made.items() if kind[0] is not Tensor]
        self.input_slots = [(slot.number, n) for slot, n in self.sources.items() if n < self.n_inputs]
        self.plain = [n for n, kind in self.made.items() if kind[0] is Tensor]
        self.sizes = [(n, 1 + (kind[3] is not None)) for n, kind in self.made.items() if kind[0] is not Tensor]
        self.steps, self.sources_of_code = list[Step](), list[str]()
        self._fixed: Fixed | None = None
        self._write_code()
        self.running = False
        self.last: Any = None  # the last run, by a weak reference
        self.programs: list[tuple[Any, Any]] = []
        self.n_derived = self.n_programs_run = 0
        self.counted = {n for call in self.calls for n in call.writes}
        self.read = {*self.leaves, *range(self.n_inputs), *self.late} - self.counted
        self.unread: list[Slot] = []

    def add_program(self, pattern: Any, program: Any) -> None:
        """Add the backward program of a pattern: from then on what no program reads is not kept."""
        self.programs.append((pattern, program))
        self.read = {n for _, each in self.programs for n in each.reads} - self.counted
        slots = {slot for _, each in self.programs for slot in each.slots}
        self.unread = [slot for slot in self.kept if slot not in slots | self.lost and slot not in self.sources]

    def _answerable(self, recording: Recording) -> list[Call]:
        """The calls up to the first that reads what neither a call, an input nor the module has made."""
        known = {*recording.sources, *recording.recorder.literals}
        for i, call in enumerate(recording.calls):
            for each in call.instructions:
                unknown = next((slot for slot in reads(each) if slot not in known), None)
                if unknown is not None:
                    self.why_not = f"{call.name} reads a tensor that no recorded call made, at {each.line}"
                    return recording.calls[:i]
                known.update(out for out in each.outs if out is not None)
            if any(
                isinstance(ref, Ref) and recording.locals.get(ref.number, None) not in {None, *known}
                for ref in call.outs
            ):
                self.why_not = f"{call.name} gives a tensor that no recorded call made, at {call.line}"
                return recording.calls[:i]
        return recording.calls

    def _optional(self) -> set[int]:
        """The calls on which no other depends, but such: a later run may leave them out."""
        optional, used, slots = set[int](), set[int](), set[Slot]()
        for i, call in reversed([*enumerate(self.calls)]):
            made = {ref.number for ref in call.outs if isinstance(ref, Ref)}
            own = {out for each in call.instructions for out in each.outs}
            writes = call.writes or any(each.writes for each in call.instructions)
            if not (writes or (made | set(call.late)) & used or own & slots or i == len(self.calls) - 1):
                optional.add(i)
                continue
            used |= made | call.refs
            slots.update(slot for each in call.instructions for slot in reads(each))
        return optional

    # -- what is kept, and for how long

    def _plan(self, recording: Recording) -> None:
        """Plan what each call runs, keeps and frees."""
        alive = (recording.alive() | recording.pending()) if self.needing else set()
        raw = instructions_of(self.calls)
        self.made_once = once_made = _made_once(raw)
        keeps = (alive & self._computed(raw)) | (once_made if self.needing else set())
        wanted = [*self.locals.values(), *keeps]
        instructions, self.same = simplified(SimpleNamespace(instructions=raw, views=self.views), wanted)
        own = {*self.leaf_slots, *self.literals}
        self.once = only_of(own, instructions)
        known = own | {out for each in self.once for out in each.outs if out is not None}
        rest = [each for each in instructions if not any(each is other for other in self.once)]
        self.segments: list[list[Instruction]] = [[] for _ in self.calls]
        for each in rest:
            self.segments[each.call].append(each)
        self.fixed_slots = known
        self.written = written_by(rest) | {
            self.at(slot) for each in raw if begins(each) for slot in slots_in(each.args[1:])
        }
        self.new_memory = {
            out for each in rest if each.operator and not each.is_view for out in each.outs if out is not None
        } - self.written
        maker = {out: each.call for each in rest for out in each.outs if out is not None}
        maker |= dict.fromkeys((slot for slot, n in self.sources.items() if n not in self.leaves), -1)
        self.kept = {slot for slot in maker if maker[slot] < 0 or slot in keeps or (slot in alive and slot in maker)}
        if not self.needing:
            self.kept = set()
        self.lost = self._lost(raw)
        self._first_made = self._calls_that_made()
        last = dict(maker)
        for each in rest:
            for slot in reads(each):
                if slot in last:
                    last[slot] = max(last[slot], each.call)
        for n, slot in self.locals.items():
            slot = self.at(slot)
            if slot in last:
                last[slot] = max(last[slot], self._first_made[n])
        self.maker, self.last = maker, last
        drops: dict[int, list[int]] = {}
        for n, i in recording.dropped.items():
            if n in self.made and self.made[n][0] is not Tensor and i < len(self.calls):
                drops.setdefault(max(i, self._first_made[n] + 1), []).append(n)
        self.drops = drops
        self.undropped = [n for n in self.made if not any(n in numbers for i, numbers in drops.items())]

    def at(self, slot: Slot) -> Slot:
        """The slot whose value stands for that of `slot`."""
        return self.same.get(slot, slot)

    def _lost(self, instructions: Iterable[Instruction]) -> set[Slot]:
        """The slots of values that nothing makes again of what is kept: drawn, sent, or written to, or made of such."""
        lost = set[Slot]()
        for each in instructions:
            made = {self.at(out) for out in each.outs if out is not None}
            is_lost = each.operator is None or bool(made & (self.made_once | self.written))
            if is_lost or any(self.at(slot) in lost - self.kept for slot in reads(each)):
                lost |= made
        return lost

    @staticmethod
    def _computed(instructions: Iterable[Instruction]) -> set[Slot]:
        return {out for each in instructions if not each.is_view for out in each.outs if out is not None}

    def _calls_that_made(self) -> dict[int, int]:
        made: dict[int, int] = {}
        for i, call in enumerate(self.calls):
            for ref in call.outs:
                if isinstance(ref, Ref) and ref.number in self.made:
                    made.setdefault(ref.number, i)
        return made

    # -- code

    def _write_code(self) -> None:
        names: dict[str, Any] = {
            "MISS": MISS,
            "R": getrefcount,
            "uses": tensor_references,
            "weak": getweakrefcount,
            "local": local_of,
            "version": version_of,
            "written": _count_writes,
            "unflatten": pytree.tree_unflatten,
        }
        self._names = names
        for i, call in enumerate(self.calls):
            run, source = self._function(i, call)
            run = without_autocast(run, call.autocast)
            self.steps.append(
                Step(call.func, call.grad, call.settings, call.checkpoint is not None, call.autocast, run)
            )
            self.sources_of_code.append(source)

    def _function(self, i: int, call: Call) -> tuple[Callable[..., Any], str]:
        """The function that answers a call, and its source."""
        mine = set[Slot]()
        code = Code(lambda slot: variable(slot) if slot in mine else f"v[{slot.number}]", self._names)
        code._known = self.__dict__.setdefault("_constants", code._known)

        def place(n: int) -> str:
            return code.constant(self.leaves[n], "p") if n in self.leaves else f"o[{n}]"

        same = Comparison(call, code, place)
        lines = [f"if not ({' and '.join(same.conditions)}): return MISS"]
        slot_of = {n: slot for slot, n in self.sources.items()}
        for n, name in same.first_seen:
            lines.append(f"o[{n}] = {name}; v[{self.version_slots[n]}] = version({name})")
            if n in slot_of:
                lines.append(f"v[{slot_of[n].number}] = local({name})")
        lines += [f"if not ({condition}): return MISS" for condition in same.after]
        for n in self.drops.get(i, ()):
            lines += [
                f"x = o[{n}]",
                "if R(x) == 3 and uses(x) == 1 and not weak(x): x.__dict__.pop('_local_tensor', None)",
            ]
        segment = self.segments[i]
        results = {self.at(self.locals[n]) for n, at in self._first_made.items() if at == i}
        stored = {s for each in segment for s in each.outs if s and (s in self.kept or self.last[s] > i)}
        ends = _last_in(segment, {*results, *stored})
        for j, each in enumerate(segment):
            lines.append(code.line(each))
            made = [out for out in each.outs if out is not None]
            mine.update(made)
            lines += [f"v[{s.number}] = {variable(s)}" for s in made if s in stored]
            freed = [variable(s) for s in ends.get(j, ()) if s in mine]
            if freed:
                lines.append(f"del {', '.join(freed)}")
        if call.writes:
            lines.append(f"written([{', '.join(map(place, call.writes))}])")
        outs = []
        for ref in call.outs:
            if not isinstance(ref, Ref):
                outs.append(code.constant(ref))
                continue
            n = ref.number
            outs.append(place(n))
            if self._first_made.get(n) == i:
                value = code.text(self.at(self.locals[n]))
                lines.append(f"o[{n}] = {value}" if self.made[n][0] is Tensor else f"o[{n}]._local_tensor = {value}")
        lines += [
            f"v[{s.number}] = None" for s, at in self.last.items() if at == i and s not in mine and s not in self.kept
        ]
        lines.append(f"return {_structured(call.structure, outs, code)}")
        return code.function(f"call_{i}_{call.name}", "args, kwargs, o, v", lines, FILE)

    # -- values

    def local_tensors(self) -> list[Tensor]:
        """The local tensors of the module's own tensors."""
        leaves: Any = self.leaves.values()
        return [x._local_tensor if wrapped else x for x, wrapped in zip(leaves, self._wrapped, strict=True)]

    def fixed(self) -> Fixed:
        """The values of the module's own tensors."""
        known = self._fixed
        if known is None or not all(map(is_, known.locals, self.local_tensors())):
            known = self._fixed = Fixed(self)
        return known

    def is_current(self) -> bool:
        """Whether the module's own tensors are of the kinds recorded."""
        with no_torch_function():
            for x, (_, spec, _, matmul, needs_grad, *_) in self._leaf_states:
                if x.requires_grad is not needs_grad or (
                    isinstance(x, Wrapper) and (x._spec is not spec or x._matmul is not matmul)
                ):
                    return False
            if self._fixed is not None and all(map(is_, self._fixed.locals, self.local_tensors())):
                return True
        return all(kind_of(x) == self.leaf_kinds[n] for n, x in self.leaves.items())


def version_of(x: Tensor) -> int:
    """How often a tensor was written to, as autograd counts; 0 for those of inference mode."""
    with no_torch_function():
        return 0 if x.is_inference() else x._version


def _needs_grad(kind: Kind) -> bool:
    return bool(kind[4])


def _made_once(instructions: Iterable[Instruction]) -> set[Slot]:
    """The slots of values that cannot be made again: random ones, and what other functions than operators fill."""
    slots = set[Slot]()
    for each in instructions:
        if each.operator is not None and torch.Tag.nondeterministic_seeded in each.operator.tags:
            slots.update(out for out in each.outs if out is not None)
        elif each.operator is None and each.key not in (ENDS, "draw") and not begins(each):
            slots.update(reads(each))
    return slots


def begins(each: Instruction) -> bool:
    """Whether an instruction begins a collective, `(tensor, buffer of the result)`."""
    return isinstance(each.key, tuple) and each.key[0] == "begin"


def _last_in(segment: Sequence[Instruction], stay: set[Slot]) -> Mapping[int, list[Slot]]:
    """By instruction: the slots of which it is the last to speak."""
    last: dict[Slot, int] = {}
    for j, each in enumerate(segment):
        for slot in (*reads(each), *(out for out in each.outs if out is not None)):
            last[slot] = j
    ends: dict[int, list[Slot]] = {}
    for slot, j in last.items():
        if slot not in stay:
            ends.setdefault(j, []).append(slot)
    return ends


def _count_writes(tensors: Sequence[Tensor]) -> None:
    """Count a write to the distributed ones: plain ones have counted it themselves."""
    increment_version([x for x in tensors if isinstance(x, Wrapper)])


def _structured(structure: Any, outs: Sequence[str], code: Code) -> str:
    """The code of a nested result."""
    if structure == _ONE:
        return outs[0]
    if structure == pytree.tree_structure((0,) * len(outs)):
        return f"({''.join(out + ', ' for out in outs)})"
    if structure == pytree.tree_structure([0] * len(outs)):
        return f"[{', '.join(outs)}]"
    return f"unflatten([{', '.join(outs)}], {code.constant(structure)})"
