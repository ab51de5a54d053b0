"""Replay steps: what a step of local operators and collectives does, without the Python that says so.

`step_recorder` records a step below autograd and distributed tensors, `step_program` makes a function of the recording,
and `step_state` says whether what the step depends on is as it was.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from dshard.autograd.accumulation import accumulating
from dshard.comm import RECORDERS, comparing, publish_failure, recording_calls, simulated_ranks
from dshard.comm.events import LISTENERS
from dshard.core.comparisons import nothing_compared
from dshard.core.context import settings_in_force
from dshard.core.observe import CALL_LOG, OBSERVERS, OperatorMode
from dshard.core.wrapper import Wrapper, wrap
from dshard.replay.step_program import StepProgram, simplified, written_by
from dshard.replay.step_recorder import Slot, StepRecorder
from dshard.replay.step_state import Entry, StepState, changed, is_plain
from dshard.torch_private import (
    dispatch_mode,
    increment_version,
    is_autocasting,
    is_transforming,
    n_dispatch_modes,
    no_torch_function,
    pytree,
)
from dshard.validate import check_callable

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCASTS = ("cpu", "cuda")
_KEPT, _TRIES, _PAUSE = 8, 4, 100
"""Keys of which something is kept; recordings of a step before it is left to Python, and calls until the next."""


def replay(step: Callable[P, R]) -> Replay[P, R]:
    """Run a training step again and again without its Python: record it once, then replay its operators.

    `step` takes distributed and plain tensors, numbers and texts, and runs forward and backward passes, an optimiser,
    or any other operators. Its first call runs by Python, two more are recorded; if both did the same, later calls run
    the local operators and collectives of the recording: no module, no autograd, no distributed tensors between them.
    Results, gradients, buffers and random numbers are those of the step, to the bit.

        @dshard.replay
        def step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

    A call runs by Python where a recording would not hold, and is recorded anew: for arguments of other shapes, layouts
    or dtypes; another topology, strategy, autocast or mode of gradients; settings of modules and of optimisers, and
    variables of `step`, that changed; and parameters that were replaced. So does every call within `trace`, `strict`,
    `explain` or a mode of torch, and with `DSHARD_DEBUG=1`, or on simulated ranks.

    Some steps cannot be replayed: those that read a number on the host (`.item()`, a Python `if` on a tensor, an
    optimiser that counts its steps there: give it `fused=True` or `capturable=True`, or leave it outside), that differ
    from one call to the next, or return a tensor whose backward pass is yet to run. They run by Python, and `why_not`
    says why. Python that a replay cannot see must not matter to the step: a `print`, a list that is appended to, the
    file a batch is read from; and kernels that are no operators of torch (numpy's, those without `torch.library`).

    Raises:
        ArgumentError: `step` cannot be called.
    """
    check_callable(step, "replay", "give a function that runs one step")
    return Replay(step)


class _Leaf(NamedTuple):
    """A tensor whose gradient a step changes: an argument by its number, or one that the step refers to."""

    number: int | None
    tensor: Tensor | None

    def of(self, call: _Call) -> Tensor:
        """The tensor in a call."""
        x = self.tensor if self.number is None else call.tensors[self.number]
        assert x is not None
        return x


class _Call:
    """The arguments of a call: their structure, the tensors among them, and the key of recordings that may hold."""

    def __init__(self, args: object, kwargs: object) -> None:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = [x for x in leaves if isinstance(x, Tensor)]
        self.values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.locals = [x._local_tensor if isinstance(x, Wrapper) else x for x in self.tensors]
        self.autocast = [each for each in _AUTOCASTS if torch.is_autocast_enabled(each)] if is_autocasting() else []
        self.key = (
            structure,
            self.values,
            [_described(x, local) for x, local in zip(self.tensors, self.locals, strict=True)],
            [[x is y for y in self.tensors[:i]] for i, x in enumerate(self.tensors)],
            settings_in_force(),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), accumulating(), torch.get_default_dtype()),
            [(each, torch.get_autocast_dtype(each)) for each in self.autocast],
            torch.are_deterministic_algorithms_enabled(),
        )

    def why_not(self) -> str:
        """Why no step with these arguments can be replayed; empty if one may be."""
        if not all(map(is_plain, self.values)):
            return "an argument is neither a tensor nor a number or a text"
        if any(not x.is_leaf for x in self.tensors):
            return "a gradient passes through the step to the operators before it: give it x.detach()"
        if any(isinstance(x, Wrapper) and x._view_sync is not None for x in self.tensors):
            return "an argument is a view that shares its values with a copy"
        return ""


def _described(x: Tensor, local: Tensor) -> tuple[object, ...]:
    layout = x._spec if isinstance(x, Wrapper) else None
    how = (local.shape, local.stride(), local.dtype, local.device, x.is_conj())
    return (type(x), layout, *how, x.requires_grad, _kind_of(x.grad) if x.requires_grad and x.is_leaf else None)


def _kind_of(grad: Tensor | None) -> object:
    """What of a gradient decides how the next one is added to it."""
    return None if grad is None else grad._spec if isinstance(grad, Wrapper) else (grad.shape, grad.dtype)


class _Recording(NamedTuple):
    """One run of a step: its instructions, its result, the gradients that it changed, and the state it ran in.

    `results` are the slots of the local tensors of its result, or values of Python; `specs` those of distributed
    tensors. `grads` has the slot and the spec of each new gradient of a leaf. `sources` say where the external tensors
    come from.
    """

    recorder: StepRecorder
    structure: Any
    results: list[Any]
    specs: list[Any]
    leaves: list[_Leaf]
    grads: list[tuple[Slot | None, Any]]
    entries: list[Entry]
    sources: dict[Slot, tuple[str, Any]]
    grads_before: list[tuple[Tensor, object]]


_KEPT_GRAD, _NO_GRAD = "kept", "none"


class _Program:
    """A recording that was seen twice, as a function of the tensors of a call."""

    def __init__(self, recording: _Recording) -> None:
        self.structure, self.results, self.specs = recording.structure, recording.results, recording.specs
        self.leaves, self.grads, self.entries = recording.leaves, recording.grads, recording.entries
        externals = recording.recorder.externals
        slots = [slot for slot in self.results if isinstance(slot, Slot)]
        grads = [slot for slot, _ in self.grads if slot is not None]
        instructions, stands_for = simplified(recording.recorder, [*slots, *grads])
        of_kind = {
            kind: {slot: source for slot, (each, source) in recording.sources.items() if each == kind}
            for kind in ("owned", "literal", "constant", "argument", "grad")
        }
        fixed = {slot: externals[slot] for slot in (*of_kind["owned"], *of_kind["literal"])}
        others = {slot: source for slot, source in recording.sources.items() if slot not in fixed}
        results = [stands_for.get(slot, slot) for slot in (*slots, *grads)]
        self.step = StepProgram(instructions, results, fixed, {*others})
        self._inputs = [
            ("constant", weakref.ref(externals[slot])) if kind == "constant" else (kind, source)
            for slot in self.step.inputs
            for kind, source in [others[slot]]
        ]
        self._uses_grads = {source for kind, source in self._inputs if kind == "grad"}
        self._n_results = len(slots)
        owned = [(owner, externals[slot]) for slot, owner in of_kind["owned"].items()]
        self._owned = [(owner, local, local.data_ptr()) for owner, local in owned]
        written = written_by(instructions)
        self._written = [owner for slot, owner in of_kind["owned"].items() if slot in written]
        self._written_arguments = [i for slot, i in of_kind["argument"].items() if slot in written]
        self._ranks = tuple(recording.recorder.ranks)

    def why_stale(self) -> str:
        """What changed since the recording; empty if nothing did."""
        with no_torch_function():
            name = changed(self.entries)
        if name:
            return f"{name} has changed"
        for owner, local, address in self._owned:
            held = owner.__dict__.get("_local_tensor") if isinstance(owner, Wrapper) else owner
            if held is not local or local.data_ptr() != address:
                return f"a tensor of shape {tuple(owner.shape)} was replaced"
        if any(kind == "constant" and source() is None for kind, source in self._inputs):
            return "a tensor that the step made before is gone"
        return ""

    def run(self, call: _Call) -> Any:
        """Run the step: its result, with the gradients in place."""
        leaves = [leaf.of(call) for leaf in self.leaves]
        inputs = [self._input(kind, source, call, leaves) for kind, source in self._inputs]
        for i, (x, (_, how)) in enumerate(zip(leaves, self.grads, strict=True)):
            if how != _KEPT_GRAD and i not in self._uses_grads:
                x.grad = None  # so that its memory is free
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for device in call.autocast:
                    stack.enter_context(torch.autocast(device, enabled=False))
                outs = self.step.run(*inputs)
        except Exception as error:
            publish_failure(error, self._ranks)
            raise
        written = [*self._written, *(call.tensors[i] for i in self._written_arguments)]
        written = [x for x in written if isinstance(x, Wrapper)]  # others have counted the writes themselves
        if written:
            increment_version(written)
        made = iter(outs[self._n_results :])
        for x, (slot, how) in zip(leaves, self.grads, strict=True):
            if slot is not None:
                local = next(made)
                x.grad = local if how is None else wrap(local, how)
            elif how == _NO_GRAD:
                x.grad = None
        return self._result(outs)

    @staticmethod
    def _input(kind: str, source: Any, call: _Call, leaves: Sequence[Tensor]) -> Any:
        if kind == "argument":
            return call.locals[source]
        if kind == "grad":
            grad = leaves[source].grad
            assert grad is not None
            return _local(grad)
        return source()

    def _result(self, outs: tuple[Any, ...]) -> Any:
        given, results = iter(outs), list[Any]()
        for result, spec in zip(self.results, self.specs, strict=True):
            local = next(given) if isinstance(result, Slot) else result
            results.append(wrap(local, spec) if spec is not None else local)
        return pytree.tree_unflatten(results, self.structure)


class _Known:
    """What is known of a step with arguments of one key and gradients of one kind."""

    def __init__(self, key: object, calls_before: int) -> None:
        self.key = key
        self.grads: list[tuple[Tensor, object]] = []  # of the leaves that the step refers to, before it
        self.calls_before = calls_before
        self.tries = 0
        self.last: _Recording | None = None
        self.program: _Program | None = None
        self.why_not = "the first call runs by Python"

    def give_up(self, why: str) -> None:
        """Leave the step to Python for many calls: it cannot be replayed as it is."""
        self.calls_before, self.tries, self.last, self.why_not = _PAUSE, 0, None, why


class Replay(Generic[P, R]):
    """A step that is recorded, and replayed: see `replay`.

    Attributes:
        calls: Calls so far.
        replays: Those that ran no Python of the step.
        why_not: Why the last call was not a replay; empty if it was.
    """

    def __init__(self, step: Callable[P, R]) -> None:
        self.step, self.calls, self.replays, self.why_not = step, 0, 0, ""
        self._known: list[_Known] = []
        update_wrapper(self, step)

    def replayed_step(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step, by a replay if there is a recording that holds."""
        with nothing_compared():
            return self._step(args, kwargs)

    def _step(self, args: Any, kwargs: Any) -> R:
        self.calls += 1
        self.why_not = _why_by_python()
        if self.why_not:
            return self.step(*args, **kwargs)
        call = _Call(args, kwargs)
        self.why_not = call.why_not()
        if self.why_not:
            return self.step(*args, **kwargs)
        known = self._of(call)
        if known.program is not None:
            self.why_not = known.program.why_stale()
            if not self.why_not:
                self.replays += 1
                return known.program.run(call)  # type: ignore[no-any-return]
            known.program, known.last, known.tries = None, None, 0
        if known.calls_before:
            known.calls_before -= 1
            self.why_not = known.why_not
            return self.step(*args, **kwargs)
        return self._recorded(known, call, args, kwargs)

    __call__ = replayed_step  # whose name errors have, of ranks that wait in a replay

    def _of(self, call: _Call) -> _Known:
        same = [known for known in self._known if known.key == call.key]
        for known in same:
            if all(_kind_of(x.grad) == kind for x, kind in known.grads):
                return known
        self._known = [_Known(call.key, 0 if same else 1), *self._known[: _KEPT - 1]]
        return self._known[0]

    def _recorded(self, known: _Known, call: _Call, args: Any, kwargs: Any) -> R:
        """Run the step by Python and record it; make a program if the recording equals the last one."""
        self.why_not = self.why_not or "this call is recorded"
        result, recording = _record(self.step, call, args, kwargs)
        known.tries += 1
        why = recording.recorder.why_not
        if why:
            known.give_up(why)
            return result  # type: ignore[no-any-return]
        known.last, last = recording, known.last
        known.grads = recording.grads_before
        if last is not None:
            why = _difference(last, recording)
            if not why:
                known.program, known.last = _Program(recording), None
            elif known.tries >= _TRIES:
                known.give_up(f"two calls differ: {why}")
        return result  # type: ignore[no-any-return]

    @property
    def code(self) -> str:
        """The programs that are replayed, as Python."""
        return "\n\n".join(known.program.step.code for known in self._known if known.program is not None)

    def __repr__(self) -> str:
        name = getattr(self.step, "__qualname__", repr(self.step))
        programs = [known.program.step for known in self._known if known.program is not None]
        sizes = ", ".join(f"{each.n_operators} operators and {each.n_collectives} collectives" for each in programs)
        return f"<replay of {name}: {self.replays} of {self.calls} calls replayed; {sizes or 'no program'}>"


def _why_by_python() -> str:
    """Why no step is replayed now; empty if one may be."""
    if comparing():
        return "DSHARD_DEBUG=1 compares the calls of the ranks"
    if OBSERVERS or LISTENERS or CALL_LOG or RECORDERS:
        return "a trace, strict or explain looks at the step"
    if simulated_ranks() is not None:
        return "the ranks are simulated"
    if (n_dispatch_modes() and not _in_mode_of_dshard()) or is_transforming() or torch.compiler.is_compiling():
        return "the call is within a mode, a transform or a compiled region of torch"
    return ""


def _in_mode_of_dshard() -> bool:
    """Whether the only mode looks at operators on local tensors, as `dshard.testing.count_traffic` does."""
    return n_dispatch_modes() == 1 and type(dispatch_mode()) is OperatorMode


def _record(step: Callable[..., Any], call: _Call, args: Any, kwargs: Any) -> tuple[Any, _Recording]:
    """Run a step by Python, and record it."""
    recorder, state = StepRecorder(), StepState(step)
    state.add_tensors(call.tensors)
    with state.gathering(), recording_calls(recorder), OperatorMode(recorder.run), _without_compiling():
        result = step(*args, **kwargs)
        flat, structure = pytree.tree_flatten(result)
        results, specs = list[Any](), list[Any]()
        for out in flat:
            is_distributed = isinstance(out, Wrapper)
            specs.append(out._spec if is_distributed else None)
            results.append(recorder.slot_of(_local(out)) if isinstance(out, Tensor) else out)
            if isinstance(out, Tensor) and out.requires_grad and not (out.is_leaf or recorder.ran_backward):
                recorder.refuse("the step returns a tensor that requires a gradient, and runs no backward pass")
            if not (isinstance(out, Tensor) or is_plain(out)):
                recorder.refuse(f"the step returns a {type(out).__name__}, which is neither a tensor nor a number")
        known = {id(x): state.tensors[i] for i, x in state.tensors.items()}
        leaves, grads, old = list[_Leaf](), list[tuple[Slot | None, Any]](), dict[int, int]()
        for i, before in state.grads.items():
            x, grad = state.tensors[i], state.tensors[i].grad
            if x._gradient_leaf is not None and x._gradient_leaf.has_partial_sum if isinstance(x, Wrapper) else False:
                recorder.refuse("the step leaves partial gradients: accumulate within one step")
            if before is not None:
                old[id(_local(before))] = len(leaves)
            number = next((n for n, each in enumerate(call.tensors) if each is x), None)
            leaves.append(_Leaf(number, None if number is not None else x))
            if grad is before:
                grads.append((None, _KEPT_GRAD))
            elif grad is None:
                grads.append((None, _NO_GRAD))
            else:
                grads.append((recorder.slot_of(_local(grad)), grad._spec if isinstance(grad, Wrapper) else None))
        recorder.close()
    for x in recorder.externals.values():
        recorder.slot_of(x)  # which refuses those whose memory was replaced
    if any(leaf not in known for leaf in recorder.leaves):
        recorder.refuse(_UNKNOWN_LEAF)
    sources = _sources(recorder, call, state, old)
    for slot, (kind, _) in sources.items():
        x = recorder.externals[slot]
        if kind == "constant" and x.requires_grad:
            recorder.refuse(_UNKNOWN_LEAF)
    held = [leaf.tensor for leaf in leaves if leaf.tensor is not None]
    grads_before = [(x, _kind_of(state.grads[id(x)])) for x in held]
    return result, _Recording(
        recorder, structure, results, specs, leaves, grads, state.entries(), sources, grads_before
    )


_UNKNOWN_LEAF = (
    "a gradient arises for a tensor that neither an argument, a module, an optimiser nor a variable of the step holds"
)


def _local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, Wrapper) else x


def _sources(
    recorder: StepRecorder, call: _Call, state: StepState, grads: dict[int, int]
) -> dict[Slot, tuple[str, Any]]:
    """Where the external tensors of a recording come from."""
    arguments = {id(x): i for i, x in enumerate(call.locals)}
    owners = {id(_local(x)): x for x in state.tensors.values()}
    sources: dict[Slot, tuple[str, Any]] = {}
    for slot, x in recorder.externals.items():
        number = id(x)
        if slot in recorder.literals:
            sources[slot] = "literal", None
        elif number in arguments:
            sources[slot] = "argument", arguments[number]
        elif number in grads:
            sources[slot] = "grad", grads[number]
        elif number in owners:
            sources[slot] = "owned", owners[number]
        else:
            sources[slot] = "constant", x
    return sources


def _same(a: object, b: object) -> bool:
    """Whether two values are one tensor, or equal numbers."""
    return a is b or (isinstance(a, int) and a == b)


def _difference(first: _Recording, second: _Recording) -> str:
    """What differs in two recordings; empty if nothing does."""
    name = changed(first.entries)
    if name:
        return f"{name} has changed"
    one, two = first.recorder, second.recorder
    for a, b in zip(one.instructions, two.instructions, strict=False):
        if not a.same_as(b):
            return f"{a.name} at {a.line} and {b.name} at {b.line}"
    if len(one.instructions) != len(two.instructions):
        return f"{len(one.instructions)} and {len(two.instructions)} operators"
    for slot, (kind, source) in first.sources.items():
        other = second.sources.get(slot)
        if other is None or other[0] != kind or not _same(other[1], source):
            return f"a tensor of shape {tuple(one.externals[slot].shape)} that no operator made"
        if kind == "literal" and not torch.equal(one.literals[slot], two.literals[slot]):
            return "numbers of which a tensor is made"
    if (first.structure, first.results, first.specs) != (second.structure, second.results, second.specs):
        return "the results"
    leaves = [*zip(first.leaves, second.leaves, strict=False)]
    same = all(_same(a.number, b.number) and _same(a.tensor, b.tensor) for a, b in leaves)
    if not same or len(first.leaves) != len(second.leaves) or first.grads != second.grads:
        return "the tensors that get a gradient"
    return ""


@contextmanager
def _without_compiling() -> Iterator[None]:
    """Within the block compiled functions run by Python: what a compiled graph does is not seen."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
