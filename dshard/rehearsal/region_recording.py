"""The session of a call of a module that is recorded: it runs by Python, and its calls are kept.

Nothing is kept alive but the module's own tensors and inputs: so what of the results is alive when the module ends is
what autograd has saved, or the program holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from sys import getrefcount
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dshard.autograd.gathered_weights import GatheredUse, use_of
from dshard.comm import ENDS, has_only_shape, recording_calls, user_line
from dshard.core.context import settings_in_force, settings_states
from dshard.core.observe import OperatorMode
from dshard.core.plain_tensors import is_within_forward
from dshard.core.signature import Args, Kwargs
from dshard.core.trees import tensors_in
from dshard.core.view_sync import CopiedView
from dshard.core.wrapper import Wrapper
from dshard.dispatch.planned_calls import PLANNED, is_checkpoint, outermost_checkpoint
from dshard.rehearsal.calls import (
    CallSettings,
    ForwardPass,
    Kind,
    RecordedCall,
    Ref,
    attention_kernels,
    autocast_now,
    is_own,
    is_ready,
    kind_of,
    local_of,
)
from dshard.rehearsal.local_recorder import Instruction, LocalRecorder, Slot, equal
from dshard.rehearsal.session import HERE, OWN_CALLS, call_with_session, run_eagerly
from dshard.rehearsal.staged_backward import gradient_order
from dshard.torch_private import (
    OpOverload,
    is_transforming,
    n_dispatch_modes,
    no_torch_function,
    pytree,
    saved_tensor_hooks,
    sequence_number,
    tensor_references,
)

CHANGE_GRAPHS = frozenset(
    {
        "backward",
        "grad",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "__set__",
        "__delete__",
        "requires_grad_",
        "detach_",
        "set_",
        "resize_",
    }
)
"""Functions that change a tensor, or autograd's graph, without a result: they end what is recorded and answered."""


def is_size(x: object) -> bool:
    return type(x) is torch.Size


Signature = tuple[Any, tuple[object, ...]]
DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
"""Gives the memory of a tensor with versions of its own: what is written to it, autograd does not know of."""
NODE: Any = cast(Any, Tensor.grad_fn).__get__
"""Gives the node of autograd that made a tensor, as hooks of a module's backward pass read it: that of one call."""


class Ends(Exception):
    """The recording ends before a call, for a reason; before call number `at`, if it has one."""

    def __init__(self, why: str, at: int | None = None) -> None:
        super().__init__(why)
        self.at = at


class RegionRecorder(LocalRecorder):
    """The local operators of one call of a module.

    `storages` has the memory of each new tensor. `reads_host` names an operator of the running call that reads numbers
    on the host. Draws of random numbers are run again in their places, so their states need no instructions. Nodes of
    autograd are numbered `since` it began; `gradient_order` is that of the operands in a backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_host = ""
        self.storages: dict[Slot, StorageWeakRef] = {}
        self.settings: list[list[object]] = []
        self.since, self.gradient_order = sequence_number(), list[int]()

    def _check(self, func: OpOverload, args: Args) -> None:
        super()._check(func, args)
        self.reads_host, self.why_not = self.reads_host or self.why_not, ""

    def settings_now(self) -> list[object]:
        """The settings of dshard, one list for all that are equal."""
        now = [*settings_in_force()]
        for known in self.settings:
            if known == now:
                return known
        self.settings.append(now)
        return now

    def add_read(self) -> None:
        """Record that numbers of a tensor were read on the host: the call cannot be answered."""
        super().add_read()
        self.reads_host, self.why_not = self.reads_host or self.why_not, ""

    def _new_slot(self, x: object) -> Slot:
        slot = super()._new_slot(x)
        if isinstance(x, Tensor) and not has_only_shape(x):
            self.storages[slot] = StorageWeakRef(x.untyped_storage())
        return slot

    def undo(self, start: int) -> None:
        """Forget the instructions from number `start` on."""
        del self.instructions[start:]
        self.reads_host = ""


class Copy(NamedTuple):
    """The origin of a result that is a view with memory of its own: `origin` but for its tensors, of the tensor `of`.

    Without an origin of its own it has that of the tensor `of`, of whose memory it is a view.
    """

    of: int
    origin: CopiedView | None


class CallResult(NamedTuple):
    """A result of a call: its kind, the slot of its local tensor, its place in storage, and what it is a copy of."""

    kind: Kind
    slot: Slot
    offset: int
    copy: Copy | None

    @property
    def is_plain(self) -> bool:
        """Whether it is no distributed tensor."""
        return self.kind[0] is Tensor


class LetGo(NamedTuple):
    """An input that is not kept: the slot of its local tensor, its place in a use of gathered weights, and its kind."""

    slot: Slot
    place: int | None
    kind: Kind


class Gathering(NamedTuple):
    """A use of gathered weights, these by number, and the slot of the function by which a backward pass reads them."""

    use: GatheredUse | None
    weights: dict[int, LetGo]
    reader: Slot | None


class RegionRecording:
    """The calls of one run of a module on `inputs`, as a session; `ended` says why it did not last to the end.

    Of the inputs some may be the gathered weights of `use`.
    Tensors have numbers: first the inputs, then others as they are seen. `leaves` are the module's own, and leaves of
    autograd, by number; `made` are the results, `dropped` has the number of the call at which Python had dropped one.
    Calls that were others `before`, by arguments or kinds of operands, are none of the record: each later run has them
    by Python, between two that it answers. The next is the last of the functions and arguments, with kinds for tensors.
    """

    def __init__(
        self,
        own: dict[int, Tensor],
        inputs: Sequence[Tensor],
        use: GatheredUse | None,
        before: Iterable[Signature] = (),
    ) -> None:
        self.own, self.inputs, self.ended, self._before = own, inputs, "", [*before][::-1]
        self.calls: list[RecordedCall] = []
        self.leaves: dict[int, Tensor] = {}
        self.made: dict[int, CallResult] = {}
        self.dropped: dict[int, int] = {}
        self.sources: dict[Slot, int] = {}  # of slots that no instruction made: the number of the tensor
        self.recorder = RegionRecorder()
        self.n_tensors = 0
        self._numbers: dict[int, int] = {}  # by id, while the tensor lives
        self._refs: dict[int, Any] = {}
        self._seen: dict[int, tuple[int, ...]] = {}
        for x in inputs:
            self._give(self._number(x), x)
        weights = {} if use is None else self._weights_of(use)
        self.gathering = Gathering(use, weights, self.recorder._new_slot(object()) if weights else None)

    @property
    def use(self) -> GatheredUse | None:
        """The use of the gathered weights among the inputs."""
        return self.gathering.use

    def _weights_of(self, use: GatheredUse) -> dict[int, LetGo]:
        """The gathered weights among the inputs, by number; those without elements are inputs like any other."""
        places = [None if use.gathered is None else use.gathered.place(x) for x in self.inputs]
        slots = [self.recorder.slot_of(local_of(x)) for x in self.inputs]
        pairs = enumerate(zip(self.inputs, slots, places, strict=True))
        return {n: LetGo(slot, place, kind_of(x)) for n, (x, slot, place) in pairs if place is not None}

    def _number(self, x: Tensor) -> int:
        number, self.n_tensors = self.n_tensors, self.n_tensors + 1
        self._numbers[id(x)] = number
        self._refs[number] = ref(x, partial(self._drop, id(x), number))
        self._see(number, x)
        return number

    def _drop(self, i: int, number: int, of: object) -> None:
        if self._numbers.get(i) == number:
            del self._numbers[i]
        self.dropped.setdefault(number, len(self.calls))

    def _see(self, number: int, x: Tensor) -> None:
        self._seen[number] = state_of(x)

    def _give(self, number: int, x: Tensor) -> None:
        self.sources[self.recorder.slot_of(local_of(x))] = number

    # -- as a session

    def __call__(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a call, and record it."""
        if HERE.drop_ended():
            return call_with_session(func, args, kwargs)
        HERE.answer = None
        try:
            if self.ended or self._varies(func, args, kwargs):
                return self._watched(func, args, kwargs)
            start = len(self.recorder.instructions)
            try:
                call, operands = self._begin(func, args, kwargs)
            except Ends as end:
                self._end(end)
                return run_eagerly(func, args, kwargs)
            self.recorder.number = len(self.calls)
            with recording_calls(self.recorder), OperatorMode(self.recorder.run), self._watching(call):
                out = run_eagerly(func, args, kwargs)
            try:
                self._add(call, operands, out, start)
            except Ends as end:
                self.recorder.undo(start)
                self._end(end)
            return out
        finally:
            HERE.answer = self

    def _varies(self, func: Any, args: Args, kwargs: Kwargs) -> bool:
        """Whether a call is other than the one in its place in the recording before."""
        if not self._before or func != self._before[-1][0]:
            return False
        flat = pytree.tree_leaves((args, kwargs), is_leaf=is_size)
        return not equal(tuple([kind_of(x) if isinstance(x, Tensor) else x for x in flat]), self._before.pop()[1])

    @contextmanager
    def _watching(self, call: RecordedCall) -> Iterator[None]:
        """Within the block a call runs, of which it is noted whether autograd saves gathered weights."""
        if self.use is None:
            yield
            return
        before, self.use.saves_weights = self.use.saves_weights, False
        try:
            yield
        finally:
            call.saves_weights = self.use.saves_weights
            self.use.saves_weights |= before

    def _watched(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a call that is not recorded: what it does to results of those that are may end the record before."""
        made = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) in self._numbers]
        if made and getattr(func, "__name__", "") in CHANGE_GRAPHS:
            self._end(Ends(self.ended, self._first_use(made)))
        if made and func == NODE:
            self._end(Ends(self.ended, self._maker(made)))
        before = [*map(state_of, made)]
        out = run_eagerly(func, args, kwargs)
        for x, state in zip(made, before, strict=True):
            if state_of(x) != state and x.requires_grad:
                self._end(Ends("a write to a tensor that needs a gradient", self._first_write(x)))
        return out

    def _end(self, end: Ends) -> None:
        self.ended = str(end) or "?"
        frame = outermost_checkpoint()
        if end.at is not None and end.at < len(self.calls):
            frame = self.calls[end.at].checkpoint
            del self.calls[end.at :]
        self.calls = outside_of(frame, self.calls)

    def _begin(self, func: Any, args: Args, kwargs: Kwargs) -> tuple[RecordedCall, list[Tensor]]:
        """The record of a call that begins, and its operands.

        Raises:
            Ends: it cannot be answered later.
        """
        flat, structure = pytree.tree_flatten((args, kwargs), is_leaf=is_size)  # which would come back as a tuple
        operands = [x for x in flat if isinstance(x, Tensor)]
        if getattr(func, "__name__", "") in CHANGE_GRAPHS:
            raise Ends(f"{func.__name__} changes a tensor or autograd's graph", self._first_use(operands))
        if func == NODE:
            raise Ends("the node of autograd that made a tensor is read", self._maker(operands))
        if n_dispatch_modes() or is_transforming():
            raise Ends("a mode or a transform of torch")
        if func == DATA:
            raise Ends("what is written to data does not count as written")
        call = RecordedCall(
            func,
            None,
            None,
            torch.is_grad_enabled(),
            CallSettings(self.recorder.settings_now(), settings_states(), attention_kernels()),
            ForwardPass(is_within_forward(), PLANNED.position(), PLANNED.position()),
        )
        call.autocast = autocast_now()
        hooks = saved_tensor_hooks(True)
        if (None if hooks is None else use_of(hooks)) is not self.use or (self.use is None and hooks is not None):
            if hooks is None or not is_checkpoint(hooks):
                raise Ends("hooks of saved tensors")
            if self.use is not None:
                raise Ends("a checkpoint within a module that gathers weights, which runs again on the stored ones")
            call.checkpoint = outermost_checkpoint()
        templates = [self._operand(x, call) if isinstance(x, Tensor) else x for x in flat]
        call.args, call.kwargs = pytree.tree_unflatten(templates, structure)
        call.line = user_line()
        return call, operands

    def _is_gathered(self, x: Tensor) -> bool:
        """Whether a tensor has the memory of a gathered weight."""
        gathered = None if self.use is None else self.use.gathered
        return gathered is not None and gathered.place(x) is not None

    def _is_of_trained(self, x: Tensor) -> bool:
        """Whether a tensor has the memory of an operand that needs a gradient, as one that was detached from it."""
        memory = self._memory(self._numbers[id(x)])
        operands = {
            slot: self.leaves.get(n, self.inputs[n] if n < len(self.inputs) else x) for slot, n in self.sources.items()
        }
        with no_torch_function():
            return any(y.requires_grad and self.recorder.storages.get(slot) == memory for slot, y in operands.items())

    def _first_use(self, operands: Sequence[Tensor]) -> int | None:
        """The first call that used one of these tensors, whose gradients no hook on them would see."""
        numbers = {self._numbers.get(id(x)) for x in operands} & set(self.made)
        return next((i for i, call in enumerate(self.calls) if call.refs & numbers), None)

    def _maker(self, operands: Sequence[Tensor]) -> int | None:
        """The first call that made one of these tensors."""
        refs = {Ref(n) for x in operands if (n := self._numbers.get(id(x))) is not None}
        return next((i for i, call in enumerate(self.calls) if refs.intersection(call.outs)), None)

    def _operand(self, x: Tensor, call: RecordedCall) -> Ref:
        number = self._numbers.get(id(x))
        if number is not None:
            if self._seen[number][:3] != state_of(x)[:3]:
                raise Ends("an operand has another node of autograd: a custom Function, or a write")
            self._see(number, x)  # others may have written to it since
            return Ref(number)
        if not (is_ready(x) and is_own(x)):
            raise Ends("an operand is in flight, or a copy of a view")
        with no_torch_function():
            is_leaf, needs_grad = x.is_leaf, x.requires_grad
        if id(x) in self.own or (isinstance(x, Wrapper) and is_leaf and needs_grad):
            number = self._number(x)
            self.leaves[number] = x
        elif needs_grad:
            raise Ends("an operand needs a gradient, and no recorded call made it")
        elif not (isinstance(x, Wrapper) or (type(x) is Tensor and call.within)):
            raise Ends(f"an operand is a {type(x).__name__}, or outside of the module's forward pass")
        else:
            number = self._number(x)
            call.late[number] = kind_of(x)
        self._give(number, x)
        return Ref(number)

    def _add(self, call: RecordedCall, operands: Sequence[Tensor], out: Any, start: int) -> None:
        """Add a call that has run.

        Raises:
            Ends: it cannot be answered later.
        """
        recorder = self.recorder
        results = pytree.tree_leaves(out)
        returns_none = not any(isinstance(x, Tensor) for x in results)
        written = [x for x in operands if state_of(x) != self._seen[self._numbers[id(x)]]]
        if returns_none and not written and call.func not in OWN_CALLS:
            recorder.undo(start)  # a question, which is asked again each time
            for number in call.late:
                self._forget(number)
            return
        if recorder.reads_host:
            raise Ends(recorder.reads_host)
        for x in written:
            with no_torch_function():
                may_be_seen = x.requires_grad or id(x) not in self._numbers
            if may_be_seen and (call.checkpoint is not None or not self._becomes(x, results)):
                raise Ends("a write to a tensor that needs a gradient", self._first_write(x))
            number = self._numbers[id(x)]
            if self._is_gathered(x):
                raise Ends("a write to a gathered weight")
            if self._is_of_trained(x):
                raise Ends("a write to the memory of a tensor that needs a gradient")
            self._see(number, x)
            call.writes.append(number)
        with recording_calls(recorder), OperatorMode(recorder.run):
            call.out = pytree.tree_map_only(Tensor, lambda x: self._result(x, operands), out)
        call.instructions = recorder.instructions[start:]
        call.forward = call.forward._replace(after=PLANNED.position())
        self.calls.append(call)

    def _forget(self, number: int) -> None:
        """Forget an operand of a call that is not kept."""
        self.sources = {slot: n for slot, n in self.sources.items() if n != number}
        self._numbers = {i: n for i, n in self._numbers.items() if n != number}
        del self._refs[number]

    def _first_write(self, x: Tensor) -> int | None:
        """The first call that made a view of the memory of `x`, which is written to: autograd has to know of it."""
        storage = self._memory(self._numbers[id(x)])
        sharing = [n for n in self.made if self._memory(n) == storage]
        makers = [i for i, call in enumerate(self.calls) if any(Ref(n) in call.outs for n in sharing)]
        if any(self.recorder.storages.get(slot) == storage for slot in self.sources):
            return makers[0] if makers else None
        return makers[1] if len(makers) > 1 else None

    def _copy_of(self, x: Wrapper, operands: Sequence[Tensor]) -> Copy:
        """The origin of a view with memory of its own."""
        origin = x._view_sync
        for operand in operands:
            if isinstance(operand, Wrapper) and operand._view_sync is origin:
                return Copy(self._numbers[id(operand)], None)
        base = self._numbers.get(id(origin.base))
        if base is None or origin.local is not x._local_tensor:
            raise Ends("a result is a view of a copy")
        return Copy(base, replace(origin, base=None, local=None))

    def _becomes(self, x: Tensor, results: Sequence[object]) -> bool:
        """Whether a result of an earlier call has become that of this one, which has overwritten it, and nothing else.

        No other tensor has its memory, so that autograd has no views to know of.
        """
        n = self._numbers.get(id(x))
        made = None if n is None else self.made.get(n)
        if n is None or made is None or len(results) != 1 or results[0] is not x:
            return False
        if not made.kind[4] or made.copy is not None or self.recorder.slot_of(local_of(x)) != made.slot:
            return False
        storage = self._memory(n)
        of_others = [self.recorder.storages.get(slot) for slot in self.sources]
        return [m for m in self.made if self._memory(m) == storage] == [n] and storage not in of_others

    def _memory(self, n: int) -> StorageWeakRef | None:
        """The memory of a tensor, that of its base if it is a view with memory of its own."""
        result = self.made.get(n)
        while result is not None and result.copy is not None:
            n, result = result.copy.of, self.made.get(result.copy.of)
        slot = next(s for s, m in self.sources.items() if m == n) if result is None else result.slot
        return self.recorder.storages.get(slot)

    def _result(self, x: Tensor, operands: Sequence[Tensor]) -> Ref:
        number = self._numbers.get(id(x))
        if number is None:
            is_distributed = isinstance(x, Wrapper)
            with no_torch_function():
                if not (is_distributed or (type(x) is Tensor and not x.requires_grad)):
                    raise Ends(f"a result is a {type(x).__name__} that needs a gradient")
            if isinstance(x, Wrapper) and not (is_ready(x) and x._leaf is None):
                raise Ends("a result is in flight, or keeps partial gradients")
            copy = self._copy_of(x, operands) if isinstance(x, Wrapper) and x._view_sync is not None else None
            number = self._number(x)
            slot = self.recorder.slot_of(local_of(x))
            with no_torch_function():
                self.made[number] = CallResult(kind_of(x), slot, int(x.storage_offset()), copy)
        return Ref(number)

    def shown_twice(self) -> list[int]:
        """The numbers of results that need a gradient and share the memory of an operand, or result, that is held.

        autograd has to know these as views: a write to one changes the other.
        """
        storages = self.recorder.storages
        seen, shown = {storages[slot] for slot in self.sources if slot in storages}, list[int]()
        for n, result in self.made.items():
            storage = self._memory(n)
            if storage is None or not result.kind[4] or not _is_held(self._refs[n]):
                continue
            if storage in seen:
                shown.append(n)
            seen.add(storage)
        return shown

    def has_given(self, out: object) -> None:
        """Note in which order a backward pass from what the module has given has its gradients whole."""
        operands = self.leaves | dict(enumerate(self.inputs))
        outs = tensors_in(out) or [x for each in self._refs.values() if (x := each()) is not None]
        self.recorder.gradient_order = gradient_order(outs, operands, self.recorder.since)

    def session(self) -> RegionRecording:
        """The session, which is itself."""
        return self

    def end_within_module(self) -> None:
        """End between calls of the module: a checkpoint that goes on is left out, and what is alive is its result."""
        self.has_given(None)
        self.calls = outside_of(outermost_checkpoint(), self.calls)

    def end(self) -> None:
        """Let go of tensors, which are not looked after any more."""
        self._refs.clear()

    def let_go(self) -> dict[int, LetGo]:
        """Let go of the inputs; gathered weights among them, and those whose memory nobody else holds."""
        kinds = [*map(kind_of, self.inputs)]
        self.inputs = []
        self.recorder.externals.clear()
        alive, weights = self.alive(), self.gathering.weights
        sources = {n: slot for slot, n in self.sources.items() if n < len(kinds) and n not in weights}
        return weights | {n: LetGo(slot, None, kinds[n]) for n, slot in sources.items() if slot not in alive}

    def alive(self) -> set[Slot]:
        """The slots whose memory is alive."""
        return {slot for slot, storage in self.recorder.storages.items() if not storage.expired()}

    def pending(self) -> set[Slot]:
        """The slots of collectives that have begun, and not ended."""
        instructions = self.recorder.instructions
        begun = {slot for each in instructions if each.begins for slot in each.made}
        return begun - {each.args[0] for each in instructions if each.key == ENDS}


def _is_held(reference: Any) -> bool:
    """Whether Python holds a tensor: while C++ does, for autograd, too, torch has one more Python reference to it."""
    x = reference()
    return x is not None and getrefcount(x) - 2 > (tensor_references(x) > 1)  # `x`, and the argument


def state_of(x: Tensor) -> tuple[int, int, bool, int]:
    """The number of a tensor's node of autograd and its place there, whether it needs a gradient, and its version."""
    with no_torch_function():
        version = 0 if x.is_inference() else x._version
        try:
            node = x.grad_fn
        except RuntimeError:  # torch makes none for a view of before that was taken without gradients and written to
            node = None
        return -1 if node is None else node._sequence_nr(), x.output_nr, x.requires_grad, version


def outside_of(frame: object, calls: list[RecordedCall]) -> list[RecordedCall]:
    """The calls without those at the end that ran in the checkpoint `frame`: torch runs it again as a whole, or not."""
    while frame is not None and calls and calls[-1].checkpoint is frame:
        calls = calls[:-1]
    return calls


def instructions_of(calls: Sequence[RecordedCall]) -> list[Instruction]:
    """The instructions of calls, in order."""
    return [each for call in calls for each in call.instructions]
