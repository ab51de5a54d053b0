"""Contents of a record: the calls that are answered, and the tensors among their operands and results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from dshard.rehearsal.calls import Kind, RecordedCall, Ref, kind_of
from dshard.rehearsal.code import reads, roots_of, unread_draws
from dshard.rehearsal.local_recorder import Instruction, Slot, View
from dshard.rehearsal.region_recording import (
    CallResult,
    LetGo,
    RegionRecording,
    Signature,
    instructions_of,
    is_size,
    outside_of,
)
from dshard.torch_private import pytree


@dataclass(frozen=True)
class Contents:
    """The calls that are answered, in order, and their tensors by number; `why_not` says why there are no more.

    Attributes:
        views: How the tensor of each slot lies in its storage.
        literals: Tensors of numbers of the program.
        sources: The number of the tensor that gives a slot its value; its first are the inputs.
        leaves: The module's own tensors, and leaves of autograd; `kinds` are theirs.
        made: The results.
        trained: The leaves and inputs that get a gradient, in the order in which a backward pass has these whole.
        dropped: The calls at which Python had dropped a result.
        let_go: The inputs that a run does not hold after its calls: gathered weights, which a backward pass gathers
            again, and those that nothing held when the recording ended, as autograd had not saved them.
        reader: The slot of the function that gives a gathered weight to a backward pass.
    """

    calls: list[RecordedCall]
    why_not: str
    n_inputs: int
    n_tensors: int
    views: list[View | None]
    literals: dict[Slot, Tensor]
    sources: dict[Slot, int]
    leaves: dict[int, Tensor]
    kinds: dict[int, Kind]
    made: dict[int, CallResult]
    trained: list[int]
    dropped: dict[int, int]
    ranks: tuple[int, ...]
    let_go: dict[int, LetGo]
    reader: Slot | None

    @property
    def instructions(self) -> list[Instruction]:
        """The instructions of all calls."""
        return instructions_of(self.calls)

    @cached_property
    def makers(self) -> dict[Slot, Instruction]:
        """The instruction that makes a slot."""
        return {out: each for each in self.instructions for out in each.made}

    @property
    def needing(self) -> list[int]:
        """The results that need a gradient."""
        return [n for n, x in self.made.items() if _needs_grad(x.kind)]

    @property
    def counted(self) -> set[int]:
        """The tensors whose versions calls count up."""
        return {n for call in self.calls for n in call.writes}

    @property
    def late(self) -> list[int]:
        """The operands that are seen first in a call."""
        return sorted({n for call in self.calls for n in call.late})

    @cached_property
    def gathered(self) -> dict[Slot, int]:
        """The slots of gathered weights, and which each is in its use."""
        return {x.slot: x.place for x in self.weights.values() if x.place is not None}

    @cached_property
    def saving(self) -> list[int]:
        """The calls of which autograd saves gathered weights."""
        return [i for i, call in enumerate(self.calls) if call.saves_weights]

    @cached_property
    def weights(self) -> dict[int, LetGo]:
        """The inputs that are gathered weights."""
        return {n: x for n, x in self.let_go.items() if x.place is not None}

    @cached_property
    def trained_of_let_go(self) -> list[int]:
        """Those of them that get a gradient."""
        return [n for n in self.trained if n in self.let_go]

    @cached_property
    def of_weights(self) -> dict[Slot, int]:
        """The slots of gathered weights and of views of them, with the weight's number: none is kept for later."""
        numbers, roots = {x.slot: n for n, x in self.weights.items()}, roots_of(self.instructions)
        return numbers | {slot: numbers[root] for slot, root in roots.items() if root in numbers}

    def signatures(self, inputs: Sequence[Tensor]) -> Iterator[Signature]:
        """The function of each call, and its arguments with kinds for tensors, if `inputs` are the module's."""
        kinds = dict(enumerate(map(kind_of, inputs))) | self.kinds | {n: x.kind for n, x in self.made.items()}
        for call in self.calls:
            kinds |= call.late
            flat = pytree.tree_leaves((call.args, call.kwargs), is_leaf=is_size)
            yield call.func, tuple([kinds[x.number] if isinstance(x, Ref) else x for x in flat])

    @property
    def first_calls(self) -> dict[int, int]:
        """The call that gives a result first."""
        numbered = reversed([*enumerate(self.calls)])
        return {
            ref.number: i
            for i, call in numbered
            for ref in call.outs
            if isinstance(ref, Ref) and ref.number in self.made
        }


def contents_of(recording: RegionRecording) -> Contents:
    """The part of a recording that can be answered."""
    recorder = recording.recorder
    calls, why_not = _answerable(recording)
    frames: dict[int, int] = {}
    for call in calls:
        if call.checkpoint is not None:  # torch's own frame holds the checkpoint's inputs
            call.checkpoint = frames.setdefault(id(call.checkpoint), len(frames))
    made = {ref.number for call in calls for ref in call.outs if isinstance(ref, Ref)}
    used = made | set(range(len(recording.inputs))) | {n for call in calls for n in call.refs}
    read = {slot for each in instructions_of(calls) for slot in reads(each)}
    known = used | {n for slot, n in recording.sources.items() if slot in read}  # some are gathered ahead
    kinds = {n: kind_of(x) for n, x in recording.leaves.items() if n in known}
    trained = [n for n, kind in kinds.items() if n in used and _needs_grad(kind)]
    trained += [n for n, x in enumerate(recording.inputs) if _needs_grad(kind_of(x))]
    place = {n: i for i, n in enumerate(recorder.gradient_order)}
    n_inputs = len(recording.inputs)
    return Contents(
        calls=calls,
        why_not=why_not,
        n_inputs=n_inputs,
        n_tensors=recording.n_tensors,
        views=recorder.views,
        literals=recorder.literals,
        sources={slot: n for slot, n in recording.sources.items() if n in known},
        leaves={n: recording.leaves[n] for n in kinds},
        kinds=kinds,
        made={n: result for n, result in recording.made.items() if n in made},
        trained=sorted(trained, key=lambda n: place.get(n, len(place) + recording.n_tensors - n)),
        dropped=recording.dropped,
        ranks=tuple(recorder.ranks),
        let_go=recording.let_go(),
        reader=recording.gathering.reader,
    )


def _needs_grad(kind: Kind) -> bool:
    return bool(kind[4])


def _answerable(recording: RegionRecording) -> tuple[list[RecordedCall], str]:
    """The calls up to the first that reads what neither a call, an input nor the module has made, and why no more."""
    known = {*recording.sources, *recording.recorder.literals}
    views = {*map(Ref, recording.shown_twice())}

    def before(i: int) -> list[RecordedCall]:
        return outside_of(recording.calls[i].checkpoint, recording.calls[:i])

    unread = {id(each) for each in unread_draws(instructions_of(recording.calls))}
    for i, call in enumerate(recording.calls):
        if not unread.isdisjoint(map(id, call.instructions)):
            return before(i), f"{call.name} draws numbers that Python reads, at {call.line}"
        if not views.isdisjoint(ref for ref in call.outs if isinstance(ref, Ref)):
            return before(i), f"{call.name} gives a view that the program holds with its base, at {call.line}"
        for each in call.instructions:
            if not known.issuperset(reads(each)):
                return before(i), f"{call.name} reads a tensor that no recorded call made, at {each.line}"
            known.update(each.made)
        given = [
            recording.made[ref.number].slot
            for ref in call.outs
            if isinstance(ref, Ref) and ref.number in recording.made
        ]
        if not known.issuperset(given):
            return before(i), f"{call.name} gives a tensor that no recorded call made, at {call.line}"
    return recording.calls, recording.ended


def optional_calls(contents: Contents) -> frozenset[int]:
    """The calls on which no other depends, but such: a later run may leave them out."""
    optional, used, slots = set[int](), set[int](), set[Slot]()
    for i, call in reversed([*enumerate(contents.calls)]):
        made = {ref.number for ref in call.outs if isinstance(ref, Ref)}
        own = {out for each in call.instructions for out in each.made}
        writes = call.writes or any(each.writes for each in call.instructions)
        if not (writes or (made | set(call.late)) & used or own & slots or i == len(contents.calls) - 1):
            optional.add(i)
            continue
        used |= made | call.refs
        slots.update(slot for each in call.instructions for slot in reads(each))
    return frozenset(optional)
