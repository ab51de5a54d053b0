"""One run of a recorded module: a session that answers its calls, and the node of autograd that stands for them.

The results are objects of the record, distributed tensors like any other, which get the node of this run before the
first call, and their local tensors when a call makes them. An object is used again only if neither Python nor C++ holds
it, so nothing is assumed of what a program does with results.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from sys import getrefcount
from typing import Any
from warnings import warn
from weakref import getweakrefcount, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from dshard.autograd.gathered_weights import GatheredUse, use_of
from dshard.comm import Changes, publish_failure
from dshard.comm.events import LISTENERS
from dshard.core.context import settings_in_force
from dshard.core.observe import OBSERVERS
from dshard.core.signature import Args, Kwargs
from dshard.core.wrapper import Wrapper, wrap
from dshard.dispatch.planned_calls import PLANNED, is_checkpoint, outermost_checkpoint
from dshard.rehearsal.calls import MISS, RecordedCall, autocast_now, local_of, memory_of
from dshard.rehearsal.gradient_order import GivenGradients
from dshard.rehearsal.local_recorder import Slot
from dshard.rehearsal.record import Record
from dshard.rehearsal.region_recording import CHANGE_GRAPHS, DATA, NODE, CallResult, state_of
from dshard.rehearsal.session import HERE, Answer, call_with_session, run_eagerly
from dshard.torch_private import (
    is_autocasting,
    is_transforming,
    n_dispatch_modes,
    no_torch_function,
    pytree,
    saved_tensor_hooks,
    tensor_references,
)

MAX_EXTRA = 64
NODE_OF_ALL = (
    "the node of autograd of a tensor within a rehearsed module was read, as it was in no call before: this time it is "
    "that of all calls of the module, whose hooks see other gradients; from the next call on it is that of the tensor. "
    "Register hooks that read it, as `register_backward_hook` does, before the first step, or call the model within "
    "`dshard.rehearsing(False)`"
)
"""The most calls between two that the record has: after so many the module is taken to do something else."""
_END = object()


TAP = torch.zeros((), requires_grad=True)
"""An operand of every run, which gets no gradient: whoever asks for one has the node of the run called."""


class Run:
    """A run of a module with `inputs` by its record.

    `values` are the values of slots, `tensors` the objects by number, while it runs. `n_answered` calls were answered,
    the next had another reason: `why_not`. `late` keeps the operands that were seen on the way, for the backward pass.
    Those inputs that are gathered weights, of `use`, are gathered again in the backward pass.
    """

    def __init__(self, record: Record, inputs: Sequence[Tensor], use: GatheredUse | None) -> None:
        self.record, self.use = record, use
        self.inputs: list[Any] = [*inputs]
        self.values: list[Any] = record.own.fixed.values.copy()
        self.tensors: list[Any] = record.tensors
        self.n_answered, self._missed = 0, (0, 0, "")
        self.answer: Answer | None = None
        self.skipped = set[int]()
        self.late: dict[int, Tensor] = {}
        record.last = ref(self)
        self.given = GivenGradients(record.order.segments(record.own.are_hooked()), record.order.packs)
        self.overwritten: list[int] = []
        self.rewritten: list[tuple[Slot, int]] = []  # those whose values calls have written to, with the versions
        self.hooks: OrderedDict[int, tuple[int, Callable[[Tensor], Any]]] = OrderedDict()
        self.tensors[: len(inputs)] = inputs
        for n, place in record.places.inputs:
            self.values[place] = local_of(inputs[n])
        if record.contents.reader is not None and use is not None:
            self.values[record.contents.reader.number] = use.reader()
        for n in record.absent:
            self.tensors[n] = _stand_in(record.contents.made[n])
        self.versions: dict[int, tuple[Tensor, int]] = {}
        if record.places.needing:
            with no_torch_function():
                numbers = record.read - record.places.late.keys()
                operands = zip(numbers, self.operands(numbers), strict=True)
                self.versions = {n: (x, x._version) for n, x in operands}

    def operands(self, numbers: Iterable[int]) -> list[Tensor]:
        """The leaves and inputs with these numbers."""
        leaves = self.record.contents.leaves
        return [leaves[n] if n in leaves else self.inputs[n] for n in numbers]

    @property
    def fixed(self) -> Any:
        """The values that are the same in all runs."""
        return self.record.own.fixed

    def session(self) -> Answer:
        """The function that answers calls."""
        steps = iter(self.record.answers)
        tensors, values, other = self.tensors, self.values, self._other
        is_grad, get_hooks, ranks = torch.is_grad_enabled, saved_tensor_hooks, self.record.contents.ranks
        settings_now: Any = None
        changes, use, frame, innermost = -1, self.use, None, None
        expected, grad, settings, checkpoint, autocast, run = next(steps, _LAST)

        def answer(func: Any, args: Args, kwargs: Kwargs) -> Any:
            nonlocal steps, expected, grad, settings, checkpoint, autocast, run, settings_now, changes
            nonlocal frame, innermost
            while True:
                if (func is expected or func == expected) and is_grad() is grad:  # getters of attributes are equal
                    if Changes.count != changes or settings is not settings_now:
                        changes, settings_now = Changes.count, None
                        if not (OBSERVERS or LISTENERS) and settings_in_force() == settings:
                            settings_now = settings
                    hooks = get_hooks(True)
                    if (
                        settings is settings_now
                        and (
                            use is None and not checkpoint
                            if hooks is None
                            else is_checkpoint(hooks)
                            if checkpoint
                            else use is not None and use_of(hooks) is use
                        )
                        and not (n_dispatch_modes() or is_transforming())
                        and (autocast_now() == autocast if is_autocasting() else not autocast)
                    ):
                        try:
                            out = run(args, kwargs, tensors, values)
                        except Exception as error:
                            publish_failure(error, ranks)
                            raise
                        if out is not MISS:
                            self.n_answered += 1
                            if checkpoint and hooks is not None and hooks[0] is not innermost:
                                innermost, frame = hooks[0], outermost_checkpoint()
                            expected, grad, settings, checkpoint, autocast, run = next(steps, _LAST)
                            return out
                at = self._next_if_skipped(func)
                if at is None:
                    return run_behind(frame, other, func, args, kwargs)
                steps = iter(self.record.answers[at:])
                expected, grad, settings, checkpoint, autocast, run = next(steps, _LAST)

        self.answer = answer
        return answer

    def _next_if_skipped(self, func: Any) -> int | None:
        """Skip a call on which no later one depends, if one after it has this function; the number of the next.

        Planned calls are none of those: by Python the next ones would not be found.
        """
        if PLANNED.of is not None:
            return None
        n = at = self.n_answered
        calls, optional = self.record.contents.calls, self.record.places.optional
        while n < len(calls) and n in optional:
            n += 1
            if n < len(calls) and calls[n].func == func:
                self.skipped.update(range(at, n))
                self.n_answered = n
                return n
        return None

    def _other(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a call that the record does not have next: eagerly, behind the results of this run."""
        if HERE.drop_ended():
            return call_with_session(func, args, kwargs)
        HERE.answer = None
        if PLANNED.of is not None:
            self.catch_up()
        at = PLANNED.at
        flat = pytree.tree_leaves((args, kwargs))
        operands = [x for x in flat if isinstance(x, Tensor)]
        name = getattr(func, "__name__", str(func))
        if name in CHANGE_GRAPHS or func in (DATA, NODE):
            is_made = any(x is args[0] for x in self.tensors[len(self.inputs) :])
            self._miss(name)
            self.stop()
            out = run_eagerly(func, args, kwargs)
            if func == NODE and is_made and out is not None:
                self.record.passes.node_read = True
                warn(NODE_OF_ALL, stacklevel=2)
            return out
        before = [*map(state_of, operands)]
        goes_on = True
        try:
            out = run_eagerly(func, args, kwargs)
            if [*map(state_of, operands)] != before:
                self._write(operands, before)
                self._miss(name)
                self.stop()
                goes_on = False
            elif PLANNED.at != at and self._is_ahead():
                self._miss(name)
                self.stop()
                goes_on = False
            elif any(isinstance(x, Tensor) for x in pytree.tree_leaves(out)):
                self._miss(name)
                at, n, why_not = self._missed
                self._missed = self.n_answered, n + 1 if at == self.n_answered else 1, why_not
                if self._missed[1] > MAX_EXTRA:
                    self.stop()
                    goes_on = False
        finally:
            if goes_on:
                HERE.answer = self.answer
        return out

    def catch_up(self) -> None:
        """Go on among the planned calls where they are after the calls that were answered."""
        at = self.record.contents.calls[self.n_answered - 1].forward.after.at if self.n_answered else 0
        if at > PLANNED.at:
            PLANNED.put(PLANNED.of, at)

    def _is_ahead(self) -> bool:
        """Whether the next call of the record is planned before the calls that follow: this was another."""
        n, calls = self.n_answered, self.record.contents.calls
        return n < len(calls) and calls[n].forward.before.at < PLANNED.at

    def _miss(self, name: str) -> None:
        i, calls = self.n_answered, self.record.contents.calls
        if not self.why_not and i < len(calls):
            why_not = f"call {i} is {name.strip('_')}, the record has {calls[i].name} at {calls[i].line}"
            self._missed = (*self._missed[:2], why_not)

    @property
    def why_not(self) -> str:
        """The first call that is another than the record has; empty if there is none."""
        return self._missed[2]

    def _write(self, operands: Sequence[Tensor], before: Sequence[tuple[int, ...]]) -> None:
        """A call that the record does not have wrote to operands: what the backward pass reads of them is lost."""
        written = [x for x, state in zip(operands, before, strict=True) if state_of(x) != state]
        self.overwritten += [local_of(x).untyped_storage()._cdata for x in written]
        for x in written:
            with no_torch_function():
                needs_grad = x.requires_grad
            if needs_grad and len(self._sharing(x)) > 1:
                raise RuntimeError(
                    "a view of an activation was written to in a rehearsed module whose earlier calls did not write: "
                    "write to a copy, or run the module `with dshard.rehearsing(False):`"
                )

    def _sharing(self, x: Tensor) -> list[int]:
        """The numbers of the tensors with the memory and a gradient of `x`, which autograd does not know as views."""
        memory, sharing = memory_of(x), list[int]()
        for n, other in enumerate(self.tensors):
            if other is None or n in self.record.places.late:
                continue
            with no_torch_function():
                needs_grad = other.requires_grad
            if needs_grad and memory_of(other) == memory:
                del other
                if n < self.record.contents.n_inputs or _is_held(self.tensors, n):
                    sharing.append(n)
        return sharing

    def answered(self) -> list[RecordedCall]:
        """The calls that were answered."""
        calls = self.record.contents.calls[: self.n_answered]
        return [call for i, call in enumerate(calls) if i not in self.skipped] if self.skipped else calls

    tap = TAP

    def uses(self, i: int) -> bool:
        """Whether a call that was answered used the result that is output number `i` of the node."""
        n = self.record.places.needing[i]
        return any(n in call.refs for call in self.record.contents.calls[: self.n_answered])

    def add_hook(self, i: int, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call `hook` with the whole gradient of output number `i`."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = (self.record.places.needing[i], hook)
        return handle

    @property
    def is_whole(self) -> bool:
        """Whether all calls of the record were answered."""
        return self.n_answered == len(self.record.answers)

    def stop(self) -> None:
        """End the run: calls that follow are eager. Results that somebody holds are given away, others are kept."""
        if not self.tensors:  # it has ended before
            return
        if PLANNED.of is not None:
            self.catch_up()
        if HERE.answer is self.answer:
            HERE.answer = None
        self.answer = None  # which holds the values
        record, tensors, places = self.record, self.tensors, self.record.places
        if places.late:
            self.late = {n: tensors[n] for call in self.answered() for n in call.late}
        if places.needing:
            self.versions |= {n: (x, self.values[places.late[n]]) for n, x in self.late.items() if n in record.read}
        for n in (*range(record.contents.n_inputs), *places.late, *places.plain):
            tensors[n] = None
        self._let_go_of_inputs()
        record.absent = absent = list[int]()
        held = {n: x for n, x in enumerate(self.inputs) if x is not None}
        with no_torch_function():
            for n, size in reversed(places.distributed):  # copies of views hold what they are views of
                x = tensors[n]
                if (
                    getrefcount(x) == 3  # the list, this variable, and the argument
                    and tensor_references(x) == 1
                    and not getweakrefcount(x)
                ):
                    attributes = x.__dict__
                    attributes.pop("_local_tensor", None)
                    if len(attributes) != size:
                        attributes.pop("_view_sync", None)
                    if len(attributes) == size:  # nobody has left a mark
                        if x.requires_grad:
                            x.detach_()  # which lets go of this run
                        continue
                elif x.requires_grad:
                    held[-1 - n] = x
                tensors[n] = None
                absent.append(n)
        self.tensors = []
        if not places.needing:
            self.values = []
        else:
            values = self.values
            written = [(slot, values[slot.number]) for slot in record.lifetimes.rewritten]
            self.rewritten = [(slot, x._version) for slot, x in written if x is not None]
            self.versions |= _sharing(held)
            del held, x
            for slot in record.unread if self.is_whole else ():
                self.values[slot.number] = None

    def _let_go_of_inputs(self) -> None:
        """Let go of gathered weights, of which eager calls have autograd save the places, and of what none saves."""
        record, use = self.record, self.use
        for n, each in record.contents.let_go.items():
            self.inputs[n] = self.values[each.slot.number] = None
        if not record.contents.weights or use is None:
            return
        for slot in record.contents.of_weights:
            self.values[slot.number] = None
        n = self.n_answered
        use.saves_weights = use.saves_weights or any(i < n and i not in self.skipped for i in record.contents.saving)

    def free(self) -> None:
        """Free what the backward pass reads: it has ended."""
        self.values, self.inputs, self.versions, self.late = [], [], {}, {}


def _sharing(held: dict[int, Tensor]) -> dict[int, tuple[Tensor, int]]:
    """Those tensors that share memory, with their versions: autograd does not know that a write changes the others."""
    memories = {n: memory_of(x) for n, x in held.items()}
    count = Counter(memories.values())
    shared = {n: local_of(held[n]) for n, memory in memories.items() if memory and count[memory] > 1 and n < 0}
    return {n: (local, local._version) for n, local in shared.items()}


def run_behind(frame: object, run: Answer, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run a call that was not answered, behind calls that were, which may have run in the same checkpoint, `frame`.

    There it keeps what autograd saves: torch would count on what answered calls have not saved, if it ran them again.
    """
    if frame is None or outermost_checkpoint() is not frame:
        return run(func, args, kwargs)
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        out = run(func, args, kwargs)
    if HERE.answer is None and HERE.entered:  # the run has stopped, and the checkpoint goes on
        HERE.answer = partial(run_behind, frame, run_eagerly)
    return out


_LAST: Any = (_END, None, None, False, (), None)


def _is_held(tensors: Sequence[Any], n: int) -> bool:
    """Whether Python or C++ holds a tensor, beside the list."""
    return getrefcount(tensors[n]) != 2 or tensor_references(tensors[n]) != 1


def _stand_in(result: CallResult) -> Wrapper:
    """A result without a local tensor."""
    _, spec, _, matmul, *_ = result.kind
    x = wrap(None, spec, result.offset or None)  # type: ignore[arg-type]
    del x._local_tensor
    if matmul is not None:
        x._matmul = matmul
    return x
