"""Records of a module, one for inputs of a kind: what answers its calls, and its backward passes by pattern.

The record holds a list of objects, which its runs use in turn: results that no program holds are used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dshard.core.wrapper import Wrapper
from dshard.rehearsal.answers import Lifetimes, answers_of, lifetimes_of
from dshard.rehearsal.calls import kind_of
from dshard.rehearsal.code import results_of
from dshard.rehearsal.contents import Contents, contents_of, optional_calls
from dshard.rehearsal.gradient_order import GradientOrder
from dshard.rehearsal.local_recorder import Instruction, Slot
from dshard.rehearsal.region_recording import RegionRecording
from dshard.torch_private import no_torch_function


class OwnTensors:
    """The leaves of a record, and the instructions that are run `once` on their local tensors and on literals.

    `fixed` are the values of all these.
    """

    def __init__(self, contents: Contents, lifetimes: Lifetimes) -> None:
        self.leaves = contents.leaves
        self.sources = {slot: n for slot, n in contents.sources.items() if n in contents.leaves}
        self.literals, self.once = dict(contents.literals), [*lifetimes.once]
        self.n_slots = len(contents.views) + len(contents.late)
        self._states: list[Any] = [(x, kind_of(x), isinstance(x, Wrapper)) for x in contents.leaves.values()]
        wrappers = [x for x in contents.leaves.values() if isinstance(x, Wrapper)]
        self._wrappers = [x for x in wrappers if x._gradient_leaf is not None]
        self.gradient_leaves = [x._gradient_leaf for x in self._wrappers]
        self.fixed = Fixed(self)

    def add(self, literals: Mapping[Slot, Tensor], once: Sequence[Instruction], n_slots: int) -> None:
        """Add what a backward program has beside."""
        self.literals |= literals
        self.once += once
        self.n_slots = n_slots

    def local_tensors(self) -> list[Tensor]:
        """The local tensors, in order."""
        return [x._local_tensor if is_wrapper else x for x, _, is_wrapper in self._states]

    def are_hooked(self) -> bool:
        """Whether hooks of the program see gradients of leaves: they may wait for them, and so decide what is sent."""
        with no_torch_function():
            for x in self._wrappers:
                if x._post_accumulate_grad_hooks or len(x._backward_hooks or ()) > 1:  # the first is dshard's
                    return True
        return False

    def is_current(self) -> bool:
        """Whether the tensors are of the kinds recorded; then `fixed` has their values now."""
        with no_torch_function():
            for x, (_, spec, _, matmul, needs_grad, *_), is_wrapper in self._states:
                if x.requires_grad is not needs_grad or (
                    is_wrapper and (x._spec is not spec or x._matmul is not matmul)
                ):
                    return False
            if all(map(is_, self.fixed.locals, self.local_tensors())):
                return True
        if not all(kind_of(x) == kind for x, kind, _ in self._states):
            return False
        self.fixed = Fixed(self)
        return True


class Fixed:
    """The values of own tensors, and of views of them, by slot; valid while their local tensors are `locals`."""

    def __init__(self, own: OwnTensors) -> None:
        self.locals = own.local_tensors()
        by_number = dict(zip(own.leaves, self.locals, strict=True))
        self.values: list[Any] = []
        self._known: dict[Slot, Any] = own.literals | {slot: by_number[n] for slot, n in own.sources.items()}
        self._n_once = 0
        self.extend(own)

    def extend(self, own: OwnTensors) -> None:
        """Add what backward programs have beside, if there is more by now."""
        if len(self.values) == own.n_slots:
            return
        self._known |= own.literals
        for each in own.once[self._n_once :]:
            self._known |= results_of(each, self._known)
        self._n_once = len(own.once)
        self.values += [None] * (own.n_slots - len(self.values))
        for slot, x in self._known.items():
            self.values[slot.number] = x


class Places(NamedTuple):
    """The numbers of tensors by what a run does with them.

    Attributes:
        needing: Results that need a gradient.
        plain: Plain results.
        distributed: Other results, with the number of attributes of each.
        inputs: Inputs, with the place of the local tensor.
        late: Operands that are seen first in a call, with the place of the version.
        optional: The calls that a run may leave out.
    """

    needing: list[int]
    plain: list[int]
    distributed: list[tuple[int, int]]
    inputs: list[tuple[int, int]]
    late: dict[int, int]
    optional: frozenset[int]


def _places_in(contents: Contents) -> Places:
    kinds = {n: x.kind for n, x in contents.made.items()}
    return Places(
        contents.needing,
        [n for n, x in contents.made.items() if x.is_plain],
        [(n, 1 + (kinds[n][3] is not None)) for n, x in contents.made.items() if not x.is_plain],
        [(n, slot.number) for slot, n in contents.sources.items() if n < contents.n_inputs],
        {n: len(contents.views) + i for i, n in enumerate(contents.late)},
        optional_calls(contents),
    )


@dataclass
class Passes:
    """How many backward passes were derived, or run by a program; whether one of the last call has created a graph.

    `node_read` says that somebody took the node of all calls for that of one of them.
    """

    derived: int = 0
    by_program: int = 0
    create_graph: bool = False
    node_read: bool = False


class Record:
    """A recording as functions of its calls; `why_not` says why there are no more, or none.

    Attributes:
        programs: The backward passes that are known: patterns, and the program of each.
        read: The numbers of the tensors whose versions a backward pass checks.
        unread: The slots that no program reads.
        tensors: The objects by number; those of `absent` results are made when a run begins.
        last: The last run, by a weak reference.
    """

    def __init__(self, recording: RegionRecording) -> None:
        self.contents = contents = contents_of(recording)
        self.why_not = contents.why_not
        self.places = _places_in(contents)
        alive = recording.alive() | recording.pending() if contents.needing else set()
        self.lifetimes = lifetimes_of(contents, alive)
        self.own = OwnTensors(contents, self.lifetimes)
        self.answers, self.code = answers_of(contents, self.lifetimes, self.places.late)
        self.tensors: list[Any] = [None] * contents.n_tensors
        self.absent = [n for n, _ in self.places.distributed]
        self.last: Any = None
        self.order = GradientOrder(contents)
        self.programs: list[tuple[Any, Any]] = []
        self.passes = Passes()
        self.read = {*contents.leaves, *range(contents.n_inputs), *self.places.late}
        self.read -= contents.counted | contents.let_go.keys()
        self.unread: list[Slot] = []

    @property
    def running(self) -> bool:
        """Whether a run has begun and not ended, which uses the objects."""
        last = None if self.last is None else self.last()
        return last is not None and bool(last.tensors)

    def watch(self, outs: Iterable[Tensor]) -> None:
        """Note whether backward passes of a call that has run by Python create a graph."""

        def note(grads: object) -> None:
            self.passes.create_graph |= torch.is_grad_enabled()

        with no_torch_function():
            for x in outs:
                if x.grad_fn is not None:
                    x.grad_fn.register_prehook(note)

    def add_program(self, pattern: Any, program: Any) -> None:
        """Add the backward program of a pattern: from then on what no program reads is not kept."""
        self.programs.append((pattern, program))
        self.read = {n for _, each in self.programs for n in each.reads} - self.contents.counted
        needed = {slot for _, each in self.programs for slot in each.slots} | self.lifetimes.lost
        self.unread = [slot for slot in self.lifetimes.kept - needed if slot not in self.contents.sources]
