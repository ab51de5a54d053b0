"""The calls of a run once more, under autograd, with the results that their local operators had.

They run on aliases of the module's own tensors, but what their local operators give is taken from the run, so that
nothing is sent, drawn or computed twice. What the inner backward pass then runs is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import sdpa_kernel
from torch.utils.dlpack import from_dlpack

from dshard.comm import ENDS, recording_calls
from dshard.core.context import settings_restored
from dshard.core.observe import OperatorMode
from dshard.core.plain_tensors import count_as_replicated
from dshard.core.signature import Args, Context, Kwargs
from dshard.core.spec import is_for_shapes
from dshard.core.wrapper import Wrapper, wrap
from dshard.dispatch.planned_calls import PLANNED
from dshard.rehearsal.calls import RecordedCall, Ref, attention_kernels, is_ready, local_of
from dshard.rehearsal.code import reads, results_of
from dshard.rehearsal.local_recorder import VIEWS_IF_POSSIBLE, Instruction, LocalRecorder, Slot, View, equal
from dshard.rehearsal.region import Run
from dshard.rehearsal.region_recording import is_size
from dshard.rehearsal.session import run_eagerly
from dshard.rehearsal.staged_backward import StagedBackward
from dshard.torch_private import OpOverload, no_torch_function, pytree

aten = torch.ops.aten
LOST = (
    "the backward pass of a rehearsed module reads a value that was not kept, and cannot be made again: "
    "run the module `with dshard.rehearsing(False):`"
)
_N_ADDRESSES = 1 << 16


class _Token:
    """Stands for a collective that has begun in the forward pass, with what it was `given`."""

    given: tuple[object, ...] = ()


class _Unread:
    """Tensors that nobody reads: all lie in one memory, as large as the largest, at addresses of their own."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}
        self._address = 0

    def like(self, view: View) -> Tensor:
        """One that lies like another, with a storage of its own."""
        n = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.stride, strict=True))
        n_bytes = 0 if 0 in view.shape else n * view.dtype.itemsize
        if view.device.type not in ("cpu", "cuda") or not n_bytes:
            return torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=view.device)
        memory, size = self._memory.get(view.device), n_bytes + _N_ADDRESSES
        if memory is None or len(memory) < size:
            memory = self._memory[view.device] = torch.empty(size, dtype=torch.uint8, device=view.device)
        self._address = (self._address + 16) % _N_ADDRESSES
        storage = from_dlpack(memory[self._address : self._address + n_bytes]).untyped_storage()
        return torch.empty(0, dtype=view.dtype, device=view.device).set_(storage, 0, view.shape, view.stride)


class Frame:
    """The calls of one checkpoint: the instructions `taken`, of which `n_saved` ran before it saved its last tensor.

    It lives as long as autograd holds one of the tensors saved, and with it what these calls have made again.
    """

    def __init__(self, derivation: Derivation) -> None:
        self.derivation, self.n_saved, self.has_run = derivation, 0, False
        self.taken: list[Instruction] = derivation.taken
        self.made: dict[Slot, Any] = {}
        derivation.frames.add(self)

    def pack(self, x: Tensor) -> Tensor:
        """Note that a tensor is saved."""
        self.n_saved = len(self.taken)
        return self.derivation.saved(x)

    def unpack(self, x: Tensor) -> Tensor:
        """The saved tensor; before the first the calls run again."""
        if not self.has_run:
            self.has_run = True
            self.derivation.run_frame(self)
        return self.derivation.with_value(x) if self.derivation.creates_graph else x


class _Views:
    """Views of tensors, each by its memory and how it lies there: equal ones have equal keys."""

    def __init__(self, views: Sequence[View | None]) -> None:
        self._views = views
        self._roots: dict[Slot, Slot] = {}
        self._first: dict[tuple[Slot, object], Slot] = {}

    def add(self, each: Instruction) -> None:
        """Note the results of an instruction, if they are views."""
        if each.is_view:
            root = self.root(each.args[0])
            for slot in each.made:
                self._roots[slot] = root
                self._first.setdefault((root, self._views[slot.number]), slot)

    def root(self, slot: Slot) -> Slot:
        """The tensor whose memory a view has."""
        return self._roots.get(slot, slot)

    def first(self, slot: Slot) -> Slot:
        """The first view that equals one."""
        return self._first.get((self.root(slot), self._views[slot.number]), slot)


class Derivation(LocalRecorder):
    """Runs calls again with the results that their local operators had in a run; then records the backward pass.

    Slots are those of the record, and go on where it ends.

    Attributes:
        creates_graph: Whether autograd's graph stays: what it saves has its values, those that the run has kept.
        n_forward: The number of the record's slots.
        unreal: The slots of tensors without their values.
        taken: The instructions that ran.
        again: The slots of what checkpoints made again.
    """

    def __init__(self, run: Run, *, creates_graph: bool = False) -> None:
        record, views = run.record, run.record.contents.views
        super().__init__([*views, *[None] * (record.own.n_slots - len(views))])
        run.fixed.extend(record.own)
        self.record, self.values, self.creates_graph = record, run.values, creates_graph
        self.n_forward = record.own.n_slots
        self.expected: list[Instruction] = []
        self._of_call: list[Instruction] = []  # those of the running call that were taken
        self.is_backward = False
        self.unreal = set[Slot]()
        self.taken: list[Instruction] = []
        self._made: dict[Slot, Any] = {}
        reader = record.contents.reader
        if reader is not None:
            self._made[reader] = run.values[reader.number]
        self.again = set[Slot]()  # made by calls of checkpoints
        self.frames: WeakSet[Frame] = WeakSet()
        self._unread = _Unread()
        self._equal = _Views(self.views)
        for each in record.contents.instructions:
            self._equal.add(each)
        for slot in (*record.contents.sources, *record.own.literals):
            x = run.fixed.values[slot.number]
            if x is None:
                x = self.values[slot.number]
            if isinstance(x, Tensor):
                self._tensors[x] = slot

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block operators on local tensors, and collectives, are run by this derivation."""
        with recording_calls(self), OperatorMode(self.run):
            yield

    def slot_of(self, x: Tensor) -> Slot:
        """The slot of a tensor; one that no instruction made becomes external."""
        slot: Slot | None = self._tensors.get(x)
        if slot is None:
            slot = self._new_slot(x)
            self.externals[slot] = x
        return slot

    def run(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator on plain tensors: what it gave in the run, or, in the backward pass, record it."""
        if self._within or is_for_shapes() or func.namespace == "profiler":
            return func(*args, **kwargs)
        if func is aten.lift_fresh.default and not self.is_backward and self.expected:
            literal = next(
                (each for each in self.expected if each.args and each.args[0] in self.record.own.literals), None
            )
            if literal is not None:
                self.expected.remove(literal)
                return self._known_result(literal, args)
        recorded_args = self._recorded(args)
        recorded_kwargs = tuple((name, self._recorded(value)) for name, value in kwargs.items())
        if not self.is_backward:
            each = self._take(func, recorded_args, recorded_kwargs)
            if each is not None and each.is_view:
                return self._view(each, func(*args, **kwargs))
            if each is not None:
                return self._known_result(each, args)
        args, kwargs = self._real(args), {name: self._real(value) for name, value in kwargs.items()}
        out, n = super().run(func, args, kwargs), len(self.instructions)
        if n and not self.is_backward:
            self._equal.add(self.instructions[-1])
        return out

    def call(self, key: object, function: Callable[..., Any], *args: object) -> Any:
        """Call a function: what it gave in the run, or, in the backward pass, record it."""
        if self._within or is_for_shapes():
            return function(*args)
        if not self.is_backward:
            each = self._take(key, self._recorded(args), (), by_key=True)
            if each is not None:
                given = [x for token in args if isinstance(token, _Token) for x in token.given]
                result = self._known_result(each, (*args, *given))
                if isinstance(result, _Token):  # its end gives what its begin was given, which pools know by its memory
                    result.given = args
                return result
        return super().call(key, function, *self._real(args))

    def _take(self, what: object, args: Any, kwargs: Any, *, by_key: bool = False) -> Instruction | None:
        """The first instruction of the call that is this one, which then has run."""
        for i, each in enumerate(self.expected):
            if self._is(each, what, args, kwargs, by_key=by_key):
                self.taken.append(each)
                self._of_call.append(each)
                return self.expected.pop(i)
        # the first call of its kind may run operators once more, to learn what they give
        return next((x for x in self._of_call if not x.writes and self._is(x, what, args, kwargs, by_key=by_key)), None)

    def _is(self, each: Instruction, what: object, args: Any, kwargs: Any, *, by_key: bool) -> bool:
        """Whether an instruction is this call of equal values."""
        if by_key:
            return each.key is not None and equal(each.key, what) and self._equals(each.args, args)
        if each.key is not None:
            return False
        if each.function is what and self._equals((each.args, each.kwargs), (args, kwargs)):
            return True
        is_view = each.is_view and what in VIEWS_IF_POSSIBLE and each.function is aten.view.default
        return is_view and self._equals(each.args[0], args[0])

    def begin_call(self, call: RecordedCall) -> None:
        """Run the operators of `call` from now on."""
        self.expected, self._of_call = [*call.instructions], []

    def run_frame(self, frame: Frame) -> None:
        """Run the calls of a checkpoint again, up to what it saved last, as torch does before it gives what it saved.

        Random numbers are those of the first time.
        """
        for each in frame.taken[: frame.n_saved]:
            if self._is_of_first_time(each):
                continue
            arguments = {slot: frame.made[slot] if slot in frame.made else self.value(slot) for slot in reads(each)}
            with self._unrecorded():
                values = results_of(each, arguments)
            frame.made |= values
            self._note(values)
            self.again.update(each.made)
            self.instructions.append(each)

    def _is_of_first_time(self, each: Instruction) -> bool:
        """Whether an instruction draws, makes or writes values that are those of the first time."""
        once, op = self.record.lifetimes.made_once, each.operator
        if op is None:
            return each.key != ENDS and not each.begins
        if each.draws or once.intersection(each.outs):
            return True
        return op._schema.is_mutable and any(self._equal.root(slot) in once for slot in each.written())

    def _note(self, values: Mapping[Slot, Any]) -> None:
        for slot, x in values.items():
            if isinstance(x, Tensor):
                self._tensors[x] = slot
            else:
                self._values[x] = slot

    def _equals(self, a: object, b: object) -> bool:
        """Whether arguments are equal: the same values, or equal views of the same."""
        return equal(self._first(a), self._first(b))

    def _first(self, value: Any) -> Any:
        if isinstance(value, Slot):
            return self._equal.first(value)
        return tuple([self._first(each) for each in value]) if isinstance(value, tuple) else value

    def _view(self, each: Instruction, out: Any) -> Any:
        is_unreal = each.args[0] in self.unreal
        for slot, x in each.values_of(out).items():
            self._tensors[x] = slot
            if is_unreal:
                self.unreal.add(slot)
        return out

    def _known_result(self, each: Instruction, args: Args) -> Any:
        """The results of an instruction, with their values where the run has kept them."""
        new = {*each.outs}
        with self._unrecorded():
            outs = [
                (self._stand_in(x) if x in new else self._operand(x, args)) if isinstance(x, Slot) else x
                for x in each.returned
            ]
        return outs if each.is_tuple else outs[0]

    def with_value(self, x: Tensor) -> Tensor:
        """A tensor with its value, of which nothing but the backward pass that runs has a part."""
        slot = self._tensors.get(local_of(x))
        if slot not in self.unreal:
            return x
        value = self.value(slot)
        return wrap(value, x._spec) if isinstance(x, Wrapper) else value

    @property
    def weights(self) -> dict[Slot, int]:
        """The slots of gathered weights, and which each is in its use."""
        return self.record.contents.gathered

    def _weight(self, slot: Slot) -> Tensor:
        """The value of a gathered weight, which the backward pass reads from the first use of it on."""
        if slot not in self._made:
            place, reader = self.weights[slot], self.record.contents.reader
            assert reader is not None
            with self._unrecorded():
                x = self._made[slot] = self._made[reader](place)
            self._tensors[x] = slot
            self.instructions.append(Instruction(_read_weight, (reader, place), (), (slot,), key="gathered weight"))
        return self._made[slot]  # type: ignore[no-any-return]

    def pack(self, x: Tensor) -> Tensor:
        """The value that autograd saves for `x` where weights are gathered."""
        return self.saved_with_value(x) if self.creates_graph and self._weight_of(x) is None else self.saved(x)

    def unpack(self, x: Tensor) -> Tensor:
        """The tensor that autograd saved: a gathered weight is gathered again now, as it would be without a record."""
        weight = self._weight_of(x)
        if weight is None:
            return x
        self._weight(weight)
        return self.with_value(x)

    def _weight_of(self, x: Tensor) -> Slot | None:
        """The gathered weight whose memory a tensor has."""
        slot = self._tensors.get(local_of(x))
        root = None if slot is None else self._equal.root(slot)
        return root if root in self.weights else None

    def saved(self, x: Tensor) -> Tensor:
        """A detached tensor for autograd to keep: an operator that saves its result would hold its own node."""
        with self._unrecorded():
            saved = x.detach()
        share(self, saved, x)
        return saved

    def saved_with_value(self, x: Tensor) -> Tensor:
        """A tensor with its value for autograd to keep in a graph that stays."""
        return self.saved(self.with_value(x))

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        within, self._within = self._within, True
        try:
            yield
        finally:
            self._within = within

    def _operand(self, slot: Slot, args: Any) -> Any:
        for x in pytree.tree_leaves(args):
            if isinstance(x, Tensor) and self._tensors.get(x) == slot:
                return x
        return self._stand_in(slot)

    def _stand_in(self, slot: Slot) -> Any:
        view = self.views[slot.number]
        if view is None and (known := self._kept(slot)) is not None:
            self._values[known] = slot
            return known
        if view is None:
            token = _Token()
            self._values[token] = slot
            self.unreal.add(slot)
            return token
        value = self._kept(slot)
        if value is None:
            self.unreal.add(slot)
            out = self._unread.like(view)
        else:
            out = aten.alias.default(value)
        self._tensors[out] = slot
        return out

    def let_go(self) -> None:
        """Drop the values that neither autograd has saved nor what it has saved, without values, is made of."""
        waiting = [slot for _, slot in self._tensors.items() if slot in self.unreal]
        waiting += [slot for slot in self._values.values() if slot in self.unreal]
        waiting += [slot for frame in self.frames for each in frame.taken[: frame.n_saved] for slot in reads(each)]
        needed, seen = set[int](), set[Slot]()
        while waiting:
            slot = waiting.pop()
            if slot in seen:
                continue
            seen.add(slot)
            if self._kept(slot) is not None:
                needed.add(self.record.lifetimes.at(slot).number)
            elif slot in self.record.contents.makers:
                waiting += reads(self.record.contents.makers[slot])
        self.values = [x if i in needed else None for i, x in enumerate(self.values)]

    def read_by(self, instructions: Iterable[Instruction], given: Iterable[Slot]) -> set[Slot]:
        """The slots that instructions read, and those `given` to others.

        Views read nothing, and who reads a view reads that of which it is one.
        """
        viewed = {slot: each for each in self.instructions if each.is_view for slot in each.outs}
        found, waiting = (
            set[Slot](),
            [*given, *(slot for each in instructions if not each.is_view for slot in reads(each))],
        )
        while waiting:
            slot = waiting.pop()
            if slot not in found:
                found.add(slot)
                waiting += reads(viewed[slot]) if slot in viewed else ()
        return found

    def operands_of(self, read: Iterable[Slot]) -> set[int]:
        """The numbers of the tensors that have these slots, or are read to make again what was not kept."""
        contents, life, numbers, seen = self.record.contents, self.record.lifetimes, set[int](), set[Slot]()
        waiting = [*read]
        while waiting:
            slot = waiting.pop()
            if slot in seen:
                continue
            seen.add(slot)
            root = self._equal.root(slot)
            if root in contents.sources:
                numbers.add(contents.sources[root])
            elif life.at(slot) not in life.kept and slot in contents.makers:
                waiting += reads(contents.makers[slot])
        return numbers

    def _kept(self, slot: Slot) -> Any:
        at = self.record.lifetimes.at(slot).number
        return self.values[at] if at < len(self.values) else None

    def _real(self, value: Any) -> Any:
        """An argument with the values of tensors that have none."""
        if isinstance(value, Tensor):
            slot = self._tensors.get(value)
            return self.value(slot) if slot in self.unreal else value
        if isinstance(value, _Token):
            return self.value(self._values[value])
        if isinstance(value, list | tuple):
            return type(value)([self._real(each) for each in value]) if type(value) in (list, tuple) else value
        return value

    def value(self, slot: Slot) -> Any:
        """The value of a slot of the forward pass: kept by the run, or made again of what it has kept."""
        value = self._kept(slot)
        if value is None:
            value = next((frame.made[slot] for frame in self.frames if slot in frame.made), None)
        if value is None and slot in self.weights:
            return self._weight(slot)
        if value is None and slot not in self._made:
            if self.record.lifetimes.at(slot) in self.record.lifetimes.lost:
                raise RuntimeError(LOST)
            each = self.record.contents.makers[slot]
            arguments = {read: self.value(read) for read in reads(each)}
            with self._unrecorded():
                self._made |= results_of(each, arguments)
        value = self._made[slot] if value is None else value
        if isinstance(value, Tensor) and value not in self._tensors:
            self._tensors[value] = slot
        return value


def inner_tensors(run: Run, derivation: Derivation, ctx: Context | None) -> dict[int, Any]:
    """The operands by number: those that get a gradient as aliases, of which autograd knows nothing else.

    With the context of the run's node they are connected to autograd's graph. Inputs that were let go have no values.
    """
    contents = run.record.contents
    inner: dict[int, Any] = {**contents.leaves, **dict(enumerate(run.inputs)), **run.late}
    distributed = {n: each for n, each in contents.let_go.items() if each.kind[0] is not Tensor}
    for n, (slot, _, kind) in contents.let_go.items():
        with derivation._unrecorded():
            x = derivation._stand_in(slot)
            inner[n] = run.inputs[n] = wrap(x, kind[1]) if n in distributed else x
    if ctx is not None:
        inner |= zip(contents.trained_of_let_go, ctx.saved_tensors, strict=True)
    for n, (slot, _, kind) in distributed.items():
        inner[n]._matmul = kind[3]
        derivation._tensors[local_of(inner[n])] = slot
    for n in contents.trained:
        inner[n] = _alias(inner[n], derivation, n not in contents.let_go, is_apart=ctx is None)
    return inner


def _alias(x: Any, derivation: Derivation, may_be_leaf: bool, *, is_apart: bool) -> Any:
    """An alias of `x` that needs a gradient: a leaf of autograd if it is apart."""
    with no_torch_function(), derivation._unrecorded():  # the class's own `requires_grad_` would have it reduced
        alias: Any = Tensor.requires_grad_(x.detach()) if is_apart else x.view_as(x)
    if isinstance(x, Wrapper):
        alias._matmul, alias._gradient_leaf = x._matmul, x._gradient_leaf
        with no_torch_function():  # of a leaf, as a gathered weight is none, matmuls keep no copy in another layout
            alias._leaf = may_be_leaf and (x.is_leaf if x._leaf is None else x._leaf)
    share(derivation, alias, x)
    return alias


def _to_write(x: Any, derivation: Derivation) -> Any:
    """A tensor that a call may write to in place of `x`, which autograd takes for a leaf, or for saved."""
    with no_torch_function(), derivation._unrecorded():
        copy = x.clone()
    share(derivation, copy, x)
    return copy


def _read_weight(read: Callable[[int], Tensor], place: int) -> Tensor:
    return read(place)


def run_again(run: Run, derivation: Derivation, inner: dict[int, Any], staged: StagedBackward | None = None) -> None:
    """Run the calls of a run again, on the tensors `inner`, to which it adds their results.

    For a backward pass in stages each call gets aliases of the results of others.
    """
    frames: dict[object, Frame] = {}
    of_module = inner.keys() - {*run.record.contents.trained}  # its own tensors, whose hooks are none of this pass
    for call in run.answered():
        derivation.number = -2
        derivation.taken = []
        frame, hooks = None, (derivation.pack, derivation.unpack) if derivation.weights else None
        if call.checkpoint is not None:
            frame = frames.setdefault(call.checkpoint, Frame(derivation))
            derivation.taken, hooks = frame.taken, (frame.pack, frame.unpack)
        operands = {n: inner[n] for n in call.refs}
        rewritten = {n: _to_write(x, derivation) for n, x in operands.items() if n in call.writes and x.requires_grad}
        inner.update(rewritten)
        derivation.begin_call(call)
        with _as_before(call), nullcontext() if hooks is None else saved_tensors_hooks(*hooks):
            args, kwargs = pytree.tree_map(
                lambda x: inner[x.number] if isinstance(x, Ref) else x, (call.args, call.kwargs), is_leaf=is_size
            )
            results = pytree.tree_leaves(run_eagerly(call.func, args, kwargs))
        made = dict[int, Any](rewritten)
        for ref, x in zip(call.outs, results, strict=True):
            if isinstance(ref, Ref):
                is_ready(x)
            if isinstance(ref, Ref) and ref.number not in inner:
                inner[ref.number] = made[ref.number] = x
                if isinstance(x, Wrapper) and x._spec is not run.record.contents.made[ref.number].kind[1]:
                    raise RuntimeError(f"{call.name} at {call.line} gives another layout when it runs again")
        if staged is not None:
            with no_torch_function():
                made = {n: x for n, x in made.items() if x.requires_grad}
            with derivation._unrecorded():
                staged.add_call(made, {n: x for n, x in operands.items() if n not in of_module})
            inner.update({n: _alias(x, derivation, True, is_apart=True) for n, x in made.items()})


@contextmanager
def _as_before(call: RecordedCall) -> Iterator[None]:
    """Within the block, the state of a call."""
    count_as_replicated(int(call.within), forward=call.within)
    position = PLANNED.position()
    PLANNED.put(*call.forward.before)
    try:
        with ExitStack() as stack:
            stack.enter_context(settings_restored(call.settings.states))
            if call.settings.kernels != attention_kernels():
                stack.enter_context(sdpa_kernel([*call.settings.kernels]))
            stack.enter_context(torch.set_grad_enabled(call.grad))
            for device, dtype, cached in call.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
            yield
    finally:
        PLANNED.put(*position)
        count_as_replicated(-int(call.within), forward=call.within)


def share(derivation: Derivation, alias: Any, x: Any) -> None:
    """Let the local tensor of an alias have the slot of the tensor's own."""
    local = local_of(alias)
    if local is not local_of(x):
        derivation._tensors[local] = derivation.slot_of(local_of(x))
