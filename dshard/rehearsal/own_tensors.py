"""A module's own tensors, and the values of views of them, which are made once while their local tensors stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from dshard.core.wrapper import Wrapper
from dshard.rehearsal.calls import kind_of
from dshard.rehearsal.code import results_of
from dshard.rehearsal.contents import Contents
from dshard.rehearsal.lifetimes import Lifetimes
from dshard.rehearsal.local_recorder import Instruction, Slot
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
