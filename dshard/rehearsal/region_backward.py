"""The backward pass of a rehearsed module: a program for each pattern of gradients that arrives.

A pattern that is met first is derived: the calls run again under autograd, on aliases of the module's own tensors, but
what their local operators give is taken from the run, so that nothing is sent, drawn or computed twice. What the inner
backward pass then runs is recorded, and is the program of later passes. Gradients of the module's own tensors are given
to autograd as they arise, often partial sums: the hooks of the leaves reduce them, as those of eager passes, so that
all ranks send the same, whatever each of them has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dshard.autograd.accumulation import accumulating
from dshard.comm import ENDS, publish_failure, recording_calls
from dshard.core.context import settings_in_force, settings_restored
from dshard.core.observe import OperatorMode
from dshard.core.plain_tensors import count_as_replicated
from dshard.core.signature import Args, Kwargs
from dshard.core.spec import is_for_shapes
from dshard.core.wrapper import Wrapper, wrap
from dshard.rehearsal.calls import Call, Ref, is_ready, local_of
from dshard.rehearsal.code import Code, filled, variable
from dshard.rehearsal.leaf_arrivals import Arrival, within_backward_pass
from dshard.rehearsal.local_recorder import VIEWS_IF_POSSIBLE, Instruction, LocalRecorder, Slot, equal
from dshard.rehearsal.record import FILE, Record, begins
from dshard.rehearsal.region import Run
from dshard.rehearsal.region_recording import has_state
from dshard.rehearsal.session import run_eagerly
from dshard.rehearsal.simplified import only_of, reads, simplified
from dshard.torch_private import OpOverload, keeps_graph, no_torch_function, pytree

aten = torch.ops.aten
MAX_PATTERNS = 8
OVERWRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{}, of a rehearsed module; write to it before the forward pass uses it, or after the backward pass, or to a copy"
)
LOST = (
    "the backward pass of a rehearsed module reads a value that was not kept, and cannot be made again: "
    "run the module `with dshard.rehearsing(False):`"
)
TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already been "
    "freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors "
    "after calling backward."
)


class Pattern(NamedTuple):
    """What a backward program depends on: the calls answered, and the gradients that arrived, by place."""

    n_answered: int
    reduces: bool
    grads: tuple[tuple[int, object, tuple[int, ...]], ...]
    settings: tuple[object, ...]
    accumulates: bool


class Program(NamedTuple):
    """The backward pass of a pattern: `run(values, own, grads)` gives the local gradients of `specs`.

    It reads the forward values in `slots`, of which those in `fresh` were never written to within the module, the
    operands `reads`, by number; `code` is its source.
    """

    run: Callable[..., Sequence[Any]]
    specs: list[Any]
    fresh: tuple[int, ...]
    slots: frozenset[Slot]
    reads: frozenset[int]
    code: str


def gradients(run: Run, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the operands of a run.

    Raises:
        RuntimeError: what they are computed of was freed, or written to.
    """
    record = run.record
    if not run.values:
        raise RuntimeError(TWICE)
    given = [i for i, grad in enumerate(grads) if grad is not None]
    arrived: list[Any] = [grads[i] for i in given]
    if torch.is_grad_enabled():
        _check_versions(run, record.read)
        return _recomputed(run, given, arrived)
    if run.hooks:
        _check_versions(run, record.read)
        return _derived(run, None, given, arrived)
    locals_ = [local_of(grad) for grad in arrived]
    pattern = Pattern(
        run.n_answered,
        run.reduces,
        tuple(
            (i, grad._spec if isinstance(grad, Wrapper) else None, local.stride())
            for i, grad, local in zip(given, arrived, locals_, strict=True)
        ),
        tuple(settings_in_force()),
        accumulating() or any(leaf.has_partial_sum for leaf in record.gradient_leaves),
    )
    program = next((known for key, known in record.programs if key == pattern), None)
    if program is None:
        return _derived(run, pattern, given, arrived)
    _check_versions(run, program.reads)
    for number in program.fresh:
        if run.values[number]._version:
            raise RuntimeError(OVERWRITTEN.format(tuple(run.values[number].shape)))
    if run.overwritten:
        _check_overwritten(run, program.slots)
    values = run.values
    if keeps_graph():
        values = values.copy()
    else:
        run.values = []
    if len(run.fixed.values) < record.n_slots:
        run.fixed.extend(record)
    del grads, arrived
    record.n_programs_run += 1
    try:
        outs = program.run(values, run.fixed.values, locals_)
    except Exception as error:
        publish_failure(error, record.ranks)
        raise
    return [
        None if x is None else x if spec is None else wrap(x, spec) for x, spec in zip(outs, program.specs, strict=True)
    ]


def _check_versions(run: Run, numbers: Iterable[int]) -> None:
    with no_torch_function():
        for n in numbers:
            x, version = run.versions.get(n, _UNKNOWN)
            if x is not None and x._version != version:
                raise RuntimeError(OVERWRITTEN.format(tuple(x.shape)))


_UNKNOWN: tuple[Tensor | None, int] = (None, 0)


def _check_overwritten(run: Run, slots: Iterable[Slot]) -> None:
    for slot in slots:
        x = run.values[slot.number]
        if isinstance(x, Tensor) and x.untyped_storage()._cdata in run.overwritten:
            raise RuntimeError(OVERWRITTEN.format(tuple(x.shape)))


# -- the calls once more


class _Token:
    """Stands for a collective that has begun in the forward pass."""


class Frame:
    """The calls of one checkpoint: the instructions `taken`, of which `n_saved` ran before it saved its last tensor."""

    def __init__(self, derivation: Derivation) -> None:
        self.derivation, self.n_saved, self.has_run = derivation, 0, False
        self.taken: list[Instruction] = derivation.taken

    def pack(self, x: Tensor) -> Tensor:
        """Note that a tensor is saved."""
        self.n_saved = len(self.taken)
        with self.derivation._unrecorded():
            saved = x.detach()  # an operator that saves its result would hold its own node
        _share(self.derivation, saved, x)
        return saved

    def unpack(self, x: Tensor) -> Tensor:
        """The saved tensor; before the first the calls run again."""
        if not self.has_run:
            self.has_run = True
            self.derivation.run_frame(self)
        return x


class Derivation(LocalRecorder):
    """Runs calls again with the results that their local operators had in a run; then records the backward pass.

    Slots are those of the record, and go on where it ends. `unreal` are the slots of tensors without their values.
    """

    def __init__(self, run: Run, *, is_real: bool = False) -> None:
        super().__init__()
        record = run.record
        self.record, self.values, self.is_real = record, run.values, is_real
        self.views = [*record.views] + [None] * (record.n_slots - len(record.views))
        self._addresses = [0] * len(self.views)
        self.n_forward = len(self.views)
        self.expected: list[Instruction] = []
        self._of_call: list[Instruction] = []  # those of the running call that were taken
        self.is_backward = False
        self.unreal = set[Slot]()
        self.taken: list[Instruction] = []
        self._made: dict[Slot, Any] = {}
        self.again = set[Slot]()  # made by calls of checkpoints
        self._roots: dict[Slot, Slot] = {}
        self._equal: dict[tuple[Slot, object], Slot] = {}  # the slots of views, by the memory and how they lie in it
        for each in record.makers.values():
            self._note_views(each)
        own = dict(zip(record.leaves, run.fixed.locals, strict=True))
        for slot, n in record.sources.items():
            x = own.get(n)
            if x is None:
                x = self.values[slot.number]
            if isinstance(x, Tensor):
                self._tensors[x] = slot
        for slot, x in record.literals.items():
            self._tensors[x] = slot

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
            literal = next((each for each in self.expected if each.args and each.args[0] in self.record.literals), None)
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
                return self._known_result(each, args, kwargs)
        args, kwargs = self._real(args), {name: self._real(value) for name, value in kwargs.items()}
        out, n = super().run(func, args, kwargs), len(self.instructions)
        if n and not self.is_backward:
            self._note_views(self.instructions[-1])
        return out

    def call(self, key: object, function: Callable[..., Any], *args: object) -> Any:
        """Call a function: what it gave in the run, or, in the backward pass, record it."""
        if self._within or is_for_shapes():
            return function(*args)
        if not self.is_backward:
            each = self._take(key, self._recorded(args), (), by_key=True)
            if each is not None:
                return self._known_result(each, args)
        return super().call(key, function, *self._real(args))

    def _note_views(self, each: Instruction) -> None:
        if each.is_view:
            root = self._roots.get(each.args[0], each.args[0])
            for slot in each.outs:
                if slot is not None:
                    self._roots[slot] = root
                    self._equal.setdefault((root, self.views[slot.number]), slot)

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

    def begin_call(self, call: Call) -> None:
        """Run the operators of `call` from now on."""
        self.expected, self._of_call = [*call.instructions], []

    def run_frame(self, frame: Frame) -> None:
        """Run the calls of a checkpoint again, up to what it saved last, as torch does before it gives what it saved.

        Random numbers are those of the first time.
        """
        for each in frame.taken[: frame.n_saved]:
            if self._is_of_first_time(each):
                continue
            arguments = {slot: self.value(slot, again=True) for slot in reads(each)}
            kwargs = {name: filled(x, arguments) for name, x in each.kwargs}
            with self._unrecorded():
                out = each.function(*filled(each.args, arguments), **kwargs)
            self._keep(each, out)
            self.again.update(slot for slot in each.outs if slot is not None)
            self.instructions.append(each)

    def _is_of_first_time(self, each: Instruction) -> bool:
        """Whether an instruction draws, makes or writes values that are those of the first time."""
        once, op = self.record.made_once, each.operator
        if op is None:
            return each.key != ENDS and not begins(each)
        if torch.Tag.nondeterministic_seeded in op.tags or once.intersection(each.outs):
            return True
        return op._schema.is_mutable and any(self._roots.get(slot, slot) in once for slot in each.written())

    def _keep(self, each: Instruction, out: Any) -> None:
        for slot, x in zip(each.outs, out if each.is_tuple else (out,), strict=True):
            if slot is not None:
                self._made[slot] = x
                if isinstance(x, Tensor):
                    self._tensors[x] = slot
                else:
                    self._values[x] = slot

    def _equals(self, a: object, b: object) -> bool:
        """Whether arguments are equal: the same values, or equal views of the same."""
        return equal(self._first(a), self._first(b))

    def _first(self, value: Any) -> Any:
        if isinstance(value, Slot):
            return self._equal.get((self._roots.get(value, value), self.views[value.number]), value)
        return tuple([self._first(each) for each in value]) if isinstance(value, tuple) else value

    def _view(self, each: Instruction, out: Any) -> Any:
        is_unreal = each.args[0] in self.unreal
        for slot, x in zip(each.outs, out if each.is_tuple else (out,), strict=True):
            if slot is not None:
                self._tensors[x] = slot
                if is_unreal:
                    self.unreal.add(slot)
        return out

    def _known_result(self, each: Instruction, args: Args, kwargs: Kwargs | None = None) -> Any:
        """What an instruction gave: tensors of its results, with their values where the run has kept them."""
        new = {*each.outs}
        if self.is_real and not self._is_kept(each):
            return self._run_really(each, args, kwargs or {})
        with self._unrecorded():
            outs = [
                (self._stand_in(x) if x in new else self._operand(x, args)) if isinstance(x, Slot) else x
                for x in each.returned
            ]
        return outs if each.is_tuple else outs[0]

    def _is_kept(self, each: Instruction) -> bool:
        """Whether the values that an instruction made, or wrote to, are those after the run."""
        made = [slot for slot in each.outs if slot is not None]
        ends = [slot for begun in made for slot in self.record.ended_in.get(begun, ())]
        if each.key == ENDS:
            ends = [slot for slot in each.returned if isinstance(slot, Slot)]
        if made or ends:
            return all(self._kept(slot) is not None for slot in ends or made)
        written = each.written() if each.operator is not None else [*reads(each)]
        return not any(self._roots.get(slot, slot) in self._made for slot in written)

    def _run_really(self, each: Instruction, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs = self._real(args), {name: self._real(value) for name, value in kwargs.items()}
        with self._unrecorded():
            out = each.function(*args, **kwargs)
        self._keep(each, out)
        return out

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
            out = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device=view.device)
        else:
            out = aten.alias.default(value)
        self._tensors[out] = slot
        return out

    def _kept(self, slot: Slot) -> Any:
        at = self.record.at(slot).number
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

    def value(self, slot: Slot, *, again: bool = False) -> Any:
        """The value of a slot of the forward pass: kept by the run, or made again of what it has kept."""
        value = None if again and slot in self._made else self._kept(slot)
        if value is None and slot not in self._made:
            if self.record.at(slot) in self.record.lost:
                raise RuntimeError(LOST)
            each = self.record.makers[slot]
            arguments = {read: self.value(read) for read in reads(each)}
            kwargs = {name: filled(x, arguments) for name, x in each.kwargs}
            with self._unrecorded():
                out = each.function(*filled(each.args, arguments), **kwargs)
            for made, x in zip(each.outs, out if each.is_tuple else (out,), strict=True):
                if made is not None:
                    self._made[made] = x
        value = self._made[slot] if value is None else value
        if isinstance(value, Tensor) and value not in self._tensors:
            self._tensors[value] = slot
        return value


def _inner_tensors(run: Run, *, create: bool) -> dict[int, Any]:
    """The operands by number: those that get a gradient as aliases, of which autograd knows nothing else."""
    record = run.record
    inner: dict[int, Any] = {**record.leaves, **dict(enumerate(run.inputs)), **run.late}
    for n in record.trained:
        x: Any = inner[n]
        with no_torch_function():  # the class's own `requires_grad_` would have the gradient reduced
            alias: Any = x.view_as(x) if create else Tensor.requires_grad_(x.detach())
        if isinstance(x, Wrapper):
            alias._matmul, alias._leaf, alias._gradient_leaf = x._matmul, x._leaf, x._gradient_leaf
        inner[n] = alias
    return inner


def _run_again(run: Run, derivation: Derivation, inner: dict[int, Any]) -> None:
    """Run the calls of a run again, on the tensors `inner`, to which it adds their results."""
    having_state = [call.args[0] for call in run.answered() if has_state(call.func, call.args)]
    with ExitStack() as stack:
        for group in {id(x): x for x in having_state}.values():
            stack.enter_context(group.apart())
        _run_calls(run, derivation, inner)


def _run_calls(run: Run, derivation: Derivation, inner: dict[int, Any]) -> None:
    frames: dict[int, Frame] = {}
    for call in run.answered():
        derivation.number = -2
        derivation.taken = []
        frame = None
        if call.checkpoint is not None and not derivation.is_real:
            frame = frames.setdefault(id(call.checkpoint), Frame(derivation))
            derivation.taken = frame.taken
        derivation.begin_call(call)
        with _as_before(call), nullcontext() if frame is None else saved_tensors_hooks(frame.pack, frame.unpack):
            args, kwargs = pytree.tree_map(
                lambda x: inner[x.number] if isinstance(x, Ref) else x, (call.args, call.kwargs)
            )
            results = pytree.tree_leaves(run_eagerly(call.func, args, kwargs))
        for ref, x in zip(call.outs, results, strict=True):
            if isinstance(ref, Ref):
                is_ready(x)
            if isinstance(ref, Ref) and ref.number not in inner:
                inner[ref.number] = x
                if isinstance(x, Wrapper) and x._spec is not run.record.made[ref.number][1]:
                    raise RuntimeError(f"{call.name} at {call.line} gives another layout when it runs again")


@contextmanager
def _as_before(call: Call) -> Iterator[None]:
    """Within the block, the state of a call."""
    count_as_replicated(int(call.within), forward=call.within)
    try:
        with ExitStack() as stack:
            stack.enter_context(settings_restored(call.states))
            stack.enter_context(torch.set_grad_enabled(call.grad))
            for device, dtype, cached in call.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
            yield
    finally:
        count_as_replicated(-int(call.within), forward=call.within)


def _derived(run: Run, pattern: Pattern | None, given: Sequence[int], grads: Sequence[Any]) -> list[Tensor | None]:
    """The gradients of a pattern without a program, which is made of them; None: hooks wait for gradients within."""
    record = run.record
    derivation = Derivation(run)
    record.n_derived += 1
    with recording_calls(derivation), OperatorMode(derivation.run), torch.enable_grad():
        inner = _inner_tensors(run, create=False)
        for n in record.trained:
            _share(derivation, inner[n], record.leaves.get(n, run.inputs[n] if n < record.n_inputs else None))
        _run_again(run, derivation, inner)
        for n, hook in run.hooks.values():
            if n in inner:
                inner[n].register_hook(hook)
        arrived: dict[int, Slot] = {}
        for n in record.trained if run.reduces else ():
            x = record.leaves.get(n)
            if isinstance(x, Wrapper) and x._gradient_leaf is not None and not run.uses_later(n):
                with no_torch_function():
                    inner[n].register_hook(partial(_arrive, derivation, arrived, n, x))
        outs = [inner[record.needing[i]] for i in given]
        derivation.is_backward, derivation.expected = True, []
        grad_slots = {derivation.slot_of(local_of(grad)): i for i, grad in enumerate(grads)}
        with torch.no_grad():
            found = torch.autograd.grad(outs, [inner[n] for n in record.trained], grads, allow_unused=True)
        slots = [
            arrived[n] if n in arrived else None if x is None else derivation.slot_of(local_of(x))
            for n, x in zip(record.trained, found, strict=True)
        ]
    specs = [
        x._spec if isinstance(x, Wrapper) and n not in arrived else None
        for n, x in zip(record.trained, found, strict=True)
    ]
    _check_overwritten(
        run,
        {record.at(slot) for each in derivation.instructions for slot in reads(each) if slot.number < len(run.values)},
    )
    if pattern is not None and not derivation.why_not and len(record.programs) < MAX_PATTERNS:
        program = _program(record, derivation, grad_slots, slots, specs)
        if isinstance(program, str):
            record.why_not = program
        else:
            record.add_program(pattern, program)
            _check_versions(run, program.reads - record.counted)
    else:
        record.why_not = derivation.why_not or record.why_not
    if not keeps_graph():
        run.values = []
    return list(found)


def _arrive(derivation: Derivation, arrived: dict[int, Slot], n: int, x: Wrapper, grad: Any) -> Any:
    """The hook of an alias of the leaf `x`: its gradient is reduced now, and in each later pass at this place."""
    if not isinstance(grad, Wrapper) or "_local_tensor" not in grad.__dict__:
        return None
    if grad._spec.layout is x._gradient_leaf.layout:
        return None
    arrival = Arrival(x, grad._spec)
    arrived[n] = derivation.add_call(("leaf", n), arrival, grad._local_tensor)
    with derivation._unrecorded(), within_backward_pass():
        return arrival.reduced(grad._local_tensor)


def _share(derivation: Derivation, alias: Any, x: Any) -> None:
    """Let the local tensor of an alias have the slot of the tensor's own."""
    local = local_of(alias)
    if local is not local_of(x):
        derivation._tensors[local] = derivation.slot_of(local_of(x))


def _recomputed(run: Run, given: Sequence[int], grads: Sequence[Any]) -> list[Tensor | None]:
    """The gradients by autograd of the calls, which are run again on the module's own tensors: a graph is created."""
    record = run.record
    derivation = Derivation(run, is_real=True)
    record.n_derived += 1
    with torch.enable_grad():
        inner = _inner_tensors(run, create=True)
        with recording_calls(derivation), OperatorMode(derivation.run):
            for n in record.trained:
                _share(derivation, inner[n], record.leaves.get(n, run.inputs[n] if n < record.n_inputs else None))
            _run_again(run, derivation, inner)
        for n, hook in run.hooks.values():
            if n in inner:
                inner[n].register_hook(hook)
    outs = [inner[record.needing[i]] for i in given]
    found = torch.autograd.grad(outs, [inner[n] for n in record.trained], grads, create_graph=True, allow_unused=True)
    if not keeps_graph():
        run.values = []
    return list(found)


# -- programs


def _program(
    record: Record,
    derivation: Derivation,
    grad_slots: Mapping[Slot, int],
    results: Sequence[Slot | None],
    specs: list[Any],
) -> Program | str:
    """The program of a recorded backward pass, or why there is none."""
    n_forward = derivation.n_forward
    stored = record.kept | record.fixed_slots | set(record.sources) | set(record.literals)
    instructions, again = list[Instruction](), set[int]()
    external = {slot for slot in derivation.externals if slot not in grad_slots and slot not in derivation.literals}
    if external:
        return "the backward pass reads a tensor that nothing has made"

    def provide(slot: Slot) -> str:
        if slot.number >= n_forward or record.at(slot) in stored or slot in derivation.again:
            return ""
        each = record.makers.get(slot)
        if each is None or record.at(slot) in record.written:
            return "the backward pass reads a value that cannot be made again"
        if id(each) not in again:
            again.add(id(each))
            for read in reads(each):
                why = provide(read)
                if why:
                    return why
            instructions.append(each)
        return ""

    for each in derivation.instructions:
        for slot in reads(each):
            why = provide(slot)
            if why:
                return why
        instructions.append(each)
    instructions = [_renamed(each, record, derivation.again) for each in instructions]
    wanted = [record.at(slot) for slot in results if slot is not None]
    instructions, same = simplified(SimpleNamespace(instructions=instructions, views=derivation.views), wanted)
    results = [None if slot is None else same.get(record.at(slot), record.at(slot)) for slot in results]
    fixed = record.fixed_slots | set(derivation.literals)
    once = only_of(fixed, instructions)
    rest = [each for each in instructions if not any(each is other for other in once)]
    known = fixed | {out for each in once for out in each.outs if out is not None}
    record.literals |= derivation.literals
    record.once += once
    record.n_slots = len(derivation.views)
    made = {out for each in rest for out in each.outs if out is not None}
    lines, code = _lines(rest, results, known, made, grad_slots)
    run, source = code.function("backward", "v, w, g", lines, FILE)
    read = {slot for each in rest for slot in reads(each)} | {slot for slot in results if slot is not None}
    read = {slot for slot in read if slot not in made and slot not in grad_slots}
    viewed = {out: each.args[0] for each in record.once for out in each.outs if out is not None}
    numbers = set[int]()
    for slot in read:
        while slot in viewed:
            slot = viewed[slot]
        if slot in record.sources:
            numbers.add(record.sources[slot])
    values = {slot for slot in read if slot not in known}
    fresh = [s.number for s in values if s in record.maker and record.maker[s] >= 0 and s in record.new_memory]
    return Program(run, specs, tuple(fresh), frozenset(values), frozenset(numbers), source)


def _renamed(each: Instruction, record: Record, again: set[Slot]) -> Instruction:
    """An instruction that reads the values which stand for others in the record, unless they are made `again`."""

    def at(value: Any) -> Any:
        if isinstance(value, Slot):
            return value if value in again else record.at(value)
        return tuple([at(x) for x in value]) if isinstance(value, tuple) else value

    return each.with_arguments(at(each.args), tuple((name, at(value)) for name, value in each.kwargs))


def _lines(
    instructions: Sequence[Instruction],
    results: Sequence[Slot | None],
    known: set[Slot],
    made: set[Slot],
    grad_slots: Mapping[Slot, int],
) -> tuple[list[str], Code]:
    """The lines of a backward program: each value is freed after its last use, also those of the forward pass."""

    def place(slot: Slot) -> str:
        if slot in made or slot in grad_slots:
            return variable(slot)
        return f"w[{slot.number}]" if slot in known else f"v[{slot.number}]"

    code = Code(place)
    lines = [f"{variable(slot)} = g[{i}]" for slot, i in grad_slots.items()]
    lines.append("g.clear()")
    last: dict[Slot, int] = {}
    for i, each in enumerate(instructions):
        for slot in (*reads(each), *(out for out in each.outs if out is not None)):
            last[slot] = i
    ends: dict[int, list[Slot]] = {}
    for slot, i in last.items():
        if slot not in results and slot not in known:
            ends.setdefault(i, []).append(slot)
    for i, each in enumerate(instructions):
        lines.append(code.line(each))
        own = [variable(slot) for slot in ends.get(i, ()) if slot in made or slot in grad_slots]
        if own:
            lines.append(f"del {', '.join(own)}")
        lines += [f"{place(slot)} = None" for slot in ends.get(i, ()) if slot not in made and slot not in grad_slots]
    roots: dict[Slot, Slot] = {}
    for each in instructions:
        if each.is_view:
            roots |= {out: roots.get(each.args[0], each.args[0]) for out in each.outs if out is not None}
    seen, texts = set[Slot](), list[str]()
    code.names["own"] = _own
    for result in results:
        if result is None:
            texts.append("None")
            continue
        root = roots.get(result, result)
        shares = root in seen or root not in made  # a leaf may keep it, and write to it
        seen.add(root)
        texts.append(f"own({place(result)})" if shares else place(result))
    lines.append(f"return [{', '.join(texts)}]")
    return lines, code


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
