"""One run of a step by Python: its arguments, instructions, results, gradients, and the state that it ran in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from dshard.autograd.leaf_gradients import accumulating
from dshard.comm import Collective, recording_calls, user_line
from dshard.core.context import settings_in_force
from dshard.core.observe import OperatorMode
from dshard.core.wrapper import Wrapper
from dshard.errors import ReplayError
from dshard.rehearsal.calls import autocast_now, kind_of, local_of
from dshard.rehearsal.local_recorder import Instruction, Slot, StepRecorder, equal
from dshard.replay.step_state import (
    Option,
    Options,
    StepState,
    Terms,
    alike,
    is_plain,
    options_of,
    terms_in,
    values_in,
    with_values,
)
from dshard.torch_private import no_torch_function, pytree

T = TypeVar("T")


class StepCall:
    """The arguments of a call, the tensors among them, and the key of recordings that may hold for it."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        self.tensors: list[Tensor] = [x for x in leaves if isinstance(x, Tensor)]
        self.values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self.autocast = autocast_now()
        self.key = (
            structure,
            [(type(x), repr(x) if type(x) is float else x) for x in self.values],  # 2 is not 2.0, and 0.0 not -0.0
            [(kind_of(x), _gradient_of_leaf(x)) for x in self.tensors],
            [[x is y for y in self.tensors[:i]] for i, x in enumerate(self.tensors)],
            settings_in_force(),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), accumulating(), torch.get_default_dtype()),
            (self.autocast, torch.are_deterministic_algorithms_enabled()),
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


def _gradient_of_leaf(x: Tensor) -> object:
    with no_torch_function():
        is_leaf = x.requires_grad and x.is_leaf
        return (gradient_kind(x.grad), [*(x._backward_hooks or {}).values()]) if is_leaf else None


def gradient_kind(grad: Tensor | None) -> object:
    """The part of a gradient that decides how the next one is added to it."""
    return None if grad is None else grad._spec if isinstance(grad, Wrapper) else (grad.shape, grad.dtype)


class Source(NamedTuple):
    """Where a tensor comes from: the argument or leaf's gradient with that number, the tensor itself, or numbers."""

    kind: Literal["argument", "gradient", "tensor", "literal"]
    of: Any

    def in_call(self, call: StepCall) -> Any:
        """The tensor in a call."""
        return call.tensors[self.of] if self.kind == "argument" else self.of


class StepLeaf(NamedTuple):
    """A tensor whose gradient, before of that kind, a step keeps, drops, or sets to the value of a slot, of a spec."""

    source: Source
    before: object
    change: Literal["keeps", "drops", "sets"]
    slot: Slot | None = None
    spec: Any = None


class StepRecording(NamedTuple):
    """One run of a step.

    `results` are the slots of the tensors of its result, or values of Python; `specs` those of distributed tensors.
    `options` are those of the groups of parameters, `terms` what arguments may follow of them, and `varied` those that
    were seen with two values.
    """

    recorder: StepRecorder
    structure: Any
    results: list[Any]
    specs: list[Any]
    leaves: tuple[StepLeaf, ...]
    sources: dict[Slot, Source]
    state: StepState
    options: Options
    terms: Terms
    varied: frozenset[Option] = frozenset()


class CheckingRecorder(StepRecorder):
    """Records a step that must do as in an earlier recording: it begins no other collectives than that."""

    def __init__(self, expected: StepRecording, error: Callable[[str], ReplayError]) -> None:
        super().__init__()
        self._expected: Iterator[Any] = iter([each for each in expected.recorder.instructions if each.begins])
        self._error = error

    def call(self, key: Any, function: Callable[..., T], *args: object) -> T:
        """Call a function, and record that."""
        if isinstance(key, tuple) and isinstance(key[-1], Collective):
            expected = next(self._expected, None)
            if expected is None or expected.key != key:
                was = f"{expected.key[-1].kind} at {expected.line}" if expected is not None else "no other collective"
                raise self._error(f"{key[-1].kind} at {user_line()}, where it was {was}")
        return super().call(key, function, *args)


def record(step: Callable[..., Any], call: StepCall, recorder: StepRecorder) -> tuple[Any, StepRecording]:
    """Run a step by Python, and record it."""
    state = StepState(step)
    state.add(*call.tensors)
    # what a compiled graph does is not seen
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with state.adding_calls(), recording_calls(recorder), OperatorMode(recorder.run), eager:
        result = step(*call.args, **call.kwargs)
        flat, structure = pytree.tree_flatten(result)
        results = [recorder.slot_of(local_of(out)) if isinstance(out, Tensor) else out for out in flat]
        _check_results(flat, recorder)
        leaves = _leaves(call, state, recorder)
        recorder.close()
    for x in recorder.externals.values():
        recorder.slot_of(x)  # which refuses those whose memory was replaced
    sources, options = _sources(call, state, recorder), options_of(state.groups)
    if state.options_changed:
        recorder.refuse("the step changes options of its optimiser: let a schedule step outside")
    recorder.externals.clear()  # which would keep the tensors of this call
    specs = [out._spec if isinstance(out, Wrapper) else None for out in flat]
    state.keep(call.tensors)
    terms = terms_in(recorder.instructions, options)
    return result, StepRecording(recorder, structure, results, specs, leaves, sources, state, options, terms)


def _check_results(results: list[Any], recorder: StepRecorder) -> None:
    for out in results:
        if isinstance(out, Tensor):
            if out.requires_grad and not (out.is_leaf or recorder.ran_backward):
                recorder.refuse("the step returns a tensor that requires a gradient, and runs no backward pass")
        elif not is_plain(out):
            recorder.refuse(f"the step returns a {type(out).__name__}, which is neither a tensor nor a number")


def _leaves(call: StepCall, state: StepState, recorder: StepRecorder) -> tuple[StepLeaf, ...]:
    """The leaves, and what the step has done to their gradients."""
    arguments = {id(x): Source("argument", i) for i, x in reversed([*enumerate(call.tensors)])}
    leaves = list[StepLeaf]()
    for i, before in state.grads.items():
        x, grad = state.tensors[i], state.tensors[i].grad
        if isinstance(x, Wrapper) and x._gradient_leaf is not None and x._gradient_leaf.has_partial_sum:
            recorder.refuse("the step leaves partial gradients: accumulate within one step")
        leaf = StepLeaf(arguments.get(i, Source("tensor", x)), gradient_kind(before), "keeps")
        if grad is None and before is not None:
            leaf = leaf._replace(change="drops")
        elif grad is not None and grad is not before:
            spec = grad._spec if isinstance(grad, Wrapper) else None
            leaf = leaf._replace(change="sets", slot=recorder.slot_of(local_of(grad)), spec=spec)
        leaves.append(leaf)
    if not recorder.leaves <= state.grads.keys():
        recorder.refuse(_UNKNOWN)
    return tuple(leaves)


_UNKNOWN = (
    "a gradient arises for a tensor that neither an argument, a module, an optimiser nor a variable of the step holds"
)


def _sources(call: StepCall, state: StepState, recorder: StepRecorder) -> dict[Slot, Source]:
    """Where the external tensors of a recording come from."""
    known = {id(local_of(x)): Source("tensor", x) for x in state.tensors.values()}
    grads = enumerate(state.grads.values())
    known |= {id(local_of(x)): Source("gradient", i) for i, x in grads if x is not None}
    known |= {id(local_of(x)): Source("argument", i) for i, x in enumerate(call.tensors)}
    sources = {
        slot: _literal(x) if slot in recorder.literals else known.get(id(x)) or Source("tensor", x)
        for slot, x in recorder.externals.items()
    }
    if any(x.requires_grad and id(x) not in known for x in recorder.externals.values()):
        recorder.refuse(_UNKNOWN)
    return sources


def _literal(x: Tensor) -> Source:
    return Source("literal", (x.dtype, tuple(x.shape), x.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()))


def matched(first: StepRecording, second: StepRecording) -> tuple[StepRecording, str]:
    """The second recording, and what differs in them; if nothing does, with what both say of options."""
    common = {place: terms & second.terms[place] for place, terms in first.terms.items() if place in second.terms}
    terms = {place: terms for place, terms in common.items() if terms}
    why = _difference(first, second, terms)
    if why:
        return second, why
    changed = {option for option, number in second.options.items() if number != first.options.get(option)}
    second.state.ignore_changes(first.state)
    return second._replace(terms=terms, varied=first.varied | changed), ""


def _difference(first: StepRecording, second: StepRecording, terms: Terms) -> str:
    one, two = first.recorder.instructions, second.recorder.instructions
    for i, (a, b) in enumerate(zip(one, two, strict=False)):
        if not a.same_as(b):
            new = {j: value for j, value in enumerate(values_in(b)) if (i, j) in terms}
            if not with_values(a, new).same_as(b):
                return _instruction_difference(a, b)
    if len(one) != len(two):
        longer, n = max(one, two, key=len), min(len(one), len(two))
        return f"{'no longer ' if longer is one else ''}{longer[n].name} at {longer[n].line}"
    for slot, source in first.sources.items():
        if not equal(source, second.sources.get(slot)):
            what = "other numbers of a tensor" if source.kind == "literal" else "another tensor that no operator made"
            user = next((each for each in one if slot in values_in(each)), None)
            return f"{user.name} at {user.line} with {what}" if user is not None else f"with {what}"
    kinds = [list(map(type, each.results)) for each in (first, second)]
    if kinds[0] != kinds[1] or first[1:4] != second[1:4]:
        return "to other results"
    return "" if equal(first.leaves, second.leaves) else "to other gradients"


def _instruction_difference(a: Instruction, b: Instruction) -> str:
    if a.name != b.name:
        return f"{b.name} at {b.line}, where it was {a.name} at {a.line}"
    values = zip(values_in(a), values_in(b), strict=False)
    others = [(x, y) for x, y in values if is_plain(x) and is_plain(y) and not alike(x, y)]
    numbers = f"{others[0][1]!r}, where it took {others[0][0]!r}" if others else "other operands"
    return f"{b.name} at {b.line} with {numbers}"
